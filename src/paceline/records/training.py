"""Training records: batch sizes, large-batch runs, the gradient noise scale, epochs, and the files of a run."""

from __future__ import annotations

import json
import math
import mmap
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from paceline.errors import RecordError
from paceline.records.checked import Checked, Count, PositiveCount, at_least, one_of
from paceline.records.kinds import Record
from paceline.records.samples import Samples, group_by
from paceline.records.steps import SERVERS, StepRecord, TracedMessage, TracedStepRecord
from paceline.records.store import check_format, load_json, read_file

BUDGETS = ("epochs", "updates")
CONFIG_FILE, METRICS_FILE, SAVES_FILE = "config.json", "metrics.jsonl", "saves.jsonl"
CONFIG_FORMAT = ("paceline-train", 1)
_NOT_FINITE = "not_finite"
_LEAST_LEARNED = 0.05  # fraction of the distance from chance to a perfect score
_ROUNDING = 1e-3  # the norm of a mean is at most the mean of the norms, except for rounding


@dataclass(frozen=True, kw_only=True)
class BatchRecord(Record):
    """Epochs on one rank at one batch size. `timing` has one repetition per epoch, without the wait for data
    (`data_wait`). If the batch does not fit in memory, `failure` says so and there are no times. `peak_bytes` is the
    peak memory of the process (on CUDA, of its tensors)."""

    kind: ClassVar[str] = "batch"
    model: str
    data: str
    device: str
    precision: str
    threads: int
    batch_size: PositiveCount
    num_samples: PositiveCount
    num_steps: PositiveCount
    timing: Samples | None = None
    data_wait: Samples | None = None
    peak_bytes: int = 0
    failure: str = ""

    @property
    def place(self) -> str:
        return f"{self.model}, batch {self.batch_size}"

    def find_faults(self) -> Iterator[str]:
        if (self.timing is None) != bool(self.failure):
            yield "expected either times or a failure"

    @property
    def epoch_s(self) -> float | None:
        return None if self.timing is None else self.timing.median_s

    @property
    def step_s(self) -> float | None:
        """The time of a full batch; the last batch of an epoch may be smaller."""
        return None if self.epoch_s is None else self.epoch_s * self.batch_size / self.num_samples

    @property
    def samples_per_s(self) -> float | None:
        return None if not self.epoch_s else self.num_samples / self.epoch_s


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of a run. `update`, `num_samples` and `seconds` count from the start of the run; `train_loss` is
    the mean since the last evaluation. Regression has no accuracy."""

    update: int
    num_samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class LargeBatchRecord(Record):
    """One training run of an accuracy study, with a `budget` of `epochs` (possibly a fraction) or `updates`.
    `batch_size` is the micro-batch of one rank, `largest_batch_size` the final global batch size if it grew. If the
    loss became NaN or infinite, there is a `failure` and the curve ends there. In a study of strategies the recipe is
    the strategy, run by `num_workers` ranks or replicas in one process that send `sent_bytes` each per step.
    `num_classes` is 0 for regression, and -1 if unknown."""

    kind: ClassVar[str] = "large_batch"
    model: str
    data: str
    device: str
    precision: str
    world_size: int
    batch_size: int
    global_batch_size: int
    largest_batch_size: int
    recipe: str
    configuration: str
    budget: Annotated[str, one_of(BUDGETS)]
    epochs: float
    num_updates: int
    num_samples: int
    seed: int
    lr: float
    seconds: float
    curve: tuple[CurvePoint, ...]
    failure: str = ""
    num_workers: int = 1
    sent_bytes: float | None = None
    num_classes: int = -1

    @property
    def place(self) -> str:
        return f"{self.recipe} at {self.global_batch_size}, seed {self.seed}"

    def find_faults(self) -> Iterator[str]:
        if not self.curve and not self.failure:
            yield "nothing was evaluated"
        values = [value for p in self.curve for value in (p.train_loss, p.test_loss, p.test_accuracy or 0.0)]
        if not all(map(math.isfinite, values)):
            yield "a loss or accuracy is NaN or infinite"

    @property
    def has_learned(self) -> bool:
        """Whether the final model beats guessing: accuracy above chance and a loss not far above that of a guess."""
        if self.failure:
            return False
        last, classes = self.curve[-1], self.num_classes
        if classes < 2 or last.test_accuracy is None:
            return True
        above = (last.test_accuracy - 1 / classes) / (1 - 1 / classes)
        return above >= _LEAST_LEARNED and last.test_loss <= 2 * math.log(classes)

    @property
    def cell(self) -> tuple[str, int, str]:
        """Runs of one cell differ only in their seed."""
        return self.budget, self.global_batch_size, self.recipe


# -- the gradient noise scale (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training") -------------------


Square = Annotated[float, at_least(0)]


@dataclass(frozen=True)
class NoiseProbe(Checked):
    """Squared gradient norms of equally sized small batches from all ranks, and the squared norm of their mean, which
    is the gradient of the big batch that they form."""

    small_squares: tuple[Square, ...]
    big_square: Square

    def find_faults(self) -> Iterator[str]:
        if len(self.small_squares) < 2:
            yield f"small gradients {self.small_squares}; expected at least 2"
        elif self.big_square > statistics.fmean(self.small_squares) * (1 + _ROUNDING):
            yield f"the square of the mean gradient, {self.big_square:g}, is above the mean of {self.small_squares}"


@dataclass(frozen=True)
class NoiseEstimate:
    """The squared norm of the true gradient, and the trace of the covariance of per-sample gradients, both unbiased:
    the first can be negative. `interval` is the 90 % interval of the noise scale, with an infinite end if the probes
    only yield a lower bound; None with too few probes."""

    gradient_square: float
    noise_trace: float
    interval: tuple[float, float] | None

    @property
    def noise_scale(self) -> float | None:
        """In samples; None if only a lower bound is known, because the gradient estimate is not positive."""
        return self.noise_trace / self.gradient_square if self.gradient_square > 0 else None


def estimate_noise_scale(probes: Sequence[NoiseProbe], small_batch_size: int) -> NoiseEstimate:
    """Estimate the noise scale from probes whose small batches have this many samples. On average |g_n|^2 = |G|^2 +
    tr(Sigma) / n, so two batch sizes determine both terms. Terms are averaged over probes before taking the ratio: the
    ratio of a single probe is noisy and biased."""
    b = small_batch_size
    signals, noises = [], []
    for probe in probes:
        big, small_square = b * len(probe.small_squares), statistics.fmean(probe.small_squares)
        signals.append((big * probe.big_square - b * small_square) / (big - b))
        noises.append((small_square - probe.big_square) / (1 / b - 1 / big))
    noise = max(0.0, statistics.fmean(noises))
    return NoiseEstimate(statistics.fmean(signals), noise, _enclose_ratio(noises, signals))


def _enclose_ratio(noises: Sequence[float], signals: Sequence[float]) -> tuple[float, float] | None:
    """Fieller's 90 % interval of mean(noises) / mean(signals): every r for which mean(noises - r * signals) can be 0.
    It is valid even for few probes, and is unbounded above if the mean of the signals can be 0. Their true mean is a
    square, so a negative estimate counts as 0."""
    count = len(signals)
    if count < 3:  # too few probes to estimate their spread
        return None
    noise, signal = statistics.fmean(noises), max(0.0, statistics.fmean(signals))
    scale = _student_t95(count - 1) ** 2 / count
    # The interval is bounded by the roots of a*r^2 - 2*h*r + c.
    a = signal**2 - scale * statistics.variance(signals)
    h = noise * signal - scale * statistics.covariance(noises, signals)
    c = noise**2 - scale * statistics.variance(noises)
    root = math.sqrt(max(0.0, h * h - a * c))
    if a > 0:
        return max(0.0, (h - root) / a), max(0.0, (h + root) / a)
    if c <= 0:
        return 0.0, math.inf
    # a <= 0 < c: one root on either side of 0. This form also works at a = 0.
    return (c / (h + root) if h + root > 0 else math.inf), math.inf


def _student_t95(freedom: int) -> float:
    """The 95 % quantile of Student's t, expanded around the normal quantile; within 1.3 % if df >= 2."""
    z = statistics.NormalDist().inv_cdf(0.95)
    second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2) + third / (384 * freedom**3)


@dataclass(frozen=True, kw_only=True)
class NoiseRecord(Record):
    """Probes of one training job after `step` steps and `epoch` epochs, possibly a fraction; `seed` determines their
    samples. The noise scale and all batch sizes count samples or, for token streams, blocks."""

    kind: ClassVar[str] = "noise_scale"
    model: str
    data: str
    device: str
    world_size: PositiveCount
    precision: str
    step: Count
    epoch: Annotated[float, at_least(0)]
    seed: int
    small_batch_size: PositiveCount
    probes: tuple[NoiseProbe, ...]

    def find_faults(self) -> Iterator[str]:
        sizes = sorted({len(probe.small_squares) for probe in self.probes})
        if len(sizes) != 1:
            found = f"{len(self.probes)} probes of {sizes} small gradients"
            yield f"{found}: expected at least one probe, with the same number of gradients in each"

    @property
    def big_batch_size(self) -> int:
        return self.small_batch_size * len(self.probes[0].small_squares)

    @cached_property
    def estimate(self) -> NoiseEstimate:
        return estimate_noise_scale(self.probes, self.small_batch_size)

    @property
    def noise_scale(self) -> float | None:
        """In samples; None if there is only a lower bound (`estimate.interval`)."""
        return self.estimate.noise_scale


@dataclass(frozen=True)
class EpochSummary:
    """One epoch of training. Averages are over samples. None means not measured."""

    epoch: int
    num_steps: int
    num_samples: int
    loss: float
    accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    test_f1: float | None
    seconds: float
    exposed_comm_s: float | None
    data_wait_s: float

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float | None:
        return None if self.exposed_comm_s is None or not self.seconds else self.exposed_comm_s / self.seconds

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.seconds if self.seconds else 0.0


def summarize_epochs(rows: Iterable[dict[str, Any]]) -> list[EpochSummary]:
    """One summary per epoch, in order, from rows of metrics with one row per step."""
    return [summarize_rows(of, epoch) for epoch, of in sorted(group_by(rows, lambda row: row["epoch"]).items())]


def summarize_rows(rows: Sequence[dict[str, Any]], epoch: int = 0) -> EpochSummary:
    """The summary of one epoch, or of a whole run as if it were one epoch."""
    samples, last = sum(row["samples"] for row in rows), rows[-1]
    # NaN if a value is missing in any step.
    loss, accuracy = (
        sum((math.nan if row.get(name) is None else row[name]) * row["samples"] for row in rows) / samples
        for name in ("loss", "accuracy")
    )
    # The wrapper does not report its first step, in which it plans its buckets.
    exposed = [row["exposed_comm_s"] for row in rows if row["exposed_comm_s"] is not None]
    tests = {name: last.get(name) for name in ("test_loss", "test_accuracy", "test_f1")}
    return EpochSummary(
        epoch=epoch,
        num_steps=len(rows),
        num_samples=samples,
        loss=loss,
        accuracy=None if math.isnan(accuracy) else accuracy,
        seconds=sum(row["step_s"] for row in rows),
        exposed_comm_s=sum(exposed) / len(exposed) * len(rows) if exposed else None,
        data_wait_s=sum(row["data_wait_s"] for row in rows),
        **tests,
    )


def list_ranks(row: Mapping[str, Any], name: str) -> list[float]:
    found: list[float] = row["ranks"][name]
    return found


def count_usable_ranks(global_batch_size: int, most: int) -> int:
    """The largest number of ranks, up to `most`, that can divide a global batch equally."""
    return next(count for count in range(most, 0, -1) if global_batch_size % count == 0)


def pick_like_last(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the last row's number of ranks, because a run may be resumed on a different number."""
    rows = list(rows)
    counts = [len(list_ranks(row, "step_s")) for row in rows]
    return [row for row, count in zip(rows, counts, strict=True) if count == counts[-1]]


def build_steps(rows: Sequence[dict[str, Any]], world_size: int, **labels: Any) -> list[Record]:
    """The steps of a run after its warm-up, as the records of an attached program."""
    rows = pick_like_last(rows)
    used = rows[min(5, len(rows) // 2) :]
    times, waits = (tuple(tuple(list_ranks(row, name)) for row in used) for name in ("step_s", "data_wait_s"))
    recorded = [(row, rank, one) for row in rows for rank, one in enumerate(row.get("messages", ()))]
    labels |= {name: recorded[0][2][name] for name in ("backend", "device") if recorded}
    step = StepRecord(world_size=world_size, batch_size=1, timing=Samples(times), data_wait=Samples(waits), **labels)
    return [step, *(_build_traced(row, rank, world_size, one) for row, rank, one in recorded)]


def _build_traced(row: Mapping[str, Any], rank: int, world_size: int, one: Mapping[str, Any]) -> TracedStepRecord:
    """Estimate ready times, assuming that gradients become ready at a constant rate between two buckets."""
    backward_s, ready, messages, last_s = one["backward_s"], list[float](), list[TracedMessage](), 0.0
    servers = SERVERS.get(one["backend"], 1)
    done = [0.0] * servers
    for sizes, *moments in zip(one["gradient_bytes"], one["ready_s"], one["launch_s"], one["done_s"], strict=True):
        ready_s, until = min(moments[0], backward_s), 0
        for size in sizes:
            until += size
            ready.append(last_s + (ready_s - last_s) * until / sum(sizes))
        start_s = max(moments[1], min(sorted(done)[-servers], moments[2]))
        last_s = ready_s
        done.append(max(start_s, moments[2]))
        messages.append(TracedMessage(sum(sizes), moments[1], start_s, done[-1]))
    over_s = max(backward_s, *done)
    after_s = max(0.0, list_ranks(row, "step_s")[rank] - one["before_s"] - over_s)
    parts = (row["ranks"].get(name) for name in ("data_wait_s", "forward_s", "optimizer_s"))
    data_s, forward_s, optimizer_s = ((times and times[rank]) or 0.0 for times in parts)
    return TracedStepRecord(
        rank=rank, world_size=world_size, device=one["device"], backend=one["backend"], host=one["host"],
        number=row["step"], before_s=one["before_s"], backward_s=backward_s,
        ready_s=tuple(min(at_s, backward_s) for at_s in ready),
        after_s=after_s, messages=tuple(messages),
        data_s=min(data_s, one["before_s"]), forward_s=forward_s, optimizer_s=optimizer_s,
        gradient_bytes=tuple(size for sizes in one["gradient_bytes"] for size in sizes), are_sizes_known=False,
    )  # fmt: skip


def load_config(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a training run: `settings`, `environment` and, after the end, `outcome`."""
    file = Path(folder) / CONFIG_FILE
    document = check_format(load_json(file, "pass the folder of a training run"), CONFIG_FORMAT, file)
    if not isinstance(document.get("settings"), dict):
        raise RecordError(f"{file} has no settings: it is not the configuration of a training run", code="damaged")
    return document


class MetricsLog:
    """A JSON Lines file of rows: an integer `step`, and any other JSON values. JSON lacks nan and inf, which are
    written as `{"step": 7, "loss": null, "not_finite": {"loss": "nan"}}`."""

    def __init__(self, path: Path, after_step: float = math.inf) -> None:
        """Open a file to append, or create it. Removes the incomplete last line of a killed run and rows of steps after
        `after_step`, which the run will repeat. `last_step` is the step of the last row; 0 if there is none."""
        self.path, self.last_step = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                self.last_step = _cut_off(path, after_step)
            # Unbuffered: the rows of one `append` reach the kernel in one write, so a kill loses no earlier row.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        self.close = self._file.close

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows. Once this returns, they survive even if the process is killed."""
        data = memoryview(_render(rows))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}") from None


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order. Ignores an incomplete last line, which a killed run leaves."""
    try:
        *lines, _ = read_file(path).split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    return [_parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        row |= {name: float(value) for name, value in row.pop(_NOT_FINITE, {}).items()}
        if type(row["step"]) is not int:
            raise TypeError(f"step {row['step']!r}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"{place}: not a row with a step: {type(error).__name__} {error}") from None
    return row


def _cut_off(path: Path, after_step: float) -> int:
    """Truncate a file, whose steps are in order, to its complete rows up to this step; return the last step kept.
    Reads from the end, so that a run recovers as fast after a million steps as after ten."""
    step = 0
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            step = _parse_row(text[begin:end], f"{path}, byte {begin}")["step"]
            if step <= after_step:
                break
            step, end = 0, begin
        size = len(text)
    if end < size:
        os.truncate(path, end)
    return step


def _render(rows: Iterable[Mapping[str, Any]]) -> bytes:
    lines = []
    for row in rows:
        lost = {name: str(x) for name, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
        plain = {**row, **dict.fromkeys(lost), **({_NOT_FINITE: lost} if lost else {})}
        lines.append(json.dumps(plain, allow_nan=False) + "\n")
    return "".join(lines).encode()
