"""`paceline scale ranks`: do more ranks help? Weak and strong scaling, and a prediction for more ranks.

`rank_steps` runs on the ranks, and `records.steps` defines the numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, cast

from paceline import machine
from paceline.errors import ConfigError, MeasurementError, PacelineError, refuse
from paceline.measure.bench_settings import BACKENDS, CollectiveSettings
from paceline.options import Option, option
from paceline.predict.networks import find_links, find_networks
from paceline.predict.predictor import Prediction
from paceline.predict.scaling import ScalingEvidence, describe_assumptions, simulate_scaling
from paceline.records import CollectiveRecord, Record, StepRecord
from paceline.records.findings import add_busy, is_busy
from paceline.records.layers import LayerProfileRecord
from paceline.records.samples import Ratio, group_by
from paceline.records.steps import ScalePoint, compare_steps, find_peak_of, find_straggler, list_points
from paceline.report.plots import COLORS, MARKERS, build_panels, draw_line, label_values, place_legend
from paceline.report.result import describe_job
from paceline.report.table import Column, Table, count_clear, ratio_columns, raw_columns, text_columns
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.runtime.ranks.session import Session, Task
from paceline.studies.study import StudyResult, StudySettings, choose_device, refuse_unused, run_study
from paceline.training.train_settings import TrainSettings
from paceline.units import MIB, format_ms, format_number_of, format_rate, format_speed, parse_counts
from paceline.verbs.jobs import Counts, Names, Place, brings_data, list_counts, list_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_PREDICTION = "No prediction for"
_CELL_S = 30.0  # approximate duration of a cell, including the start of its ranks
_three = "{:.3f}".format


def ranks(
    model: str = "cnn", ranks: Counts | None = None, batch_size: Counts = (8, 32),
    global_batch_size: Counts | None = None, *, wrapper: Names = ("paceline", "torch"), backend: Names = "auto",
    network: str = "10gbe,100gbe", predict_ranks: Counts = (64, 1024), iters: int | None = None, device: str = "auto",
    out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> RanksResult:  # fmt: skip
    """Do more ranks help? Weak and strong scaling, with all wrappers and backends interleaved, compared with one rank.

    The other arguments are those of `batch`.
    Inside a launched world this is collective: every rank must call it.

    Args:
        ranks: By default 1, 2, 4, ... up to the number of cores or GPUs, or to the size of the launched world.
        batch_size: Samples per rank (weak scaling).
        global_batch_size: Samples over all ranks (strong scaling). By default a multiple of all numbers of ranks.
        wrapper: Wrappers to compare.
        backend: Backends to compare.
        network: Networks to predict the curve on.
        predict_ranks: Numbers of ranks to predict the curve for.
        iters: Number of timed steps. By default determined by the time budget.
    """
    return cast("RanksResult", run_study(ScaleSettings, locals()))


@dataclass(frozen=True)
class Setup:
    """A wrapper and its backend."""

    wrapper: str
    backend: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", machine.canonical_backend(self.backend))


@dataclass(frozen=True)
class ScalingCell:
    """A set of interleaved variants: a mode, and samples per rank's micro-batch (weak) or over all ranks (strong)."""

    mode: str
    samples: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.samples}"

    def batch_size(self, world_size: int, accumulate: int = 1) -> int:
        """The size of a rank's micro-batch on this number of ranks."""
        return self.samples if self.mode == "weak" else self.samples // (world_size * accumulate)

    def count_samples(self, accumulate: int) -> int:
        """Samples per step: on one rank (weak) or over all ranks (strong)."""
        return self.samples * accumulate if self.mode == "weak" else self.samples


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(StudySettings):
    """The job on each number of ranks, weak (`batch_sizes` per rank) and strong (`global_batch_sizes`), with all
    wrappers on all backends interleaved, including a single rank. `network` and `predict_ranks` extend the curve with
    predictions."""

    verb = staticmethod(ranks)

    ranks: tuple[int, ...]
    setups: tuple[Setup, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...] = ()
    iters: int | None = option(None, least=2, each_s=1e-6, advice=" to estimate the noise")
    network: str = "10gbe,100gbe"
    predict_ranks: str = "64,1024"

    @classmethod
    def build(
        cls, *, ranks: Counts | None, batch_size: Counts, global_batch_size: Counts | None, wrapper: Names,
        backend: Names, network: str, predict_ranks: Counts, iters: int | None, device: str, **job: Any,
    ) -> Self:  # fmt: skip
        refuse_unused(job, ("plan",), "the study compares wrappers with their default buckets")
        refuse_unused(job, ("sync_batchnorm",), "it would wait for ranks that are idle in this turn")
        find_links(network)  # rejects an unknown network
        counts = _choose_counts(ranks)
        most = max(counts)
        sizes = list_counts(batch_size, "batch_size")
        device = choose_device(device)
        wrappers = list_names(wrapper)
        backends = list_names(backend)
        if backends == ("auto",):
            on_gpu = ("nccl",) if machine.can_serve_nccl(machine.count_gpus(), most) else ("gloo",)
            backends = on_gpu if device == "cuda" else ("gloo", "shm")
        setups = [Setup(w, b) for b in backends for w in wrappers if w != "dp"]
        setups += [Setup("dp", backends[0])] if "dp" in wrappers else []
        accumulate = job.get("accumulate") or 1
        # By default, at least twice the largest batch, rounded up to a multiple of every number of ranks.
        shares = math.lcm(*counts) * accumulate
        least = shares * -(-2 * max(sizes) // shares)
        strong = list_counts(least if global_batch_size is None else global_batch_size, "global_batch_size")
        # A single rank gets as many threads as each of several ranks, because the study compares ranks, not machines.
        job["threads"] = job.get("threads") or max(1, machine.count_cores() // most)
        data = job.get("data", "synthetic")
        is_synthetic = not brings_data(job["model"], job.get("data")) and data.startswith("synthetic")
        if job.get("samples") is None and is_synthetic:
            job["samples"] = max(2048, max(max(sizes) * most, *strong, 0) * accumulate)
        train = TrainSettings(batch_size=sizes[0], wrapper="none", backend="gloo", device=device, **job)
        return cls(
            job=train, ranks=counts, setups=tuple(setups), batch_sizes=sizes, global_batch_sizes=strong, iters=iters,
            network=network, predict_ranks=",".join(map(str, list_counts(predict_ranks, "predict_ranks"))),
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        return max(self.ranks)

    @property
    def cells(self) -> tuple[ScalingCell, ...]:
        weak = (ScalingCell("weak", size) for size in self.batch_sizes)
        return (*weak, *(ScalingCell("strong", size) for size in self.global_batch_sizes))

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.backend for c in self.setups if c.wrapper != "dp"))

    def check(self) -> None:
        super().check()
        Option(choices=("paceline", "torch", "dp")).check("wrapper", tuple(setup.wrapper for setup in self.setups))
        Option(choices=BACKENDS).check("backend", tuple(setup.backend for setup in self.setups))
        most = self.num_ranks
        parts = self.job.accumulate or 1
        if most < 2:
            found = f"--ranks {','.join(map(str, self.ranks))}"
            raise ConfigError(f"{found}: scaling compares one rank with two or more")
        for size, count in itertools.product(self.global_batch_sizes, self.ranks):
            if size % (count * parts):
                how = f" in {parts} micro-batches" if parts > 1 else ""
                needed = f"use a multiple of {', '.join(str(n * parts) for n in self.ranks)}"
                what = f"--global-batch-size {size} cannot be divided evenly among {count} ranks{how}"
                raise ConfigError(f"{what}: {needed}")
        gpus = machine.count_gpus()
        if any(setup.wrapper == "dp" for setup in self.setups) and (gpus < most or self.job.device == "cpu"):
            found = f"--wrapper dp uses {most} GPUs in one process, but {gpus} can be used here"
            raise ConfigError(f"{found}: leave it out")

    def sweep(self, num_bytes: int, on_one_host: bool = True) -> CollectiveSettings:
        """Plain all-reduces up to the size of all gradients, for peak bandwidths and predictions."""
        sizes = [1 << 14]
        while sizes[-1] < num_bytes:
            sizes.append(4 * sizes[-1])
        sizes[-1] = max(sizes[-1], MIB)
        return CollectiveSettings(
            backends=self.backends,
            ranks=tuple(n for n in self.ranks if n > 1),
            sizes=tuple(sizes),
            device="auto" if "nccl" in self.backends else self.job.device,
            threads=self.job.threads or 1,
            memories=("ordinary", "shared") if on_one_host and "shm" in self.backends else ("ordinary",),
        )

    def measure(self, session: Session, at_once: int) -> list[Record]:
        """Measure the cells on all ranks, the job's layers on one rank, and plain all-reduces."""
        here, most, place = "paceline.studies.rank_steps:", self.num_ranks, session.place

        def sweep_up_to_all(records: Sequence[Record]) -> tuple[Any, ...]:
            most_bytes = max(one.num_bytes for one in records if isinstance(one, StepRecord))
            return (self.sweep(most_bytes, place is None or place.local_world_size in (None, place.world_size)),)

        tasks = [Task(cell.name, here + "measure_scaling", (self, cell), most, weight=4.0) for cell in self.cells]
        if place is None:  # in a launched world the other ranks would compute at the same time
            for size in sorted({cell.batch_size(1, self.job.accumulate or 1) for cell in self.cells}):
                # The cells already include steps of the wrapper on one rank.
                arguments = dataclasses.replace(self.job, batch_size=size), "layers", 12, 2, 0, 1, 0, False
                tasks.append(Task(f"layers {size}", "paceline.measure.job_profile:measure_profile", arguments))
        if self.backends and most > 1:
            sweep = here + "measure_allreduce"
            tasks.append(Task("allreduce", sweep, ranks=most, weight=2.0, follow=sweep_up_to_all))
        return session.run([dataclasses.replace(task, expected_s=_CELL_S) for task in tasks])


def _choose_counts(ranks: Counts | None) -> tuple[int, ...]:
    """1, 2, 4, ... up to the cores, GPUs or launched ranks; always includes one rank as the baseline."""
    launched = read_place().world_size if is_launched() else 1
    most = launched if launched > 1 else max(2, machine.count_gpus() or machine.count_cores())
    counts = list_counts(ranks) if ranks is not None else tuple(2**k for k in range(most.bit_length()))
    asked = f"{max(counts)} ranks in a launched world of {launched}"
    refuse((1 < launched < max(counts), f"{asked}: use at most {launched}"), code="launched")
    return tuple(sorted({1, *counts}))


@dataclass(frozen=True)
class ScaleLine(ScalePoint):
    """A point with its efficiency relative to torch's wrapper, on the same backend and on gloo, and the peak bandwidth;
    None if not measured."""

    to_torch: Ratio | None = None
    to_torch_on_gloo: Ratio | None = None
    peak: float | None = None

    @property
    def split(self) -> StepRecord | None:
        return self.record if self.record.comm_off else None


def list_lines(points: Sequence[ScalePoint], collectives: Sequence[CollectiveRecord] = ()) -> list[ScaleLine]:
    """Add comparisons to each point, in order; MeasurementError if a point is above the peak."""
    records = [point.record for point in points]
    known = {(r.cell, r.world_size, r.wrapper, r.backend): r for r in records}

    def compare(record: StepRecord, backend: str) -> Ratio | None:
        torch = known.get((record.cell, record.world_size, "torch", backend))
        return None if torch is None or record.world_size == 1 else compare_steps(torch, record)

    lines = []
    for p, r in zip(points, records, strict=True):
        to_torch = compare(r, r.backend), compare(r, "gloo")
        lines.append(ScaleLine(r, p.alone, p.ratio, p.is_disturbed, *to_torch, find_peak_of(r, collectives)))
    return lines


def _format_cell(record: StepRecord | Prediction, unit: str = " samples") -> str:
    return f"{record.cell_size}{unit} {'per rank' if record.mode == 'weak' else 'in all'}"


# Columns that identify a step. `cell_size` counts samples per rank (weak) or over all ranks (strong).
_FIRST = (
    *text_columns("record.model", "record.device"),
    *text_columns("record.mode", priority=-2),
    Column("samples", lambda s: _format_cell(s.record, ""), is_key=True),
    Column("global batch", "record.global_batch_size", "number", "global_batch_size", priority=-2),
    Column("ranks", "record.world_size", "number", "world_size", is_key=True),
    Column("wrapper", "record.variant", is_key=True),
    *raw_columns("record.data", "record.precision", "record.threads", "record.accumulate", "record.batch_size"),
    *raw_columns("record.cell_size", "record.wrapper", "record.backend", num_repetitions="record.timing.count"),
)
_MARK = (Column("mark", lambda s: "disturbed" if s.is_disturbed else "", is_key=True), *raw_columns("is_disturbed"))
_LAST = (*_MARK, *text_columns("record.source", priority=-2))

# Efficiencies are fractions of 1; `alone_s` is the single-rank step time in the same cell.
SCALING = (
    *_FIRST,
    Column("step", "record.timing.median_s", "ms", "step_s", priority=2),
    Column("p10", "record.timing.p10_s", "ms", "step_p10_s", priority=-2),
    Column("p90", "record.timing.p90_s", "ms", "step_p90_s", priority=-2),
    Column("samples/s", "record.samples_per_s", format_speed, "samples_per_s", priority=0),
    Column("speed-up", "speedup", "ratio", "speedup", priority=3),
    Column("ideal", "record.world_size", "number", "ideal_speedup", priority=-2),
    Column("efficiency", "efficiency", _three, "efficiency", priority=4),
    Column("±", "efficiency_noise", _three, "efficiency_noise", priority=1),
    Column(None, lambda s: s.slowdown if s.split else None, key="compute_slowdown"),
    Column("1 rank", "alone.timing.median_s", "ms", "alone_s", priority=-2),
    *ratio_columns("/ torch", "to_torch", "efficiency_over_torch"),
    *ratio_columns("/ torch on gloo", "to_torch_on_gloo", "efficiency_over_torch_on_gloo"),
    *_LAST,
)


# Null if no steps without communication were timed.
COMMUNICATION = (
    *_FIRST,
    Column("step", "record.timing.median_s", "ms", "step_s", priority=0),
    Column("compute", "split.compute_s", "ms", "compute_s", priority=2),
    Column("exposed", "split.exposed_s", "ms", "exposed_s", priority=3),
    Column("±", "record.exposed_noise_s", "ms", "exposed_noise_s", priority=-1),
    Column("of step", "split.overhead", "percent.1", "exposed_share", priority=4),
    Column("busy", "record.busy_s", "ms", "busy_s", priority=-1),
    # A rank also waits for the others, so exposed time may exceed message time; the overlap is then 0.
    Column("overlap", "split.overlap", lambda overlap: f"{max(0.0, overlap):.1%}", "overlap", priority=1),
    *_LAST,
)

BANDWIDTH = (
    *_FIRST,
    Column("sent per step", "record.num_bytes", "bytes", "num_bytes", priority=0),
    Column("messages", "record.num_messages", "number", "num_messages", priority=-1),
    Column("busy", "record.busy_s", "ms", "busy_s", priority=-1),
    Column("busbw (GB/s)", "record.busbw_bytes_per_s", format_rate, "busbw_bytes_per_s", priority=3),
    Column("peak (GB/s)", "peak", format_rate, "peak_bytes_per_s", priority=1),
    Column("of peak", lambda s: s.peak and s.record.busbw_bytes_per_s / s.peak, "percent.1", "peak_share", priority=2),
    *_LAST,
)


def match_predictions(predicted: Sequence[Prediction], points: Sequence[ScalePoint]) -> list[Prediction]:
    """Match each prediction, in order, with the measurement of the same variant, cell and ranks."""
    known = {(p.record.variant, p.record.cell, p.record.world_size): p for p in points}
    found = []
    for row in predicted:
        point = known.get((row.label, (row.mode, row.cell_size), row.world_size))
        if point is not None:
            row = replace(
                row, measured=point.record, measured_efficiency=point.efficiency, is_disturbed=point.is_disturbed
            )
        found.append(row)
    return found


# `source` is the prediction's.
PREDICTED = (
    Column("wrapper", "label", key="variant", is_key=True),
    *text_columns("network", is_key=True),
    Column("samples", lambda q: _format_cell(q, ""), is_key=True),
    Column("ranks", "world_size", "{:,}".format, "world_size", is_key=True),
    Column("predicted step", "step_s", "ms", "step_s", priority=2),
    Column("low", "low_s", "ms", "low_s", priority=-1),
    Column("high", "high_s", "ms", "high_s", priority=-1),
    Column("measured step", "measured_s", "ms", "measured_step_s", priority=1),
    Column("error", "error", "{:+.1%}".format, "error", priority=3),
    Column("predicted speed-up", "speedup", "ratio", "speedup", priority=-2),
    Column("predicted efficiency", "efficiency", _three, "efficiency", priority=0),
    Column(None, lambda q: q.efficiency_bounds[0], key="efficiency_low"),
    Column(None, lambda q: q.efficiency_bounds[1], key="efficiency_high"),
    Column("measured efficiency", "measured_efficiency", _three, "measured_efficiency", priority=-1),
    *raw_columns("mode", "cell_size", "is_covered", "doubt", "source"),
    *raw_columns(alone_s="local_s", measured_source="measured.source"),
    *_MARK,
    Column("source", lambda q: f"{q.source}{', doubtful' if q.doubt else ''}", priority=-2),
)


def _format_place(record: StepRecord) -> str:
    source = "" if record.source == "measured" else f" ({record.source})"
    return f"{format_number_of(record.world_size, 'rank')} with {_format_cell(record)}{source}"


def _describe_cause(point: ScalePoint) -> str:
    """The larger of the two causes of an efficiency below 1; empty if unknown."""
    record = point.record
    if 1 - point.efficiency <= (point.efficiency_noise or 0.0):
        return " The loss is within the noise."
    if record.comm_off is None:
        return ""
    exposed = f"exposed communication is {record.overhead:.0%} of the step"
    if record.exposed_s >= record.compute_s - point.alone.timing.median_s / point.share:
        return f" The cause: {exposed}." if record.exposed_s > 0 else ""
    if record.mode == "weak":
        why = f"ranks slow each other down: compute takes {point.slowdown:.2f} times as long as on one rank"
    else:
        why = f"a rank's share of the batch takes {point.slowdown:.2f} times as long per sample as the whole batch on "
        why += "one rank"
    return f" The cause: {why} ({exposed})."


def describe_most(lines: Sequence[ScaleLine]) -> list[str]:
    """Summarize the best variants on the most ranks in one sentence."""
    most, parts = max((line.record.world_size for line in lines), default=0), []
    for mode in ("weak", "strong"):
        here = [line for line in lines if (line.record.mode, line.record.world_size) == (mode, most)]
        if here:
            best = max(here, key=lambda point: point.efficiency if mode == "weak" else point.speedup)
            value = f"{best.efficiency:.0%} efficiency" if mode == "weak" else f"a speed-up of {best.speedup:.2f}"
            parts.append(f"{value} in {mode} scaling ({best.record.variant}, {_format_cell(best.record)})")
    return [f"{format_number_of(most, 'rank')} reach {' and '.join(parts)}."] if parts else []


def describe_lines(chosen: Sequence[ScaleLine], lines: Sequence[ScaleLine]) -> list[str]:
    """Describe each chosen curve's efficiency, the main cause of its loss, and the limit of strong scaling."""
    texts = []
    for point in chosen:
        record, noise = point.record, point.efficiency_noise
        speed = "" if record.mode == "weak" else f"speed-up {point.speedup:.2f} of {record.world_size}, "
        sure = " (one repetition)" if noise is None else f" ± {noise:.2f}"
        text = f"{_format_place(record)} in {record.variant}: {speed}efficiency {point.efficiency:.2f}{sure}."
        text += _describe_cause(point)
        if record.mode == "strong":
            same = [one for one in lines if (one.record.variant, one.record.cell) == (record.variant, record.cell)]
            best = max(same, key=lambda one: one.speedup)
            if best.speedup < 1:
                text += " One rank alone is faster than any number of ranks."
            elif best.record.world_size != record.world_size:
                text += f" The speed-up is largest on {best.record.world_size} ranks: {best.speedup:.2f}."
            if record.busy_s:
                limit = point.alone.timing.median_s / record.busy_s
                ranks, busy = format_number_of(record.world_size, "rank"), format_ms(record.busy_s)
                text += f" Messages take {busy} ms on {ranks}, which limits the speed-up to {limit:.1f}."
        texts.append(text)
    return texts


def choose_lines(lines: Sequence[ScaleLine]) -> list[ScaleLine]:
    """Choose the best variant of each cell on the most ranks and the worst of all curves, to limit the number of
    findings."""
    cells = group_by(lines, lambda line: line.record.cell).values()
    best = [max(cell, key=lambda line: (line.record.world_size, line.efficiency)) for cell in cells]
    worst = sorted(lines, key=lambda line: line.efficiency)[:1]
    return [*best, *(line for line in worst if line not in best)]


def describe_stragglers(records: Sequence[StepRecord]) -> list[str]:
    """Report cells disturbed by one slow rank, once per number of ranks."""
    found = group_by(filter(None, map(find_straggler, records)), lambda one: (_format_place(one.record), one.rank))
    worst = {place: max(ones, key=lambda one: one.excess) for place, ones in found.items()}
    return [
        f"{place}: do not use this cell. Rank {rank} was the slowest in {straggler.share:.0%} of the steps, "
        f"{straggler.excess:.0%} slower than the others even without communication: another process used its core. "
        "Measure again."
        for (place, rank), straggler in worst.items()
    ]


def describe_comparisons(lines: Sequence[ScaleLine]) -> list[str]:
    """Count, over all cells, how often each variant is better or worse than torch's wrapper."""
    found: dict[tuple[str, str], list[Ratio]] = {}
    for line in lines:
        # On gloo both comparisons are the same, and the dict keeps one.
        for backend, ratio in {line.record.backend: line.to_torch, "gloo": line.to_torch_on_gloo}.items():
            if ratio is not None and line.record.wrapper != "torch":
                found.setdefault((line.record.variant, f"torch on {backend}"), []).append(ratio)
    texts = []
    for (mine, theirs), ratios in found.items():
        worse, better, rest = count_clear(ratios)
        values = [ratio.value for ratio in ratios]
        texts.append(
            f"{mine} compared with {theirs}, by efficiency: better in {better} of "
            f"{format_number_of(len(ratios), 'undisturbed cell')}, worse in {worse}, within the noise in "
            f"{rest}; ratios from {min(values):.2f} to {max(values):.2f}."
        )
    return texts


def describe_errors(points: Sequence[Prediction]) -> list[str]:
    """Summarize the errors of predictions on held-out measurements."""
    known = [(abs(point.error), point) for point in points if point.error is not None]
    if not known:
        return []
    worst, point = max(known, key=lambda pair: pair[0])
    mean, inside = statistics.fmean(error for error, _ in known), sum(bool(point.is_covered) for _, point in known)
    ranks = ", ".join(str(n) for n in sorted({point.world_size for _, point in known}))
    num_left = sum(point.is_disturbed for point in points)
    left = f" ({format_number_of(num_left, 'disturbed step')} left out)" if num_left else ""
    return [
        f"Predicting {format_number_of(len(known), 'step')} on {ranks} ranks from half the ranks: mean error "
        f"{mean:.1%}, largest {worst:.1%} ({point.label}, {_format_cell(point)}); {inside} of {len(known)} within the "
        f"90 % interval{left}."
    ]


def describe_predictions(points: Sequence[Prediction]) -> list[str]:
    """Describe each mode's best variant in its largest cell, on the fewest and the most ranks of each network."""
    texts = []
    networked = [point for point in points if point.network]
    for (mode, network), found_here in group_by(networked, lambda point: (point.mode, point.network)).items():
        here = [point for point in found_here if point.cell_size == max(other.cell_size for other in found_here)]
        last = max(here, key=lambda point: (point.world_size, point.efficiency))
        first = min((point for point in here if point.label == last.label), key=lambda point: point.world_size)
        found = []
        for point in [first] if first is last else [first, last]:
            word, value = ("efficiency", point.efficiency) if mode == "weak" else ("speed-up", point.speedup)
            low, high = point.find_bounds(value)
            found.append(f"{word} {value:.2f} ({low:.2f} to {high:.2f}) on {point.world_size:,} ranks")
        doubt = first.doubt or last.doubt  # uncertainty only grows with the number of ranks
        text = f"Predicted ({last.source}) for {last.label}, {_format_cell(last)}, {network}: {', '.join(found)}"
        texts.append(f"{text}; doubtful: {doubt}." if doubt else f"{text}.")
    return texts


def plot_ranks(mode: str, points: Sequence[ScalePoint], subtitle: str, predicted: Sequence[Prediction] = ()) -> Figure:
    """Plot weak-scaling efficiency, or strong-scaling speed-up on log axes, against ranks: a panel per batch size, with
    the ideal line and predictions."""
    is_weak = mode == "weak"
    kept = [p for p in points if p.record.mode == mode and p.record.world_size > 1]
    beyond = [q for q in predicted if q.mode == mode]
    sizes = sorted({p.record.cell_size for p in kept} | {q.cell_size for q in beyond})
    names = list(dict.fromkeys([p.record.variant for p in kept] + [q.label for q in beyond]))
    where = "per rank" if is_weak else "over all ranks"
    figure, panels = build_panels([f"{size:,} samples {where}" for size in sizes], f"{mode} scaling", subtitle)
    for axes, size in zip(panels, sizes, strict=True):
        here = [p for p in kept if p.record.cell_size == size]
        there = [q for q in beyond if q.cell_size == size]
        counts = sorted({1, *(p.record.world_size for p in here), *(q.world_size for q in there)})
        axes.plot(counts, [1 if is_weak else n for n in counts], ":", color="#000000", lw=1.2, label="ideal")
        _draw_ranks(axes, here, there, names, is_weak)
        axes.set_xlabel("ranks", fontsize=9)
        label_values(axes, counts)
    if is_weak:
        panels[0].set_ylim(bottom=0)
    else:
        panels[0].set_yscale("log", base=2)
        panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel(f"{'efficiency' if is_weak else 'speed-up'} T(1)/T(n), ± 95 %")
    place_legend(figure, *panels)
    return figure


def _draw_ranks(
    axes: Axes, points: Sequence[ScalePoint], predicted: Sequence[Prediction], names: Sequence[str], is_weak: bool
) -> None:
    """Draw a line per variant and source, starting at one rank, and crosses for predictions at measured rank counts.
    Predictions for more ranks continue only the best variant's line, dashed and with their interval, to avoid
    overlapping lines."""

    def value(point: ScalePoint | Prediction) -> float:
        return point.efficiency if is_weak else point.speedup

    def noise(point: ScalePoint) -> float:
        return (point.efficiency_noise if is_weak else point.ratio.noise) or 0.0

    beyond = sorted((q for q in predicted if q.measured is None), key=lambda q: q.world_size)
    leader = max(beyond, key=lambda q: (q.world_size, value(q))).label if beyond else ""
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        found = sorted((p for p in points if p.record.variant == name), key=lambda p: p.record.world_size)
        for source, line in group_by(found, lambda p: p.record.source).items():
            drawn = [(p.record.world_size, value(p), value(p) - noise(p), value(p) + noise(p)) for p in line]
            style = "-" if source == "measured" else "-." if source == "emulated" else ":"
            draw_line(axes, number, [(1, 1.0, 1.0, 1.0), *drawn], f"{name} ({source})", style)
        late = [(p.record.world_size, value(p)) for p in found if p.is_disturbed]
        if late:
            axes.plot(*zip(*late, strict=True), MARKERS[number % len(MARKERS)], color=color, mfc="white", ms=5)
        for q in (q for q in predicted if q.label == name and q.measured is not None):
            axes.plot(q.world_size, value(q), "x", color=color, ms=6, mew=1.4)
        networks = dict.fromkeys(q.network for q in beyond) if name == leader else {}
        for style, network in zip(("--", "-.", ":") * len(networks), networks, strict=False):
            curve = [q for q in beyond if (q.label, q.network) == (name, network)]
            used = [p for p in found if not p.is_disturbed]
            joined = [(p.record.world_size, value(p), value(p), value(p)) for p in used[-1:]]
            joined += [(q.world_size, value(q), *q.find_bounds(value(q))) for q in curve]
            draw_line(axes, number, joined, f"{name}, {network} ({curve[0].source})", style, marker=".", ms=3, lw=1.1)
    if len(beyond) < len(predicted):
        axes.plot([], [], "x", color="#555555", label="predicted from half the ranks (simulated)")
    if any(p.is_disturbed for p in points):
        axes.plot([], [], "o", color="#555555", mfc="white", ms=5, label="disturbed")


def plot_communication(points: Sequence[ScalePoint], subtitle: str) -> Figure:
    """Plot stacked compute and exposed communication of a step: a bar per number of ranks and batch size, a panel per
    variant and mode."""
    kept = sorted((p.record for p in points if p.record.comm_off), key=lambda r: (r.cell_size, r.world_size))
    disturbed = [p.record for p in points if p.is_disturbed]
    groups = group_by(kept, lambda r: f"{r.variant}, {r.mode} ({r.source})")
    figure, panels = build_panels(list(groups), "where step time goes", subtitle)
    source = ", ".join(dict.fromkeys(r.source for r in kept))
    for axes, group in zip(panels, groups.values(), strict=True):
        sizes = list(dict.fromkeys(r.cell_size for r in group))
        # Gaps between batch sizes group the bars by size.
        xs = [place + 0.6 * sizes.index(r.cell_size) for place, r in enumerate(group)]
        compute, exposed = [1e3 * r.compute_s for r in group], [1e3 * r.exposed_s for r in group]
        axes.bar(xs, compute, 0.8, color=COLORS[0], label=f"compute ({source})")
        style: dict[str, Any] = {"color": COLORS[1], "label": f"exposed communication ({source}), ± 95 %"}
        noise = [1e3 * (r.exposed_noise_s or 0.0) for r in group]
        bars = axes.bar(xs, exposed, 0.8, bottom=compute, yerr=noise, capsize=2, **style)
        axes.bar_label(bars, [f"{r.overhead:.0%}" for r in group], fontsize=7.5, padding=2)
        late = {x: a + b for x, a, b, r in zip(xs, compute, exposed, group, strict=True) if r in disturbed}
        if late:
            axes.bar(
                list(late), list(late.values()), 0.8, fill=False, hatch="///", ec="#333333", lw=0, label="disturbed"
            )
        axes.set_xticks(xs, [f"{r.world_size}\n{r.cell_size:,}" for r in group])
        where = "per rank" if group[0].mode == "weak" else "over all ranks"
        axes.set_xlabel(f"ranks, and samples {where}", fontsize=9)
        axes.set_xlim(-0.7, max(xs[-1], 3.0) + 0.7)
        axes.margins(y=0.12)
        axes.grid(False, axis="x")
    panels[0].set_ylabel("step (ms); exposed in % of it")
    place_legend(figure, *panels)
    return figure


class RanksResult(StudyResult):
    """`scale ranks`: weak and strong scaling of all wrappers, and predictions for more ranks."""

    topic = "Ranks"

    def _derive(self) -> None:
        self.steps = [record for record in self.only(StepRecord) if record.role == "job" and record.mode]
        self.several = [record for record in self.steps if record.world_size > 1]
        self.points = list_points(self.steps)

    @cached_property
    def _lines(self) -> tuple[list[ScaleLine], str]:
        """The rows of all tables, and the reason for hiding bandwidths if they are hidden."""
        try:
            return list_lines(self.points, self.only(CollectiveRecord)), ""
        except MeasurementError as error:
            return list_lines(self.points), str(error)

    @property
    def failure(self) -> str:
        return super().failure or self._lines[1]

    @cached_property
    def _predicted(self) -> tuple[list[Prediction], list[str]]:
        """Predictions for more ranks from all measurements, and one for the largest measured rank count from half
        as many ranks, to check it against the measurement. Also returns the assumptions, or the reason why there is no
        prediction; there are none without layer profiles."""
        if not self.several or not self.only(LayerProfileRecord):
            return [], []
        networks = find_networks(self.config["network"])
        most = max(record.world_size for record in self.several)
        counts = [n for n in parse_counts(self.config["predict_ranks"], "--predict-ranks") if n > most]
        cores = self.run.environment.cores // self.several[0].threads
        at_hand = most if self.several[0].device == "cuda" else max(cores, most)
        points: list[Prediction] = []
        notes: dict[str, None] = {}
        for mode, size, wrapper, backend in dict.fromkeys((*r.cell, r.wrapper, r.backend) for r in self.several):
            if wrapper == "dp":
                continue
            ranks = [n for n in counts if mode == "weak" or size % n == 0]
            try:
                study = self.records, wrapper, backend, (mode, size), at_hand
                evidence, half = ScalingEvidence(*study), ScalingEvidence(*study, up_to=most // 2)
                found = simulate_scaling(half, [most])
                found += simulate_scaling(evidence, ranks, networks) if ranks else []
                lines = describe_assumptions(evidence, networks)
            except PacelineError as error:  # no model fits the times, for example on a busy machine
                found, lines = [], [f"{NO_PREDICTION} {wrapper} on {backend}, {mode} {size}: {error}"]
            points += found
            notes |= dict.fromkeys(lines)
        busy = ["steps"] if is_busy(self.doubts) else []
        points = [replace(point, doubt=add_busy(point.doubt, busy)) for point in points]
        return match_predictions(points, self.points), list(notes)

    @property
    def assumptions(self) -> list[str]:  # type: ignore[override]
        return self._predicted[1]

    def tables(self) -> list[Table]:
        (lines, failure), predicted = self._lines, self._predicted[0]
        rates = [] if failure else [line for line in lines if line.record.busbw_bytes_per_s is not None]
        several = [line for line in lines if line.record.world_size > 1]
        tables = [
            Table("scaling", "ranks", SCALING, lines),
            Table("communication", "compute and communication", COMMUNICATION, several),
            Table("bandwidth", "bandwidth and its measured peak", BANDWIDTH, rates),
            # The terminal shows only predictions with a measurement; the findings have the others.
            Table("predicted", "predicted", PREDICTED, predicted, shown=[q for q in predicted if q.measured]),
        ]
        return [table for table in tables if table.rows]

    def page_tables(self) -> list[Table]:
        """The tables, preceded by matrices of the same numbers by batch size and ranks for weak and strong scaling."""
        tables, found = self.tables(), []
        variants = list(dict.fromkeys(record.variant for record in self.several))
        for mode, ratio in (("weak", "efficiency"), ("strong", "speed-up")):
            matrices = {
                "scaling": (f"{ratio} by batch size and ranks", ("wrapper", "samples", "1 rank"), "ranks", (ratio,)),
                "communication": ("compute and exposed", ("wrapper", "ranks"), "samples", ("compute", "exposed")),
                "bandwidth": ("bandwidth", ("wrapper", "ranks"), "samples", ("busbw (GB/s)",)),
            }
            for table in (table for table in tables if table.name in matrices):
                title, rows, by, values = matrices[table.name]
                lines = [s for s in table.rows if s.record.mode == mode and s.record.world_size > 1]
                lines.sort(key=lambda s: variants.index(s.record.variant))
                if lines:
                    one = replace(table, title=f"{mode} scaling: {title}", rows=lines)
                    found.append(one.pivot(rows, by, (*values, "mark")))
        return [*found, *tables]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        modes = [mode for mode in ("weak", "strong") if any(record.mode == mode for record in self.several)]
        drawn: dict[str, Callable[[], Figure]] = {
            mode: partial(plot_ranks, mode, self.points, self.machine, self._predicted[0]) for mode in modes
        }
        if any(step.comm_off for step in self.steps):
            drawn["communication"] = partial(plot_communication, self.points, self.machine)
        return drawn

    @cached_property
    def sentences(self) -> list[str]:  # type: ignore[override]
        lines, predicted = self._lines[0], self._predicted[0]
        usable = [line for line in lines if line.record.world_size > 1 and not line.is_disturbed]
        return [
            *describe_most(usable),
            *describe_lines(choose_lines(usable), usable),
            *describe_stragglers(self.steps),
            *describe_comparisons(usable),
            *[f"{line}." for line in self.assumptions if line.startswith(NO_PREDICTION)][:1],
            *describe_errors(predicted),
            *describe_predictions(predicted),
        ]

    @property
    def next_steps(self) -> list[str]:
        most = max((record.world_size for record in self.several), default=1)
        named = {"model": self.steps[0].model, "data": self.config.get("job", {}).get("data")}
        return [] if most == 1 else [f"paceline tune {describe_job(named)} --ranks {most}"]
