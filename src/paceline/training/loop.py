"""The training loop, top to bottom: `run_steps` is the bare loop, `train` adds metrics, evaluation and checkpoints.

`step` takes a single step, `journal` exchanges metrics between ranks, and `checkpoints` writes files.
"""

import contextlib
import functools
import gc
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, TrainingError
from paceline.parallel import DataParallel, is_torchs
from paceline.parallel.replicas import read_replica
from paceline.parallel.zero import ShardedOptimizer
from paceline.plan import Plan
from paceline.runtime.faults import pulse
from paceline.runtime.ranks.session import Progress
from paceline.runtime.ranks.worker import SPARE, is_wanted, post, report_step, stand_by
from paceline.runtime.ranks.world import World
from paceline.torch_internals import import_compiler
from paceline.training.build import Job, build_job, open_world
from paceline.training.checkpoints import RunFiles
from paceline.training.journal import Journal, Position, StopRequest, TakenStep, catch_stop
from paceline.training.loader import load_windows
from paceline.training.regroup import BufferGuard, Carried, MoreRanksError, check_policy, may_stay, warm_up
from paceline.training.step import Learner, NoPhases, PhaseClock, Phases, find_bad_parameter, list_models, take_step
from paceline.training.train_settings import TrainSettings
from paceline.units import format_bytes, format_number_of, format_speed
from paceline.workloads.data.own import OwnData
from paceline.workloads.data.sets import DataSet
from paceline.workloads.external import own_errors
from paceline.workloads.models import compute_outcome
from paceline.workloads.registry import describe_model

START = Position(0, 0, 0)
_NO_PHASES = NoPhases()
# Upper limits for an evaluation batch. Without gradients, most memory is logits: one per token and vocabulary entry.
_MAX_SAMPLES = 64
_MAX_TARGETS = 4096
_PAUSE_S = 1800.0  # hang timeout for a save or one evaluation batch


def run_steps(job: Job, start: Position = START, phases: Phases = _NO_PHASES) -> Iterator[TakenStep]:
    """Train from `start` to the end of the job, yielding after each step.

    Between steps the caller may evaluate, probe, save or report progress, and may stop early. The loop itself never
    waits for a GPU or another rank. Collective: iterate on every rank.
    """
    job.check_length()
    world, learner, position, num_steps = job.world, job.learner, start, job.schedule.num_steps
    restoring_buffers = BufferGuard(learner.module) if job.settings.stays_in_memory else contextlib.nullcontext
    learner.model.train()
    while position.step < num_steps:
        epoch = position.epoch
        order, sizes = job.order(epoch), job.micro_batch_sizes(epoch)
        where = (world.rank, world.world_size, sizes, world.device, functools.partial(_agree, world))
        begin, windows = position, load_windows(job.train, order, position.window, *where)
        with contextlib.closing(windows):
            begin_s = time.perf_counter()
            for window in windows:
                waited_s = time.perf_counter() - begin_s
                pulse.begin_step(position.step + 1)
                rate = job.schedule.rate(position.step)
                num_targets = window.num_samples * learner.form.targets_per_sample
                job.seed_step(position.step)
                with restoring_buffers():
                    outcome = take_step(learner, window.batches, num_targets, rate, phases)
                pulse.complete_step()
                ends = window.is_last
                place = (epoch + 1, 0) if ends else (epoch, window.number + 1)
                position = Position(*place, position.step + 1)
                is_last = position.step == num_steps
                about = window.num_samples, num_targets, waited_s
                yield TakenStep(position, epoch, rate, *about, outcome, ends, is_last)
                if is_last:
                    return
                begin_s = time.perf_counter()
        if position == begin:
            found = f"epoch {epoch + 1} of {job.train.describe()} has no batch {begin.window} or later"
            remain = f"{num_steps - position.step} steps remain"
            raise TrainingError(f"{found}, but {remain}: is the data shorter than before?")


def _agree(world: World, num_samples: int) -> int:
    """Total samples over all ranks in the next window, or 0 if any rank has none. Collective: call on every rank."""
    counts = torch.tensor([num_samples > 0, num_samples])
    dist.all_reduce(counts, group=world.control)
    return int(counts[1]) if counts[0] == world.world_size else 0


@dataclass(frozen=True)
class Evaluation:
    """Averages over all targets of all samples. `accuracy` is None for regression.

    `f1` is the F1 score of class 1 in binary classification, or 0 if the class neither occurs nor is predicted.
    """

    loss: float
    accuracy: float | None
    f1: float | None
    num_samples: int


@torch.no_grad()
def evaluate(learner: Learner, data: DataSet | OwnData, world: World) -> Evaluation:
    """Compute loss and accuracy on a whole data set, counting each sample once. Collective: call on every rank.

    Each rank takes whole batches, so batches, rounding and padding do not depend on the number of ranks. Synchronizes
    replicas that have diverged since the last sync.
    """
    learner.sync_parameters()
    if any(is_torchs(model) for model in list_models(learner.model)):
        # torch's DDP broadcasts buffers only in the next training forward.
        for buffer in learner.module.buffers():
            dist.broadcast(buffer, src=0)
    was_training = learner.module.training
    learner.module.eval()
    # Sums: loss; correct predictions; true positives of class 1; its predictions plus its occurrences; samples.
    sums = torch.zeros((5,), dtype=torch.float64, device=learner.device)
    size = max(1, min(_MAX_SAMPLES, _MAX_TARGETS // learner.form.targets_per_sample))
    try:
        for batch in data.cut(size, world.rank, world.world_size, learner.device):
            pulse.progress()
            sums[4] += len(batch)
            if learner.own_evaluate is not None:
                sums[0] += learner.call_own("evaluate", learner.module, batch).double() * len(batch)
                continue
            with learner.autocast(), own_errors(learner.name):
                outcome = compute_outcome(learner.module, batch, learner.form)
            sums[0] += outcome.loss_sum.double()
            if outcome.predicted is not None and outcome.num_correct is not None:
                predicted = outcome.predicted == 1
                actual = batch.split()[1].reshape(-1) == 1
                sums[1] += outcome.num_correct
                sums[2] += (predicted & actual).sum()
                sums[3] += predicted.sum() + actual.sum()
    finally:
        learner.module.train(was_training)
    sums = sums.cpu()
    if world.world_size > 1:
        dist.all_reduce(sums, group=world.control)
    loss_sum, num_correct, num_right, num_ones, num_samples = sums.tolist()
    classes = learner.form.num_classes
    count = max(1.0, num_samples * learner.form.targets_per_sample)
    f1 = 2 * num_right / max(1.0, num_ones) if classes == 2 else None
    return Evaluation(loss_sum / count, num_correct / count if classes else None, f1, int(num_samples))


@dataclass(frozen=True)
class TrainOutcome:
    """The outcome of a run. `signal` is the signal that stopped it, or 0, and `asked` lists the ranks that received it;
    `facts` describe the environment; `notes` are messages for the user."""

    step: int
    signal: int
    facts: dict[str, Any]
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    asked: tuple[int, ...] = ()


def train(settings: TrainSettings, folder: Path | None, resume: bool = False, rows: bool = False) -> TrainOutcome:
    """Train the job. Rank 0 writes into the run's folder, if there is one. Collective: call on every rank.

    With `rows`, every rank gets the rows of metrics; otherwise they are only in the folder.
    """
    carried = Carried()
    if settings.stays_in_memory:
        import_compiler()  # the first optimizer would import it in the middle of the run
        gc.collect()
        gc.freeze()  # exempts older objects from the garbage collection that leaving a world triggers
    is_lost = False
    with catch_stop() as request:
        if os.environ.pop(SPARE, ""):
            carried = warm_up(settings)
            stand_by(carried.step)
        while True:
            try:
                return _train(settings, folder, resume, rows, request, carried)
            except Exception as error:
                if not settings.stays_in_memory or not may_stay(error):
                    raise
                is_lost = not isinstance(error, MoreRanksError)
            gc.collect()  # freeing unused process groups tells the other ranks that this one has left
            stand_by(carried.step, is_lost)


def _train(
    settings: TrainSettings, folder: Path | None, resume: bool, rows: bool, request: StopRequest, carried: Carried
) -> TrainOutcome:
    """Train in one world: from scratch, from the last checkpoint, or from the state in the ranks' memory."""
    with open_world(settings) as world, contextlib.ExitStack() as stack:
        settings, source = carried.agree_on_source(settings, world)
        settings.check()
        files = RunFiles(folder, settings, world)
        stack.push(lambda kind, error, _: _close(files, world, error, carried if settings.stays_in_memory else None))
        found = files.lock(resume and source is None)
        if source is not None:
            found = carried.broadcast_state(world, source)
        plan = found.meta.get("plan") if found is not None else None  # the bucket plan in use at the time
        sets = carried.sets if carried.device == world.device else None  # with a new rank number, the GPU may differ
        job = build_job(settings, world, None if plan is None else Plan.from_json(plan), sets, carried.module)
        start = files.restore(job, found) if found is not None else START
        total = job.schedule.num_steps
        if settings.stays_in_memory:
            check_policy(job)
            carried.position = start
            carried.module = None
            carried.snapshot = None
            stack.callback(carried.keep, job)
        if start.step > total:
            ends = "epochs" if settings.steps is None else "steps"
            text = f"--{ends} {getattr(settings, ends)} ends after step {total}, but the run is already at step"
            raise ConfigError(f"{text} {start.step}: increase --{ends}", code="mismatch")
        files.open(start.step)
        notes = tuple(found.refused) if found is not None else ()
        if resume and found is None:
            notes = ("there is no checkpoint yet: starting from the first step",)
        if world.rank == 0 and source is None:
            for note in filter(None, (*notes, describe_model(settings.model), _describe(job, start), _warn(job))):
                post(Progress(start.step, total, f"epoch {start.epoch + 1}", line=note))
        step, number, asked = _run(job, files, request, start, carried)
        facts = {"world_size": world.world_size, "backend": world.backend, "device": world.device.type}
        facts["num_parameters"] = _count_elements(job.learner.module)
        return TrainOutcome(step, number, facts, notes, tuple(files.read_rows()) if rows else (), asked)


def _close(files: RunFiles, world: World, error: BaseException | None, carried: Carried | None) -> None:
    """Make all ranks wait for pending writes: a launcher may kill the other ranks as soon as one exits."""
    if carried is not None and error is not None and may_stay(error):
        # Close the files later: the other ranks wait for this one, and a checkpoint may still be in progress.
        carried.files = files.leave_world()
        return
    with pulse.slow("save", _PAUSE_S):
        files.close(has_failed=error is not None)
    if error is None:
        world.barrier()


def _describe(job: Job, start: Position) -> str:
    batches = job.batches
    world = job.world
    growth = job.batch_schedule
    made_of = f"{batches.world_size} x {batches.batch_size}"
    if batches.accumulate > 1:
        made_of += f" x {batches.accumulate} micro-batches"
    grown = zip(growth.marks, growth.growth_steps, strict=True)
    sizes = "".join(f"{size} from step {step + 1} on, " for (_, size), step in grown if step is not None)
    length = f"{format_number_of(job.schedule.num_steps, 'step')} in {format_number_of(growth.epochs, 'epoch')}"
    return (
        f"{job.settings.model} with {_count_elements(job.learner.module):,} parameters on {job.train.describe()}; "
        f"{format_number_of(world.world_size, 'rank')} on {world.backend} ({world.device.type}), "
        f"global batch {batches.global_batch_size} = {made_of}, {sizes}{length}{_describe_strategy(job)}"
        + (f"; resumes at step {start.step}" if start.step else "")
    )


def _describe_strategy(job: Job) -> str:
    strategy = job.settings.parsed_strategy
    num = job.world.world_size * job.settings.workers
    if strategy.is_dense or num == 1:
        return ""
    gradients = read_replica(job.learner.module).gradients
    sent = strategy.count_sent_bytes(gradients, num, job.world.local_world_size)
    return f"; strategy {strategy.text} (each rank sends {format_bytes(round(sent))} per step)"


def _warn(job: Job) -> str:
    """A warning about optional parts missing from a user's step, or an empty string."""
    learner = job.learner
    missing = [] if learner.can_resume else ["state, so the run cannot be resumed"]
    missing += ["evaluate, so it is not tested"] if job.test is not None and not learner.can_evaluate else []
    return f"{learner.name} returned no {', and no '.join(missing)}" if missing else ""


def _count_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _run(
    job: Job, files: RunFiles, request: StopRequest, start: Position, carried: Carried
) -> tuple[int, int, tuple[int, ...]]:
    """Train to the end. Returns the last step, the signal that stopped the run or 0, and the ranks that received it."""
    read = functools.partial(read_messages, job.learner.model, job.world)
    journal = Journal(job.world, request, read_messages=read)
    clock = PhaseClock(job.world.device)
    phases: Phases = PhaseClock(job.world.device) if job.settings.profile else _NO_PHASES
    step = start.step
    number = 0
    if job.settings.stays_in_memory:
        number = _finish_previous_world(job, files, journal, start, carried)
    clock.enter("step")
    for taken in run_steps(job, start, phases) if not number else ():
        carried.position = taken.position
        carried.taken = None
        step = taken.position.step
        times = phases.end()
        lap = clock.end()
        clock.enter("step")
        journal.add(taken, lap, times, read_exposed(job.learner.model, job.world.world_size))
        if step == start.step + 1 and job.world.rank == 0:
            report_step(start.step)
        is_due = journal.is_due or files.is_due(step, taken.is_epoch_end)
        if taken.is_epoch_end or taken.is_last or is_due:
            carried.taken = taken
            number = _synchronize(job, files, journal, taken)
            carried.taken = None
            if number:
                break
            clock.end()  # the time between two steps belongs to neither
            clock.enter("step")
    if not number:
        with pulse.slow("save", _PAUSE_S):
            files.export(job)
    return step, number, journal.asked


def _finish_previous_world(job: Job, files: RunFiles, journal: Journal, start: Position, carried: Carried) -> int:
    """Write the previous world's unwritten rows and finish its last step. Returns a signal, or 0."""
    written = job.world.share(files.written)[0]
    journal.carry(carried.unwritten, start.step)
    carried.journal, carried.unwritten = journal, None
    journal.carried = [row for row in journal.carried if row["step"] > written]
    carried.taken = carried.agree_on_taken(job.world, start.step)
    number = 0 if carried.taken is None else _synchronize(job, files, journal, carried.taken)
    carried.taken = None
    return number


def _synchronize(job: Job, files: RunFiles, journal: Journal, taken: TakenStep) -> int:
    """Exchange the ranks' records of their steps, then evaluate, write rows and save if due. Returns a signal, or 0.
    Collective: call on every rank."""
    step = taken.position.step
    job.learner.check_last_step()  # a failed rank would not join the exchange
    exchange = journal.exchange(files.is_due_by_time, job.settings.stays_in_memory and is_wanted())
    rows, is_due = list(exchange.rows), exchange.is_save_due or files.is_due(step, taken.is_epoch_end)
    is_due = is_due or bool(exchange.signal) or taken.is_last
    if isinstance(job.learner.optimizer, ShardedOptimizer) and (is_due or taken.is_epoch_end or exchange.bad):
        job.learner.optimizer.wait()  # evaluating or saving needs parameters that would arrive during the next step
    if exchange.bad is not None:
        files.write_rows(rows)
        bad_step, rank, name = exchange.bad
        name = name or next(filter(None, job.world.share(find_bad_parameter(job.learner.module))), "")
        name = f"the first non-finite value in the model is {name}" if name else "all values in the model are finite"
        found = f"the loss of rank {rank} is not finite; {name}"
        raise _not_finite(files, bad_step, found)
    if taken.is_last:
        job.learner.sync_parameters()
    ends = (taken.is_epoch_end or taken.is_last) and rows  # without rows: the previous world wrote them
    if ends and job.test is not None and job.learner.can_evaluate:
        with pulse.slow("evaluate", _PAUSE_S):
            test = evaluate(job.learner, job.test, job.world)
        rows[-1] |= {"test_loss": test.loss, "test_accuracy": test.accuracy, "test_samples": test.num_samples}
        rows[-1] |= {} if test.f1 is None else {"test_f1": test.f1}
    files.write_rows(rows)
    if job.world.rank == 0 and rows:
        total, label = job.schedule.num_steps, _describe_rows(rows)
        line = f"step {step} of {total}, {label}" if "test_loss" in rows[-1] else ""
        post(Progress(step, total, label, line=line))
    if is_due:
        # A finite loss may still produce non-finite gradients: never save a model corrupted by them. Replicas may
        # differ between syncs, so share the names: if only the affected rank raised, the others would wait for it.
        names = job.world.share(find_bad_parameter(job.learner.module))
        if name := next(filter(None, names), ""):
            where = "" if all(names) else f" on rank {names.index(name)}"
            raise _not_finite(files, step, f"{name} is not finite{where} after the update, although the loss was")
        with pulse.slow("save", _PAUSE_S):
            files.save(job, taken.position)
    if exchange.is_left and not exchange.signal and not taken.is_last:
        job.world.barrier()
        raise MoreRanksError(f"step {step}: more ranks are available")
    return exchange.signal


def _not_finite(files: RunFiles, step: int, found: str) -> TrainingError:
    files.close()  # the error mentions a checkpoint, so make sure that it is on disk
    kept = "there is no checkpoint yet" if files.last is None else f"the checkpoint of step {files.last} is kept"
    hint = f"{kept}; try a lower --lr or --clip, or check the data and the model"
    return TrainingError(f"step {step}: {found}; {hint}", code="not-finite")


def _describe_rows(rows: list[dict[str, Any]]) -> str:
    row, seconds = rows[-1], sum(row["step_s"] for row in rows) or math.inf
    exposed = None if row.get("exposed_comm_s") is None or not row["step_s"] else row["exposed_comm_s"] / row["step_s"]
    shares = {"accuracy": row.get("accuracy"), "exposed": exposed, "test accuracy": row.get("test_accuracy")}
    text = f"epoch {row['epoch'] + 1}: loss {row['loss']:.4f}, "
    text += f"{format_speed(sum(row['samples'] for row in rows) / seconds)} samples/s"
    text = ", ".join((text, *(f"{name} {share:.1%}" for name, share in shares.items() if share is not None)))
    return text + (f", test F1 {row['test_f1']:.3f}" if "test_f1" in row else "")


def read_exposed(model: nn.Module, world_size: int) -> float | None:
    """Seconds that this rank waited for communication in the last step; None if its wrapper does not report them."""
    if (models := list_models(model)) != [model]:
        parts = [read_exposed(part, world_size) for part in models]
        return None if None in parts else sum(filter(None, parts))
    if not isinstance(model, DataParallel):
        return None if hasattr(model, "no_sync") else 0.0
    return model.exposed_s if world_size > 1 else 0.0


def read_messages(model: nn.Module, world: World) -> tuple[int, dict[str, Any]] | None:
    """The age in steps of a recent step, and when each of its buckets was ready, sent and done on this rank.

    None on a single rank, with another wrapper, or if our wrapper did not record a recent step.
    """
    if not isinstance(model, DataParallel) or world.world_size == 1:
        return None
    found = model.read_recorded()
    plan = model.plan
    if found is None or plan is None:
        return None
    age, times = found
    about: dict[str, Any] = {name: getattr(times, name) for name in ("begin_s", "backward_s", "over_s")}
    about |= {
        "backend": world.backend,
        "device": world.device.type,
        "host": str(world.hosts.index(world.hosts[world.rank])),
    }
    about["gradient_bytes"] = [[piece.num_bytes for piece in bucket.pieces] for bucket in plan.buckets]
    moments = {name: [getattr(one, name) for one in times.buckets] for name in ("ready_s", "launch_s", "done_s")}
    return age, about | moments
