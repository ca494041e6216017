"""The table of wrappers beside each other: its columns for people, and its rows for JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.records.samples import Ratio
from paceline.records.steps import PRECISIONS, Standing
from paceline.report.tables import Column
from paceline.units import format_bytes, format_ms

__all__ = ["choose_columns", "wrapper_row", "wrapper_table"]


def _ratio(ratio: Ratio | None) -> str:
    """The ratio with its noise; `=` marks one that is 1 within the noise."""
    if ratio is None:
        return ""
    if ratio.noise is None:
        return f"{ratio.value:.3f} ?"
    return f"{ratio.value:.3f} ± {ratio.noise:.3f}{'' if ratio.is_clear else ' ='}"


def _against(ratio: Ratio | None, is_itself: bool) -> str:
    return "1" if is_itself else _ratio(ratio)


def _verdict(standing: Standing) -> str:
    """Against torch's wrapper, in words."""
    ratio = standing.to_torch
    if ratio is None or standing.torch is standing.record:
        return ""
    if ratio.noise is None:
        return "one repetition"
    if not ratio.is_clear:
        return "within the noise"
    return f"{abs(ratio.value - 1):.1%} {'slower' if ratio.value > 1 else 'faster'}"


wrapper_table: Sequence[Column] = (
    Column("model", lambda s: s.record.model, False),
    Column("backend", lambda s: s.record.backend, False),
    Column("device", lambda s: s.record.device, False),
    Column("precision", lambda s: s.record.precision, False),
    Column("ranks", lambda s: str(s.record.world_size), is_optional=True),
    Column("batch", lambda s: str(s.record.batch_size), is_optional=True),
    Column("wrapper", lambda s: s.record.wrapper, False),
    Column("forward (ms)", lambda s: format_ms(s.record.phase("forward").median_s), is_optional=True),
    Column("backward (ms)", lambda s: format_ms(s.record.phase("backward").median_s)),
    Column("step (ms)", lambda s: format_ms(s.record.timing.median_s)),
    Column("p10 (ms)", lambda s: format_ms(s.record.timing.p10_s), is_optional=True),
    Column("p90 (ms)", lambda s: format_ms(s.record.timing.p90_s), is_optional=True),
    Column("/ torch", lambda s: _against(s.to_torch, s.torch is s.record)),
    Column("/ tuned", lambda s: _against(s.to_tuned, s.tuned is s.record)),
    Column("/ bare", lambda s: _against(s.to_bare, s.bare is s.record)),
    Column("than torch", _verdict, False),
    Column("host µs/param", lambda s: _host_us(s), is_optional=True),
    Column("memory added", lambda s: "" if s.added_bytes is None else format_bytes(s.added_bytes), is_optional=True),
    Column("#wrong", lambda s: "" if s.record.num_wrong is None else str(s.record.num_wrong)),
    Column("iters", lambda s: str(s.record.timing.count), is_optional=True),
    Column("source", lambda s: s.record.source, False),
)


def choose_columns(standings: Sequence[Standing]) -> Sequence[Column]:
    """`wrapper_table` and, where several backends took turns, the ratio across them."""
    columns = list(wrapper_table)
    if len({standing.record.backend for standing in standings}) > 1:
        place = [column.name for column in columns].index("/ torch") + 1
        columns.insert(
            place,
            Column("/ torch on gloo", lambda s: _against(s.to_torch_on_gloo, s.torch_on_gloo is s.record)),
        )
    return columns


def _host_us(standing: Standing) -> str:
    seconds = standing.host_s_per_parameter
    return "" if seconds is None else f"{seconds * 1e6:.2f}"


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def _noise(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.noise


# JSON rows name the element type as torch does, as they always have.
_DTYPES = {precision: dtype for dtype, precision in PRECISIONS.items()}


def wrapper_row(standing: Standing) -> dict[str, Any]:
    """One row of `bench wrappers --json` and of its table.csv. `noise` belongs to `ratio_to_torch`."""
    record = standing.record
    host_s = standing.host_s_per_parameter
    return {
        "model": record.model,
        "wrapper": record.wrapper,
        "world_size": record.world_size,
        "backend": record.backend,
        "device": record.device,
        "dtype": _DTYPES.get(record.precision, record.precision),
        "batch_size": record.batch_size,
        "step_median_s": record.timing.median_s,
        "step_p10_s": record.timing.p10_s,
        "step_p90_s": record.timing.p90_s,
        "forward_median_s": record.phase("forward").median_s,
        "backward_median_s": record.phase("backward").median_s,
        "optimizer_median_s": record.phase("optimizer").median_s,
        "ratio_to_torch": _value(standing.to_torch),
        "noise": _noise(standing.to_torch),
        "ratio_to_torch_on_gloo": _value(standing.to_torch_on_gloo),
        "noise_to_torch_on_gloo": _noise(standing.to_torch_on_gloo),
        "ratio_to_torch_tuned": _value(standing.to_tuned),
        "noise_to_torch_tuned": _noise(standing.to_tuned),
        "ratio_to_bare": _value(standing.to_bare),
        "noise_to_bare": _noise(standing.to_bare),
        "added_s": standing.added_s,
        "host_us_per_parameter": None if host_s is None else host_s * 1e6,
        "held_bytes": record.held_bytes or None,
        "peak_step_bytes": record.peak_step_bytes or None,
        "added_bytes": standing.added_bytes,
        "num_parameters": record.num_parameters,
        "num_bytes": record.num_bytes,
        "configuration": record.configuration,
        "note": record.note,
        "nwrong": record.num_wrong,
        "nchecked": record.num_checked,
        "iters": record.timing.count,
        "skew_s": record.timing.skew_s,
        "source": record.source,
    }
