"""`paceline.profile`, `profile layers`, `trace`, `comm-table` and `--compare` as results: tables, figures, text."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, RecordError
from paceline.predict.advice import Advice, StepFacts
from paceline.predict.networks import MeasuredFabric, find_networks
from paceline.predict.overview import (
    ComparedRow,
    Overview,
    StepLane,
    build_lanes,
    compare_overviews,
    overview_from_json,
    overview_to_json,
)
from paceline.predict.traces import RankTrace, merge_traces, render_trace
from paceline.predict.whatif import CommRow, build_comm_table
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes
from paceline.records.environment import Environment
from paceline.records.exchange import export_layer_sizes, export_layer_times
from paceline.records.layers import OUTSIDE, CostRatio
from paceline.records.steps import StepRecord
from paceline.records.store import Run
from paceline.report.plots import COLORS, new_figure
from paceline.report.result import Result
from paceline.report.steps import PHASES, StepResult, describe_phases, describe_step
from paceline.report.table import Column, Table
from paceline.units import MIB, format_bytes, format_duration, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERVIEW = "overview.json"
COMPARE = "profile --compare"
MAX_RANKS = 8  # in one timeline
_MAX_ROWS = 12  # of operators or kernels on a terminal

# -- layers ------------------------------------------------------------------------------------------------------------


class ProfileResult(StepResult):
    """`paceline.profile` and `profile layers`: layers of the bare model and, on several ranks, phases of its steps.

    `profile` is the record of the layers, None where they were not measured, `steps` the records of the phases.
    """

    verbs = ("profile", "profile layers")

    def __init__(self, run: Run, folder: Path | None = None) -> None:
        super().__init__(run, folder)
        self.profile = next((record for record in run.records if isinstance(record, LayerProfileRecord)), None)

    @property
    def answer(self) -> str:
        if self.steps:
            return describe_step(self.steps[-1])
        if self.profile is None:
            return "No step was measured."
        profile, step_s = self.profile, self.profile.timing.median_s
        parts = ", ".join(
            f"{getattr(profile, name).median_s / step_s:.0%} {name}" for name in ("forward", "backward", "optimizer")
        )
        return f"A step of {profile.model} takes {format_duration(step_s)} (batch {profile.batch_size}): {parts}."

    @property
    def findings(self) -> list[str]:
        layers = [] if self.profile is None else describe_layers(self.profile)
        return [*layers, *(line for record in self.steps for line in describe_phases(record))]

    def tables(self) -> list[Table]:
        tables = [Table("phases", "phases", PHASES, self.steps)] if self.steps else []
        if self.profile is not None:
            name, blocks = self.profile.model, list_blocks(self.profile)
            tables.append(Table("blocks", f"{name}, blocks", BLOCKS, blocks))
            parameters = list_parameters(self.profile)
            tables.append(Table("parameters", f"{name}, parameters", PARAMETERS, parameters, shown=()))
        return tables

    def figures(self) -> dict[str, Callable[[], Figure]]:
        profile = self.profile
        return {} if profile is None else {"ready": lambda: plot_ready(profile, self.run.environment.machine)}

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

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"notes": list(self.findings)}


@dataclass(frozen=True)
class _Block:
    """One block of a profile, or what is in none."""

    profile: LayerProfileRecord
    times: BlockTimes

    @property
    def forward_s(self) -> float:
        return statistics.median(self.times.forward_s)

    @property
    def backward_s(self) -> float:
        return statistics.median(self.times.backward_s)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.profile.parameters_of(self.times.name))

    @property
    def ready_s(self) -> float | None:
        return self.profile.ready_of(self.times.name)

    @property
    def share(self) -> float:
        """Of the profiled backward."""
        whole_s = self.profile.profiled_backward.median_s
        return self.backward_s / whole_s if whole_s else 0.0


@dataclass(frozen=True)
class _Parameter:
    """One parameter of a profile: its place in ready order, and the bytes ready with it."""

    profile: LayerProfileRecord
    index: int
    parameter: ParameterTimes
    ready_bytes: int

    @property
    def names(self) -> str:
        return " = ".join((self.parameter.name, *self.parameter.aliases))

    @property
    def ready(self) -> str:
        return "never" if self.parameter.median_s is None else format_ms(self.parameter.median_s)


def list_blocks(profile: LayerProfileRecord) -> list[_Block]:
    """The blocks in the order of the model's definition, and the rest, so that the columns add up."""
    return [_Block(profile, times) for times in (*profile.blocks, profile.outside)]


def list_parameters(profile: LayerProfileRecord) -> list[_Parameter]:
    ready = itertools.accumulate(0 if p.median_s is None else p.num_bytes for p in profile.parameters)
    return [
        _Parameter(profile, index, parameter, num_bytes)
        for index, (parameter, num_bytes) in enumerate(zip(profile.parameters, ready, strict=True))
    ]


BLOCKS = (
    Column(None, lambda line: line.profile.model, key="model"),
    Column("block", lambda line: line.times.name, key="block", is_key=True),
    Column("gradients", lambda line: line.num_bytes, "bytes", "num_bytes", priority=1),
    Column("forward", lambda line: line.forward_s, "ms", "forward_s", priority=2),
    Column("backward", lambda line: line.backward_s, "ms", "backward_s", priority=3),
    Column("of backward", lambda line: line.share, "percent.1", "share_of_backward"),
    Column("last ready", lambda line: line.ready_s, "ms", "last_ready_s", priority=2),
    Column("source", lambda line: line.profile.source, key="source", priority=-1),
)
PARAMETERS = (
    Column("#", lambda line: line.index, "number", "index"),
    Column(None, lambda line: line.profile.model, key="model"),
    Column(None, lambda line: line.parameter.name, key="parameter"),
    Column(None, lambda line: list(line.parameter.aliases), key="aliases"),
    Column("parameter", lambda line: line.names, is_key=True),
    Column("block", lambda line: line.parameter.block or OUTSIDE),
    Column(None, lambda line: line.parameter.block or None, key="block"),
    Column("type", lambda line: line.parameter.dtype, key="dtype"),
    Column("bytes", lambda line: line.parameter.num_bytes, "bytes", "num_bytes"),
    Column(None, lambda line: line.parameter.median_s, key="ready_s"),
    Column("ready (ms)", lambda line: line.ready, lambda text: text, priority=1),
    Column("ready so far", lambda line: line.ready_bytes, "bytes", "ready_bytes"),
    Column("source", lambda line: line.profile.source, key="source"),
)


def _format_cost(ratio: CostRatio) -> str:
    verdict = "" if ratio.is_clear else ", within the noise"
    return f"{ratio.value - 1:+.1%} (p10 {ratio.p10 - 1:+.1%}, p90 {ratio.p90 - 1:+.1%}{verdict})"


def describe_layers(profile: LayerProfileRecord) -> list[str]:
    """What the tables do not show: the plain step, what profiling costs, and what is odd about the gradients."""
    lines = [
        f"plain step {format_ms(profile.timing.median_s)} ms: forward {format_ms(profile.forward.median_s)}, backward "
        f"{format_ms(profile.backward.median_s)}, optimizer {format_ms(profile.optimizer.median_s)}",
        f"profiling costs {_format_cost(profile.step_cost)} of a step, {_format_cost(profile.backward_cost)} of "
        "backward",
        "gradients became ready in the same order in every step"
        if profile.is_order_stable
        else "the order in which gradients became ready changed between steps: it is that of the medians",
    ]
    tied = [p for p in profile.parameters if p.aliases]
    if tied:
        names = "; ".join(" = ".join((p.name, *p.aliases)) for p in tied)
        lines.append(f"tied, and ready only after the last use: {names}")
    if profile.unused:
        lines.append(f"without a gradient: {', '.join(p.name for p in profile.unused)}")
    return [*lines, profile.note] if profile.note else lines


_GREY = "#555555"
_NEAR = 0.04  # of an axis: labels of points that are closer would print over each other


def plot_ready(profile: LayerProfileRecord, subtitle: str) -> Figure:
    """Bytes ready against the time since backward began, by medians; a mark where the last of each block is ready."""
    figure, axes = new_figure(f"{profile.model}: gradients ready during backward", subtitle)
    end_s = profile.profiled_backward.median_s
    points = [(0.0, 0), *profile.timeline]
    xs = [*(time_s * 1e3 for time_s, _ in points), end_s * 1e3]
    ys = [*(num_bytes / MIB for _, num_bytes in points), points[-1][1] / MIB]
    axes.step(xs, ys, where="post", color=COLORS[0], lw=1.6, label=f"ready ({profile.source}, median)")
    axes.axvline(end_s * 1e3, color=_GREY, lw=1, ls="--", label="end of backward")
    marks = _find_marks(profile)
    xs, ys = [x for x, _, _ in marks], [y for _, y, _ in marks]
    axes.plot(xs, ys, "o", color=COLORS[1], ms=4.5, label="last of a block")
    for x, y, text in _join_labels(marks, end_s * 1e3):
        # The curve only rises, so that the upper left of a point is free.
        is_left = x < 0.06 * end_s * 1e3
        axes.annotate(
            text,
            (x, y),
            xytext=(4 if is_left else -5, 3),
            textcoords="offset points",
            fontsize=7.5,
            ha="left" if is_left else "right",
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.06 * profile.num_bytes / MIB)
    axes.set_xlabel("time since backward began (ms)")
    axes.set_ylabel("gradients ready (MiB)")
    axes.legend(fontsize=8.5, frameon=False, loc="lower right", bbox_to_anchor=(0.94, 0.0))
    return figure


def _find_marks(profile: LayerProfileRecord) -> list[tuple[float, float, str]]:
    """(ms, MiB ready by then, block) for the last gradient of each block, in the order of time."""
    ready_bytes = dict(profile.timeline)  # of several at one moment, the last
    found = [(profile.ready_of(block.name), block.name) for block in profile.blocks]
    return sorted((time_s * 1e3, ready_bytes[time_s] / MIB, name) for time_s, name in found if time_s is not None)


def _join_labels(marks: list[tuple[float, float, str]], width: float) -> list[tuple[float, float, str]]:
    """One label for marks that lie close together: the last of them, and how many more there are."""
    if not marks:
        return []
    height = marks[-1][1]
    groups: list[list[tuple[float, float, str]]] = []
    for mark in marks:
        near = (
            bool(groups) and mark[0] - groups[-1][0][0] < _NEAR * width and mark[1] - groups[-1][0][1] < _NEAR * height
        )
        if near:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [
        (x, y, name + (f" +{len(group) - 1}" if len(group) > 1 else ""))
        for group in groups
        for x, y, name in group[-1:]
    ]


# -- traces ------------------------------------------------------------------------------------------------------------


class TraceResult(Result):
    """`profile trace`: what each rank did in a step, what takes the time, and what would make steps faster.

    A run has no records of its traces: `document` comes from the ranks or, of a saved run, from `overview.json` in its
    folder. `traces` are those of the ranks, None of a saved run; `plot` draws one step of them.
    """

    verbs = ("profile trace",)

    def __init__(
        self,
        run: Run,
        folder: Path | None = None,
        document: dict[str, Any] | None = None,
        traces: Sequence[RankTrace] = (),
        plot: bool = True,
    ) -> None:
        super().__init__(run, folder)
        self.document = _load_overview(folder) if document is None else document
        self.traces, self._plot = traces, plot and 1 <= len(traces) <= MAX_RANKS
        try:
            self.overviews = [overview_from_json(one) for one in self.document["overviews"]]
            self.facts = StepFacts(**self.document["facts"])
            self.advice: list[dict[str, Any]] = self.document["advice"]
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{folder or 'a trace'}: {OVERVIEW} cannot be read: {error}") from None

    @staticmethod
    def build_document(overviews: Sequence[Overview], facts: StepFacts, advice: Sequence[Advice]) -> dict[str, Any]:
        """What `overview.json` holds."""
        names = ("kind", "gain_s", "factor", "certainty", "text")
        return {
            "overviews": [overview_to_json(overview) for overview in overviews],
            "facts": {name: getattr(facts, name) for name in facts.__dataclass_fields__},
            "advice": [{name: getattr(one, name) for name in names} for one in advice],
        }

    @property
    def samples_per_s(self) -> float:
        facts = self.facts
        return facts.batch_size * facts.accumulate * facts.world_size / self.overviews[0].step_s

    @property
    def answer(self) -> str:
        first = self.overviews[0]
        what = f"{self._name} takes {format_duration(first.step_s)} in the trace of rank 0"
        return f"A step of {what}. {self.advice[0]['text']}" if self.advice else f"A step of {what}."

    @property
    def _name(self) -> str:
        facts = self.facts
        ranks = format_number_of(facts.world_size, "rank")
        return f"{self.config.get('model', 'the model')} on {ranks}, batch {facts.batch_size}, {facts.precision}"

    @property
    def findings(self) -> list[str]:
        lines = []
        for number, one in enumerate(self.advice, 1):
            gain = f" ({one['certainty']} {one['factor']:.2f} x as fast)" if one["gain_s"] else ""
            lines.append(f"{number}. {one['text']}{gain}")
        if self.folder is not None:
            lines.append(f"trace: {self.folder / 'trace.json.gz'} (open it in ui.perfetto.dev)")
            if self.figures():
                lines.append(f"picture: {self.folder / 'timeline.png'}")
        return lines

    @property
    def warnings(self) -> tuple[str, ...]:
        known = {one["text"] for one in self.advice}  # older runs kept the advice among the warnings
        return tuple(text for text in self.run.warnings if text not in known)

    def tables(self) -> list[Table]:
        operators, kernels = self.overviews[0].operators, self.overviews[0].kernels
        tables = [
            Table("overview", self._name, choose_overview_columns(self.overviews), self.overviews),
            Table(
                "operators", "operators of rank 0", OPERATORS, operators, shown=() if kernels else operators[:_MAX_ROWS]
            ),
        ]
        if kernels:
            tables.append(Table("kernels", "kernels of rank 0", KERNELS, kernels, shown=kernels[:_MAX_ROWS]))
        return tables

    def figures(self) -> dict[str, Callable[[], Figure]]:
        if not self._plot:
            return {}
        model, wrapper = self.config.get("model", "the model"), self.config.get("wrapper", "unknown wrapper")
        title = f"One step of {model} on {format_number_of(len(self.traces), 'rank')} ({wrapper})"
        return {"timeline": lambda: plot_timeline(build_lanes(self.traces), title, self.run.environment.machine)}

    def files(self) -> dict[str, str | bytes]:
        files: dict[str, str | bytes] = {OVERVIEW: json.dumps(self.document, indent=1) + "\n"}
        return files | ({"trace.json.gz": render_trace(merge_traces(self.traces))} if self.traces else {})

    @property
    def next_steps(self) -> list[str]:
        return [] if self.folder is None else [f"paceline profile --compare {self.folder} OTHER"]

    def to_json(self) -> dict[str, Any]:
        picture = str(self.folder / "timeline.png") if self.folder is not None and self.figures() else None
        return super().to_json() | self.document | {"picture": picture}


def _load_overview(folder: Path | None) -> dict[str, Any]:
    path = OVERVIEW if folder is None else folder / OVERVIEW
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}; `paceline profile trace` writes it") from None
    return document


_SHARES = (
    ("kernels", "kernel"), ("communication", "communication"), ("copies", "copy"), ("data", "data"), ("CPU", "cpu"),
    ("other", "other"),
)  # fmt: skip


def _share_column(name: str, category: str) -> Column:
    return Column(name, lambda o: o.share(category), "percent.1", f"{category}_share", priority=2)


def _phase_column(phase: str) -> Column:
    return Column(phase, lambda o: o.phases_s.get(phase), "ms", f"{phase}_s")


def _gpu_column(name: str | None, field: str) -> Column:
    return Column(name, lambda o: None if o.gpu is None else getattr(o.gpu, field), "percent.1", f"gpu_{field}")


# A row is the overview of one rank. The shares sum to the step.
OVERVIEWS = (
    Column("rank", lambda o: o.rank, "number", "rank", is_key=True),
    Column(None, lambda o: o.world_size, key="world_size"),
    Column("device", lambda o: o.device, key="device"),
    Column("steps", lambda o: len(o.steps), "number", "steps", priority=-1),
    Column("step", lambda o: o.step_s, "ms", "step_s", is_key=True),
    *(_share_column(name, category) for name, category in _SHARES),
    *(_phase_column(phase) for phase in ("forward", "backward", "optimizer")),
    _gpu_column("GPU busy", "busy"),
    _gpu_column("SM efficiency (est.)", "sm_efficiency"),
    _gpu_column("occupancy (est.)", "occupancy"),
    _gpu_column("tensor cores", "tensor_core_share"),
    _gpu_column("messages of kernels", "communication_share"),
    _gpu_column(None, "missed_s"),
    Column(None, lambda o: o.message_s, key="message_s"),
    Column(None, lambda o: o.host_s, key="host_s"),
    Column("peak memory", lambda o: o.peak_bytes, "bytes", "peak_bytes", priority=-1),
    Column("source", lambda o: o.source, key="source", priority=-1),
)


def choose_overview_columns(overviews: Sequence[Overview]) -> list[Column]:
    """`OVERVIEWS`, but people are not shown shares that are 0 on every rank."""
    zero = {f"{category}_share" for _, category in _SHARES if not any(o.share(category) >= 5e-4 for o in overviews)}
    return [
        Column(None, column.value, column.unit, column.key) if column.key in zero else column for column in OVERVIEWS
    ]


OPERATORS = (
    Column("operator", lambda r: r.name, key="name", is_key=True),
    Column("calls/step", lambda r: r.calls, lambda calls: f"{calls:g}", "calls"),
    Column("self (ms/step)", lambda r: r.self_s, format_ms, "self_s", priority=2),
    Column("total (ms/step)", lambda r: r.total_s, format_ms, "total_s", priority=1),
)


def _shorten(name: str, width: int = 44) -> str:
    """Names of templates run to thousands of characters; both ends say most."""
    return name if len(name) <= width else f"{name[: width - 16]}…{name[-15:]}"


KERNELS = (
    Column("kernel", lambda r: _shorten(r.name), is_key=True),
    Column(None, lambda r: r.name, key="name"),
    Column("kind", lambda r: r.kind, key="kind"),
    Column("calls/step", lambda r: r.calls, lambda calls: f"{calls:g}", "calls"),
    Column("time (ms/step)", lambda r: r.time_s, format_ms, "time_s", priority=3),
    Column("mean (µs)", lambda r: r.mean_s * 1e6, lambda us: f"{us:.1f}", priority=1),
    Column(None, lambda r: r.mean_s, key="mean_s"),
    Column("occupancy (est.)", lambda r: r.occupancy, "percent.1", "occupancy", priority=-1),
    Column(None, lambda r: r.uses_tensor_cores, key="uses_tensor_cores"),
    Column("tensor cores", lambda r: r.uses_tensor_cores if r.uses_tensor_cores or r.kind == "matmul" else None, "yes"),
)


# -- timeline ----------------------------------------------------------------------------------------------------------

# The height of a row of buckets, the width of a label as a share of the step, and how many labels can be read.
_ROW, _LABEL_WIDTH, _MAX_LABELS = 0.22, 0.065, 16
_PHASE_COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
_OTHER, _WAITING, _MOVING, _EXPOSED = "#BBBBBB", "#F5D9A8", "#E69F00", "#D55E00"


def plot_timeline(lanes: Sequence[StepLane], title: str, subtitle: str, source: str = "measured") -> Figure:
    """For each rank a lane of phases and one of buckets, in ms; what moves after the end of backward is hatched."""
    from matplotlib.figure import Figure

    if not 1 <= len(lanes) <= MAX_RANKS:
        raise ConfigError(f"{len(lanes)} ranks cannot be drawn: choose 1 to {MAX_RANKS} of them")
    end_ms = max(lane.end_s for lane in lanes) * 1e3
    rows = {lane.rank: _choose_rows(lane, end_ms / 1e3) for lane in lanes}
    heights = {rank: 0.65 + _ROW * (max(places, default=-1) + 1) for rank, places in rows.items()}
    figure = Figure(figsize=(9.6, 1.7 + 0.8 * sum(heights.values())), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.0, f"{source}. {subtitle}", transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for lane in lanes:
        bottom = top + heights[lane.rank]
        ticks.append((top + 0.2, f"rank {lane.rank}"))
        _draw_phases(axes, lane, top, end_ms)
        if lane.buckets:
            ticks.append(((top + bottom) / 2 + 0.15, "buckets"))
            _draw_buckets(axes, lane, rows[lane.rank], top + 0.47, end_ms)
            if lane.backward_end_s is not None:
                axes.plot([lane.backward_end_s * 1e3] * 2, [top, bottom - 0.2], color="#000000", lw=0.9, ls=":")
        if lane is not lanes[-1]:
            axes.axhline(bottom - 0.1, color="#DDDDDD", lw=0.8)
        top = bottom
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.1, -0.12)
    axes.set_xlim(0, end_ms * 1.01)
    axes.set_xlabel("ms since the first rank began the step")
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _place_legend(figure, lanes)
    return figure


def _choose_rows(lane: StepLane, end_s: float) -> list[int]:
    """A row for each bucket, so that neither it nor its label is drawn over another."""
    free_at: list[float] = []
    rows = []
    for bucket in lane.buckets:
        row = next((number for number, free_s in enumerate(free_at) if free_s <= bucket.ready_s), len(free_at))
        free_at[row : row + 1] = [bucket.done_s + (_LABEL_WIDTH * end_s if _has_labels(lane) else 0.0)]
        rows.append(row)
    return rows


def _has_labels(lane: StepLane) -> bool:
    return len(lane.buckets) <= _MAX_LABELS


def _draw_phases(axes: Axes, lane: StepLane, top: float, end_ms: float) -> None:
    for phase in lane.phases:
        start_ms, width_ms = phase.start_s * 1e3, (phase.end_s - phase.start_s) * 1e3
        color = _PHASE_COLORS.get(phase.name, _OTHER)
        axes.broken_barh([(start_ms, width_ms)], (top, 0.4), facecolors=color)
        words = f"{phase.name} {format_ms(phase.end_s - phase.start_s)}"
        if width_ms > 0.011 * len(words) * end_ms:
            axes.text(
                start_ms + width_ms / 2, top + 0.2, words, ha="center", va="center", fontsize=7.5,
                color="white" if phase.name == "backward" else "black",
            )  # fmt: skip


def _draw_buckets(axes: Axes, lane: StepLane, rows: Sequence[int], top: float, end_ms: float) -> None:
    free_s = float("inf") if lane.backward_end_s is None else lane.backward_end_s
    for bucket, row in zip(lane.buckets, rows, strict=True):
        place = (top + _ROW * row, 0.85 * _ROW)
        hidden_s = min(max(bucket.launch_s, free_s), bucket.done_s)
        for first_s, last_s, options in (
            (bucket.ready_s, bucket.launch_s, {"facecolors": _WAITING}),
            (bucket.launch_s, hidden_s, {"facecolors": _MOVING}),
            (hidden_s, bucket.done_s, {"facecolors": "white", "edgecolors": _EXPOSED, "hatch": "//////", "lw": 0.8}),
        ):
            if last_s > first_s:
                axes.broken_barh([(first_s * 1e3, (last_s - first_s) * 1e3)], place, **options)
        if _has_labels(lane):  # beside the bar, where hatching does not cross it
            axes.text(
                bucket.done_s * 1e3 + 0.004 * end_ms, place[0] + 0.42 * _ROW, format_bytes(bucket.num_bytes),
                fontsize=6.5, va="center", color="#333333",
            )  # fmt: skip


def _place_legend(figure: Figure, lanes: Sequence[StepLane]) -> None:
    from matplotlib.patches import Patch

    names = dict.fromkeys(phase.name for lane in lanes for phase in lane.phases)
    entries = [Patch(facecolor=_PHASE_COLORS.get(name, _OTHER), label=name) for name in names]
    if any(lane.buckets for lane in lanes):
        exposed = dict.fromkeys(format_duration(pick(lane.exposed_s for lane in lanes)) for pick in (min, max))
        entries += [
            Patch(facecolor=_WAITING, label="bucket ready, gathered"),
            Patch(facecolor=_MOVING, label="bucket on its way"),
            Patch(facecolor="white", edgecolor=_EXPOSED, hatch="//////", label=f"exposed ({' to '.join(exposed)})"),
        ]
    # Outside of the axes and by the figure's own measure, so that it keeps its distance at any height.
    figure.legend(handles=entries, fontsize=8, frameon=False, loc="outside lower center", ncols=len(entries))


# -- networks ----------------------------------------------------------------------------------------------------------


class CommTableResult(Result):
    """`profile comm-table`: the measured step of one rank, and its gradients on assumed and measured networks.

    `sweeps` are networks that were measured; those of a saved run are in the runs that `--curve` named.
    """

    verbs = ("profile comm-table",)

    def __init__(self, run: Run, folder: Path | None = None, sweeps: Sequence[MeasuredFabric] = ()) -> None:
        super().__init__(run, folder)
        profile = next((record for record in run.records if isinstance(record, LayerProfileRecord)), None)
        self.rows: list[CommRow] = []
        if profile is not None:
            self.rows = build_comm_table(profile, find_networks(self.config["networks"]), sweeps, self.config["ranks"])

    @property
    def answer(self) -> str:
        if not self.rows:
            return "No step was measured."
        best, worst = (pick(self.rows, key=lambda row: row.step.exposed_share) for pick in (min, max))
        parts = [
            f"{row.step.exposed_share:.1%} of a step on {row.step.network} with "
            f"{format_number_of(row.step.world_size, 'rank')}"
            for row in ([best] if best is worst else [best, worst])
        ]
        return (
            f"A step of {best.model} computes for {format_duration(best.step.local_s)} and sends "
            f"{format_bytes(best.num_bytes)} of gradients. Predicted exposed communication, with the best bucket size: "
            f"{', '.join(parts)}."
        )

    @property
    def findings(self) -> list[str]:
        if not self.rows:
            return []
        return [
            *dict.fromkeys(row.assumption for row in self.rows),
            "overhead: all gradients in one message after backward; step and exposed: the best bucket size, as "
            "`predict` finds it",
        ]

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for text in self.run.warnings if text not in self.findings)

    def tables(self) -> list[Table]:
        if not self.rows:
            return []
        title = f"{self.rows[0].model}: communication against computation"
        return [Table("table", title, COMM, self.rows, key="rows")]

    @property
    def next_steps(self) -> list[str]:
        return [] if self.folder is None else [f"paceline predict --model-profile {self.folder} --network 10gbe"]


COMM = (
    Column("model", lambda r: r.model, key="model"),
    Column("gradients", lambda r: r.num_bytes, "bytes", "gradient_bytes", priority=-1),
    Column("network", lambda r: r.step.network, key="network", is_key=True),
    Column("ranks", lambda r: r.step.world_size, "number", "world_size", is_key=True),
    Column("compute", lambda r: r.step.local_s, "ms", "compute_s", priority=1),
    Column(None, lambda r: r.backward_s, key="backward_s"),
    Column(None, lambda r: r.compute_source, key="compute_source"),
    Column("comm", lambda r: r.message_s, "ms", "comm_s", priority=1),
    Column("overhead", lambda r: r.overhead, "percent.1", "overhead", priority=2),
    Column(None, lambda r: r.step.algorithm, key="algorithm"),
    Column("step", lambda r: r.step.step_s, "ms", "step_s", priority=3),
    Column(None, lambda r: r.step.low_s, key="low_s"),
    Column(None, lambda r: r.step.high_s, key="high_s"),
    Column(None, lambda r: r.step.exposed_s, key="exposed_s"),
    Column("exposed", lambda r: r.step.exposed_share, "percent.1", "exposed_overhead", priority=3),
    Column(None, lambda r: r.step.best_cap_bytes, key="best_cap_bytes"),
    Column(None, lambda r: r.assumption, key="assumption"),
    Column(None, lambda r: r.step.source, key="source"),
    Column("source", lambda r: f"compute {r.compute_source}, comm {r.step.source}", priority=-2),
)


# -- two profiles ------------------------------------------------------------------------------------------------------

# The settings in which two profiles may differ without a remark: of phases, only cells that both have are compared.
_MAY_DIFFER = ("batch_sizes", "batch_size", "ranks")


class ComparisonResult(Result):
    """`profile --compare`: two traces, or the phases of two runs, and the ratio of each quantity."""

    verbs = (COMPARE,)

    @classmethod
    def of(cls, first: Result, second: Result, environment: Environment) -> ComparisonResult:
        """Compare two profiles. They were not taken in turns: the machine may have changed between them."""
        names = [str(one.folder or f"a run of {one.run.verb}") for one in (first, second)]
        if isinstance(first, TraceResult) and isinstance(second, TraceResult):
            rows = _compare_traces(first, second)
        elif isinstance(first, StepResult) and isinstance(second, StepResult) and first.steps and second.steps:
            rows = _compare_phases(first.steps, second.steps, *names)
        else:
            raise ConfigError(
                f"{names[0]} is a run of `{first.run.verb}` and {names[1]} of `{second.run.verb}`: give two of "
                "`paceline profile trace`, or two of `paceline profile phases`",
                code="mismatch",
            )
        here, there = first.config, second.config
        may_differ = () if isinstance(first, TraceResult) else _MAY_DIFFER
        unlike = {
            name: [here[name], there.get(name)]
            for name in here
            if name not in may_differ and here[name] != there.get(name)
        }
        config = {
            "runs": names,
            "rows": [{"name": r.name, "unit": r.unit, "first": r.first, "second": r.second} for r in rows],
            "settings_that_differ": unlike,
        }
        return cls(Run(COMPARE, config, environment, ()))

    @property
    def rows(self) -> list[ComparedRow]:
        return [ComparedRow(**row) for row in self.config["rows"]]

    @property
    def answer(self) -> str:
        first, second = self.config["runs"]
        row = next((row for row in self.rows if row.name.split(": ")[-1] == "step" and row.ratio is not None), None)
        if row is None or row.ratio is None:
            return f"{first} and {second} compared."
        return f"A step of {second} takes {row.ratio:.2f} times as long as one of {first}."

    @property
    def findings(self) -> list[str]:
        unlike = self.config["settings_that_differ"]
        return [
            *(f"they differ in {name}: {here} and {there}" for name, (here, there) in unlike.items()),
            "two runs, not taken in turns: differences of a few per cent may be the machine's",
        ]

    def tables(self) -> list[Table]:
        return [Table("comparison", "{} and {}".format(*self.config["runs"]), COMPARED, self.rows, key="rows")]

    def to_json(self) -> dict[str, Any]:
        names = ("runs", "settings_that_differ")
        return super().to_json() | {name: self.config[name] for name in names}


def _format_compared(pair: tuple[str, float]) -> str:
    unit, value = pair
    if unit == "s":
        return format_duration(value)
    return f"{value:.1%}" if unit == "share" else format_bytes(value) if unit == "bytes" else f"{value:.0f}"


def _compared_columns(name: str) -> tuple[Column, Column]:
    """One side of the comparison: in its own unit for people, raw for programs."""

    def pick(row: ComparedRow) -> float | None:
        value: float | None = getattr(row, name)
        return value

    return (
        Column(name, lambda r: None if pick(r) is None else (r.unit, pick(r)), _format_compared, is_key=True),
        Column(None, pick, key=name),
    )


COMPARED = (
    Column("quantity", lambda r: r.name, key="name", is_key=True),
    Column(None, lambda r: r.unit, key="unit"),
    *_compared_columns("first"),
    *_compared_columns("second"),
    Column("second / first", lambda r: r.ratio, "ratio", "ratio"),
)


def _compare_traces(first: TraceResult, second: TraceResult) -> list[ComparedRow]:
    # Steps of different batches are compared by what they get done.
    speeds = ComparedRow("samples/s", "", first.samples_per_s, second.samples_per_s)
    return [speeds, *compare_overviews(first.overviews[0], second.overviews[0])]


# What is compared of phases, and its unit.
_QUANTITIES = {
    "step_s": "s", "data_wait_s": "s", "forward_s": "s", "backward_s": "s", "optimizer_s": "s", "compute_s": "s",
    "exposed_comm_s": "s", "busy_comm_s": "s", "comm_overhead": "share", "samples_per_s": "count",
}  # fmt: skip


def _compare_phases(first: Sequence[StepRecord], second: Sequence[StepRecord], one: str, two: str) -> list[ComparedRow]:
    found = [
        {(row["world_size"], row["batch_size"]): row for row in Table("", "", PHASES, records).rows_json()}
        for records in (first, second)
    ]
    common = [cell for cell in found[0] if cell in found[1]]
    if not common:
        raise ConfigError(f"{one} and {two} have no number of ranks and batch size in common", code="mismatch")
    rows = []
    for world_size, batch_size in common:
        ours, theirs = (cells[world_size, batch_size] for cells in found)
        place = f"{format_number_of(world_size, 'rank')}, batch {batch_size}"
        for name, unit in _QUANTITIES.items():
            if ours[name] is not None or theirs[name] is not None:
                label = "samples/s" if name == "samples_per_s" else name.removesuffix("_s").replace("_", " ")
                rows.append(ComparedRow(f"{place}: {label}", unit, ours[name], theirs[name]))
    return rows
