"""Results of `bench wrappers` and `profile phases`: tables of steps, a figure and findings."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.records.kinds import PRECISIONS
from paceline.records.samples import group_by
from paceline.records.steps import StepRecord, WrapperComparison, compare_wrappers
from paceline.report.plots import COLORS, MARKERS, Drawings, Figure, build_panels
from paceline.report.result import Result, describe_job
from paceline.report.table import Column, Table, count_clear, describe_change, ratio_columns, raw_columns, text_columns
from paceline.units import format_bytes, format_duration, format_ms, format_number_of, format_speed


class PhasesResult(Result):
    """Result of `profile phases`: one row per number of ranks and batch size."""

    def _derive(self) -> None:
        self.steps = [record for record in self.only(StepRecord) if record.role == "job"]

    @property
    def answer(self) -> str:
        return describe_step(self.steps[-1])

    @property
    def findings(self) -> list[str]:
        return [line for record in self.steps for line in describe_phases(record)]

    def tables(self) -> list[Table]:
        return [Table("table", "phases", PHASES, self.steps, key="records")]

    @property
    def next_steps(self) -> list[str]:
        last = self.steps[-1]
        named = {"model": last.model, "data": self.config.get("data"), "batch_size": last.batch_size}
        job = f"--ranks {last.world_size} {describe_job(named)}"
        return [f"paceline profile trace {job}", *([f"paceline tune {job}"] if last.world_size > 1 else [])]


def describe_step(record: StepRecord) -> str:
    """Where the time of a step goes, in one sentence."""
    step_s, wait_s = record.timing.median_s, record.data_wait.median_s if record.data_wait else 0.0
    names = {"forward": "forward", "backward": "no_comm_backward", "optimizer": "optimizer"}
    parts_s = {"waiting for data": wait_s} if wait_s > 0.005 * step_s else {}
    parts_s |= {name: record.phase(phase).median_s for name, phase in names.items()}
    parts_s |= {"exposed communication": record.exposed_s} if record.world_size > 1 else {}
    parts = ", ".join(f"{seconds / step_s:.0%} {name}" for name, seconds in parts_s.items())
    where = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
    return f"A step of {record.model} takes {format_duration(step_s)} ({where}): {parts}."


PHASES = (
    *text_columns("model"),
    *text_columns("data", priority=-3),
    *text_columns("wrapper", priority=5),
    *text_columns("backend", "device", "precision"),
    Column("ranks", "world_size", "number", "world_size", is_key=True),
    Column("batch", "batch_size", "number", "batch_size", is_key=True),
    Column("accumulate", "accumulate", "number", "accumulate", priority=-2),
    Column("step", "timing.median_s", "ms", "step_s", is_key=True),
    Column("data wait", "data_wait.median_s", "ms", "data_wait_s", priority=-1),
    Column("forward", lambda r: r.phase("forward").median_s, "ms", "forward_s", priority=4),
    Column("backward", lambda r: r.phase("no_comm_backward").median_s, "ms", "backward_s", priority=4),
    Column("optimizer", lambda r: r.phase("optimizer").median_s, "ms", "optimizer_s", priority=2),
    Column("host gaps", "gap_s", "ms", "gap_s", priority=-2),
    Column("compute", "compute_s", "ms", "compute_s"),
    Column("exposed", "exposed_s", "ms", "exposed_comm_s", priority=5),
    Column("busy", "busy_s", "ms", "busy_comm_s"),
    Column("overlap", "overlap", "percent.1", "overlap", priority=-1),
    Column("comm overhead", "overhead", "percent.1", "comm_overhead", priority=3),
    Column("busbw", "busbw_bytes_per_s", "GB/s", "busbw_gbps", priority=-1),
    Column("samples/s", "samples_per_s", format_speed, "samples_per_s", priority=1),
    Column(None, lambda r: r.cost.value - 1, key="profiling_cost"),
    *raw_columns("num_parameters", "num_bytes", "num_messages", "exposed_noise_s", profiling_cost_noise="cost.noise"),
    *text_columns("source", priority=-3),
)


def describe_phases(record: StepRecord) -> list[str]:
    """Facts that are not in the table: the bytes sent, the noise of exposed communication, and the profiling
    overhead."""
    place = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
    cost = f"{place}: profiling overhead: {describe_change(record.cost, 'of a step')}"
    if record.world_size == 1:
        return [cost]
    sure = "" if record.exposed_noise_s is None else f" ± {format_ms(record.exposed_noise_s)}"
    sent = f"{format_bytes(record.num_bytes)} in {format_number_of(record.num_messages, 'message')} per step"
    took = f"{format_ms(record.exposed_s)}{sure} ms of {format_ms(record.timing.median_s)}"
    return [f"{place}: each rank sends {sent}; communication overhead {record.overhead:.1%} ({took})", cost]


class WrappersResult(Result):
    """Result of `bench wrappers`: one row per wrapper, backend, number of ranks and model."""

    def _derive(self) -> None:
        self.steps = self.only(StepRecord)
        self.standings = compare_wrappers(self.steps)

    @property
    def answer(self) -> str:
        ours = [s for s in self.standings if s.record.wrapper == "paceline" and s.to_torch is not None]
        ratios = [ratio for s in ours if (ratio := s.to_torch) is not None]
        if not ratios:
            return "torch's wrapper and Paceline's were not measured together."
        if len(ours) == 1:
            one = ours[0].record
            where = f"{one.model} on {format_number_of(one.world_size, 'rank')} ({one.backend})"
            change = describe_change(ratios[0], "compared with torch's")
            return f"A step of {where} in Paceline's wrapper takes {format_duration(one.timing.median_s)}: {change}."
        faster, slower, rest = count_clear(ratios)
        return (
            f"Paceline's wrapper is faster than torch's in {faster} of {len(ratios)} cells, slower in {slower}, and "
            f"not significantly different in {rest}."
        )

    @property
    def findings(self) -> list[str]:
        tuned = [record for record in self.steps if record.wrapper.endswith("-tuned")]
        places = [f"{r.wrapper} ({r.model}, {format_number_of(r.world_size, 'rank')}, {r.backend})" for r in tuned]
        return [f"{at}: {r.configuration}; {r.note}" for at, r in zip(places, tuned, strict=True)]

    def tables(self) -> list[Table]:
        title, columns = "steps of data-parallel wrappers", build_columns(self.standings)
        return [Table("table", title, columns, self.standings, key="rows")]

    def figures(self) -> Drawings:
        subtitle = f"{self.machine}; {self.steps[0].precision}"
        return {"wrappers": lambda: plot_wrappers(self.steps, subtitle)}

    @property
    def next_steps(self) -> list[str]:
        return [f"paceline profile phases --model {self.steps[-1].model} --ranks {self.steps[-1].world_size}"]


# JSON rows use torch's names of element types.
_DTYPES = {precision: dtype for dtype, precision in PRECISIONS.items()}


def build_columns(comparisons: Sequence[WrapperComparison]) -> list[Column]:
    """The columns for wrappers; the ratio across backends is shown if several were interleaved."""
    several = len({comparison.record.backend for comparison in comparisons}) > 1
    on_gloo = "/ torch on gloo" if several else None
    return [
        *text_columns("record.model", is_key=True),
        *text_columns("record.backend", is_key=several),
        *text_columns("record.device", priority=-3),
        Column("precision", "record.precision", priority=-3),
        Column(None, lambda s: _DTYPES.get(s.record.precision, s.record.precision), key="dtype"),
        Column("ranks", "record.world_size", "number", "world_size", is_key=True),
        Column("batch", "record.batch_size", "number", "batch_size", priority=-1),
        *text_columns("record.wrapper", is_key=True),
        Column("forward", lambda s: s.record.phase("forward").median_s, "ms", "forward_median_s", priority=-1),
        Column("backward", lambda s: s.record.phase("backward").median_s, "ms", "backward_median_s"),
        Column(None, lambda s: s.record.phase("optimizer").median_s, key="optimizer_median_s"),
        Column("step", "record.timing.median_s", "ms", "step_median_s", priority=4),
        Column("p10", "record.timing.p10_s", "ms", "step_p10_s", priority=-2),
        Column("p90", "record.timing.p90_s", "ms", "step_p90_s", priority=-2),
        *ratio_columns("/ torch", "to_torch", "ratio_to_torch", "noise", 5),
        *ratio_columns(on_gloo, "to_torch_on_gloo", "ratio_to_torch_on_gloo", "noise_to_torch_on_gloo", 3),
        *ratio_columns("/ tuned", "to_tuned", "ratio_to_torch_tuned", "noise_to_torch_tuned", 2),
        *ratio_columns("/ bare", "to_bare", "ratio_to_bare", "noise_to_bare", 1),
        Column("host µs/param", "host_us_per_parameter", "{:.2f}".format, "host_us_per_parameter", priority=-1),
        Column(None, lambda s: s.record.held_bytes or None, key="held_bytes"),
        Column(None, lambda s: s.record.peak_step_bytes or None, key="peak_step_bytes"),
        Column("memory added", "added_bytes", "bytes", "added_bytes", priority=-1),
        *raw_columns("record.num_parameters", "record.num_bytes", "record.configuration", "record.note", "added_s"),
        Column("#wrong", "record.num_wrong", "number", "nwrong", priority=2),
        Column("iters", "record.timing.count", "number", "iters", priority=-2),
        *raw_columns("record.timing.skew_s", nchecked="record.num_checked"),
        *text_columns("record.source", priority=-3),
    ]


def plot_wrappers(records: Sequence[StepRecord], subtitle: str) -> Figure:
    """Plot step times from p10 to p90 by wrapper and backend, with a panel per model and number of ranks."""
    several = len({record.backend for record in records}) > 1

    def name(record: StepRecord) -> str:
        on, ranks = "" if several else f"{record.backend}, ", format_number_of(record.world_size, "rank")
        return f"{record.model} ({on}{ranks}, {record.source})"

    groups = group_by(records, name)
    wrappers = list(dict.fromkeys(record.wrapper for record in records))
    # Keep the backends of one wrapper next to each other for comparison.
    rows = list(dict.fromkeys((r.wrapper, r.backend) for r in sorted(records, key=lambda r: wrappers.index(r.wrapper))))
    names = [f"{wrapper} on {backend}" if several else wrapper for wrapper, backend in rows]
    subtitle = f"step (ms), median, line p10 to p90. {subtitle}"
    figure, panels = build_panels(list(groups), "step time of data-parallel wrappers", subtitle, 1 + 0.3 * len(rows))
    for axes, group in zip(panels, groups.values(), strict=True):
        for record in group:
            place, number = rows.index((record.wrapper, record.backend)), wrappers.index(record.wrapper)
            color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
            low, middle, high = (1e3 * s for s in (record.timing.p10_s, record.timing.median_s, record.timing.p90_s))
            axes.plot([low, middle, high], [place] * 3, color=color, lw=2, marker=marker, ms=6, markevery=[1])
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(rows)), names, fontsize=8.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure
