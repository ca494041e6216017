"""Tables of a profile: the overview of each rank, operators, kernels, advice, and two runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.report.tables import Column
from paceline.units import format_bytes, format_duration, format_ms

__all__ = [
    "advice_row",
    "advice_table",
    "choose_overview_columns",
    "compared_table",
    "kernel_table",
    "operator_table",
    "overview_row",
    "overview_table",
]

_SHARES = (
    ("kernels", "kernel"), ("communication", "communication"), ("copies", "copy"), ("data", "data"), ("CPU", "cpu"),
    ("other", "other"),
)  # fmt: skip


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _share_column(name: str, category: str) -> Column:
    return Column(name, lambda o: _percent(o.share(category)))


def _gpu_column(name: str, field: str) -> Column:
    return Column(name, lambda o: "" if o.gpu is None else _percent(getattr(o.gpu, field)))


def _phase_column(phase: str) -> Column:
    return Column(
        f"{phase} (ms)", lambda o: format_ms(o.phases_s[phase]) if phase in o.phases_s else "", is_optional=True
    )


# A row is the overview of one rank. The shares sum to the step.
overview_table: Sequence[Column] = (
    Column("rank", lambda o: str(o.rank)),
    Column("device", lambda o: o.device, False),
    Column("steps", lambda o: str(len(o.steps)), is_optional=True),
    Column("step (ms)", lambda o: format_ms(o.step_s)),
    *(_share_column(name, category) for name, category in _SHARES),
    *(_phase_column(phase) for phase in ("forward", "backward", "optimizer")),
    _gpu_column("GPU busy", "busy"),
    _gpu_column("SM efficiency (est.)", "sm_efficiency"),
    _gpu_column("occupancy (est.)", "occupancy"),
    _gpu_column("tensor cores", "tensor_core_share"),
    _gpu_column("messages of kernels", "communication_share"),
    Column("peak memory", lambda o: "" if o.peak_bytes is None else format_bytes(o.peak_bytes), is_optional=True),
    Column("source", lambda o: o.source, False),
)


def choose_overview_columns(overviews: Sequence[Any]) -> Sequence[Column]:
    """`overview_table` without the columns that are empty in every row, and without shares that are 0 in every row."""
    shares = {name for name, _ in _SHARES}

    def tells(column: Column) -> bool:
        nothing = ("", "0.0%") if column.name in shares else ("",)
        return any(column.cell(overview) not in nothing for overview in overviews)

    return [column for column in overview_table if tells(column)]


operator_table: Sequence[Column] = (
    Column("operator", lambda r: r.name, False),
    Column("calls/step", lambda r: f"{r.calls:g}"),
    Column("self (ms/step)", lambda r: format_ms(r.self_s)),
    Column("total (ms/step)", lambda r: format_ms(r.total_s)),
)

kernel_table: Sequence[Column] = (
    Column("kernel", lambda r: _shorten(r.name), False),
    Column("kind", lambda r: r.kind, False),
    Column("calls/step", lambda r: f"{r.calls:g}"),
    Column("time (ms/step)", lambda r: format_ms(r.time_s)),
    Column("mean (µs)", lambda r: f"{r.mean_s * 1e6:.1f}"),
    Column("occupancy (est.)", lambda r: _percent(r.occupancy), is_optional=True),
    Column("tensor cores", lambda r: "yes" if r.uses_tensor_cores else "no" if r.kind == "matmul" else "", False),
)


def _shorten(name: str, width: int = 70) -> str:
    """Names of templates run to thousands of characters; both ends tell most."""
    return name if len(name) <= width else f"{name[: width - 21]}…{name[-20:]}"


# The share is of a step: what the advice could make shorter.
advice_table: Sequence[Column] = (
    Column("what", lambda a: a.kind, False),
    Column("gain per step", lambda a: format_duration(a.gain_s) if a.gain_s else ""),
    Column("faster", lambda a: f"{a.factor:.2f} x" if a.gain_s else ""),
    Column("certainty", lambda a: a.certainty, False),
    Column("advice", lambda a: a.text, False),
)


def _write(row: Any, value: float | None) -> str:
    if value is None:
        return ""
    if row.unit == "s":
        return format_duration(value)
    if row.unit == "share":
        return _percent(value)
    return format_bytes(value) if row.unit == "bytes" else f"{value:.0f}"


compared_table: Sequence[Column] = (
    Column("", lambda r: r.name, False),
    Column("first", lambda r: _write(r, r.first)),
    Column("second", lambda r: _write(r, r.second)),
    Column("second / first", lambda r: "" if r.ratio is None else f"{r.ratio:.2f}"),
)


def overview_row(overview: Any) -> dict[str, Any]:
    """One row of a profile's JSON and CSV."""
    gpu = overview.gpu
    row = {"rank": overview.rank, "world_size": overview.world_size, "device": overview.device}
    row |= {"steps": len(overview.steps), "step_s": overview.step_s}
    row |= {f"{category}_share": overview.share(category) for _, category in _SHARES}
    row |= {f"{phase}_s": overview.phases_s.get(phase) for phase in ("forward", "backward", "optimizer")}
    for field in ("busy", "sm_efficiency", "occupancy", "tensor_core_share", "communication_share", "missed_s"):
        row[f"gpu_{field}"] = None if gpu is None else getattr(gpu, field)
    return {
        **row, "message_s": overview.message_s, "host_s": overview.host_s, "peak_bytes": overview.peak_bytes,
        "source": overview.source,
    }  # fmt: skip


def advice_row(advice: Any) -> dict[str, Any]:
    return {
        "kind": advice.kind, "gain_s": advice.gain_s, "factor": advice.factor, "certainty": advice.certainty,
        "text": advice.text,
    }  # fmt: skip
