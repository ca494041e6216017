"""Run comparison: numbers relative to the first run, significant differences, and settings that differ."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import refuse
from paceline.predict.advice import find_message_share
from paceline.predict.traces import CATEGORIES
from paceline.records.environment import Environment
from paceline.records.samples import Ratio, Samples, compare_medians
from paceline.records.store import Run
from paceline.report.observed import WHERE, AttachedResult
from paceline.report.plots import Drawings, Figure, draw_line, new_figure, place_legend
from paceline.report.profiles import OVERVIEWS, TraceResult, shorten_names
from paceline.report.result import Result, load_result
from paceline.report.step_tables import PHASES, PhasesResult
from paceline.report.table import Column, Table, build_row, format_ratio, join_words, raw_columns
from paceline.report.training_result import TrainRunResult
from paceline.units import format_bytes, format_duration, format_ms, format_number_of, format_speed

# Settings whose differences are not reported: they serve to match rows, or follow from results or other settings.
_PHASES_MAY_DIFFER = ("batch_sizes", "batch_size", "ranks")
_TRAINING_MAY_DIFFER = ("ranks", "outcome", "faults")
_TUNING_MAY_DIFFER = ("tune", "predictions", "gradients", "default_plan")  # fields of `tune` are compared one by one
_MOST_LETTERS = 120  # maximum length of a setting's value
# Compared quantities, by JSON key; throughput first for traces, because their batches may differ.
_OF_PHASES = (
    *("step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "compute_s"),
    *("exposed_comm_s", "busy_comm_s", "comm_overhead", "samples_per_s"),
)
_OF_TRACES = (
    *("samples_per_s", "step_s"),
    *(f"{name}_s" for name in CATEGORIES),
    *(f"{name}_share" for name in CATEGORIES),
    *("forward_s", "backward_s", "optimizer_s", "message_s", "host_s", "peak_bytes"),
    *("gpu_busy", "gpu_sm_efficiency", "gpu_occupancy", "gpu_tensor_core_share", "gpu_communication_share"),
    *("gpu_kernel_s", "gpu_num_kernels"),
)
_OF_TRAINING = ("step_s", "data_wait_s", "exposed_comm_s")
_UNITS = {"samples_per_s": "count", "gpu_num_kernels": "count", "peak_bytes": "bytes"}  # else by suffix
_RATIO_NOTE = "Ratios of medians ± 95 %; = marks no clear difference. The runs were not interleaved."
# Fields of a record that do not identify the measurement, or that follow from other fields.
_ABOUT = (
    *("source", "note", "num_wrong", "num_checked", "held_bytes", "peak_step_bytes", "order_seed"),
    *("configuration", "num_parameters", "steps_per_turn"),
)

_Key = str | tuple[str, ...]  # identifies a number: its name, or its record's fields as text


class _Number(NamedTuple):
    """One number of a run. Ratios have an interval if it has `samples` or is an accuracy over `num_tested` samples."""

    unit: str
    value: float | None
    samples: Sequence[float] = ()
    num_tested: int = 0

    def find_noise(self, first: _Number) -> float | None:
        """The half-width of the 95 % interval of the ratio to the first run's number; None if unknown."""
        if self.samples and first.samples:
            return compare_medians(self.samples, first.samples).noise
        a, b = first.value, self.value
        if a and b and self.num_tested and first.num_tested:  # binomial
            return 1.96 * b / a * math.sqrt((1 - a) / (a * first.num_tested) + (1 - b) / (b * self.num_tested))
        return None


def _list_numbers(result: Result) -> dict[_Key, _Number]:
    if isinstance(result, TraceResult):
        row = build_row(OVERVIEWS, result.overviews[0]) | {"samples_per_s": result.samples_per_s}
        return {_name(key): _Number(_find_unit(key), row[key]) for key in _OF_TRACES}
    if isinstance(result, TrainRunResult):
        return _list_training(result)
    if isinstance(result, AttachedResult):
        return _list_observed(result)
    found: dict[_Key, _Number] = {}
    for record in result.steps if isinstance(result, PhasesResult) else ():
        cell = f"{format_number_of(record.world_size, 'rank')}, batch {record.batch_size}"
        row = build_row(PHASES, record)
        for key in _OF_PHASES:
            samples = record.timing.reduced_s if key == "step_s" else ()
            found[f"{cell}: {_name(key)}"] = _Number(_find_unit(key), row[key], samples)
    for timed in () if found else result.records:
        timing = getattr(timed, "timing", None)
        if isinstance(timing, Samples):
            fields = vars(timed).items()
            words = (_describe_field(name, v) for name, v in fields if isinstance(v, str | int) and name not in _ABOUT)
            found[timed.kind.replace("_", " "), *filter(None, words)] = _Number("s", timing.median_s, timing.reduced_s)
    return found


def _list_observed(result: AttachedResult) -> dict[_Key, _Number]:
    """The parts of a step on the critical rank and the step time with each compared plan."""
    row, times = build_row(WHERE, result.critical), result.steps.timing.reduced_s
    found: dict[_Key, _Number] = {"step": _Number("s", row["step_s"], times)}
    found |= {_name(key): _Number("s", value) for key, value in row.items() if key.endswith("_s") and key != "step_s"}
    for label, record in result.raced.items():
        found[f"step, {label}"] = _Number("s", record.timing.median_s, record.timing.reduced_s)
    return found


def _list_training(result: TrainRunResult) -> dict[_Key, _Number]:
    found: dict[_Key, _Number] = {}
    settled = result.rows[min(5, len(result.rows) // 2) :]
    for key in _OF_TRAINING:
        if times := [row[key] for row in settled if row.get(key)]:
            found[_name(key)] = _Number("s", statistics.median(times), times)
    if tested := [row for row in result.rows if row.get("test_accuracy")]:
        last = tested[-1]
        found["test accuracy"] = _Number("share", last["test_accuracy"], num_tested=last["test_samples"])
    return found


def _find_unit(key: str) -> str:
    return _UNITS.get(key, "s" if key.endswith("_s") else "share")


def _name(key: str) -> str:
    return "samples/s" if key == "samples_per_s" else key.removesuffix("_s").replace("_", " ")


def _describe_field(name: str, value: str | int) -> str:
    """A record's field as text; empty if it has no value."""
    if isinstance(value, str) or not value:
        return str(value or "")
    plain = name.replace("_bytes", "").removeprefix("num").replace("_", " ")
    return f"{plain} {format_bytes(value) if '_bytes' in name else value}".strip()


@dataclass(frozen=True)
class ComparedNumber:
    """One number in the first run and in another run; None if a run lacks it. `unit` is `s`, `share`, `bytes` or
    `count`. `noise` is the half-width of the ratio's 95 % interval, None if unknown."""

    name: str
    unit: str
    first: float | None
    second: float | None
    noise: float | None = None
    run: str = ""

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def change(self) -> Ratio | None:
        return None if self.ratio is None else Ratio(self.ratio, self.noise)


def compare_numbers(parts: Sequence[Result], names: Sequence[str]) -> list[ComparedNumber]:
    """Compare each run with the first, for the numbers that both have."""
    first, *others = map(_list_numbers, parts)
    fields = [set(key) for numbers in (first, *others) for key in numbers if not isinstance(key, str)]
    common = set.intersection(*fields) if fields else set()
    rows = []
    for run, numbers in zip(names[1:], others, strict=True):
        for key, here in first.items():
            there = numbers.get(key)
            if there is not None and (here.value or there.value):
                words = [key] if isinstance(key, str) else [word for word in key if word not in common] or [key[0]]
                name = ", ".join(words)
                rows.append(ComparedNumber(name, here.unit, here.value, there.value, there.find_noise(here), run))
    return rows


_FORMATS: dict[str, Callable[[Any], str]] = {
    "s": format_duration,
    "share": "{:.1%}".format,
    "bytes": format_bytes,
    "count": "{:.0f}".format,
}


def _format_side(row: ComparedNumber, side: str) -> str | None:
    return None if (value := getattr(row, side)) is None else _FORMATS[row.unit](value)


def _format_ratio(change: Ratio) -> str:
    return f"{change.value:.2f}" if change.noise is None else format_ratio(change)


def _build_numbers_table(name: str, title: str, rows: Sequence[ComparedNumber], key: str = "") -> Table:
    is_of_two = len({row.run for row in rows}) == 1
    columns = [
        Column(None if is_of_two else "run", "run", key="run", is_key=True),
        Column("quantity", "name", key="name", is_key=True),
        Column("first", partial(_format_side, side="first"), str, is_key=True),
        Column("second" if is_of_two else "this", partial(_format_side, side="second"), str, is_key=True),
        Column("second / first" if is_of_two else "this / first", "change", _format_ratio),
        *raw_columns("unit", "first", "second", "ratio", ratio_noise="noise"),
    ]
    return Table(name, title, columns, rows, key, ratio_note=_RATIO_NOTE)


def _name_runs(parts: Sequence[Result]) -> list[str]:
    return [str(part.folder or f"run {number}") for number, part in enumerate(parts, 1)]


class ComparisonResult(Result):
    """Result of `paceline.compare`, `profile --compare` and `paceline report`: runs of one verb compared with the
    first. `rows` are the shared numbers, and `differences` maps each setting that differs to its value in every run.
    Two traces are also compared by operator and kernel."""

    json_columns = raw_columns("config.runs", "config.settings_that_differ", "config.accumulation")

    def _derive(self) -> None:
        self.rows: Sequence[Any] = [ComparedNumber(**row) for row in self.config["rows"]]
        self.differences: dict[str, list[Any]] = self.config["settings_that_differ"]

    @classmethod
    def of(cls, parts: Sequence[Result], environment: Environment) -> ComparisonResult:
        """Compare runs. They were not interleaved, so the machine may have changed between them."""
        names = _name_runs(parts)
        config: dict[str, Any] = {
            "runs": names,
            "rows": [asdict(row) for row in compare_numbers(parts, names)],
            "settings_that_differ": _list_differences(parts),
        }
        first, second = parts[:2]
        if len(parts) == 2 and isinstance(first, TraceResult) and isinstance(second, TraceResult):
            for kind, time in _TIMES.items():
                config[kind] = [asdict(row) for row in _compare_times(first, second, kind, time)]
            config["accumulation"] = _compare_shares(first, second, config["settings_that_differ"])
        doubts = tuple(f"{name}: {line}" for name, one in zip(names, parts, strict=True) for line in one.warnings)
        return cls(Run("compare", config, environment, (), doubts))

    @property
    def answer(self) -> str:
        first, second, *more = self.config["runs"]
        rows = {row.name.split(": ")[-1]: row for row in reversed(self.rows)}  # keep the first of several cells
        if more or not {"step", "samples/s"} <= set(rows):
            return describe_numbers(self.rows)
        step, speed = rows["step"], rows["samples/s"]
        one, two = (round(getattr(step, side) * getattr(speed, side)) for side in ("first", "second"))
        if one == two:
            return f"A step of {second} takes {step.ratio:.2f} times as long as one of {first}."
        return (
            f"{second} processes {speed.ratio:.2f} times as many samples/s as {first}. Its steps have "
            f"{two:,} samples instead of {one:,} and take {step.ratio:.2f} times as long."
        )

    @property
    def findings(self) -> list[str]:
        differ = [
            f"the runs differ in {name}: {join_words(textwrap.shorten(str(v), _MOST_LETTERS) for v in values)}"
            for name, values in self.differences.items()
        ]
        drift = "the runs were not interleaved: differences of a few percent may be machine drift"
        return [*differ, *self._explain(), drift]

    def _explain(self) -> Sequence[str]:
        """State how well the first trace's communication fraction predicts the second's."""
        found = self.config.get("accumulation")
        if not found:
            return ()
        one, two = found["accumulate"]
        share, optimizer = found["share"], found["optimizer"]
        once, rest = ("s + o", "s - o") if optimizer else ("s", "s")
        means = "; mean over all ranks: {:.1%} and {:.1%}".format(*found["means"]) if "means" in found else ""
        return [
            f"communication is s = {share:.1%} of {found['of']} on rank {found['rank']} at accumulate {one}"
            + (f", and the optimizer is o = {optimizer:.1%}" if optimizer else "")
            + f"; at {two}, s / ({once} + {two / one:g} (1 - {rest})) predicts {found['predicted']:.1%}; "
            + f"measured: {found['measured']:.1%}{means}"
        ]

    def tables(self) -> list[Table]:
        title = " and ".join(self.config["runs"]) + (", rank 0" if "operators" in self.config else "")
        tables = [_build_numbers_table("comparison", title, self.rows, key="rows")]
        for kind in _TIMES:
            if rows := [ComparedTime(**row) for row in self.config.get(kind, ())]:
                shown = rows[:_MAX_COMPARED]
                most = f"the {len(shown)} largest of {len(rows)} changes" if len(shown) < len(rows) else "all"
                what = "self time" if kind == "operators" else "time"
                title = f"{kind} of rank 0, {what} per step, {most}"
                tables.append(Table(kind, title, _build_times_columns(kind, rows), rows, shown=shown))
        return tables


def compare_results(parts: Sequence[Result], environment: Environment) -> ComparisonResult:
    are_training = all(isinstance(part, TrainRunResult) and part.rows for part in parts)
    return (TrainComparisonResult if are_training else ComparisonResult).of(parts, environment)


def describe_numbers(rows: Sequence[ComparedNumber]) -> str:
    """State how many numbers differ by more than their noise, and which one differs most."""
    known = [(row, row.change) for row in rows if row.change is not None and row.change.noise is not None]
    if not rows:
        return "These runs have no numbers in common."
    clear = [(abs(math.log(change.value)), row, change) for row, change in known if change.is_clear]
    text = f"{len(clear)} of {len(known)} numbers shared by these runs differ by more than their noise"
    if clear:
        _, row, change = max(clear, key=lambda one: one[0])
        text += f"; the largest difference is {row.name} ({row.run}), by a factor of {format_ratio(change)}"
    return f"{text}."


def _list_differences(parts: Sequence[Result]) -> dict[str, list[Any]]:
    """Settings that may explain a difference. For a trace, uses the batch size and accumulation that actually ran."""
    settings = []
    for part in parts:
        tune = part.config.get("tune") or {}
        settings.append(part.config | tune | {"machine": part.run.environment.machine_and_torch})
        if isinstance(part, TraceResult):
            settings[-1] |= {"batch_size": part.facts.batch_size, "accumulate": part.facts.accumulate}
    first = parts[0]
    is_phases, is_training = isinstance(first, PhasesResult), isinstance(first, TrainRunResult)
    may_differ = _PHASES_MAY_DIFFER * is_phases + _TRAINING_MAY_DIFFER * is_training + _TUNING_MAY_DIFFER
    return list_differences(settings, may_differ)


def list_differences(configs: Sequence[dict[str, Any]], but: Sequence[str]) -> dict[str, list[Any]]:
    """The settings that differ between runs, with their value in each run; excludes the settings in `but`."""
    names = dict.fromkeys(name for config in configs for name in config if name not in but)
    values = {name: [config.get(name) for config in configs] for name in names}
    return {name: each for name, each in values.items() if len(set(map(json.dumps, each))) > 1}


# -- two traces --------------------------------------------------------------------------------------------------------

# Tables that compare two traces, and the field to compare; a terminal shows the largest differences.
_TIMES = {"operators": "self_s", "kernels": "time_s"}
_MAX_COMPARED = 10


@dataclass(frozen=True)
class ComparedTime(ComparedNumber):
    """An operator or kernel in two runs: seconds and calls per step."""

    first_calls: float | None = None
    second_calls: float | None = None

    @property
    def difference_s(self) -> float:
        return (self.second or 0.0) - (self.first or 0.0)


def _compare_times(first: TraceResult, second: TraceResult, kind: str, time: str) -> list[ComparedTime]:
    """The operators or kernels of rank 0 in two traces by full name, largest difference first."""
    here, there = ({row.name: row for row in getattr(one.overviews[0], kind)} for one in (first, second))
    rows = []
    for name in here | there:
        sides = here.get(name), there.get(name)
        times_s, calls = ([getattr(side, field, None) for side in sides] for field in (time, "calls"))
        rows.append(ComparedTime(name, "s", times_s[0], times_s[1], first_calls=calls[0], second_calls=calls[1]))
    return sorted(rows, key=lambda row: -abs(row.difference_s))


def _compare_shares(first: TraceResult, second: TraceResult, unlike: Collection[str]) -> dict[str, Any] | None:
    """The fraction of each trace's step spent on communication, and the prediction of the second from the first; None
    if the traces differ in anything but accumulation."""
    counts = [one.facts.accumulate for one in (first, second)]
    if counts[0] == counts[1] or first.facts.world_size == 1 or not set(unlike) <= {"accumulate", "global_batch_size"}:
        return None
    by_rank = [{overview.rank: overview for overview in one.overviews} for one in (first, second)]
    pairs = [(by_rank[0][rank], by_rank[1][rank]) for rank in by_rank[0].keys() & by_rank[1].keys()]
    if not pairs:
        return None
    # Use one rank for both, the one that waits least overall: the late rank may differ between the runs.
    pair = min(pairs, key=lambda pair: sum(overview.seconds("communication") for overview in pair))
    before, after = (find_message_share([overview]) for overview in pair)
    predicted = before.estimate(counts[1] / counts[0])
    means = [statistics.fmean(find_message_share([row]).share for row in one.overviews) for one in (first, second)]
    found = {"accumulate": counts, "predicted": predicted, "measured": after.share, "means": means}
    return before._asdict() | found


def _build_times_columns(kind: str, rows: Sequence[ComparedTime]) -> Sequence[Column]:
    names = tuple(row.name for row in rows)
    return (
        Column(kind.removesuffix("s"), lambda r: shorten_names(names)[r.name], is_key=True),
        *raw_columns("name"),
        Column("first", "first", "ms", "first_s", is_key=True),
        Column("second", "second", "ms", "second_s", is_key=True),
        Column("change (ms)", "difference_s", _format_change, "difference_s", is_key=True),
        Column("ratio", "ratio", "ratio", "ratio", priority=1),
        Column("first calls", "first_calls", "{:g}".format, "first_calls"),
        Column("second calls", "second_calls", "{:g}".format, "second_calls"),
    )


def _format_change(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_ms(abs(seconds))}"


# -- training runs -----------------------------------------------------------------------------------------------------

_SAME = 0.01  # maximum loss difference, relative to the mean loss, between runs that learn the same


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


@dataclass(frozen=True)
class ComparedRun:
    """One of several training runs, compared with the first."""

    name: str
    run: TrainRunResult
    first: TrainRunResult

    @property
    def differences(self) -> list[float]:
        """The loss difference at each common step, relative to the first run's mean loss."""
        there, here = ({row["step"]: row["loss"] for row in run.rows} for run in (self.first, self.run))
        mean = statistics.fmean([loss for loss in there.values() if _is_number(loss)] or [1.0])
        both = [(loss, there[step]) for step, loss in here.items() if step in there]
        return [abs(a - b) / mean if _is_number(a) and _is_number(b) else math.inf for a, b in both]

    @property
    def largest_difference(self) -> float:
        return max(self.differences)

    @property
    def speed_up(self) -> float:
        """Throughput relative to the first run; for equal steps, the ratio of their times."""
        assert self.run.total is not None and self.first.total is not None
        return self.run.total.samples_per_s / self.first.total.samples_per_s


_RUNS = (
    Column("run", "name", key="run", is_key=True),
    *raw_columns(ranks="run.world_size"),
    Column("steps", "run.steps", "number", "steps", priority=-1),
    Column("loss", lambda row: row.run.epochs[-1].loss, "{:.4f}".format, "loss", priority=2),
    Column("test loss", "run.tested.test_loss", "{:.4f}".format, "test_loss", priority=1),
    Column("test accuracy", "run.tested.test_accuracy", "percent.1", "test_accuracy", priority=3),
    Column("test F1", "run.tested.test_f1", "{:.3f}".format, "test_f1", priority=3),
    Column("time", "run.total.seconds", "s", "seconds", priority=2),
    Column("samples/s", "run.total.samples_per_s", format_speed, "samples_per_s", priority=0),
    Column("speed-up", "speed_up", "ratio", "speed_up", priority=3),
    Column("exposed comm", "run.total.exposed_share", "percent.1", "exposed_share", priority=1),
    Column("loss differs", "largest_difference", "{:.2%}".format, "largest_difference", priority=0),
)


class TrainComparisonResult(ComparisonResult):
    """Result of `train --compare`, and of a job trained on several rank counts. `parts` are the runs, `rows` has a
    row for each, and `numbers` are the metrics that they have in common, with uncertainties. A saved comparison stores
    the folders of the runs relative to its own folder (`config["runs"]`)."""

    json_columns = raw_columns("learned_the_same", settings_that_differ="differences")

    def __init__(self, run: Run, folder: Path | None = None, parts: Sequence[Result] | None = None) -> None:
        if parts is None:
            parts = [load_result((folder or Path()) / path) for path in run.config["runs"]]
        self.parts = [part for part in parts if isinstance(part, TrainRunResult)]
        super().__init__(run, folder)

    def _derive(self) -> None:
        ranks = [part.world_size for part in self.parts]
        names = [format_number_of(count, "rank") for count in ranks]
        names = names if len(set(ranks)) == len(ranks) else _name_runs(self.parts)
        self.rows = [ComparedRun(name, part, self.parts[0]) for name, part in zip(names, self.parts, strict=True)]
        self.differences = _list_differences(self.parts)
        self.numbers = compare_numbers(self.parts, names)

    @classmethod
    def of(cls, parts: Sequence[Result], environment: Environment) -> TrainComparisonResult:
        for one in parts:
            found = f"{one.folder or 'a result'} is a run of `paceline {one.run.verb}`"
            refuse(
                (not isinstance(one, TrainRunResult), f"{found}: use runs of `paceline train`"),
                (not getattr(one, "rows", ()), f"{found} that has no steps: resume it, or use another"),
                code="mismatch",
            )
        return cls(Run("train --compare", {}, environment, ()), None, parts)

    @property
    def learned_the_same(self) -> bool:
        return all(row.largest_difference <= _SAME for row in self.rows)

    @property
    def _num_equal(self) -> int:
        """The number of steps before the losses of the runs differ."""
        return min(len([*itertools.takewhile(_SAME.__ge__, row.differences)]) for row in self.rows)

    @property
    def answer(self) -> str:
        first, *others = self.rows
        names, most = join_words(row.name for row in self.rows), max(row.largest_difference for row in others)
        text = f"The losses of {names} agree in every step, within {max(most, 1e-4):.2%}."
        if not self.learned_the_same:
            text = f"The losses of {names} differ from the first step onward; "
            if self._num_equal:
                text = f"The losses of {names} agree for {self._num_equal} of {first.run.steps} steps; after that, "
            by = f"the loss of a step differs by up to {most:.1%}."
            text += by if math.isfinite(most) else "one of the runs has a loss that is not finite."
        for what, name, say in (("accuracy", "accuracy", "{:.1%}".format), ("f1", "F1", "{:.3f}".format)):
            found = [getattr(row.run.tested, f"test_{what}", None) for row in self.rows]
            if None not in found:
                text += f" Test {name}: {join_words(map(say, found))}."
        speeds = ", ".join(f"{row.name} {row.speed_up:.2f}" for row in others)
        return f"{text} Speed: {speeds} times that of {first.name}."

    def _explain(self) -> list[str]:
        """State which differences are significant, and why losses differ if the runs differ only in the number of
        ranks."""
        sure = describe_numbers(self.numbers).removesuffix(".")
        if self.learned_the_same or self.differences or len({row.run.world_size for row in self.rows}) == 1:
            return [sure]
        return [
            sure,
            "rounding depends on the number of ranks and accumulates over steps; dropout and, without "
            "--sync-batchnorm, BatchNorm depend on it as well",
        ]

    @property
    def warnings(self) -> tuple[str, ...]:
        unfinished = [f"{row.name}: the run is not finished" for row in self.rows if not row.run.finished]
        why = "times as fast is more than the additional ranks explain: the machine may have been busy"
        ratios = [(row, row.run.world_size / row.first.world_size) for row in self.rows]
        fast = [f"{row.name}: {row.speed_up:.2f} {why}" for row, ratio in ratios if row.speed_up > 1.1 * ratio > 1.1]
        return (*unfinished, *fast, *(f"{row.name}: {line}" for row in self.rows for line in row.run.warnings))

    def tables(self) -> list[Table]:
        numbers = _build_numbers_table("numbers", "steps compared with the first run", self.numbers)
        return [Table("comparison", self.parts[0].title, _RUNS, self.rows, key="runs"), numbers]

    def figures(self) -> Drawings:
        return {"losses": lambda: plot_losses(self.rows, self.parts[0].title, self.parts[0].machine)}

    def _save_run(self, folder: Path) -> None:
        """Save the runs that do not have a folder yet, inside this result's folder."""
        for number, part in enumerate(self.parts, 1):
            if part.folder is None:
                part.save(folder / f"run-{number}")
        places = [os.path.relpath(part.folder.absolute(), folder.absolute()) for part in self.parts if part.folder]
        self.run = replace(self.run, config=self.config | {"runs": places})
        super()._save_run(folder)


def plot_losses(rows: Sequence[ComparedRun], title: str, subtitle: str) -> Figure:
    """Training and test losses of several runs on one axis, with thinner lines for later runs."""
    figure, axes = new_figure(title, f"{subtitle}; measured")
    for number, row in enumerate(rows):
        thin = {"marker": "", "lw": max(0.8, 2.4 - 0.8 * number), "alpha": 0.7}
        for name, what, style, look in (("loss", "training", "-", thin), ("test_loss", "test", "--", {})):
            points = [(one["step"], one[name], None, None) for one in row.run.rows if one.get(name) is not None]
            if points:
                draw_line(axes, number, points, f"{row.name}: {what} loss", style, **look)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_ylim(bottom=0)
    place_legend(figure, axes)
    return figure
