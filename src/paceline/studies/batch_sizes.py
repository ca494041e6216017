"""`paceline scale batch`: which batch size keeps one rank busy?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from paceline.errors import ConfigError, LaunchError, refuse
from paceline.options import option
from paceline.records import BatchRecord, Record
from paceline.report.plots import COLORS, Drawings, Figure, draw_line, label_values, new_figure, place_legend
from paceline.report.result import describe_job
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.runtime.ranks.session import Session, Task
from paceline.studies.study import StudyResult, StudySettings, choose_device, refuse_launched, refuse_unused, run_study
from paceline.training.train_settings import TrainSettings
from paceline.units import MIB, format_bytes, format_ms, format_speed
from paceline.verbs.jobs import Counts, Place, list_counts
from paceline.workloads.data import parse_data

if TYPE_CHECKING:
    import torch

    from paceline.training.build import Job

KNEE = 0.9  # the knee is the smallest batch size with this fraction of the best throughput
# torch's out-of-memory messages: on a CPU the error has no class of its own.
_FULL = re.compile(r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


def batch(
    model: str = "cnn", batch_size: Counts = (32, 128, 512, 2048), *, epochs: int = 3, device: str = "auto",
    out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> BatchResult:  # fmt: skip
    """Which batch size keeps one rank busy? Times whole epochs at each size, after a warm-up epoch.

    Args:
        model: A name, or "FILE.py:FUNCTION", as in `paceline.train`.
        batch_size: The sizes to compare.
        epochs: Number of epochs at each size.
        device: cpu or cuda. `auto` uses GPUs if there is one for each rank.
        out: Save the study in a new subfolder of this folder, cell by cell.
        resume: The folder of an interrupted study, which keeps its own settings: omit all other arguments.
        job: Further settings of the job, named like the options of `paceline train` (data, precision, channels, ...).
    """
    refuse_launched("this study compares batch sizes on one rank")
    return cast("BatchResult", run_study(BatchSettings, locals()))


@dataclass(frozen=True, kw_only=True)
class BatchSettings(StudySettings):
    """Whole epochs of the job on one rank at each batch size, the first as a warm-up."""

    verb = staticmethod(batch)

    batch_sizes: tuple[int, ...]
    epochs: int = option(2, least=2, each_s=1e-6, advice=", because the first is a warm-up")

    @classmethod
    def build(cls, *, batch_size: Counts, epochs: int, device: str, **job: Any) -> Self:
        alone = ("ranks", "wrapper", "backend", "plan", "sync_batchnorm", "accumulate")
        refuse_unused(job, alone, "this study uses a single rank")
        refuse_unused(job, ("steps",), "this study times whole epochs; use --epochs")
        sizes = list_counts(batch_size, "batch_size")
        train = TrainSettings(batch_size=sizes[0], wrapper="none", device=choose_device(device), **job)
        return cls(job=train, batch_sizes=sizes, epochs=epochs)

    def check(self) -> None:
        super().check()
        most, samples = max(self.batch_sizes), self.job.samples
        few = f"--batch-size {most} is more than --samples {samples}: leave it out, or pass more samples"
        refuse((samples is not None and samples < most, few))

    def measure(self, session: Session, at_once: int) -> list[Record]:
        def describe(records: Sequence[Record]) -> str:
            record = next(record for record in records if isinstance(record, BatchRecord))
            return record.failure or f"{record.samples_per_s:.0f} samples/s"

        tasks = []
        for size in self.batch_sizes:
            job = dataclasses.replace(self.job, batch_size=size)
            on_death = functools.partial(build_killed, job, size)
            tasks.append(Task(f"batch size {size}", f"{__name__}:measure_batch", (job, self.epochs), on_death=on_death))
        return session.run(tasks, describe)


def build_killed(job: TrainSettings, size: int, error: LaunchError) -> list[Record] | None:
    """Build the record of a batch size at which the kernel killed the process."""
    record = BatchRecord(
        model=job.model, data=parse_data(job.data)[0], device=job.device, precision=job.precision,
        threads=job.threads or 1, batch_size=size, num_samples=size, num_steps=1,
        failure="killed, probably by the kernel's out-of-memory killer",
    )  # fmt: skip
    return [record] if error.code == "killed" else None


def measure_batch(settings: TrainSettings, epochs: int) -> list[Record]:
    """Time epochs of the job, the first as a warm-up. Also records batches that do not fit in memory."""
    import torch

    from paceline.measure.engine import build_samples
    from paceline.training.build import build_job, open_world

    with open_world(settings) as world:
        with contextlib.suppress(OSError):
            # If memory runs out, the kernel should kill this process rather than the user's desktop.
            Path("/proc/self/oom_score_adj").write_text("1000")
        job = build_job(dataclasses.replace(settings, ranks=world.world_size, epochs=epochs, steps=None), world)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # reset this process's peak
        times: list[tuple[float, float]] = []
        # A smaller batch must not be recorded under this batch size.
        num_samples = job.batch_schedule.num_samples
        is_large = job.batches.global_batch_size > num_samples
        failure = f"more than the {num_samples} samples of an epoch" if is_large else ""
        try:
            times.extend(() if failure else _time_epochs(job))
        except (RuntimeError, MemoryError, ConfigError) as error:
            cause = error.__cause__ or error  # errors of a user's step are wrapped
            if not (isinstance(cause, MemoryError | torch.OutOfMemoryError) or _FULL.search(str(cause))):
                raise
            failure = f"out of memory in epoch {len(times) + 1}"
        timing, data_wait = (None if failure else build_samples([[row[i] for row in times]], 1) for i in (0, 1))
        record = BatchRecord(
            model=settings.model, data=job.train.name, device=world.device.type, precision=settings.precision,
            threads=torch.get_num_threads(), batch_size=job.batches.batch_size, num_samples=num_samples,
            num_steps=job.batch_schedule.count_steps(0), timing=timing, data_wait=data_wait,
            peak_bytes=_read_peak(world.device), failure=failure,
        )  # fmt: skip
        del job
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        return [record]


def _time_epochs(job: Job) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each epoch's steps, and of its data waits.

    GPU steps are timed by the GPU's clock: the host runs ahead, and the GPU computes while the host waits for data or a
    full queue, so subtracting the host's waits would underestimate steps.
    """
    from paceline.measure.engine import follow, synchronize
    from paceline.training.loop import run_steps
    from paceline.training.step import PhaseClock

    device, laps, report = job.world.device, [], follow(job.world, f"batch size {job.batches.batch_size}")
    clock = PhaseClock(device)
    synchronize(device)
    begin_s = time.perf_counter()
    for taken in run_steps(job, phases=clock):
        laps.append(clock.end())
        report(taken.position.step / job.schedule.num_steps)
        if taken.is_epoch_end:
            synchronize(device)
            epoch_s = time.perf_counter() - begin_s
            steps_s = min(epoch_s, sum(sum(lap.read().values()) for lap in laps))
            yield steps_s, epoch_s - steps_s
            laps, begin_s = [], time.perf_counter()


def _read_peak(device: torch.device) -> int:
    """Peak bytes since the last reset: of tensors on CUDA, of the whole process on a CPU; 0 if unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def find_knee(records: Sequence[BatchRecord]) -> BatchRecord | None:
    """The smallest batch size that reaches `KNEE` of the best throughput. None if only the largest does: throughput may
    keep growing."""
    found = sorted(((rate, r) for r in records if (rate := r.samples_per_s)), key=lambda pair: pair[1].batch_size)
    best = max((rate for rate, _ in found), default=0.0)
    return next((record for rate, record in found[:-1] if rate >= KNEE * best), None)


def build_batch_table(records: Sequence[BatchRecord]) -> Table:
    """Build the table of all batch sizes. Times are per epoch and exclude warm-ups and data waits."""
    knee, repeated = find_knee(records), [r for r in records if r.timing and r.timing.count > 1]
    columns = [
        *text_columns("model", "data", "device", "precision"),
        Column("batch size", "batch_size", "number", "batch_size", is_key=True),
        Column("steps per epoch", "num_steps", "number", "num_steps", priority=-1),
        Column("epoch (s)", "epoch_s", "{:.3f}".format, "epoch_s", priority=1),
        Column("step", "step_s", "ms", "step_s", priority=2),
        Column("samples/s", "samples_per_s", format_speed, "samples_per_s", priority=3),
        Column("data wait (s)", "data_wait.median_s", "{:.3f}".format, "data_wait_s", priority=-1),
        Column("peak memory", lambda r: r.peak_bytes or None, "bytes", "peak_bytes", priority=2),
        # A single epoch has no noise estimate.
        Column("noise", lambda r: r.timing.noise if r in repeated else None, "percent.1", "noise", priority=-1),
        Column("mark", lambda r: r.failure or ("knee" if r is knee else ""), "words", is_key=True),
        *raw_columns("threads", "num_samples", "failure", epoch_p10_s="timing.p10_s", epoch_p90_s="timing.p90_s"),
        Column(None, lambda r: r is knee, key="is_knee"),
        Column(None, lambda r: r.timing.count if r.timing else 0, key="num_epochs"),
        *text_columns("source"),
    ]
    return Table("batch", "batch sizes on one rank", columns, records)


def describe_batches(records: Sequence[BatchRecord]) -> list[str]:
    """Report the knee of the throughput, the step time there, and the batch sizes that do not fit."""
    timed = {r.batch_size: r for r in records if r.timing}
    failed = [f"Batch size {r.batch_size} does not fit: {r.failure}." for r in records if r.failure]
    if not timed:
        return failed
    rates = {size: r.samples_per_s or 0.0 for size, r in timed.items()}
    best, knee = max(rates, key=lambda size: rates[size]), find_knee(records)
    here = best if knee is None else knee.batch_size
    reached = f"{rates[here] / rates[best]:.0%} of the best {format_speed(rates[best])} samples/s (at {best})"
    text = f"Batch size {here} (the knee) reaches {reached}."
    if len(rates) == 1:
        text = f"Batch size {here}, the only one measured, reaches {format_speed(rates[here])} samples/s."
    elif knee is None:
        is_full = any(r.failure and r.batch_size > here for r in records)
        more = "larger batches do not fit" if is_full else "try larger batches"
        text = f"Throughput still grows at batch size {here}: {more}."
    elif here == min(rates):
        text = f"The batch size hardly matters: {here}, the smallest, reaches {reached}."
    memory = f" and the process peaks at {format_bytes(timed[here].peak_bytes)}" if timed[here].peak_bytes else ""
    return [text, f"At batch size {here} a step takes {format_ms(timed[here].step_s or 0.0)} ms{memory}.", *failed]


def plot_batches(records: Sequence[BatchRecord], subtitle: str) -> Figure:
    """Plot samples/s and peak memory against batch size, with the knee, and a cross where a batch did not fit."""
    source = ", ".join(dict.fromkeys(record.source for record in records))
    figure, axes = new_figure(f"{records[0].model} on one rank: batch size", subtitle)
    timed = sorted((r for r in records if r.timing), key=lambda r: r.batch_size)
    times = [(r, (r.timing.median_s, r.timing.p90_s, r.timing.p10_s)) for r in timed if r.timing]
    rates = [(r.batch_size, *(r.num_samples / seconds for seconds in found)) for r, found in times]
    draw_line(axes, 0, rates, f"samples/s ({source})")
    axes.set(ylim=(0, 1.1 * max(high for *_, high in rates)), xlabel="batch size", ylabel="samples/s, band p10 to p90")
    knee = find_knee(records)
    if knee is not None:
        axes.axvline(knee.batch_size, color="#555555", ls=":", lw=1.2, label=f"knee: {knee.batch_size}")
    failed = [r.batch_size for r in records if r.failure]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=COLORS[1], ms=9, mew=2, clip_on=False, label="does not fit")
    if any(r.peak_bytes for r in timed):
        memory = axes.twinx()
        peaks = [(r.batch_size, r.peak_bytes / MIB, None, None) for r in timed]
        draw_line(memory, 2, peaks, f"peak memory ({source})", "--", ms=4)
        memory.set(ylim=(0, 1.3 * max(peak for _, peak, *_ in peaks)), ylabel="peak memory (MiB)")
        memory.spines[["top"]].set_visible(False)
    place_legend(figure, *figure.axes)
    label_values(axes, [r.batch_size for r in records])
    return figure


class BatchResult(StudyResult):
    """`scale batch`: epochs on one rank at several batch sizes."""

    topic = "Batch size on one rank"

    def _derive(self) -> None:
        self.rows = self.only(BatchRecord)
        self.sentences = describe_batches(self.rows)

    def tables(self) -> list[Table]:
        return [build_batch_table(self.rows)]

    def figures(self) -> Drawings:
        is_timed = any(record.timing is not None for record in self.rows)
        return {"batch": lambda: plot_batches(self.rows, self.machine)} if is_timed else {}

    @property
    def next_steps(self) -> list[str]:
        largest = max((r for r in self.rows if r.timing), key=lambda r: r.batch_size, default=None)
        best = find_knee(self.rows) or largest
        data = self.config.get("job", {}).get("data")
        named = {} if best is None else {"model": best.model, "data": data, "batch_size": best.batch_size}
        return [f"paceline scale ranks {describe_job(named)}"] if named else []
