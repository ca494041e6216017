"""Records of training: batch sizes, large-batch runs, the gradient noise scale, and summaries of epochs.

Derived numbers (spread over seeds, the knee of a batch sweep, averages of an epoch) are computed here and never stored.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from paceline.errors import ConfigError, RecordError
from paceline.records.kinds import Record
from paceline.records.samples import Samples

BUDGETS = ("epochs", "updates")
CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"
CONFIG_FORMAT = ("paceline-train", 1)
_NOT_FINITE = "not_finite"
# The knee: the smallest batch size with this share of the best throughput.
KNEE = 0.9
# The norm of a mean is at most the mean of the norms, except for rounding.
_ROUNDING = 1e-3
# The spread of fewer probes than this is not known.
_MIN_PROBES = 3


@dataclass(frozen=True, kw_only=True)
class BatchRecord(Record):
    """Epochs on one rank at one batch size. `timing` has one repetition per epoch: the seconds of its steps, without
    the time that they waited for data, which is `data_wait`. Warm-up epochs are kept apart.

    If the batch does not fit into memory, `failure` says so and there are no times. `peak_bytes` is the peak memory of
    the process (on CUDA: of its tensors); 0 if it is not known.
    """

    kind: ClassVar[str] = "batch"
    model: str
    data: str
    device: str
    precision: str
    threads: int
    batch_size: int
    num_samples: int
    num_steps: int
    timing: Samples | None = None
    data_wait: Samples | None = None
    peak_bytes: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.batch_size, self.num_samples, self.num_steps) < 1:
            raise RecordError(
                f"{self.num_samples} samples in {self.num_steps} steps of {self.batch_size}: all must be at least 1"
            )
        if (self.timing is None) != bool(self.failure):
            raise RecordError(f"batch size {self.batch_size}: either times or a failure is needed")

    @property
    def epoch_s(self) -> float | None:
        return None if self.timing is None else self.timing.median_s

    @property
    def step_s(self) -> float | None:
        """The seconds of a full batch; the last batch of an epoch may be smaller."""
        return None if self.epoch_s is None else self.epoch_s * self.batch_size / self.num_samples

    @property
    def samples_per_s(self) -> float | None:
        return None if not self.epoch_s else self.num_samples / self.epoch_s

    @property
    def data_wait_s(self) -> float | None:
        return None if self.data_wait is None else self.data_wait.median_s


def find_knee(records: Sequence[BatchRecord]) -> BatchRecord | None:
    """The smallest batch size that reaches `KNEE` of the best throughput; None if none was measured."""
    found = [(record.samples_per_s, record) for record in records if record.samples_per_s is not None]
    if not found:
        return None
    best = max(rate for rate, _ in found)
    return min((record for rate, record in found if rate >= KNEE * best), key=lambda record: record.batch_size)


# -- large batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation during a run. `update` and `num_samples` count from the start; `train_loss` is the mean since the
    last evaluation."""

    update: int
    num_samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float


@dataclass(frozen=True, kw_only=True)
class LargeBatchRecord(Record):
    """One training run of a large-batch study. `recipe` is its name, `configuration` its full description.

    All runs of a study have the same `budget`: a number of `epochs` or of `updates`. A run of updates may end within an
    epoch, so `epochs` may be a fraction. `batch_size` is the samples that one rank computes at once,
    `largest_batch_size` the global batch size at the end if it grew. A run whose loss became NaN or infinite has a
    `failure`, and its curve ends there.
    """

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
    budget: str
    epochs: float
    num_updates: int
    num_samples: int
    seed: int
    lr: float
    seconds: float
    curve: tuple[CurvePoint, ...]
    failure: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget not in BUDGETS:
            raise RecordError(f"unknown budget {self.budget!r}: known are {', '.join(BUDGETS)}")
        if not self.curve and not self.failure:
            raise RecordError(f"{self.recipe} at {self.global_batch_size}, seed {self.seed}: nothing was evaluated")
        for point in self.curve:
            if not all(map(math.isfinite, (point.train_loss, point.test_loss, point.test_accuracy))):
                raise RecordError(f"{self.recipe} at {self.global_batch_size}: a loss or accuracy is NaN or infinite")

    @property
    def test_accuracy(self) -> float | None:
        """At the end of the run; None for one that failed."""
        return None if self.failure else self.curve[-1].test_accuracy

    @property
    def test_loss(self) -> float | None:
        return None if self.failure else self.curve[-1].test_loss

    @property
    def train_loss(self) -> float | None:
        return None if self.failure else self.curve[-1].train_loss

    @property
    def cell(self) -> tuple[str, int, str]:
        """Runs with the same cell differ only in their seed."""
        return self.budget, self.global_batch_size, self.recipe


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; the deviation of one seed is None."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class RecipeSummary:
    """All seeds of one recipe at one global batch size, compared with `baseline`."""

    runs: tuple[LargeBatchRecord, ...]
    baseline: RecipeSummary | None = None

    def __post_init__(self) -> None:
        if len({run.cell for run in self.runs}) != 1:
            raise RecordError("a summary needs runs of one recipe, batch size and budget; these are of several cells")
        if len({run.seed for run in self.runs}) != len(self.runs):
            raise RecordError(f"{self.first.recipe} at {self.first.global_batch_size}: a seed appears twice")

    @property
    def first(self) -> LargeBatchRecord:
        return self.runs[0]

    @property
    def finished(self) -> list[LargeBatchRecord]:
        return [run for run in self.runs if not run.failure]

    @property
    def num_failed(self) -> int:
        return len(self.runs) - len(self.finished)

    @property
    def accuracy(self) -> Spread | None:
        return self._spread("test_accuracy")

    @property
    def test_loss(self) -> Spread | None:
        return self._spread("test_loss")

    @property
    def train_loss(self) -> Spread | None:
        return self._spread("train_loss")

    def _spread(self, name: str) -> Spread | None:
        values = [getattr(run, name) for run in self.finished]
        return Spread.of(values) if values else None

    @property
    def gap(self) -> float | None:
        """The baseline's mean test accuracy minus this one's: what the batch size costs, as a fraction."""
        if self.baseline is None or self.baseline.accuracy is None or self.accuracy is None:
            return None
        return self.baseline.accuracy.mean - self.accuracy.mean


def summarize_recipes(records: Sequence[LargeBatchRecord]) -> list[RecipeSummary]:
    """A summary for each cell, in order of first appearance. The baseline of a budget is its smallest batch size
    without a recipe."""
    cells: dict[tuple[str, int, str], list[LargeBatchRecord]] = {}
    for record in records:
        cells.setdefault(record.cell, []).append(record)
    found = {cell: RecipeSummary(tuple(runs)) for cell, runs in cells.items()}
    summaries = []
    for (budget, size, recipe), summary in found.items():
        plain = [key for key in found if key[0] == budget and key[2] == "none"]
        base = min(plain, key=lambda key: key[1], default=None)
        is_base = base is None or base == (budget, size, recipe)
        summaries.append(summary if is_base else RecipeSummary(summary.runs, found[base]))  # type: ignore[index]
    return summaries


# -- the gradient noise scale (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training") -------------------


@dataclass(frozen=True)
class NoiseProbe:
    """Squared gradient norms of small batches of equal size, from all ranks, and the squared norm of their mean.

    The mean is the gradient of the big batch that the small batches form.
    """

    small_squares: tuple[float, ...]
    big_square: float

    def __post_init__(self) -> None:
        if not isinstance(self.small_squares, list | tuple) or len(self.small_squares) < 2:
            raise RecordError(f"a probe has the small gradients {self.small_squares!r:.60}; it needs at least 2")
        object.__setattr__(self, "small_squares", tuple(self.small_squares))  # JSON has lists
        for value in (*self.small_squares, self.big_square):
            if type(value) not in (float, int) or not 0 <= value < math.inf:
                raise RecordError(f"a probe has the squared norm {value!r}; it must be finite and not negative")
        if self.big_square > self.mean_small_square * (1 + _ROUNDING):
            raise RecordError(
                f"a probe's mean gradient has the squared norm {self.big_square:g}, which is above the average of its "
                f"parts, {self.mean_small_square:g}: one of them is wrong"
            )

    @property
    def num_small(self) -> int:
        return len(self.small_squares)

    @property
    def mean_small_square(self) -> float:
        return statistics.fmean(self.small_squares)


@dataclass(frozen=True)
class NoiseEstimate:
    """The squared norm of the true gradient, and the trace of the covariance of one sample's gradient.

    Both estimates are unbiased, so the first can be negative if the noise is large. `interval` is the 90 % confidence
    interval of the noise scale. Its upper end is infinite if the probes only give a lower bound; it is None if there
    are too few probes.
    """

    gradient_square: float
    noise_trace: float
    interval: tuple[float, float] | None

    @property
    def noise_scale(self) -> float | None:
        """In samples. None if the estimate of the gradient is not positive: the noise scale then only has a lower
        bound."""
        return self.noise_trace / self.gradient_square if self.gradient_square > 0 else None


def estimate_noise_scale(probes: Sequence[NoiseProbe], small_batch_size: int) -> NoiseEstimate:
    """The noise scale from probes whose small batches have this many samples.

    On average |g_n|^2 = |G|^2 + tr(Sigma) / n, so two batch sizes determine both. They are averaged over probes before
    their ratio is taken, because the ratio of a single probe is noisy and biased.
    """
    if not probes or small_batch_size < 1:
        raise RecordError(f"{len(probes)} probes of batches of {small_batch_size} samples: both must be at least 1")
    signals, noises = [], []
    for probe in probes:
        b, big = small_batch_size, small_batch_size * probe.num_small
        signals.append((big * probe.big_square - b * probe.mean_small_square) / (big - b))
        noises.append((probe.mean_small_square - probe.big_square) / (1 / b - 1 / big))
    signal, noise = statistics.fmean(signals), max(0.0, statistics.fmean(noises))
    return NoiseEstimate(signal, noise, _enclose_ratio(noises, signals))


def _enclose_ratio(noises: Sequence[float], signals: Sequence[float]) -> tuple[float, float] | None:
    """Fieller's 90 % interval of mean(noises) / mean(signals): all r for which mean(noises - r * signals) may be 0.

    Unlike quantiles of resampled ratios it is valid for few probes. It has no upper end if the mean of the signals may
    be 0. The true mean of the signals is a square, so a negative estimate counts as 0.
    """
    count = len(signals)
    if count < _MIN_PROBES:
        return None
    noise, signal, t = statistics.fmean(noises), max(0.0, statistics.fmean(signals)), _student_t95(count - 1)
    scale = t * t / count
    var_noise, var_signal = statistics.variance(noises), statistics.variance(signals)
    # The interval is bounded by the roots of a*r^2 - 2*h*r + c.
    a = signal**2 - scale * var_signal
    h = noise * signal - scale * statistics.covariance(noises, signals)
    c = noise**2 - scale * var_noise
    root = math.sqrt(max(0.0, h * h - a * c))
    if a > 0:
        return max(0.0, (h - root) / a), max(0.0, (h + root) / a)
    if c <= 0:
        return 0.0, math.inf
    # a <= 0 < c: one root on either side of 0. This form is also valid at a = 0.
    return (c / (h + root) if h + root > 0 else math.inf), math.inf


def _student_t95(freedom: int) -> float:
    """The 95 % quantile of Student's t, expanded about the normal quantile; within 1.3 % from 2 degrees of freedom."""
    z = statistics.NormalDist().inv_cdf(0.95)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


@dataclass(frozen=True, kw_only=True)
class NoiseRecord(Record):
    """Probes of one training job after `step` steps. The probes do not change the parameters.

    `epoch` is the number of epochs trained so far, possibly a fraction. `seed` is the job's; it determines the samples
    of the probes. `small_batch_size`, the noise scale and all batch sizes count samples (for tokens: blocks).
    """

    kind: ClassVar[str] = "noise_scale"
    model: str
    data: str
    device: str
    world_size: int
    precision: str
    step: int
    epoch: float
    seed: int
    small_batch_size: int
    probes: tuple[NoiseProbe, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.world_size, self.small_batch_size) < 1 or self.step < 0:
            raise RecordError(
                f"{self.model}: probes of batches of {self.small_batch_size} on {self.world_size} ranks after "
                f"{self.step} steps are not valid: all must be positive"
            )
        if type(self.epoch) not in (float, int) or not 0 <= self.epoch < math.inf:
            raise RecordError(f"{self.model}: the epoch is {self.epoch!r}; it must be finite and not negative")
        if len({probe.num_small for probe in self.probes}) != 1:
            raise RecordError(
                f"{self.model}: {len(self.probes)} probes of {sorted({p.num_small for p in self.probes})} small "
                "gradients: at least one probe is needed, and the same number of gradients in each"
            )

    @property
    def big_batch_size(self) -> int:
        return self.small_batch_size * self.probes[0].num_small

    @cached_property
    def estimate(self) -> NoiseEstimate:
        return estimate_noise_scale(self.probes, self.small_batch_size)

    @property
    def noise_scale(self) -> float | None:
        """tr(Sigma) / |G|^2, in samples; None if there is only a lower bound (`estimate.interval`)."""
        return self.estimate.noise_scale

    @property
    def critical_batch_size(self) -> float | None:
        """The global batch size that needs twice the fewest steps and twice the fewest samples to reach a target."""
        return self.noise_scale

    def steps_factor(self, batch_size: float) -> float | None:
        """Predicted steps to a target at this global batch size, relative to the steps of a huge batch, the fewest."""
        scale = self.noise_scale
        return None if scale is None else 1 + scale / batch_size

    def samples_factor(self, batch_size: float) -> float | None:
        """Predicted samples to a target at this global batch size, relative to those of a tiny batch, the fewest."""
        scale = self.noise_scale
        if scale is None:
            return None
        return 1 + batch_size / scale if scale > 0 else math.inf


# -- epochs of a training run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochSummary:
    """One epoch of training. Averages are over samples. None stands for what was not measured."""

    epoch: int
    num_steps: int
    num_samples: int
    loss: float
    accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    exposed_comm_s: float | None
    data_wait_s: float

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication as a share of the epoch's step time."""
        return None if self.exposed_comm_s is None or not self.seconds else self.exposed_comm_s / self.seconds

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.seconds if self.seconds else 0.0


def summarize_epochs(rows: Iterable[dict[str, Any]]) -> list[EpochSummary]:
    """One summary per epoch, in order, from one row of metrics per step."""
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row)
    return [_summarize(epoch, found) for epoch, found in sorted(by_epoch.items())]


def _summarize(epoch: int, rows: Sequence[dict[str, Any]]) -> EpochSummary:
    samples = sum(row["samples"] for row in rows)
    # A wrapper does not report it for its first step, in which it makes its plan.
    exposed = [row["exposed_comm_s"] for row in rows if row["exposed_comm_s"] is not None]
    last = rows[-1]
    return EpochSummary(
        epoch=epoch,
        num_steps=len(rows),
        num_samples=samples,
        loss=sum((float("nan") if row["loss"] is None else row["loss"]) * row["samples"] for row in rows) / samples,
        accuracy=None
        if any(row.get("accuracy") is None for row in rows)
        else sum(row["accuracy"] * row["samples"] for row in rows) / samples,
        test_loss=last.get("test_loss"),
        test_accuracy=last.get("test_accuracy"),
        seconds=sum(row["step_s"] for row in rows),
        exposed_comm_s=sum(exposed) / len(exposed) * len(rows) if exposed else None,
        data_wait_s=sum(row["data_wait_s"] for row in rows),
    )


# -- the folder of a training run: config.json and metrics.jsonl -------------------------------------------------------


def load_config(folder: str | Path) -> dict[str, Any]:
    """The document `config.json` of a training run: `settings`, `environment`, and `outcome` once it has ended."""
    file = Path(folder) / CONFIG_FILE
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{file} does not exist; give the folder of a training run", code="missing") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}", code="damaged") from None
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != CONFIG_FORMAT:
        raise RecordError(f"{file} is not the configuration of a training run of this Paceline", code="damaged")
    if not isinstance(document.get("settings"), dict):
        raise RecordError(f"{file} lacks its settings: start a new run", code="damaged")
    return document


class MetricsLog:
    """A file of rows, one JSON object per line: `step`, an integer, and anything that JSON can write.

    JSON has no nan and inf. Such a value is written as null, and its name goes into `not_finite`:
    `{"step": 7, "loss": null, "not_finite": {"loss": "nan"}}`. `load_metrics` restores it.
    """

    def __init__(self, path: str | Path) -> None:
        """Continue a file, or create one. The incomplete last line of a killed run is removed."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: the rows of one `append` reach the system in one write, and a kill loses none before it.
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(_count_whole_bytes(self.path.read_bytes()))
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def resume(cls, path: str | Path, step: int) -> MetricsLog:
        """Continue after this step: rows of later steps, which the run will repeat, are dropped."""
        path = Path(path)
        if path.exists():
            rows = load_metrics(path)
            kept = [row for row in rows if row["step"] <= step]
            if len(kept) < len(rows):
                replace_file(path, _render(kept))
        return cls(path)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows; they are in the file when this returns, even if the process is killed right after."""
        data = memoryview(_render(rows))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file in order. An incomplete last line, which a killed run leaves, is ignored."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(content[: _count_whole_bytes(content)].splitlines(), 1):
        try:
            row = json.loads(line)
            row |= {name: float(value) for name, value in row.pop(_NOT_FINITE, {}).items()}
            if type(row["step"]) is not int:
                raise TypeError(f"step {row['step']!r}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecordError(f"{path}, line {number} is no row with a step: {type(error).__name__} {error}") from None
        rows.append(row)
    return rows


def _count_whole_bytes(content: bytes) -> int:
    """The bytes of all complete lines."""
    return content.rfind(b"\n") + 1


def _render(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(_render_row(row) for row in rows)


def _render_row(row: Mapping[str, Any]) -> bytes:
    if type(row.get("step")) is not int or _NOT_FINITE in row:
        raise ConfigError(f"a row of metrics has the keys {list(row)}: it needs an integer `step`, and no `not_finite`")
    lost = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {**row, **dict.fromkeys(lost), **({_NOT_FINITE: lost} if lost else {})}
    try:
        return json.dumps(plain, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the row of metrics of step {row['step']} cannot be written as JSON: {error}") from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is the old one or the new one, whole, at any time."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
