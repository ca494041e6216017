"""Profiles a job: ready times of the bare model's gradients, times of its blocks, and step phases.

No hook waits for the device: on CUDA a timestamp is an event on the stream, which is read after the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline import machine
from paceline.errors import ConfigError, MeasurementError
from paceline.measure import step_bench
from paceline.measure.codec_bench import measure_codecs, take_gradients
from paceline.measure.disturbance import Disturbance, Traffic, build_traffic
from paceline.measure.engine import Pace, Report, build_samples, follow
from paceline.measure.step_bench import MeasuredJob, OwnJob, OwnModel, OwnStep, Replica, StepBench, TrainingJob, Variant
from paceline.parallel.channel import Channel
from paceline.parallel.graph import find_tensors
from paceline.parallel.rows import Lookups
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes, Record, StepRecord
from paceline.runtime.ranks.moments import between_s, mark
from paceline.runtime.ranks.session import Progress
from paceline.runtime.ranks.worker import post
from paceline.runtime.ranks.world import World, join_world
from paceline.training.build import build_job, open_world
from paceline.training.step import Phases, PhaseTimes
from paceline.training.train_settings import TrainSettings
from paceline.units import MIB, format_bytes, format_number_of
from paceline.workloads.models import find_blocks

_PACE = Pace(budget_s=15.0, min_iters=12, max_iters=100, warmup=4)
_OUTSIDE = -1
# Sizes of the messages that disturb steps, and their memory limit. Smaller messages have no visible effect on a GPU.
_MESSAGE_BYTES = {"cpu": (MIB // 4, 4 * MIB), "cuda": (4 * MIB, 25 * MIB)}
_TRAFFIC_BYTES = {"cpu": 256 * MIB, "cuda": 512 * MIB}

Block = tuple[str, nn.Module]
# A built-in job; or a user's module and step (or a factory for both), a wrapper and the options of `join_world`.
Given = TrainSettings | tuple[OwnModel, OwnStep | None, str, dict[str, Any]]


class LayerTimes(NamedTuple):
    """Times of one step: `took_s` of each phase and each block, and `ready_s` of each gradient since backward began.

    If lookups contribute rows to an embedding's gradient, `num_rows` counts these rows, and `rest_s` is the ready time
    of the rest of the gradient.
    """

    took_s: dict[str, float]
    ready_s: dict[int, float]
    rest_s: dict[int, float]
    num_rows: dict[int, int]
    forward_s: list[float]
    backward_s: list[float]


class LayerClock:
    """Timestamps of a step: its phases, its gradients as they become ready, and the start and end of each block.

    Hooks are on autograd nodes. A parameter hook would slow every later step even after its removal, because torch
    still looks for it; a hook on the gradient accumulation node disappears with the graph. A module's full backward
    hooks wrap every output in a view, which breaks in-place operations; hooks on the nodes of a block's inputs and
    outputs do not.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], blocks: Sequence[nn.Module], device: torch.device,
        lookups: Lookups | None = None,
    ) -> None:  # fmt: skip
        self._params = params
        self._blocks = blocks
        self.device = device
        self._lookups = lookups

    def attach(self, hooks: contextlib.ExitStack) -> None:
        """Start a step. The caller closes `hooks` at its end."""
        self.marks: list[tuple[str, Any]] = []  # phases and their start times
        self._ready: dict[int, Any] = {}
        self._rows: dict[int, tuple[Any, list[torch.Tensor]]] = {}  # arrival times and rows of lookup gradients
        if self._lookups is not None:
            self._lookups.attach(self._note_rows)
            hooks.callback(self._lookups.stop)
        self._calls: list[tuple[int, Any, Any]] = []  # block, start and end of one forward
        self._owners: list[tuple[Any, int]] = []  # time in backward, and the block (or none) that starts there
        self._open: dict[int, tuple[Any, list[Any]]] = {}  # forwards in progress; recomputation may stop halfway
        step_bench.hook_gradients(self._params, hooks, self._note_ready)
        for index, block in enumerate(self._blocks):
            before = functools.partial(self._begin_forward, index)
            after = functools.partial(self._end_forward, index)
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)

    def enter(self, phase: str) -> None:
        moment = mark(self.device)
        if self._is_backward or phase == "backward":
            self._owners.append((moment, _OUTSIDE))
        self.marks.append((phase, moment))

    def end(self) -> PhaseTimes:
        self.enter("end")
        return PhaseTimes(self.marks)

    def read(self) -> LayerTimes:
        """Read the step's times once the GPU has finished the step."""
        # Measure from the first timestamp: event times are rounded, and a part must not exceed the whole.
        at_s = functools.partial(between_s, self.marks[0][1])
        spans = [(phase, at_s(begin), at_s(end)) for (phase, begin), (_, end) in itertools.pairwise(self.marks)]
        took_s: dict[str, float] = {}
        for phase, begin_s, end_s in spans:
            took_s[phase] = took_s.get(phase, 0.0) + end_s - begin_s
        # A step may run backward several times; ready times count only the time spent in backward.
        backwards = [(begin_s, end_s) for phase, begin_s, end_s in spans if phase == "backward"]

        def passed_s(moment: Any) -> float:
            return sum(max(0.0, min(end_s, at_s(moment)) - begin_s) for begin_s, end_s in backwards)

        ready_s = {index: passed_s(at) for index, at in self._ready.items()}
        rest_s = {index: ready_s[index] for index in self._rows if index in ready_s}
        ready_s |= {index: max(ready_s.get(index, 0.0), passed_s(at)) for index, (at, _) in self._rows.items()}
        num_rows = {index: len(torch.unique(torch.cat(rows))) for index, (_, rows) in self._rows.items()}
        forward_s = [0.0] * len(self._blocks)
        backward_s = [0.0] * len(self._blocks)
        for index, begin, end in self._calls:
            forward_s[index] += at_s(end) - at_s(begin)
        for (begin, index), (end, _) in itertools.pairwise(self._owners):
            if index != _OUTSIDE:
                backward_s[index] += at_s(end) - at_s(begin)
        return LayerTimes(took_s, ready_s, rest_s, num_rows, forward_s, backward_s)

    @property
    def _is_backward(self) -> bool:
        return bool(self.marks) and self.marks[-1][0] == "backward"

    def _note_ready(self, index: int, *grads: Any) -> None:
        self._ready[index] = mark(self.device)  # a gradient may arrive in parts, of which the last one counts

    def _note_rows(self, index: int, rows: torch.Tensor) -> None:
        self._rows[index] = mark(self.device), [*self._rows.get(index, (None, []))[1], rows]

    def _begin_forward(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._open[index] = mark(self.device), _find_nodes(*args, *kwargs.values())
        # Recomputation (activation checkpointing) counts as part of the block's backward.
        if self._is_backward:
            self._begin_block(index)

    def _end_forward(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        begin, inputs = self._open.pop(index)
        if not self._is_backward:
            self._calls.append((index, begin, mark(self.device)))
        # A block that returns its input unchanged has no backward.
        for node in _find_nodes(output):
            if not any(node is other for other in inputs):
                node.register_prehook(functools.partial(self._begin_block, index))
        waiting = set(range(len(inputs)))
        for number, node in enumerate(inputs):
            node.register_prehook(functools.partial(self._end_block, index, waiting, number))

    def _begin_block(self, index: int, *grads: Any) -> None:
        if self._owners[-1][1] != index:
            self._owners.append((mark(self.device), index))

    def _end_block(self, index: int, waiting: set[int], number: int, *grads: Any) -> None:
        waiting.discard(number)
        if not waiting and self._owners[-1][1] == index:
            self._owners.append((mark(self.device), _OUTSIDE))


def _find_nodes(*values: Any) -> list[Any]:
    """The autograd nodes that produced the tensors in a nested structure."""
    found: list[Any] = []
    for value in values:
        # Fast path for the usual case: the search takes longer than the rest of the hook.
        for tensor in [value] if isinstance(value, torch.Tensor) else find_tensors(value):
            node = tensor.grad_fn
            if node is not None and not any(node is other for other in found):
                found.append(node)
    return found


def list_blocks(module: nn.Module) -> list[Block]:
    """The blocks from `find_blocks`, and parameterless modules outside them (activations), in definition order.
    Blocks may share a submodule, such as a dropout, but a nested block belongs to its outer block."""
    found = {block: name or "model" for name, block in find_blocks(module)}  # the root module has no name
    inside = {part for block in found for part in block.modules() if part is not block}
    parts = ((found.get(part, name), part) for name, part in module.named_modules() if part not in inside)
    return [(name, part) for name, part in parts if part in found or not [*part.children(), *part.parameters()]]


class Layers(step_bench.Probe):
    """Collects layer times from the `profiled` steps of a bare replica. Leaves no hooks on the module.

    `blocks` are named, non-nested modules in definition order; None means `list_blocks`.
    """

    def __init__(self, replica: Replica, model: str, blocks: Sequence[Block] | None) -> None:
        self._module = replica.module
        self._model = model
        self.steps: list[LayerTimes] = []
        self._names: dict[nn.Parameter, list[str]] = {}  # trainable parameters; tied ones have several names
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                self._names.setdefault(parameter, []).append(name)
        if len(devices := {parameter.device for parameter in self._names}) != 1:
            found = ", ".join(sorted(map(str, devices))) or "no device, because nothing is trained"
            raise ConfigError(f"the trained parameters of {model} are on {found}: they must be on one device")
        self._blocks = list_blocks(self._module) if blocks is None else blocks
        params, device = list(self._names), devices.pop()
        lookups = Lookups(self._module, params)
        self._clock = LayerClock(params, [b for _, b in self._blocks], device, lookups if lookups.tables else None)

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        if kind != "profiled":
            return None
        self._clock.attach(hooks)
        return self._clock

    def end(self, kind: str, times: PhaseTimes) -> None:
        if kind == "profiled":
            self.steps.append(self._clock.read())
            for phase in {"forward", "backward"} - self.steps[-1].took_s.keys():
                needed = "it must call the model that it receives, and backward() on a loss"
                raise MeasurementError(f"the step of {self._model} ran no {phase}: {needed}", code="no-phase")

    def read_ready_times(self) -> tuple[dict[int, float], float]:
        """Each gradient's ready time in the last step, by parameter index, and the duration of backward."""
        return self.steps[-1].ready_s, self.steps[-1].took_s["backward"]

    def build_record(self, bench: StepBench, variant: Variant) -> LayerProfileRecord:
        """Build the record of rank 0's layers, profiled while all ranks computed. Collective: call on every rank."""
        warm, num_ranks = bench.num_warm_steps, bench.world.world_size
        times = {name: variant.times[name] for name in ("forward", "backward", "optimizer")}
        times |= {"timing": variant.times["marked"], "profiled_step": variant.times["profiled"]}
        times |= {f"profiled_{phase}": [s.took_s[phase] for s in self.steps] for phase in ("forward", "backward")}
        samples: dict[str, Any] = {name: build_samples([seconds], warm) for name, seconds in times.items()}
        kept = self.steps[warm:]
        num_frozen = sum(not p.requires_grad for p in self._module.parameters())
        # The first block that contains the parameter.
        owner = {parameter: name for name, block in reversed(self._blocks) for parameter in block.parameters()}
        parameters = [
            ParameterTimes(
                name, p.nbytes, p.numel(), str(p.dtype).removeprefix("torch."), owner.get(p, ""),
                tuple(step.ready_s.get(index) for step in kept), tuple(aliases), tuple(p.shape),
                max((step.num_rows.get(index, 0) for step in kept), default=0),
                tuple(step.rest_s.get(index) for step in kept if step.num_rows.get(index)),
            )
            for index, (p, (name, *aliases)) in enumerate(self._names.items())
        ]  # fmt: skip
        blocks = [
            BlockTimes(name, tuple(s.forward_s[i] for s in kept), tuple(s.backward_s[i] for s in kept))
            for i, (name, _) in enumerate(self._blocks)
        ]
        notes = [f"{num_frozen} parameters are not trained"] if num_frozen else []
        notes += [f"measured on rank 0 while {num_ranks} ranks computed"] if num_ranks > 1 else []
        record = LayerProfileRecord(
            model=self._model, device=self._clock.device.type, dtype=bench.labels["precision"],
            batch_size=bench.labels["batch_size"], blocks=tuple(blocks), **samples, note="; ".join(notes),
            # Sorted by median; ties in reverse definition order, the usual order of backward.
            parameters=tuple(sorted(reversed(parameters), key=lambda parameter: parameter.order_s)),
        )  # fmt: skip
        first: LayerProfileRecord = bench.world.share(record)[0]
        return first


@contextlib.contextmanager
def open_job(given: Given, is_bare: bool = False) -> Iterator[tuple[World, MeasuredJob]]:
    """Open the world and build the job, wrapped or bare. Collective: call on every rank."""
    if isinstance(given, TrainSettings):
        with open_world(given) as world:
            wrapper = "none" if is_bare else given.wrapper
            settings = dataclasses.replace(given, ranks=world.world_size, wrapper=wrapper)
            yield world, TrainingJob(build_job(settings, world))
        return
    model, step, wrapper, options = given
    with join_world(**options) as world:
        own = OwnJob(model, step, "none" if is_bare else wrapper)
        try:
            yield world, own
        finally:
            own.close()


def measure_profile(
    given: Given, kind: str, iters: int | None, warmup: int | None, number: int = 0, total: int = 1, largest: int = 0,
    with_costs: bool = True,
) -> list[Record]:  # fmt: skip
    """Profile the layers of the bare model ("layers"), its step phases ("phases"), or both on several ranks ("all").
    `with_costs` also measures the cost of messages and of the wrapper.

    This is job `number` of `total`. There must be enough data for `largest`, the largest batch per rank of these jobs;
    otherwise a later job would be rejected and the earlier results lost. Collective: call on every rank.
    """
    records: list[Record] = []
    with open_job(given, is_bare=kind == "layers") as (world, job):
        if isinstance(job, TrainingJob):
            step_bench.check_whole(job.job, largest * world.world_size * job.job.batches.accumulate)
        parts = (kind,) if kind != "all" else ("layers", "phases") if world.world_size > 1 else ("layers",)
        total = max(total, len(parts))
        what = f"{format_number_of(world.world_size, 'rank')}, batch {job.labels['batch_size']}"
        for place, part in enumerate(parts, number):
            label = what if part == kind else f"{part}, {what}"
            report = follow(world, label, place, total)
            if part == "phases":
                new: list[Record] = [_run_phases(world, job, iters, warmup, report)]
            else:
                bare = job.build_own() if kind == "layers" else job.build()
                new = measure_layers(world, bare, job.labels, None, iters, warmup, report, job if with_costs else None)
            records += new
            if world.rank == 0:
                post(Progress(place + 1, total, label, tuple(new)))
    return records


def measure_together(given: Given, ranks: int, iters: int | None, warmup: int | None) -> list[Record]:
    """Measure how ranks on one host slow each other down: interleaved steps of the bare model on the first `ranks`
    ranks and on all ranks of this world, without messages.

    Ranks divide the cores evenly by default. Returns no records if there is too little data for all ranks.
    Collective: call on every rank.
    """
    requested = given.threads if isinstance(given, TrainSettings) else given[3]["threads"]
    if isinstance(given, TrainSettings) and given.global_batch_size is not None:
        # Keep the batch size per rank fixed.
        size, parts = given.batches.batch_size, given.batches.accumulate
        given = dataclasses.replace(given, batch_size=size, accumulate=parts, global_batch_size=None)
    try:
        with open_job(given, is_bare=True) as (world, job), StepBench(world, job.labels) as bench:
            replica = job.build()
            for count in (ranks, world.world_size):
                threads = requested or max(1, machine.count_cores() // count)
                own = dataclasses.replace(replica, activate=functools.partial(torch.set_num_threads, threads))
                where = {"role": "together", "label": format_number_of(count, "rank"), "wrapper": "none"}
                labels = where | {"world_size": count, "threads": threads}
                bench.add(Variant(labels, own if world.rank < count else None))
            bench.run(_PACE, iters or 8, 2 if warmup is None else warmup, follow(world, "neighbors"))
            return [bench.build_record(variant) for variant in bench.variants]
    except ConfigError:  # too few samples; the profile reports other problems
        return []


def measure_layers(
    world: World, replica: Replica, labels: dict[str, Any], blocks: Sequence[Block] | None = None,
    iters: int | None = None, warmup: int | None = None, report: Report | None = None, job: MeasuredJob | None = None,
) -> list[Record]:  # fmt: skip
    """Profile steps of a bare replica, interleaved with plain steps to show the cost of profiling.

    `labels` are its job's labels. With `job`, also interleave steps disturbed by messages and steps of the wrapper on a
    single-rank group, and return their records and the codecs' records after the profile. The steps train the module.
    Collective: call on every rank.
    """
    per_turn = 1 if job is None else job.steps_per_turn
    iters = iters or (20 if job is None else 10)
    warmup = 3 if warmup is None else warmup
    with StepBench(world, labels, steps_per_turn=per_turn) as bench, contextlib.ExitStack() as stack:
        plain = bench.add(Variant({"role": "plain", "label": "plain"}, replica, ("marked", "profiled")))
        plain.probe = layers = Layers(replica, labels["model"], blocks)
        if job is not None:
            bench.labels = labels | {"wrapper": "torch" if labels.get("wrapper") == "torch" else "paceline"}
            if _has_room(world, replica):
                _add_costs(bench, replica, layers, job, stack)
            else:
                plain.labels["note"] = "too little memory to measure copies and contention"
        bench.run(_PACE, -(-iters // per_turn), -(-warmup // per_turn), report)
        profile = layers.build_record(bench, plain)
        if job is None:
            return [profile]
        # Measured last: codecs would disturb the steps of other ranks.
        has_room = _has_room(world, replica)
        codecs = measure_codecs(take_gradients(replica), replica.device, bench) if has_room else []
        return [profile, *(bench.build_record(variant) for variant in bench.variants), *codecs]


def _has_room(world: World, replica: Replica) -> bool:
    """Whether every GPU has enough memory for two more models with gradients, optimizer moments and buckets plus
    traffic, or for the codecs' buffers. Collective: call on every rank."""
    device = replica.device
    num_bytes = sum(param.nbytes for param in replica.parameters)
    return device.type != "cuda" or all(world.share(torch.cuda.mem_get_info(device)[0] > 16 * num_bytes))


def _add_costs(
    bench: StepBench, replica: Replica, layers: Layers, job: MeasuredJob, stack: contextlib.ExitStack
) -> None:
    assert dist.group.WORLD is not None
    device, wrapper = replica.device, bench.labels["wrapper"]
    channel = Channel(dist.group.WORLD, device)
    num_bytes = min(sum(param.nbytes for param in replica.parameters), _TRAFFIC_BYTES[device.type])
    traffic = build_traffic(bench.world, channel, channel.allocate(max(MIB, num_bytes) // 4, torch.float32, device))
    if traffic is not None:
        stack.callback(traffic.close)

    def build(group: dist.ProcessGroup, cap_bytes: int) -> Replica:
        return job.build(functools.partial(step_bench.wrap, wrapper=wrapper, group=group, cap_bytes=cap_bytes))

    add_costs(bench, replica, layers, traffic, _MESSAGE_BYTES[device.type], build)


def add_costs(
    bench: StepBench, replica: Replica, layers: Layers, traffic: Traffic | None, sizes: Sequence[int],
    build: Callable[[dist.ProcessGroup, int], Replica],
) -> None:  # fmt: skip
    """Add steps of a bare replica disturbed by messages of these sizes, and steps of the wrapper on a single-rank
    group, with one bucket and with one bucket per gradient. `build(group, cap_bytes)` returns a wrapped replica.
    Collective: call on every rank."""
    world = bench.world
    num_bytes = sum(param.nbytes for param in replica.parameters)
    for size in sizes:
        if traffic is None or 2 * size > num_bytes:
            continue
        labels = {"role": "disturbed", "label": f"messages of {format_bytes(size)}", "message_bytes": size}
        Disturbance(world, traffic, bench.add(Variant(labels, replica)), layers.read_ready_times)
    alone = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)][world.rank]
    for label, cap_bytes in (("one bucket", 1 << 50), ("a bucket each", 1)):
        bench.add(Variant({"role": "local", "label": label}, build(alone, cap_bytes), ("marked",)))


def _run_phases(world: World, job: MeasuredJob, iters: int | None, warmup: int | None, report: Report) -> StepRecord:
    replica, wrapper, kinds = job.build_own(), job.labels["wrapper"], ("plain", "marked", "no_comm")
    # Timing torch's wrapper needs a second replica, which a shared module cannot provide.
    is_alone = wrapper == "torch" and isinstance(job, OwnJob) and job.is_shared
    can_time = world.world_size > 1 and wrapper in ("paceline", "torch") and not is_alone
    timed = step_bench.TimedMessages(replica, job.build_own) if can_time else None
    with StepBench(world, job.labels | {"num_parameters": len(replica.parameters)}, loads_inside=True) as bench:
        variant = bench.add(Variant({}, replica, (*kinds, "timed") if can_time else kinds, timed))
        bench.run(_PACE, iters, warmup, report)
        return bench.build_record(variant)
