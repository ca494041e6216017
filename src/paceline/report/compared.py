"""Several runs of one verb compared with the first: differences and their uncertainty."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from paceline.records.samples import Ratio, Samples, compare_medians
from paceline.records.store import Run
from paceline.report.result import Result
from paceline.report.table import Column, Table, format_ratio, raw_columns
from paceline.report.training import TrainComparisonResult, TrainRunResult
from paceline.units import format_bytes, format_ms

# Fields of a record that do not identify what it measures.
_ABOUT = ("source", "note", "num_wrong", "num_checked", "held_bytes", "peak_step_bytes", "order_seed")
_PLAIN = ("configuration", "num_parameters")  # fields that follow from others
_TITLE = "compared with the first run (± 95 %, = is within that); not interleaved, so a few percent may be drift"
Key = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One number of a run next to that of the first run."""

    run: str
    what: str
    first: str
    other: str
    ratio: Ratio


_COLUMNS = (
    Column("run", "run", key="run", is_key=True),
    Column("what", "what", key="what", is_key=True),
    Column("first", "first", str),
    Column("this", "other", str),
    Column("ratio", "ratio", lambda ratio: format_ratio(ratio)),
    *raw_columns(ratio="ratio.value", ratio_noise="ratio.noise"),
)


def _list_times(result: Result) -> dict[Key, Sequence[float]]:
    """Times by the fields that identify them."""
    if isinstance(result, TrainRunResult):
        names, rows = ("step_s", "data_wait_s", "exposed_comm_s"), result.rows[min(5, len(result.rows) // 2) :]
        found = {name: [row[name] for row in rows if row.get(name)] for name in names}
        return {(("time", name[:-2].replace("_", " ")),): times for name, times in found.items() if times}
    timed = ((vars(record), getattr(record, "timing", None)) for record in result.records)
    return {
        tuple((name, value) for name, value in of.items() if isinstance(value, str | int) and name not in _ABOUT):
        timing.reduced_s for of, timing in timed if isinstance(timing, Samples)
    }  # fmt: skip


class ComparedResult(Result):
    """Several runs of one verb, compared with the first. `parts` are the runs, `rows` the differences."""

    def __init__(self, parts: Sequence[Result]) -> None:
        self.parts, self.rows = list(parts), list[Difference]()
        names = [str(part.folder or f"run {n}") for n, part in enumerate(parts, 1)]
        times = list(map(_list_times, parts))
        counts = Counter(name for name, _ in {pair for each in times for key in each for pair in key})
        shown = {name for name, count in counts.items() if count > 1 and name not in _PLAIN} | {"time"}
        for name, part, own in zip(names[1:], parts[1:], times[1:], strict=True):
            for key in (key for key in own if key in times[0]):
                words = (_say(*pair) for pair in key if pair[1] and pair[0] in shown)
                first, other = (f"{format_ms(statistics.median(each[key]))} ms" for each in (times[0], own))
                ratio = compare_medians(own[key], times[0][key])
                self.rows.append(Difference(name, ", ".join(words) or "time", first, other, ratio))
            self.rows += _compare_accuracy(name, parts[0], part)
        are_training = all(isinstance(part, TrainRunResult) and part.rows for part in parts)
        environment = parts[0].run.environment
        self.trained = TrainComparisonResult.of(parts, environment) if are_training else None
        super().__init__(Run(f"{parts[0].run.verb}: {len(parts)} runs", {}, environment, ()))

    @property
    def answer(self) -> str:
        clear = sorted((row for row in self.rows if row.ratio.is_clear), key=lambda r: -abs(math.log(r.ratio.value)))
        text = f"{len(clear)} of {len(self.rows)} numbers shared by these runs differ by more than their noise"
        if clear:
            text += f", most of all {clear[0].what} in {clear[0].run}, by a factor of {format_ratio(clear[0].ratio)}"
        return f"{text}. {'' if self.trained is None else self.trained.answer}".strip()

    @property
    def findings(self) -> Sequence[str]:
        return () if self.trained is None else self.trained.findings

    def tables(self) -> list[Table]:
        others = [] if self.trained is None else self.trained.tables()
        return [Table("differences", _TITLE, _COLUMNS, self.rows), *others]

    def figures(self) -> dict[str, Callable[[], Any]]:
        return {} if self.trained is None else self.trained.figures()


def _say(name: str, value: Any) -> str:
    plain = name.replace("_bytes", "").removeprefix("num").replace("_", " ")
    return value if isinstance(value, str) else f"{plain} {format_bytes(value) if '_bytes' in name else value}".strip()


def _compare_accuracy(name: str, *parts: Result) -> list[Difference]:
    """Compare test accuracies, with binomial noise."""
    rows = (part.rows if isinstance(part, TrainRunResult) else () for part in parts)
    tests = [[row for row in each if row.get("test_accuracy")] for each in rows]
    if not all(tests):
        return []
    (a, n), (b, m) = ((rows[-1]["test_accuracy"], rows[-1]["test_samples"]) for rows in tests)
    noise = 1.96 * b / a * math.sqrt((1 - a) / (a * n) + (1 - b) / (b * m))
    return [Difference(name, "test accuracy", f"{a:.1%}", f"{b:.1%}", Ratio(b / a, noise))]
