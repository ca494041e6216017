"""`bench wrappers` and `profile phases` as results: steps of a job, their tables, the figure and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.records.samples import Ratio
from paceline.records.steps import PRECISIONS, Standing, StepRecord, compare_wrappers
from paceline.records.store import Run
from paceline.report.plots import COLORS, MARKERS
from paceline.report.result import Result
from paceline.report.table import Column, Table, raw_columns
from paceline.units import format_bytes, format_duration, format_ms, format_number_of, format_speed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StepResult(Result):
    """A result whose records are steps. Older runs kept their findings among the warnings, where they are left out."""

    def __init__(self, run: Run, folder: Path | None = None) -> None:
        super().__init__(run, folder)
        self.steps = [record for record in run.records if isinstance(record, StepRecord)]

    @property
    def warnings(self) -> tuple[str, ...]:
        known = tuple(line[:20] for line in self.findings)  # some ended otherwise
        return tuple(text for text in self.run.warnings if not text.startswith(known))


# -- phases ------------------------------------------------------------------------------------------------------------


class PhasesResult(StepResult):
    """`profile phases`: one row per number of ranks and batch size."""

    verbs: ClassVar[tuple[str, ...]] = ("profile phases",)

    @property
    def answer(self) -> str:
        return describe_step(self.steps[-1]) if self.steps else "No step was measured."

    @property
    def findings(self) -> list[str]:
        return [line for record in self.steps for line in describe_phases(record)]

    def tables(self) -> list[Table]:
        return [Table("table", "phases", PHASES, self.steps, key="records")] if self.steps else []

    @property
    def next_steps(self) -> list[str]:
        if not self.steps:
            return []
        last = self.steps[-1]
        job = f"--model {last.model} --ranks {last.world_size} --batch-size {last.batch_size}"
        return [f"paceline profile trace {job}", *([f"paceline tune {job}"] if last.world_size > 1 else [])]


def describe_step(record: StepRecord) -> str:
    """Where the time of a step goes, in one sentence."""
    step_s, wait_s = record.timing.median_s, record.data_wait.median_s if record.data_wait else 0.0
    parts_s = {"waiting for data": wait_s} if wait_s > 0.005 * step_s else {}
    parts_s["forward"] = record.phase("forward").median_s
    parts_s["backward"] = record.phase("no_comm_backward").median_s
    parts_s["optimizer"] = record.phase("optimizer").median_s
    if record.world_size > 1:
        parts_s["exposed communication"] = record.exposed_s
    parts = ", ".join(f"{seconds / step_s:.0%} {name}" for name, seconds in parts_s.items())
    where = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
    return f"A step of {record.model} takes {format_duration(step_s)} ({where}): {parts}."


PHASES = (
    Column("model", lambda r: r.model, key="model"),
    Column("data", lambda r: r.data, key="data", priority=-3),
    Column("wrapper", lambda r: r.wrapper, key="wrapper", priority=5),
    Column("backend", lambda r: r.backend, key="backend"),
    Column("device", lambda r: r.device, key="device"),
    Column("precision", lambda r: r.precision, key="precision"),
    Column("ranks", lambda r: r.world_size, "number", "world_size", is_key=True),
    Column("batch", lambda r: r.batch_size, "number", "batch_size", is_key=True),
    Column("accumulate", lambda r: r.accumulate, "number", "accumulate", priority=-2),
    *raw_columns("num_parameters", "num_bytes", "num_messages"),
    Column("step", lambda r: r.timing.median_s, "ms", "step_s", is_key=True),
    Column("data wait", lambda r: r.data_wait.median_s if r.data_wait else None, "ms", "data_wait_s", priority=-1),
    Column("forward", lambda r: r.phase("forward").median_s, "ms", "forward_s", priority=4),
    Column("backward", lambda r: r.phase("no_comm_backward").median_s, "ms", "backward_s", priority=4),
    Column("optimizer", lambda r: r.phase("optimizer").median_s, "ms", "optimizer_s", priority=2),
    Column("host gaps", lambda r: r.gap_s, "ms", "gap_s", priority=-2),
    Column("compute", lambda r: r.compute_s, "ms", "compute_s"),
    Column("exposed", lambda r: r.exposed_s, "ms", "exposed_comm_s", priority=5),
    *raw_columns("exposed_noise_s"),
    Column("busy", lambda r: r.busy_s, "ms", "busy_comm_s"),
    Column("overlap", lambda r: r.overlap, "percent.1", "overlap", priority=-1),
    Column("comm overhead", lambda r: r.overhead, "percent.1", "comm_overhead", priority=3),
    Column("busbw", lambda r: r.busbw_bytes_per_s, "GB/s", "busbw_gbps", priority=-1),
    Column("samples/s", lambda r: r.samples_per_s, format_speed, "samples_per_s", priority=1),
    Column(None, lambda r: r.cost.value - 1, key="profiling_cost"),
    Column(None, lambda r: r.cost.noise, key="profiling_cost_noise"),
    Column("source", lambda r: r.source, key="source", priority=-3),
)


def describe_phases(record: StepRecord) -> list[str]:
    """What the table does not show: what was sent, how sure the exposed part is, and what profiling costs."""
    place = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
    cost = f"{place}: profiling costs {describe_cost(record.cost, 'a step')}"
    if record.world_size == 1:
        return [cost]
    sure = "" if record.exposed_noise_s is None else f" ± {format_ms(record.exposed_noise_s)}"
    messages = format_number_of(record.num_messages, "message")
    return [
        f"{place}: each rank sends {format_bytes(record.num_bytes)} in {messages} per step; "
        f"communication overhead {record.overhead:.1%} ({format_ms(record.exposed_s)}{sure} ms of "
        f"{format_ms(record.timing.median_s)})",
        cost,
    ]


def describe_cost(ratio: Ratio, of: str) -> str:
    """What something adds to a step, or to a part of it, and whether that is shown."""
    noise = "" if ratio.noise is None else f" ± {ratio.noise:.1%}"
    return f"{ratio.value - 1:+.1%}{noise} of {of}{'' if ratio.is_clear else ', within the noise'}"


# -- wrappers ----------------------------------------------------------------------------------------------------------

_RATIOS = "Ratios are medians of step / step in the same repetition, ± 95 %; = is 1 within that."


class WrappersResult(StepResult):
    """`bench wrappers`: one row per wrapper, backend, number of ranks and model, compared with torch's wrapper."""

    verbs = ("bench wrappers",)

    @property
    def standings(self) -> list[Standing]:
        return compare_wrappers(self.steps)

    @property
    def answer(self) -> str:
        ours = [s for s in self.standings if s.record.wrapper == "paceline" and s.torch is not None]
        if not ours:
            count = format_number_of(len(self.steps), "row")
            return f"{count}: torch's wrapper and Paceline's were not measured together."
        if len(ours) == 1:
            one, verdict = ours[0].record, _describe_verdict(ours[0])
            where = f"{one.model} on {format_number_of(one.world_size, 'rank')} ({one.backend})"
            than = "" if verdict in ("within the noise", "one repetition") else " than in torch's"
            took = format_duration(one.timing.median_s)
            return f"A step of {where} in Paceline's wrapper takes {took}: {verdict}{than}."
        ratios = [ratio for s in ours if (ratio := s.to_torch) is not None]
        faster = sum(ratio.is_clear and ratio.value < 1 for ratio in ratios)
        slower = sum(ratio.is_clear and ratio.value > 1 for ratio in ratios)
        return (
            f"Paceline's wrapper is faster than torch's in {faster} of {len(ratios)} cells, slower in {slower}, and "
            f"not shown to differ in {len(ratios) - faster - slower}."
        )

    @property
    def findings(self) -> list[str]:
        return [
            f"torch-tuned ({record.model}, {format_number_of(record.world_size, 'rank')}, {record.backend}): "
            f"{record.configuration}; {record.note}"
            for record in self.steps
            if record.wrapper == "torch-tuned"
        ]

    def tables(self) -> list[Table]:
        rows, title = self.standings, "steps of data-parallel wrappers"
        return [Table("table", title, build_columns(rows), rows, key="rows", note=_RATIOS)] if rows else []

    def figures(self) -> dict[str, Callable[[], Figure]]:
        if not self.steps:
            return {}
        subtitle = f"{self.run.environment.machine}; {self.steps[0].precision}"
        return {"wrappers": lambda: plot_wrappers(self.steps, subtitle)}

    @property
    def next_steps(self) -> list[str]:
        return [f"paceline profile phases --model {r.model} --ranks {r.world_size}" for r in self.steps[-1:]]


def _format_ratio(ratio: Ratio) -> str:
    """The ratio with its noise; `=` marks one that is 1 within the noise."""
    if ratio.noise is None:
        return f"{ratio.value:.3f} ?"
    if (ratio.value, ratio.noise) == (1.0, 0.0):  # compared with itself
        return "1"
    return f"{ratio.value:.3f} ± {ratio.noise:.3f}{'' if ratio.is_clear else ' ='}"


def _describe_verdict(standing: Standing) -> str | None:
    """The step compared with torch's wrapper, in words."""
    ratio = standing.to_torch
    if ratio is None or standing.torch is standing.record:
        return None
    if ratio.noise is None:
        return "one repetition"
    if not ratio.is_clear:
        return "within the noise"
    return f"{abs(ratio.value - 1):.1%} {'slower' if ratio.value > 1 else 'faster'}"


def _host_us(standing: Standing) -> float | None:
    host_s = standing.host_s_per_parameter
    return None if host_s is None else host_s * 1e6


def _ratio_columns(name: str | None, reference: str, priority: int, noise: str = "") -> list[Column]:
    """The ratio to a reference with its noise for people, unless there is no name; both as numbers for programs."""
    pick = attrgetter(f"to_{reference}".replace("torch_tuned", "tuned"))
    shown = [Column(name, pick, _format_ratio, priority=priority)] if name else []
    return [
        *shown,
        Column(None, lambda s: getattr(pick(s), "value", None), key=f"ratio_to_{reference}"),
        Column(None, lambda s: getattr(pick(s), "noise", None), key=noise or f"noise_to_{reference}"),
    ]


# JSON rows name the element type as torch does, as they always have.
_DTYPES = {precision: dtype for dtype, precision in PRECISIONS.items()}


def build_columns(standings: Sequence[Standing]) -> list[Column]:
    """The columns of wrappers; the ratio across backends is shown where several took turns."""
    backends = {standing.record.backend for standing in standings}
    return [
        Column("model", lambda s: s.record.model, key="model", is_key=True),
        Column("backend", lambda s: s.record.backend, key="backend", is_key=len(backends) > 1),
        Column("device", lambda s: s.record.device, key="device", priority=-3),
        Column("precision", lambda s: s.record.precision, priority=-3),
        Column(None, lambda s: _DTYPES.get(s.record.precision, s.record.precision), key="dtype"),
        Column("ranks", lambda s: s.record.world_size, "number", "world_size", is_key=True),
        Column("batch", lambda s: s.record.batch_size, "number", "batch_size", priority=-1),
        Column("wrapper", lambda s: s.record.wrapper, key="wrapper", is_key=True),
        Column("forward", lambda s: s.record.phase("forward").median_s, "ms", "forward_median_s", priority=-1),
        Column("backward", lambda s: s.record.phase("backward").median_s, "ms", "backward_median_s"),
        Column(None, lambda s: s.record.phase("optimizer").median_s, key="optimizer_median_s"),
        Column("step", lambda s: s.record.timing.median_s, "ms", "step_median_s", priority=4),
        Column("p10", lambda s: s.record.timing.p10_s, "ms", "step_p10_s", priority=-2),
        Column("p90", lambda s: s.record.timing.p90_s, "ms", "step_p90_s", priority=-2),
        *_ratio_columns("/ torch", "torch", 5, "noise"),
        *_ratio_columns("/ torch on gloo" if len(backends) > 1 else None, "torch_on_gloo", 3),
        *_ratio_columns("/ tuned", "torch_tuned", 2),
        *_ratio_columns("/ bare", "bare", 1),
        Column("than torch", _describe_verdict, priority=3),
        *raw_columns("added_s"),
        Column("host µs/param", _host_us, "{:.2f}".format, "host_us_per_parameter", priority=-1),
        Column(None, lambda s: s.record.held_bytes or None, key="held_bytes"),
        Column(None, lambda s: s.record.peak_step_bytes or None, key="peak_step_bytes"),
        Column("memory added", lambda s: s.added_bytes, "bytes", "added_bytes", priority=-1),
        *raw_columns("record.num_parameters", "record.num_bytes", "record.configuration", "record.note"),
        Column("#wrong", lambda s: s.record.num_wrong, "number", "nwrong", priority=2),
        Column(None, lambda s: s.record.num_checked, key="nchecked"),
        Column("iters", lambda s: s.record.timing.count, "number", "iters", priority=-2),
        *raw_columns("record.timing.skew_s"),
        Column("source", lambda s: s.record.source, key="source", priority=-3),
    ]


def plot_wrappers(records: Sequence[StepRecord], subtitle: str) -> Figure:
    """Step time of each wrapper and backend, one panel for each model and number of ranks; a line from p10 to p90."""
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[StepRecord]] = {}
    for record in records:
        panels.setdefault((record.job, record.cell), []).append(record)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    backends = list(dict.fromkeys(record.backend for record in records))
    wrappers = list(dict.fromkeys(record.wrapper for record in records))
    # One wrapper's backends stand together, so that the eye compares them.
    lines = [(w, b) for w in wrappers for b in backends if any((r.wrapper, r.backend) == (w, b) for r in records)]
    names = [f"{wrapper} on {backend}" if len(backends) > 1 else wrapper for wrapper, backend in lines]
    width, height = 2.2 + 3.2 * columns + (0.8 if len(backends) > 1 else 0), 1.1 + rows * (1.0 + 0.3 * len(lines))
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle("step time of data-parallel wrappers", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(f"step (ms), median, line p10 to p90. {subtitle}", fontsize=8.5, color="#555555")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels.values(), strict=False):
        first = panel[0]
        on = f"{first.backend}, " if len(backends) == 1 else ""
        ranks = format_number_of(first.world_size, "rank")
        axes.set_title(f"{first.model} ({on}{ranks}, {first.source})", loc="left", fontsize=9)
        for record in panel:
            place, number = lines.index((record.wrapper, record.backend)), wrappers.index(record.wrapper)
            color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
            low, middle, high = (1e3 * s for s in (record.timing.p10_s, record.timing.median_s, record.timing.p90_s))
            axes.plot([low, high], [place, place], color=color, lw=2, alpha=0.5)
            axes.plot([middle], [place], color=color, marker=marker, ms=6)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(lines)), names, fontsize=8.5)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.grid(True, axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8.5)
    return figure
