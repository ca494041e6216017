"""Times codec computation on the gradients of a job. The messages are simulated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from paceline.measure.engine import Pace, build_samples, run_rounds, synchronize
from paceline.measure.step_bench import Replica, StepBench, hook_gradients
from paceline.parallel.codecs import GATHER, SCATTER, Exchange, build_codec
from paceline.parallel.outer import Outer
from paceline.parallel.zero import join, scatter
from paceline.predict.sending import LARGE_BYTES
from paceline.predict.strategy_costs import MEASURED
from paceline.records import CodecRecord
from paceline.strategy import Strategy, count_each
from paceline.training.step import NoPhases
from paceline.units import MIB

# Maximum total size of the gradients used.
_MOST_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
_PACE = Pace(budget_s=5.0, min_iters=4, max_iters=10, warmup=1)
_STEP_TOUCHES = 4  # memory that a step touches outside the codec, relative to the gradient size
# One small and one large rank count, to separate fixed costs from those that grow with the number of ranks.
RANKS = (2, 8)

Named = list[tuple[str, torch.Tensor]]


def take_gradients(replica: Replica) -> Named:
    """Run one more step of a bare replica and return its gradients in ready order."""
    found: dict[str, torch.Tensor] = {}
    most = _MOST_BYTES[replica.device.type]

    def save(index: int, *_: object) -> None:
        name, param = params[index]
        fits = not found or sum(grad.nbytes for grad in found.values()) + param.nbytes <= most
        if fits and param.grad is not None and param.grad.layout == torch.strided and param.is_floating_point():
            found[name] = param.grad.detach().clone()

    replica.activate()
    params = [(name, param) for name, param in replica.module.named_parameters() if param.requires_grad]
    with contextlib.ExitStack() as hooks:
        hook_gradients([param for _, param in params], hooks, save)
        replica.run(replica.load(), NoPhases())
    return list(found.items())


def measure_codecs(
    grads: Named, device: torch.device, bench: StepBench, ranks: Sequence[int] = RANKS
) -> list[CodecRecord]:
    """Time the codecs in interleaved turns while all ranks of the job's bench run them. Each codec runs with large
    buckets, with one bucket per gradient, for a larger rank count, and, unless there is only one large bucket, with a
    single bucket. The outer optimizer is timed for one round over the same number of parameters. A sharded update
    includes gathering the parameters. Collective: call on every rank."""
    grads = _choose_common(grads, bench)
    if not grads:
        return []
    each, num_bytes = [[named] for named in grads], sum(grad.nbytes for _, grad in grads)
    few: list[Named] = [[]]
    for named in grads:
        if few[-1] and sum(grad.nbytes for _, grad in (*few[-1], named)) > LARGE_BYTES:
            few.append([])
        few[-1].append(named)
    first, *more = sorted(set(ranks))
    settings = [(first, few), *([(first, each)] if len(grads) > 1 else []), *((count, few) for count in more)]
    settings += [(first, [grads])] if len(few) > 1 else []
    parsed = [Strategy.parse(text) for text in MEASURED]
    runs = [(one, *setting) for one in parsed if not one.outer for setting in settings]
    runs += [(one, first, [grads]) for one in parsed if one.outer]
    # Evicts the caches as a step does when it touches parameters, gradients and optimizer state.
    others = torch.zeros(min(_STEP_TOUCHES * num_bytes, _MOST_BYTES[device.type]) // 4, device=device)
    rounds: list[list[list[float]]] = []  # seconds of each part of each run

    def run_round(_: int) -> float:
        begin_s = time.perf_counter()
        rounds.append([_time(*run, others, bench.control) for run in runs])
        return time.perf_counter() - begin_s

    run_rounds(run_round, bench.control, _PACE)
    by_rank = bench.world.share(rounds)
    return [
        CodecRecord(
            strategy=strategy.text,
            device=device.type,
            world_size=world_size,
            num_bytes=num_bytes,
            num_buckets=len(buckets),
            parts=tuple(
                build_samples([[parts[number][part] for parts in found] for found in by_rank], _PACE.warmup)
                for part in range(len(rounds[0][number]))
            ),
        )
        for number, (strategy, world_size, buckets) in enumerate(runs)
    ]


def _choose_common(grads: Named, bench: StepBench) -> Named:
    """The gradients present on all ranks, in rank 0's order."""
    names = bench.world.share([name for name, _ in grads])
    own, common = dict(grads), set(names[0]).intersection(*names)
    return [(name, own[name]) for name in names[0] if name in common]


def _time(
    strategy: Strategy, world_size: int, buckets: Sequence[Named], others: torch.Tensor, control: dist.ProcessGroup
) -> list[float]:
    """Seconds per part, summed over all buckets. Only the second step is timed: by then, memory is allocated and the
    caches no longer hold the gradients."""
    codec = build_codec(strategy, 0, world_size)
    parts: list[float] = []
    outers = [
        Outer(strategy, [name for name, _ in bucket], [grad.clone() for _, grad in bucket], codec)
        for bucket in buckets
        if strategy.outer
    ]
    for step in range(2):
        parts.clear()
        others.fill_(step)
        wait = partial(synchronize, others.device)
        wait()
        dist.barrier(group=control)
        for number, bucket in enumerate(buckets):
            names, grads = [name for name, _ in bucket], [grad.clone() for _, grad in bucket]
            if strategy.is_sharded:
                exchange = _update(torch.cat([grad.reshape(-1) for grad in grads]), world_size)
            else:
                exchange = _end_round(outers[number]) if outers else codec.average(names, grads, step)
            for place, part_s in enumerate(_run(exchange, world_size, wait)):
                parts += [0.0] * (place == len(parts))
                parts[place] += part_s
    return parts


def _end_round(outer: Outer) -> Exchange:
    outer.begin_round()
    outer.count()
    yield from outer.advance([1.0] * len(outer.names))


def _update(vector: torch.Tensor, world_size: int) -> Exchange:
    """The exchange of a sharded update: scatter a bucket of gradients, then gather its parameters."""
    yield from scatter(vector, 0, world_size, sums=vector.is_cuda)
    each = count_each(vector.numel(), vector.element_size(), world_size)
    rows = yield GATHER, join([vector[:each]], vector.new_empty(each))
    for rank in range(1, world_size):
        piece = vector[rank * each : (rank + 1) * each]
        piece.copy_(rows[rank, : piece.numel()])


@torch.no_grad()
def _run(exchange: Exchange, world_size: int, wait: Callable[[], None]) -> list[float]:
    """Seconds per part of an exchange in which every other rank is simulated to send this rank's data."""
    value = None
    parts: list[float] = []
    while True:
        wait()
        begin_s = time.perf_counter()
        message = None
        try:
            message = exchange.send(value)  # type: ignore[arg-type]
        except StopIteration:
            pass
        wait()
        parts.append(time.perf_counter() - begin_s)
        if message is None:
            return parts
        kind, tensor = message
        value = torch.stack([tensor] * world_size) if kind == GATHER else tensor.clone()
        value = value[0] if kind == SCATTER else value
