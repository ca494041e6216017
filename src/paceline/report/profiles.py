"""Results of `paceline.profile`, `profile layers`, `trace` and `comm-table`: tables, figures, text."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import RecordError
from paceline.predict import traces as tracing
from paceline.predict.advice import StepFacts
from paceline.predict.memory_use import HeldMemory, MemoryUse
from paceline.predict.networks import MeasuredFabric, build_sweeps, find_networks
from paceline.predict.predictor import describe_rank, find_evidence, fit_rank
from paceline.predict.simulate import BucketSpan
from paceline.predict.traces import CATEGORIES, KernelRow, Overview, RankTrace, StepLane
from paceline.predict.whatif import CommRow, build_comm_table
from paceline.records import CollectiveRecord, LayerProfileRecord, TracedStepRecord
from paceline.records.exchange import export_layer_sizes, export_layer_times
from paceline.records.findings import Finding, add_busy, is_busy
from paceline.records.layers import OUTSIDE
from paceline.records.samples import group_by
from paceline.records.store import Run, load_run, read_file
from paceline.report.plots import COLORS, Drawings, Figure, new_figure, place_legend
from paceline.report.result import Result
from paceline.report.step_tables import PHASES, PhasesResult
from paceline.report.table import Column, Table, describe_change, raw_columns, text_columns
from paceline.units import MIB, format_bytes, format_duration, format_ms, format_number_of

OVERVIEW = "overview.json"
MAX_RANKS = 8  # maximum in one timeline
_MAX_ROWS = 12  # maximum number of operators or kernels shown on a terminal
_PHASES = ("forward", "backward", "optimizer")
_PHASE_COLORS = {"data": "#E69F00", "forward": "#0072B2", "backward": "#56B4E9", "optimizer": "#009E73"}


class ProfileResult(PhasesResult):
    """Result of `paceline.profile` and `profile layers`. `profile` is the record of the bare model's layers, and
    `steps` are the records of the phases on several ranks, if measured. `evidence` has the costs of messages and the
    wrapper, or is None if only layers were profiled."""

    json_columns = raw_columns(notes="findings")

    def _derive(self) -> None:
        super()._derive()
        self.profile = next(iter(self.only(LayerProfileRecord)), None)
        self.evidence = find_evidence(self.records)

    @property
    def answer(self) -> str:
        profile = self.profile
        if self.steps or profile is None:
            return super().answer
        step_s = profile.timing.median_s
        phases = ((name, getattr(profile, name).median_s) for name in _PHASES)
        parts = ", ".join(f"{name} {format_duration(time_s)} ({time_s / step_s:.0%})" for name, time_s in phases)
        return f"A step of {profile.model} takes {format_duration(step_s)} (batch {profile.batch_size}): {parts}."

    @property
    def findings(self) -> list[str]:
        lines = [] if self.profile is None else describe_layers(self.profile)
        if self.profile is not None and self.evidence is not None:
            lines += [*describe_rank(fit_rank(self.evidence), self.profile.num_bytes), self.evidence.plain.note]
        return [*filter(None, lines), *super().findings]

    def tables(self) -> list[Table]:
        tables = [Table("phases", "phases", PHASES, self.steps)] if self.steps else []
        if self.profile is not None:
            name, blocks, parameters = self.profile.model, list_blocks(self.profile), list_parameters(self.profile)
            tables.append(Table("blocks", f"{name}, blocks", BLOCKS, blocks))
            tables.append(Table("parameters", f"{name}, parameters", PARAMETERS, parameters, shown=()))
        return tables

    def figures(self) -> Drawings:
        profile = self.profile
        return {} if profile is None else {"ready": lambda: plot_ready(profile, self.machine)}

    def files(self) -> dict[str, str | bytes]:
        if self.profile is None:
            return {}
        return {
            "layer-sizes.csv": export_layer_sizes(self.profile.layer_sizes),
            "layer-times.csv": export_layer_times(self.profile.layer_times),
        }

    @property
    def next_steps(self) -> list[str]:
        if self.folder is None or self.profile is None:
            return []
        return [f"paceline predict --model-profile {self.folder} --network 10gbe --ranks 2,8,64"]


class _Part(NamedTuple):
    """A block and the bytes of its gradients, or a parameter, its place in ready order and the bytes ready so far."""

    profile: LayerProfileRecord
    of: Any
    place: int = 0
    ready_bytes: int = 0


def list_blocks(profile: LayerProfileRecord) -> list[_Part]:
    """The blocks in definition order, and everything else in one row, so that columns add up to the total."""
    return [
        _Part(profile, times, ready_bytes=sum(p.num_bytes for p in profile.parameters_of(times.name)))
        for times in (*profile.blocks, profile.outside)
    ]


def list_parameters(profile: LayerProfileRecord) -> list[_Part]:
    ready = itertools.accumulate(0 if p.median_s is None else p.num_bytes for p in profile.parameters)
    return [_Part(profile, *row) for row in zip(profile.parameters, itertools.count(), ready, strict=False)]


def _find_share(row: _Part) -> float:
    backward_s: float = statistics.median(row.of.backward_s)
    return backward_s / (row.profile.profiled_backward.median_s or 1.0)


BLOCKS = (
    *raw_columns("profile.model"),
    Column("block", "of.name", key="block", is_key=True),
    Column("gradients", "ready_bytes", "bytes", "num_bytes", priority=1),
    Column("forward", lambda r: statistics.median(r.of.forward_s), "ms", "forward_s", priority=2),
    Column("backward", lambda r: statistics.median(r.of.backward_s), "ms", "backward_s", priority=3),
    Column("of backward", _find_share, "percent.1", "share_of_backward"),
    Column("last ready", lambda r: r.profile.ready_of(r.of.name), "ms", "last_ready_s", priority=2),
    *text_columns("profile.source", priority=-1),
)
PARAMETERS = (
    Column("#", "place", "number", "index"),
    *raw_columns("profile.model", parameter="of.name", ready_s="of.median_s"),
    Column(None, lambda r: list(r.of.aliases), key="aliases"),
    Column("parameter", "of.names", is_key=True),
    Column("block", lambda r: r.of.block or OUTSIDE),
    Column(None, lambda r: r.of.block or None, key="block"),
    Column("type", "of.dtype", key="dtype"),
    Column("bytes", "of.num_bytes", "bytes", "num_bytes"),
    Column("ready (ms)", lambda r: "never" if r.of.median_s is None else format_ms(r.of.median_s), str, priority=1),
    Column("ready so far", "ready_bytes", "bytes", "ready_bytes"),
    *text_columns("profile.source"),
)


def describe_layers(profile: LayerProfileRecord) -> list[str]:
    """Facts that are not in the tables: the profiling overhead and unusual gradients."""
    step = describe_change(profile.step_cost, "of a step")
    backward = describe_change(profile.backward_cost, "of backward")
    order = "in the same order in every step"
    if not profile.is_order_stable:
        order = "in an order that changed between steps; the table is sorted by the medians"
    lines = [f"profiling overhead: {step}; {backward}", f"gradients became ready {order}"]
    if tied := [p.names for p in profile.parameters if p.aliases]:
        lines.append(f"tied, so ready only after the last use: {'; '.join(tied)}")
    if profile.unused:
        lines.append(f"without a gradient: {', '.join(p.name for p in profile.unused)}")
    return [*lines, profile.note] if profile.note else lines


def plot_ready(profile: LayerProfileRecord, subtitle: str) -> Figure:
    """Plot median bytes ready against the time since backward began, with a mark at the last gradient of each block."""
    figure, axes = new_figure(f"{profile.model}: gradients ready during backward", subtitle)
    end_ms = profile.profiled_backward.median_s * 1e3
    ready = [(p.of.median_s, p.ready_bytes) for p in list_parameters(profile) if p.of.median_s is not None]
    points = [(0.0, 0), *ready]
    xs = [*(time_s * 1e3 for time_s, _ in points), end_ms]
    ys = [*(num_bytes / MIB for _, num_bytes in points), points[-1][1] / MIB]
    axes.step(xs, ys, where="post", color=COLORS[0], lw=1.6, label=f"ready ({profile.source}, median)")
    axes.axvline(end_ms, color="#555555", lw=1, ls="--", label="end of backward")
    ready_bytes = dict(ready)  # for equal times, the last entry counts
    found = [(profile.ready_of(block.name), block.name) for block in profile.blocks]
    marks = sorted((time_s * 1e3, ready_bytes[time_s] / MIB, name) for time_s, name in found if time_s is not None)
    xs, ys = [x for x, _, _ in marks], [y for _, y, _ in marks]
    axes.plot(xs, ys, "o", color=COLORS[1], ms=4.5, label="last gradient of a block")
    for x, y, text in _join_labels(marks, end_ms):
        # The curve never falls, so the upper left of a point is free.
        offset, side = (4, "left") if x < 0.06 * end_ms else (-5, "right")
        axes.annotate(text, (x, y), xytext=(offset, 3), textcoords="offset points", fontsize=7.5, ha=side)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.06 * profile.num_bytes / MIB)
    axes.set(xlabel="time since backward began (ms)", ylabel="gradients ready (MiB)")
    place_legend(figure, axes)
    return figure


def _join_labels(marks: list[tuple[float, float, str]], width: float) -> list[tuple[float, float, str]]:
    """One label for marks whose labels would overlap: the name of the last mark and the number of others."""
    groups: list[list[tuple[float, float, str]]] = []
    for mark in marks:
        first = groups[-1][0] if groups else None
        if first and mark[0] - first[0] < 0.04 * width and mark[1] - first[1] < 0.04 * marks[-1][1]:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [(x, y, name + (f" +{len(others)}" if others else "")) for *others, (x, y, name) in groups]


class TraceResult(Result):
    """Result of `profile trace`: the activity of each rank in a step, where the time goes, and how to speed it up.
    `document` comes from the ranks or, for a saved run, from `overview.json` in its folder. `traces` has one trace per
    rank and is empty for a saved run; `plot` draws one step of them."""

    def __init__(
        self,
        run: Run,
        folder: Path | None = None,
        document: Any = None,
        traces: Sequence[RankTrace] = (),
        plot: bool = True,
    ) -> None:
        super().__init__(run, folder)
        self.traces, self._plot = traces, plot and 1 <= len(traces) <= MAX_RANKS
        path = (folder or Path()) / OVERVIEW
        try:
            self.document: dict[str, Any] = json.loads(read_file(path)) if document is None else document
            self.overviews = [tracing.overview_from_json(one) for one in self.document["overviews"]]
            self.facts = StepFacts(**self.document["facts"])
            self.advice = [Finding.from_json(one) for one in self.document["advice"]]
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecordError(f"{path} cannot be read: {error}; `paceline profile trace` writes it") from None
        self._model, ranks = self.config.get("model", "the model"), format_number_of(self.facts.world_size, "rank")
        batch = f"batch {self.facts.batch_size}" + (f", accumulate {n}" if (n := self.facts.accumulate) > 1 else "")
        self._name = f"{self._model} on {ranks}, {batch}, {self.facts.precision}"
        self._memory = self.overviews[0].memory

    @staticmethod
    def build_document(overviews: Sequence[Overview], facts: StepFacts, advice: Sequence[Finding]) -> dict[str, Any]:
        return {
            "overviews": [tracing.overview_to_json(overview) for overview in overviews],
            "facts": asdict(facts),
            "advice": [one.to_json() for one in advice],
        }

    @property
    def samples_per_s(self) -> float:
        return self.facts.batch_size * self.facts.accumulate * self.facts.world_size / self.overviews[0].step_s

    @property
    def answer(self) -> str:
        text = f"A step of {self._name} takes {format_duration(self.overviews[0].step_s)} in the trace of rank 0."
        return "\n".join([*(line for one in self.advice[:1] for line in one.card_lines), text])

    @property
    def findings(self) -> list[str]:
        lines = [] if self._memory is None else [describe_memory(self._memory)]
        return [*lines, *(f"also: {_describe_gain(one)}" for one in self.advice[1:])]

    @property
    def places(self) -> list[str]:
        if self.folder is None:
            return super().places
        trace = f"trace: {self.folder / 'trace.json.gz'} (open it in ui.perfetto.dev)"
        return [*super().places, trace, *(f"figure: {self.folder / name}.png" for name in self.figures())]

    def tables(self) -> list[Table]:
        operators, kernels = self.overviews[0].operators, self.overviews[0].kernels
        shown = () if kernels else operators[:_MAX_ROWS]
        tables = [
            Table("overview", self._name, OVERVIEWS, self.overviews),
            Table("operators", "operators of rank 0", OPERATORS, operators, shown=shown),
        ]
        if kernels:
            columns = build_kernel_columns(kernels)
            tables.append(Table("kernels", "kernels of rank 0", columns, kernels, shown=kernels[:_MAX_ROWS]))
        if self._memory is not None:
            rows = list_memory(self._memory)
            tables.append(Table("memory", "memory of rank 0 over one step", MEMORY, rows))
        return tables

    def figures(self) -> Drawings:
        wrapper, memory = self.config.get("wrapper", "unknown wrapper"), self._memory
        figures: Drawings = {}
        if self._plot:
            title = f"One step of {self._model} on {format_number_of(len(self.traces), 'rank')} ({wrapper})"
            figures["timeline"] = lambda: plot_timeline(tracing.build_lanes(self.traces), title, self.machine)
        if memory is not None:
            what = f"Memory in one step of {self._name} ({wrapper})"
            figures["memory"] = lambda: plot_memory(memory, what, self.machine)
        return figures

    def files(self) -> dict[str, str | bytes]:
        files: dict[str, str | bytes] = {OVERVIEW: json.dumps(self.document, indent=1) + "\n"}
        return files | (
            {"trace.json.gz": tracing.render_trace(tracing.merge_traces(self.traces))} if self.traces else {}
        )

    @property
    def next_steps(self) -> list[str]:
        return [] if self.folder is None else [f"paceline profile --compare {self.folder} OTHER"]

    def to_json(self) -> dict[str, Any]:
        picture = str(self.folder / "timeline.png") if self.folder is not None and self._plot else None
        return super().to_json() | self.document | {"picture": picture}


def _describe_gain(one: Finding) -> str:
    return f"{one.text} ({one.certainty} {one.factor:.2f}x as fast)" if one.gain_s else one.text


_SHOWN = {"kernel": "kernels", "copy": "copies", "cpu": "CPU"}


def _format_share(share: float) -> str:
    return f"{share:.1%}" if share >= 5e-4 else ""  # empty on every rank: the column is hidden


def _gpu_column(name: str, field: str) -> Column:
    return Column(name, f"gpu.{field}", "percent.1", f"gpu_{field}")


# One row per rank's overview. The shares sum to the step.
OVERVIEWS = (
    Column("rank", "rank", "number", "rank", is_key=True),
    *text_columns("device"),
    Column("steps", lambda o: len(o.steps), "number", "steps", priority=-1),
    Column("step", "step_s", "ms", "step_s", is_key=True),
    *(
        Column(_SHOWN.get(c, c), partial(Overview.share, category=c), _format_share, f"{c}_share", priority=2)
        for c in CATEGORIES
    ),
    *(Column(phase, f"phases_s.{phase}", "ms", f"{phase}_s") for phase in _PHASES),
    _gpu_column("GPU busy", "busy"),
    _gpu_column("SM efficiency (est.)", "sm_efficiency"),
    _gpu_column("occupancy (est.)", "occupancy"),
    _gpu_column("tensor cores", "tensor_core_share"),
    _gpu_column("communication (of kernel time)", "communication_share"),
    *raw_columns("world_size", "message_s", "host_s"),
    *raw_columns(gpu_missed_s="gpu.missed_s", gpu_kernel_s="gpu.kernel_s", gpu_num_kernels="gpu.num_kernels"),
    *(Column(None, partial(Overview.seconds, category=c), key=f"{c}_s") for c in CATEGORIES),
    Column("peak memory", "memory.peak_bytes", "bytes", "peak_bytes", priority=-1),
    *text_columns("source", priority=-1),
)


OPERATORS = (
    Column("operator", "name", key="name", is_key=True),
    Column("calls/step", "calls", "{:g}".format, "calls"),
    Column("self (ms/step)", "self_s", format_ms, "self_s", priority=2),
    Column("total (ms/step)", "total_s", format_ms, "total_s", priority=1),
)


def _shorten(name: str, width: int) -> str:
    """Shorten a name to its ends. Template names can have thousands of characters, and both ends are the most
    informative."""
    return name if len(name) <= width else f"{name[: width - 16]}…{name[-15:]}"


def build_kernel_columns(kernels: Sequence[KernelRow]) -> Sequence[Column]:
    names = tuple(kernel.name for kernel in kernels)
    return (
        Column("kernel", lambda r: shorten_names(names, 44)[r.name], is_key=True),
        *text_columns("kind"),
        Column("calls/step", "calls", "{:g}".format, "calls"),
        Column("time (ms/step)", "time_s", format_ms, "time_s", priority=3),
        Column("mean (µs)", lambda r: r.mean_s * 1e6, "{:.1f}".format, priority=1),
        Column("occupancy (est.)", "occupancy", "percent.1", "occupancy", priority=-1),
        *raw_columns("name", "mean_s", "uses_tensor_cores"),
        Column("tensor cores", lambda r: r.uses_tensor_cores or (None if r.kind != "matmul" else False), "yes"),
    )


# Height of a row of buckets, and the number of labels that stay readable.
_ROW, _MAX_LABELS = 0.22, 16


def build_step_lanes(records: Sequence[TracedStepRecord]) -> list[StepLane]:
    """The last recorded step of each rank. Ranks of several hosts share no clock, so their steps are aligned at the end
    of the last message, which all ranks receive together."""
    last = {step.rank: step for step in sorted(records, key=lambda step: step.number) if step.messages}
    shared_s = max((step.before_s + step.over_s for step in last.values()), default=0.0)
    lanes = []
    for rank, step in sorted(last.items()):
        zero_s = shared_s - step.over_s  # when backward begins
        begin_s, end_s = zero_s - step.before_s, zero_s + step.over_s + step.after_s
        phases = {
            "data": (begin_s, begin_s + step.data_s),
            "forward": (zero_s - step.forward_s, zero_s),
            "backward": (zero_s, zero_s + step.backward_s),
            "optimizer": (end_s - step.optimizer_s, end_s),
        }
        buckets = [
            BucketSpan(
                one.num_bytes, zero_s + one.launch_s, zero_s + one.launch_s, zero_s + one.start_s, zero_s + one.done_s
            )
            for one in step.messages
        ]
        spans = tuple((name, *span) for name, span in phases.items() if span[1] > span[0])
        lanes.append(StepLane(rank, spans, tuple(buckets), zero_s + step.backward_s, end_s))
    return lanes


def plot_timeline(lanes: Sequence[StepLane], title: str, subtitle: str) -> Figure:
    """A lane of phases and a lane of buckets per rank, in ms; communication after the end of backward is hatched."""
    figure, axes = new_figure(title, f"measured. {subtitle}")
    end_ms = max(lane.end_s for lane in lanes) * 1e3
    ends = dict.fromkeys(format_duration(pick(lane.exposed_s for lane in lanes)) for pick in (min, max))
    exposed = f"message after it, or waiting ({' to '.join(ends)})"
    hatched = {"facecolors": "white", "edgecolors": "#D55E00", "hatch": "//////", "lw": 0.8}
    ticks: dict[float, str] = {}
    top = 0.0

    def draw(first_s: float, last_s: float, at: float, height: float, label: str, **style: Any) -> None:
        if last_s > first_s:
            axes.broken_barh([(first_s * 1e3, (last_s - first_s) * 1e3)], (at, height), label=label, **style)

    for lane in lanes:
        ticks[top + 0.2] = f"rank {lane.rank}"
        for name, first_s, last_s in lane.phases:
            draw(first_s, last_s, top, 0.4, name, facecolors=_PHASE_COLORS[name])
            words, color = f"{name} {format_ms(last_s - first_s)}", "white" if name == "forward" else "black"
            if (last_s - first_s) * 1e3 > 0.011 * len(words) * end_ms:
                place = (first_s + last_s) / 2 * 1e3, top + 0.2
                axes.text(*place, words, ha="center", va="center", fontsize=7.5, color=color)
        # Keep buckets and their labels from overlapping.
        label_s = 0.065 * end_ms / 1e3 if len(lane.buckets) <= _MAX_LABELS else 0.0
        rows = tracing.find_lanes((bucket.ready_s, bucket.done_s + label_s) for bucket in lane.buckets)
        bottom = top + 0.65 + _ROW * (max(rows, default=-1) + 1)
        free_s = float("inf") if lane.backward_end_s is None else lane.backward_end_s
        for bucket, row in zip(lane.buckets, rows, strict=True):
            at, height = top + 0.47 + _ROW * row, 0.85 * _ROW
            hidden_s = min(max(bucket.launch_s, free_s), bucket.done_s)
            draw(bucket.ready_s, bucket.launch_s, at, height, "bucket ready, being gathered", facecolors="#F5D9A8")
            draw(bucket.launch_s, hidden_s, at, height, "message beside backward", facecolors="#999999")
            draw(hidden_s, bucket.done_s, at, height, exposed, **hatched)
            if label_s:  # to the right of the bar, clear of the hatching
                place = bucket.done_s * 1e3 + 0.004 * end_ms, at + 0.42 * _ROW
                axes.text(*place, format_bytes(bucket.num_bytes), fontsize=6.5, va="center", color="#333333")
        if rows:
            ticks[(top + bottom) / 2 + 0.15] = "buckets"
            axes.plot([min(free_s * 1e3, end_ms)] * 2, [top, bottom - 0.2], color="#000000", lw=0.9, ls=":")
        axes.axhline(bottom - 0.1, color="#DDDDDD", lw=0.8)
        top = bottom
    figure.set_size_inches(9.6, 1.7 + 0.8 * top)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set(ylim=(top - 0.1, -0.12), xlim=(0, end_ms * 1.01), xlabel="ms since the first rank began the step")
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
    place_legend(figure, axes)
    return figure


# -- memory of one step ------------------------------------------------------------------------------------------------

_MEMORY_COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#009E73",
    "buckets": "#E69F00",
    "gradients": "#D55E00",
    "data": "#F0E442",
    "activations": "#56B4E9",
    "temporary": "#CC79A7",
    "other": "#999999",
}


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one category at the start, peak and end of the step, and its fraction of the peak. `largest_bytes` is
    the category's maximum, and `by_phase` its maximum in each phase."""

    category: str
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    largest_bytes: int
    share: float
    by_phase: dict[str, int]


def list_memory(memory: MemoryUse) -> list[MemoryRow]:
    """One row per category, and the total, whose maximum is that of the sum."""
    peak, by_phase = memory.peak, group_by(memory.phases, lambda phase: phase.name)
    return [
        MemoryRow(
            category=one.category,
            begin_bytes=one.num_bytes[0],
            peak_bytes=one.num_bytes[peak],
            end_bytes=one.num_bytes[-1],
            largest_bytes=one.largest_bytes,
            share=one.num_bytes[peak] / max(1, memory.peak_bytes),
            by_phase={name: max(phase.largest_bytes[number] for phase in same) for name, same in by_phase.items()},
        )
        for number, one in enumerate((*memory.held, HeldMemory("total", tuple(memory.totals))))
    ]


MEMORY = (
    Column("memory", "category", key="category", is_key=True),
    Column("at start", "begin_bytes", "bytes", "begin_bytes", is_key=True),
    Column("at peak", "peak_bytes", "bytes", "peak_bytes", is_key=True),
    Column("of peak", "share", "percent.1", "share_of_peak"),
    Column("at end", "end_bytes", "bytes", "end_bytes", is_key=True),
    Column("largest", "largest_bytes", "bytes", "largest_bytes"),
    *(Column(f"in {p}", f"by_phase.{p}", "bytes", f"{p}_bytes", priority=-1) for p in tracing.PHASES),
)


def describe_memory(memory: MemoryUse) -> str:
    """The peak and when it occurs; the table shows what contributes to the peak."""
    moment = format_duration(memory.times_s[memory.peak])
    where = f"in {memory.peak_phase}, {moment} after the step began" if memory.peak else "at the start of the step"
    by = f" ({memory.operator})" if memory.operator else ""
    return f"memory: peak {format_bytes(memory.peak_bytes)} {where}{by}"


def plot_memory(memory: MemoryUse, title: str, subtitle: str) -> Figure:
    """Plot one stacked area per category, in MiB against ms, with the phases and the peak marked."""
    figure, axes = new_figure(title, f"measured. {subtitle}")
    end_ms, peak, totals = memory.times_s[-1] * 1e3, memory.peak, memory.totals
    shown = [one for one in memory.held if one.largest_bytes]
    axes.stackplot(
        [time_s * 1e3 for time_s in memory.times_s],
        [[num_bytes / MIB for num_bytes in one.num_bytes] for one in shown],
        labels=[one.category for one in shown],
        colors=[_MEMORY_COLORS[one.category] for one in shown],
        step="post",
        lw=0,
    )
    top = 1.15 * totals[peak] / MIB
    for phase in memory.phases:
        axes.axvline(phase.begin_s * 1e3, color="#555555", lw=0.8, ls=":")
        has_room = (phase.end_s - phase.begin_s) * 1e3 > 0.009 * len(phase.name) * end_ms
        if has_room or phase is memory.phases[-1]:  # there is room to the right of the last phase
            at_ms, side = ((phase.begin_s + phase.end_s) * 500, "center") if has_room else (phase.begin_s * 1e3, "left")
            axes.text(at_ms, 1.01, phase.name, ha=side, fontsize=8, transform=axes.get_xaxis_transform())
    at_ms = memory.times_s[peak] * 1e3
    axes.plot([at_ms], [totals[peak] / MIB], "v", color="black", ms=6)
    offset, side = (8, "left") if at_ms < 0.5 * end_ms else (-8, "right")
    words = f"peak {format_bytes(totals[peak])}"
    axes.annotate(words, (at_ms, totals[peak] / MIB), (offset, 4), textcoords="offset points", ha=side, fontsize=8.5)
    axes.set(xlim=(0, end_ms or 1), ylim=(0, top or 1), xlabel="ms since the step began", ylabel="allocated (MiB)")
    place_legend(figure, axes)
    return figure


# -- tables of communication -------------------------------------------------------------------------------------------


class CommTableResult(Result):
    """Result of `profile comm-table`: the measured step of one rank, and the predicted cost of its gradients on named
    networks and on those that other runs measured (`--curve`)."""

    def _derive(self) -> None:
        self.rows: list[CommRow] = []
        self._lost = [path for path in self.config.get("curves", ()) if not Path(path).exists()]
        ranks, profiles = self.config["ranks"], self.only(LayerProfileRecord)
        self._profiles = profiles
        parts: list[tuple[str, Any, Any]] = [("", find_networks(self.config["networks"]), ())]
        curves = [path for path in self.config.get("curves", ()) if path not in self._lost]
        parts += [(f"--curve {path}", (), load_sweeps(path, ranks)) for path in curves]
        names = self.config.get("profiles") or ["profile"] * len(profiles)
        busy = {*self.config.get("busy", ()), *(["profile"] if is_busy(self.doubts) else [])}  # the profile of this run
        # Keep evidence with its own profile: two profiles may be of the same job on two devices, or before and after a
        # change.
        places = [place for place, record in enumerate(self.records) if isinstance(record, LayerProfileRecord)]
        carried = [self.records[start:end] for start, end in itertools.pairwise([*places, None])]
        for name, profile, own in zip(names, profiles, carried, strict=True):
            evidence = find_evidence(own)
            for curve, networks, sweeps in parts:
                for row in build_comm_table(profile, networks, sweeps, ranks, evidence):
                    doubt = add_busy(row.step.doubt, [one for one in (name, curve) if one in busy])
                    self.rows.append(row._replace(step=replace(row.step, doubt=doubt)))
        # Keep the models of each network and rank count next to each other.
        groups = group_by(self.rows, lambda row: (row.step.network, row.step.world_size))
        self.rows = [row for rows in groups.values() for row in rows]

    @property
    def answer(self) -> str:
        best, worst = (pick(self.rows, key=lambda row: row.step.exposed_share) for pick in (min, max))
        is_one = len(self._profiles) == 1

        def say(row: CommRow) -> str:
            size = format_bytes(row.job.num_bytes)
            of = f" of {row.profile.model} (batch {row.profile.batch_size}, {size} of gradients)"
            where = f"{row.step.network} with {row.step.world_size:,} ranks"
            return f"{row.step.exposed_share:.1%} of a step{'' if is_one else of} on {where}"

        took = f"A step of {best.profile.model} computes for {format_duration(best.step.local_s)} and sends "
        took += f"{format_bytes(best.job.num_bytes)} of gradients. "
        exposed = "Predicted exposed communication, with the best bucket size: "
        return f"{took if is_one else ''}{exposed}{', '.join(dict.fromkeys((say(best), say(worst))))}."

    @property
    def findings(self) -> list[str]:
        how = "overhead: all gradients in one message after backward; step and exposed: at the best bucket size that "
        lost = [f"{path} no longer exists, so its networks are omitted" for path in self._lost]
        return [*dict.fromkeys(row.assumption for row in self.rows), how + "`predict` finds", *lost]

    def tables(self) -> list[Table]:
        return [Table("table", "communication and compute", COMM, self.rows, key="rows")]

    @property
    def next_steps(self) -> list[str]:
        if self.folder is None or len(self._profiles) > 1:
            return []
        return [f"paceline predict --model-profile {self.folder} --network 10gbe"]


def load_sweeps(path: str | Path, ranks: Sequence[int]) -> list[MeasuredFabric]:
    """The networks in a `bench allreduce` run that were measured with at least one of these rank counts."""
    records = [record for record in load_run(path).records if isinstance(record, CollectiveRecord)]
    return [sweep for sweep in build_sweeps(records) if set(sweep.ranks) & set(ranks)]


COMM = (
    *text_columns("profile.model", priority=1),
    Column("batch", "profile.batch_size", "number", "batch_size", is_key=True),
    Column("gradients", "job.num_bytes", "bytes", "gradient_bytes", is_key=True),
    *text_columns("step.network", is_key=True),
    Column("ranks", "step.world_size", "number", "world_size", is_key=True),
    Column("compute", "step.local_s", "ms", "compute_s", priority=1),
    Column("compute per MiB", lambda r: r.step.local_s * MIB / r.job.num_bytes, "ms", priority=-1),
    Column("comm", "step.message_s", "ms", "comm_s", priority=1),
    Column("overhead", "step.overhead", "percent.1", "overhead", priority=2),
    Column("step", "step.step_s", "ms", "step_s", priority=3),
    Column("exposed", "step.exposed_share", "percent.1", "exposed_overhead", priority=3),
    Column("doubtful", lambda r: bool(r.step.doubt) or None, "yes", priority=2),
    *raw_columns("job.backward_s", compute_source="profile.source"),
    *raw_columns("step.algorithm", "step.low_s", "step.high_s", "step.exposed_s", best_cap_bytes="step.cap_bytes"),
    *raw_columns("assumption", "step.doubt", "step.source"),
    Column("source", lambda r: f"compute {r.profile.source}, comm {r.step.source}", priority=-2),
)


@functools.lru_cache(maxsize=8)
def shorten_names(names: tuple[str, ...], width: int = 32) -> dict[str, str]:
    """Short names: both ends if that is unique, otherwise the words that differ; remaining duplicates are numbered."""
    short: dict[str, str] = {}
    ends, count = Counter(_shorten(name, width) for name in names), Counter[str]()
    for name in names:
        is_unique = ends[_shorten(name, width)] == 1
        found = _shorten(name, width) if is_unique else _shorten_among(name, names, width)
        count[found] += 1
        short[name] = found if count[found] == 1 else f"{found} #{count[found]}"
    return short


def _shorten_among(name: str, names: Sequence[str], width: int) -> str:
    """Reduce a long name to its first word and the words where other names begin to differ from it."""
    marks = {sum(itertools.takewhile(bool, map(eq, name, other))) for other in names if other != name}
    words = [(word[0], range(word.start(), word.end())) for word in re.finditer(r"[^\W_]+[\W_]*|[\W_]+", name)]
    kept = [word if 0 in place or marks.intersection(place) else "…" for word, place in words]
    return _shorten(re.sub("…+", "…", "".join(kept)), width)
