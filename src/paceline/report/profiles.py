"""`paceline.profile`, `profile layers`, `trace`, `comm-table` and `--compare` as results: tables, figures, text."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import ConfigError, RecordError
from paceline.predict.advice import Advice, StepFacts
from paceline.predict.networks import MeasuredFabric, find_networks
from paceline.predict.traces import (
    CATEGORIES,
    Overview,
    RankTrace,
    StepLane,
    build_lanes,
    find_lanes,
    merge_traces,
    overview_from_json,
    overview_to_json,
    render_trace,
)
from paceline.predict.whatif import CommRow, build_comm_table
from paceline.records import LayerProfileRecord
from paceline.records.environment import Environment
from paceline.records.exchange import export_layer_sizes, export_layer_times
from paceline.records.layers import OUTSIDE
from paceline.records.store import Run
from paceline.report.plots import COLORS, new_figure
from paceline.report.result import Result
from paceline.report.steps import PHASES, PhasesResult, StepResult, describe_cost
from paceline.report.table import Column, Table, raw_columns
from paceline.units import MIB, format_bytes, format_duration, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERVIEW = "overview.json"
COMPARE = "profile --compare"
MAX_RANKS = 8  # in one timeline
_MAX_ROWS = 12  # of operators or kernels on a terminal
_PHASE_COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}

# -- layers ------------------------------------------------------------------------------------------------------------


class ProfileResult(PhasesResult):
    """`paceline.profile` and `profile layers`: layers of the bare model and, on several ranks, phases of its steps.

    `profile` is the record of the layers, None where they were not measured, `steps` the records of the phases.
    """

    verbs = ("profile", "profile layers")

    def __init__(self, run: Run, folder: Path | None = None) -> None:
        super().__init__(run, folder)
        self.profile = next((record for record in run.records if isinstance(record, LayerProfileRecord)), None)

    @property
    def answer(self) -> str:
        profile = self.profile
        if self.steps or profile is None:
            return super().answer
        step_s = profile.timing.median_s
        parts = [f"{getattr(profile, name).median_s / step_s:.0%} {name}" for name in _PHASE_COLORS]
        where = f"(batch {profile.batch_size}): {', '.join(parts)}"
        return f"A step of {profile.model} takes {format_duration(step_s)} {where}."

    @property
    def findings(self) -> list[str]:
        return [*([] if self.profile is None else describe_layers(self.profile)), *super().findings]

    def tables(self) -> list[Table]:
        tables = [Table("phases", "phases", PHASES, self.steps)] if self.steps else []
        if self.profile is not None:
            name, blocks, parameters = self.profile.model, list_blocks(self.profile), list_parameters(self.profile)
            tables.append(Table("blocks", f"{name}, blocks", BLOCKS, blocks))
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


class _Part(NamedTuple):
    """A block or a parameter of a profile; of a parameter, its place in ready order, and the bytes ready with it."""

    profile: LayerProfileRecord
    of: Any
    place: int = 0
    ready_bytes: int = 0


def list_blocks(profile: LayerProfileRecord) -> list[_Part]:
    """The blocks in the order of the model's definition, and the rest, so that the columns add up."""
    return [_Part(profile, times) for times in (*profile.blocks, profile.outside)]


def list_parameters(profile: LayerProfileRecord) -> list[_Part]:
    ready = itertools.accumulate(0 if p.median_s is None else p.num_bytes for p in profile.parameters)
    return [_Part(profile, *row) for row in zip(profile.parameters, itertools.count(), ready, strict=False)]


def _count_bytes(block: _Part) -> int:
    return sum(parameter.num_bytes for parameter in block.profile.parameters_of(block.of.name))


def _find_share(block: _Part) -> float:
    """Of the profiled backward."""
    return float(statistics.median(block.of.backward_s)) / (block.profile.profiled_backward.median_s or 1.0)


BLOCKS = (
    *raw_columns("profile.model"),
    Column("block", attrgetter("of.name"), key="block", is_key=True),
    Column("gradients", _count_bytes, "bytes", "num_bytes", priority=1),
    Column("forward", lambda r: statistics.median(r.of.forward_s), "ms", "forward_s", priority=2),
    Column("backward", lambda r: statistics.median(r.of.backward_s), "ms", "backward_s", priority=3),
    Column("of backward", _find_share, "percent.1", "share_of_backward"),
    Column("last ready", lambda r: r.profile.ready_of(r.of.name), "ms", "last_ready_s", priority=2),
    Column("source", attrgetter("profile.source"), key="source", priority=-1),
)
PARAMETERS = (
    Column("#", attrgetter("place"), "number", "index"),
    *raw_columns("profile.model"),
    Column(None, attrgetter("of.name"), key="parameter"),
    Column(None, lambda r: list(r.of.aliases), key="aliases"),
    Column("parameter", attrgetter("of.names"), is_key=True),
    Column("block", lambda r: r.of.block or OUTSIDE),
    Column(None, lambda r: r.of.block or None, key="block"),
    Column("type", attrgetter("of.dtype"), key="dtype"),
    Column("bytes", attrgetter("of.num_bytes"), "bytes", "num_bytes"),
    Column(None, attrgetter("of.median_s"), key="ready_s"),
    Column("ready (ms)", lambda r: "never" if r.of.median_s is None else format_ms(r.of.median_s), str, priority=1),
    Column("ready so far", attrgetter("ready_bytes"), "bytes", "ready_bytes"),
    Column("source", attrgetter("profile.source"), key="source"),
)


def describe_layers(profile: LayerProfileRecord) -> list[str]:
    """What the tables do not show: the plain step, what profiling costs, and what is odd about the gradients."""
    parts = ", ".join(f"{phase} {format_ms(getattr(profile, phase).median_s)}" for phase in _PHASE_COLORS)
    step, backward = describe_cost(profile.step_cost, "a step"), describe_cost(profile.backward_cost, "backward")
    lines = [
        f"plain step {format_ms(profile.timing.median_s)} ms: {parts}",
        f"profiling costs {step}; {backward}",
        "gradients became ready in the same order in every step"
        if profile.is_order_stable
        else "the order in which gradients became ready changed between steps: it is that of the medians",
    ]
    if tied := [p.names for p in profile.parameters if p.aliases]:
        lines.append(f"tied, and ready only after the last use: {'; '.join(tied)}")
    if profile.unused:
        lines.append(f"without a gradient: {', '.join(p.name for p in profile.unused)}")
    return [*lines, profile.note] if profile.note else lines


_NEAR = 0.04  # of an axis: labels of points that are closer would print over each other


def plot_ready(profile: LayerProfileRecord, subtitle: str) -> Figure:
    """Bytes ready against the time since backward began, by medians; a mark where the last of each block is ready."""
    figure, axes = new_figure(f"{profile.model}: gradients ready during backward", subtitle)
    end_ms = profile.profiled_backward.median_s * 1e3
    points = [(0.0, 0), *profile.timeline]
    xs = [*(time_s * 1e3 for time_s, _ in points), end_ms]
    ys = [*(num_bytes / MIB for _, num_bytes in points), points[-1][1] / MIB]
    axes.step(xs, ys, where="post", color=COLORS[0], lw=1.6, label=f"ready ({profile.source}, median)")
    axes.axvline(end_ms, color="#555555", lw=1, ls="--", label="end of backward")
    ready_bytes = dict(profile.timeline)  # of several at one moment, the last
    found = [(profile.ready_of(block.name), block.name) for block in profile.blocks]
    marks = sorted((time_s * 1e3, ready_bytes[time_s] / MIB, name) for time_s, name in found if time_s is not None)
    xs, ys = [x for x, _, _ in marks], [y for _, y, _ in marks]
    axes.plot(xs, ys, "o", color=COLORS[1], ms=4.5, label="last of a block")
    for x, y, text in _join_labels(marks, end_ms):
        # The curve only rises, so that the upper left of a point is free.
        offset, side = (4, "left") if x < 0.06 * end_ms else (-5, "right")
        axes.annotate(text, (x, y), xytext=(offset, 3), textcoords="offset points", fontsize=7.5, ha=side)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.06 * profile.num_bytes / MIB)
    axes.set_xlabel("time since backward began (ms)")
    axes.set_ylabel("gradients ready (MiB)")
    axes.legend(fontsize=8.5, frameon=False, loc="lower right", bbox_to_anchor=(0.94, 0.0))
    return figure


def _join_labels(marks: list[tuple[float, float, str]], width: float) -> list[tuple[float, float, str]]:
    """One label for marks that lie close together: the last of them, and how many more there are."""
    groups: list[list[tuple[float, float, str]]] = []
    for mark in marks:
        first = groups[-1][0] if groups else mark
        if groups and mark[0] - first[0] < _NEAR * width and mark[1] - first[1] < _NEAR * marks[-1][1]:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [(x, y, name + (f" +{len(others)}" if others else "")) for *others, (x, y, name) in groups]


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
        self.traces, self._plot = traces, plot and 1 <= len(traces) <= MAX_RANKS
        path = (folder or Path()) / OVERVIEW
        try:
            self.document: dict[str, Any] = json.loads(path.read_text()) if document is None else document
            self.overviews = [overview_from_json(one) for one in self.document["overviews"]]
            self.facts = StepFacts(**self.document["facts"])
            self.advice: list[dict[str, Any]] = self.document["advice"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} cannot be read: {error}; `paceline profile trace` writes it") from None
        model, ranks = self.config.get("model", "the model"), format_number_of(self.facts.world_size, "rank")
        self._name = f"{model} on {ranks}, batch {self.facts.batch_size}, {self.facts.precision}"

    @staticmethod
    def build_document(overviews: Sequence[Overview], facts: StepFacts, advice: Sequence[Advice]) -> dict[str, Any]:
        """What `overview.json` holds."""
        names = ("kind", "gain_s", "factor", "certainty", "text")
        return {
            "overviews": [overview_to_json(overview) for overview in overviews],
            "facts": asdict(facts),
            "advice": [{name: getattr(one, name) for name in names} for one in advice],
        }

    @property
    def samples_per_s(self) -> float:
        return self.facts.batch_size * self.facts.accumulate * self.facts.world_size / self.overviews[0].step_s

    @property
    def answer(self) -> str:
        text = f"A step of {self._name} takes {format_duration(self.overviews[0].step_s)} in the trace of rank 0."
        return f"{text} {self.advice[0]['text']}" if self.advice else text

    @property
    def findings(self) -> list[str]:
        lines = []
        for number, one in enumerate(self.advice, 1):
            gain = f" ({one['certainty']} {one['factor']:.2f} x as fast)" if one["gain_s"] else ""
            lines.append(f"{number}. {one['text']}{gain}")
        if self.folder is not None:
            lines.append(f"trace: {self.folder / 'trace.json.gz'} (open it in ui.perfetto.dev)")
            lines += [f"picture: {self.folder / name}.png" for name in self.figures()]
        return lines

    @property
    def warnings(self) -> tuple[str, ...]:
        known = {one["text"] for one in self.advice}  # older runs kept the advice among the warnings
        return tuple(text for text in self.run.warnings if text not in known)

    def tables(self) -> list[Table]:
        operators, kernels = self.overviews[0].operators, self.overviews[0].kernels
        shown = () if kernels else operators[:_MAX_ROWS]
        tables = [
            Table("overview", self._name, choose_overview_columns(self.overviews), self.overviews),
            Table("operators", "operators of rank 0", OPERATORS, operators, shown=shown),
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
        picture = str(self.folder / "timeline.png") if self.folder is not None and self._plot else None
        return super().to_json() | self.document | {"picture": picture}


_SHOWN = {"kernel": "kernels", "copy": "copies", "cpu": "CPU"}


def _phase_column(phase: str) -> Column:
    return Column(phase, lambda o: o.phases_s.get(phase), "ms", f"{phase}_s")


def _gpu_column(name: str | None, field: str) -> Column:
    return Column(name, lambda o: None if o.gpu is None else getattr(o.gpu, field), "percent.1", f"gpu_{field}")


# A row is the overview of one rank. The shares sum to the step.
OVERVIEWS = (
    Column("rank", attrgetter("rank"), "number", "rank", is_key=True),
    *raw_columns("world_size"),
    Column("device", attrgetter("device"), key="device"),
    Column("steps", lambda o: len(o.steps), "number", "steps", priority=-1),
    Column("step", attrgetter("step_s"), "ms", "step_s", is_key=True),
    *(
        Column(_SHOWN.get(c, c), partial(Overview.share, category=c), "percent.1", f"{c}_share", priority=2)
        for c in CATEGORIES
    ),
    *map(_phase_column, _PHASE_COLORS),
    _gpu_column("GPU busy", "busy"),
    _gpu_column("SM efficiency (est.)", "sm_efficiency"),
    _gpu_column("occupancy (est.)", "occupancy"),
    _gpu_column("tensor cores", "tensor_core_share"),
    _gpu_column("messages of kernels", "communication_share"),
    *(_gpu_column(None, name) for name in ("missed_s", "kernel_s", "num_kernels")),
    *(Column(None, partial(Overview.seconds, category=c), key=f"{c}_s") for c in CATEGORIES),
    *raw_columns("message_s", "host_s"),
    Column("peak memory", attrgetter("peak_bytes"), "bytes", "peak_bytes", priority=-1),
    Column("source", attrgetter("source"), key="source", priority=-1),
)


def choose_overview_columns(overviews: Sequence[Overview]) -> list[Column]:
    """`OVERVIEWS`, but people are not shown shares that are 0 on every rank."""
    zero = {f"{category}_share" for category in CATEGORIES if not any(o.share(category) >= 5e-4 for o in overviews)}
    return [replace(column, name=None) if column.key in zero else column for column in OVERVIEWS]


OPERATORS = (
    Column("operator", attrgetter("name"), key="name", is_key=True),
    Column("calls/step", attrgetter("calls"), "{:g}".format, "calls"),
    Column("self (ms/step)", attrgetter("self_s"), format_ms, "self_s", priority=2),
    Column("total (ms/step)", attrgetter("total_s"), format_ms, "total_s", priority=1),
)


def _shorten(name: str, width: int = 44) -> str:
    """Names of templates run to thousands of characters; both ends say most."""
    return name if len(name) <= width else f"{name[: width - 16]}…{name[-15:]}"


KERNELS = (
    Column("kernel", lambda r: _shorten(r.name), is_key=True),
    *raw_columns("name"),
    Column("kind", attrgetter("kind"), key="kind"),
    Column("calls/step", attrgetter("calls"), "{:g}".format, "calls"),
    Column("time (ms/step)", attrgetter("time_s"), format_ms, "time_s", priority=3),
    Column("mean (µs)", lambda r: r.mean_s * 1e6, "{:.1f}".format, priority=1),
    *raw_columns("mean_s"),
    Column("occupancy (est.)", attrgetter("occupancy"), "percent.1", "occupancy", priority=-1),
    *raw_columns("uses_tensor_cores"),
    Column("tensor cores", lambda r: r.uses_tensor_cores if r.uses_tensor_cores or r.kind == "matmul" else None, "yes"),
)


# -- timeline ----------------------------------------------------------------------------------------------------------

# The height of a row of buckets, the width of a label as a share of the step, and how many labels can be read.
_ROW, _LABEL_WIDTH, _MAX_LABELS = 0.22, 0.065, 16
_WAITING, _MOVING, _EXPOSED = "#F5D9A8", "#E69F00", "#D55E00"


def plot_timeline(lanes: Sequence[StepLane], title: str, subtitle: str) -> Figure:
    """For each rank a lane of phases and one of buckets, in ms; what moves after the end of backward is hatched."""
    from matplotlib.figure import Figure

    end_ms = max(lane.end_s for lane in lanes) * 1e3
    rows: dict[int, list[int]] = {}  # of each bucket, so that neither it nor its label is drawn over another
    for lane in lanes:
        label_s = _LABEL_WIDTH * end_ms / 1e3 if len(lane.buckets) <= _MAX_LABELS else 0.0
        rows[lane.rank] = find_lanes((bucket.ready_s, bucket.done_s + label_s) for bucket in lane.buckets)
    heights = {rank: 0.65 + _ROW * (max(places, default=-1) + 1) for rank, places in rows.items()}
    figure = Figure(figsize=(9.6, 1.7 + 0.8 * sum(heights.values())), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.0, f"measured. {subtitle}", transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    ticks: dict[float, str] = {}
    top = 0.0
    for lane in lanes:
        bottom = top + heights[lane.rank]
        ticks[top + 0.2] = f"rank {lane.rank}"
        _draw_phases(axes, lane, top, end_ms)
        if lane.buckets:
            ticks[(top + bottom) / 2 + 0.15] = "buckets"
            _draw_buckets(axes, lane, rows[lane.rank], top + 0.47, end_ms)
            if lane.backward_end_s is not None:
                axes.plot([lane.backward_end_s * 1e3] * 2, [top, bottom - 0.2], color="#000000", lw=0.9, ls=":")
        if lane is not lanes[-1]:
            axes.axhline(bottom - 0.1, color="#DDDDDD", lw=0.8)
        top = bottom
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.1, -0.12)
    axes.set_xlim(0, end_ms * 1.01)
    axes.set_xlabel("ms since the first rank began the step")
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _place_legend(figure, lanes)
    return figure


def _draw_phases(axes: Axes, lane: StepLane, top: float, end_ms: float) -> None:
    for name, first_s, last_s in lane.phases:
        start_ms, width_ms = first_s * 1e3, (last_s - first_s) * 1e3
        axes.broken_barh([(start_ms, width_ms)], (top, 0.4), facecolors=_PHASE_COLORS[name])
        words, color = f"{name} {format_ms(last_s - first_s)}", "white" if name == "backward" else "black"
        if width_ms > 0.011 * len(words) * end_ms:
            place = start_ms + width_ms / 2, top + 0.2
            axes.text(*place, words, ha="center", va="center", fontsize=7.5, color=color)


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
        if len(rows) <= _MAX_LABELS:  # beside the bar, where hatching does not cross it
            beside = bucket.done_s * 1e3 + 0.004 * end_ms, place[0] + 0.42 * _ROW
            axes.text(*beside, format_bytes(bucket.num_bytes), fontsize=6.5, va="center", color="#333333")


def _place_legend(figure: Figure, lanes: Sequence[StepLane]) -> None:
    from matplotlib.patches import Patch

    names = dict.fromkeys(name for lane in lanes for name, _, _ in lane.phases)
    entries = [Patch(facecolor=_PHASE_COLORS[name], label=name) for name in names]
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


class CommTableResult(StepResult):
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
        how = "overhead: all gradients in one message after backward; step and exposed: the best bucket size, as "
        return [*dict.fromkeys(row.assumption for row in self.rows), how + "`predict` finds it"]

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
    *raw_columns("backward_s", "compute_source"),
    Column("comm", lambda r: r.message_s, "ms", "comm_s", priority=1),
    Column("overhead", lambda r: r.overhead, "percent.1", "overhead", priority=2),
    *raw_columns("step.algorithm"),
    Column("step", lambda r: r.step.step_s, "ms", "step_s", priority=3),
    *raw_columns("step.low_s", "step.high_s", "step.exposed_s"),
    Column("exposed", lambda r: r.step.exposed_share, "percent.1", "exposed_overhead", priority=3),
    *raw_columns("step.best_cap_bytes", "assumption", "step.source"),
    Column("source", lambda r: f"compute {r.compute_source}, comm {r.step.source}", priority=-2),
)


# -- two profiles ------------------------------------------------------------------------------------------------------

# The settings in which two runs of phases may differ without a remark: only cells that both have are compared.
_MAY_DIFFER = ("batch_sizes", "batch_size", "ranks")
# What is compared, by the keys of JSON rows, and its unit. Steps of different batches are compared by what they get
# done, which comes first.
_OF_PHASES = {
    "step_s": "s", "data_wait_s": "s", "forward_s": "s", "backward_s": "s", "optimizer_s": "s", "compute_s": "s",
    "exposed_comm_s": "s", "busy_comm_s": "s", "comm_overhead": "share", "samples_per_s": "count",
}  # fmt: skip
_OF_TRACES = {
    "samples_per_s": "count", "step_s": "s", **{f"{name}_s": "s" for name in CATEGORIES},
    **{f"{name}_share": "share" for name in CATEGORIES}, "forward_s": "s", "backward_s": "s", "optimizer_s": "s",
    "message_s": "s", "host_s": "s", "peak_bytes": "bytes", "gpu_busy": "share", "gpu_sm_efficiency": "share",
    "gpu_occupancy": "share", "gpu_tensor_core_share": "share", "gpu_communication_share": "share",
    "gpu_kernel_s": "s", "gpu_num_kernels": "count",
}  # fmt: skip


@dataclass(frozen=True)
class ComparedRow:
    """One quantity of two runs; `unit` is `s`, `share`, `bytes` or `count`, and None means that a run lacks it."""

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """Second over first."""
        return self.second / self.first if self.first and self.second is not None else None


class ComparisonResult(Result):
    """`profile --compare`: two traces, or the phases of two runs, and the ratio of each quantity."""

    verbs = (COMPARE,)

    @classmethod
    def of(cls, first: Result, second: Result, environment: Environment) -> ComparisonResult:
        """Compare two profiles. They were not taken in turns: the machine may have changed between them."""
        names = [str(one.folder or f"a run of {one.run.verb}") for one in (first, second)]
        if isinstance(first, TraceResult) and isinstance(second, TraceResult):
            quantities: dict[str, str] = _OF_TRACES
            here, there = (
                {"": Table("", "", OVERVIEWS, one.overviews[:1]).rows_json()[0] | {"samples_per_s": one.samples_per_s}}
                for one in (first, second)
            )
        elif isinstance(first, StepResult) and isinstance(second, StepResult) and first.steps and second.steps:
            quantities = _OF_PHASES
            here, there = (
                {
                    f"{format_number_of(row['world_size'], 'rank')}, batch {row['batch_size']}: ": row
                    for row in Table("", "", PHASES, one.steps).rows_json()
                }
                for one in (first, second)
            )
        else:
            raise ConfigError(
                f"{names[0]} is a run of `{first.run.verb}` and {names[1]} of `{second.run.verb}`: give two of "
                "`paceline profile trace`, or two of `paceline profile phases`",
                code="mismatch",
            )
        common = [cell for cell in here if cell in there]
        if not common:
            raise ConfigError(
                "{} and {} have no number of ranks and batch size in common".format(*names), code="mismatch"
            )
        rows = [
            ComparedRow(
                cell + ("samples/s" if name == "samples_per_s" else name.removesuffix("_s").replace("_", " ")),
                unit, here[cell][name], there[cell][name],
            )
            for cell in common
            for name, unit in quantities.items()
        ]  # fmt: skip
        config = {
            "runs": names,
            "rows": [asdict(row) for row in rows if row.first or row.second],
            "settings_that_differ": {
                name: [value, second.config.get(name)]
                for name, value in first.config.items()
                if (quantities is _OF_TRACES or name not in _MAY_DIFFER) and value != second.config.get(name)
            },
        }
        return cls(Run(COMPARE, config, environment, ()))

    @property
    def rows(self) -> list[ComparedRow]:
        return [ComparedRow(**row) for row in self.config["rows"]]

    @property
    def answer(self) -> str:
        first, second = self.config["runs"]
        ratio = next(row.ratio for row in self.rows if row.name.split(": ")[-1] == "step")
        return f"A step of {second} takes {ratio:.2f} times as long as one of {first}."

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
        return super().to_json() | {name: self.config[name] for name in ("runs", "settings_that_differ")}


_FORMATS: dict[str, Callable[[Any], str]] = {
    "s": format_duration, "share": "{:.1%}".format, "bytes": format_bytes, "count": "{:.0f}".format,
}  # fmt: skip


def _compared_columns(name: str) -> tuple[Column, Column]:
    """One side of the comparison: in its own unit for people, raw for programs."""
    pick = attrgetter(name)
    return (
        Column(name, lambda r: None if pick(r) is None else _FORMATS[r.unit](pick(r)), str, is_key=True),
        Column(None, pick, key=name),
    )


COMPARED = (
    Column("quantity", attrgetter("name"), key="name", is_key=True),
    *raw_columns("unit"),
    *_compared_columns("first"),
    *_compared_columns("second"),
    Column("second / first", attrgetter("ratio"), "ratio", "ratio"),
)
