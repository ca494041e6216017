"""Tables of where the time of training steps goes: phases, and computation against communication.

What the numbers mean is in `records.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.records.steps import StepRecord
from paceline.report.tables import Column
from paceline.units import GB, format_bytes, format_ms, format_number_of, format_rate, format_speed

__all__ = ["describe_phases", "phase_row", "phase_table"]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


phase_table: Sequence[Column] = (
    Column("model", lambda r: r.model, False),
    Column("data", lambda r: r.data, False),
    Column("wrapper", lambda r: r.wrapper, False),
    Column("backend", lambda r: r.backend, False),
    Column("device", lambda r: r.device, False),
    Column("precision", lambda r: r.precision, False),
    Column("ranks", lambda r: str(r.world_size)),
    Column("batch", lambda r: str(r.batch_size)),
    Column("accumulate", lambda r: str(r.accumulate), is_optional=True),
    Column("step (ms)", lambda r: format_ms(r.timing.median_s)),
    Column("data wait (ms)", lambda r: format_ms(r.phase("data_wait").median_s), is_optional=True),
    Column("forward (ms)", lambda r: format_ms(r.phase("forward").median_s)),
    Column("backward (ms)", lambda r: format_ms(r.phase("no_comm_backward").median_s)),
    Column("optimizer (ms)", lambda r: format_ms(r.phase("optimizer").median_s)),
    Column("host gaps (ms)", lambda r: format_ms(r.gap_s), is_optional=True),
    Column("compute (ms)", lambda r: format_ms(r.compute_s)),
    Column("exposed (ms)", lambda r: format_ms(r.exposed_s)),
    Column("busy (ms)", lambda r: "" if r.busy_s is None else format_ms(r.busy_s)),
    Column("overlap", lambda r: _percent(r.overlap), is_optional=True),
    Column("comm overhead", lambda r: _percent(r.overhead)),
    Column("busbw (GB/s)", lambda r: "" if r.busbw_bytes_per_s is None else format_rate(r.busbw_bytes_per_s)),
    Column("samples/s", lambda r: format_speed(r.samples_per_s)),
    Column("source", lambda r: r.source, False),
)


def phase_row(record: StepRecord) -> dict[str, Any]:
    """One record for JSON and CSV."""
    names = (
        "model", "data", "wrapper", "backend", "device", "precision", "world_size", "batch_size", "accumulate",
        "num_parameters", "num_bytes", "num_messages",
    )  # fmt: skip
    return {name: getattr(record, name) for name in names} | {
        "step_s": record.timing.median_s,
        "data_wait_s": record.phase("data_wait").median_s,
        "forward_s": record.phase("forward").median_s,
        "backward_s": record.phase("no_comm_backward").median_s,
        "optimizer_s": record.phase("optimizer").median_s,
        "gap_s": record.gap_s,
        "compute_s": record.compute_s,
        "exposed_comm_s": record.exposed_s,
        "exposed_noise_s": record.exposed_noise_s,
        "busy_comm_s": record.busy_s,
        "overlap": record.overlap,
        "comm_overhead": record.overhead,
        "busbw_gbps": None if record.busbw_bytes_per_s is None else record.busbw_bytes_per_s / GB,
        "samples_per_s": record.samples_per_s,
        "profiling_cost": record.cost.value - 1,
        "profiling_cost_noise": record.cost.noise,
        "source": record.source,
    }


def describe_phases(record: StepRecord) -> list[str]:
    """What the table does not show: what was sent, how sure the exposed part is, and what profiling costs."""
    place = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
    lines = []
    if record.world_size > 1:
        noise = record.exposed_noise_s
        sure = "" if noise is None else f" ± {format_ms(noise)}"
        lines.append(
            f"{place}: each rank sends {format_bytes(record.num_bytes)} in "
            f"{format_number_of(record.num_messages, 'message')} per step; "
            f"communication overhead {record.overhead:.1%} ({format_ms(record.exposed_s)}{sure} ms of "
            f"{format_ms(record.timing.median_s)})"
        )
    noise_text = "" if record.cost.noise is None else f" ± {record.cost.noise:.1%}"
    verdict = "" if record.cost.is_clear else ", within the noise"
    lines.append(f"{place}: profiling costs {record.cost.value - 1:+.1%}{noise_text} of a step{verdict}")
    return lines
