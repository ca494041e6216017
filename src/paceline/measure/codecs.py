"""What codecs compute: their parts between messages, timed over the gradients of a job, with ranks that are made up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from paceline.measure.engine import synchronize
from paceline.measure.steps import Replica
from paceline.parallel.codecs import GATHER, Codec, build_codec
from paceline.predict.simulate import LARGE_BYTES
from paceline.predict.strategies import MEASURED
from paceline.records import CodecRecord, Samples
from paceline.strategy import Strategy
from paceline.training.step import NoPhases
from paceline.units import MIB

# As many gradients as these bytes hold are enough.
_MOST_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
_BUDGET_S, _LEAST, _MOST = 0.05, 2, 10
# Of few ranks and many: what grows with their number is separated from what does not.
_RANKS = (2, 8)

Named = list[tuple[str, torch.Tensor]]


def take_gradients(replica: Replica) -> Named:
    """The gradients of one more step of a bare replica, in the order in which they are ready."""
    found: dict[str, torch.Tensor] = {}
    most = _MOST_BYTES[replica.device.type]

    def save(name: str, param: torch.Tensor, *_: object) -> None:
        fits = not found or sum(grad.nbytes for grad in found.values()) + param.nbytes <= most
        if fits and param.grad is not None and param.grad.layout == torch.strided and param.is_floating_point():
            found[name] = param.grad.detach().clone()

    replica.activate()
    params = [(name, param) for name, param in replica.module.named_parameters() if param.requires_grad]
    nodes = [get_gradient_edge(param).node for _, param in params]  # held, so that the step uses these
    handles = [node.register_hook(partial(save, *named)) for node, named in zip(nodes, params, strict=True)]
    try:
        replica.run(replica.load(), NoPhases())
    finally:
        for handle in handles:
            handle.remove()
    return list(found.items())


def measure_codecs(grads: Named, device: torch.device, strategies: Sequence[str] = MEASURED) -> list[CodecRecord]:
    """Each codec for all gradients in one bucket and in a bucket each; and in one on more ranks. Where one bucket is
    large, also in several that are not."""
    if not grads:
        return []
    each = [[named] for named in grads]
    few = [grads]
    if sum(grad.nbytes for _, grad in grads) > LARGE_BYTES:
        few = [[]]
        for named in grads:
            if few[-1] and sum(grad.nbytes for _, grad in (*few[-1], named)) > LARGE_BYTES:
                few.append([])
            few[-1].append(named)
    settings = [(_RANKS[0], few), (_RANKS[0], each), (_RANKS[1], few)]
    settings += [(_RANKS[0], [grads])] if len(few) > 1 else []
    return [
        _measure(Strategy.parse(text), world_size, buckets, device)
        for text in strategies
        for world_size, buckets in (settings if len(grads) > 1 else settings[::2])
    ]


def _measure(strategy: Strategy, world_size: int, buckets: Sequence[Named], device: torch.device) -> CodecRecord:
    codec, rows, spent_s = build_codec(strategy, 0, world_size), list[list[float]](), 0.0
    while len(rows) <= _LEAST or (spent_s < _BUDGET_S and len(rows) <= _MOST):
        parts: list[float] = []
        for bucket in buckets:
            for number, part_s in enumerate(_run(codec, bucket, len(rows), partial(synchronize, device))):
                parts += [0.0] * (number == len(parts))
                parts[number] += part_s
        rows.append(parts)
        spent_s += sum(parts)
    warmup, *timed = ([(value,) for value in row] for row in rows)
    samples = [Samples(tuple(row[number] for row in timed), (warmup[number],)) for number in range(len(warmup))]
    num_bytes = sum(grad.nbytes for bucket in buckets for _, grad in bucket)
    return CodecRecord(
        strategy=strategy.text, device=device.type, world_size=world_size, num_bytes=num_bytes,
        num_buckets=len(buckets), parts=tuple(samples),
    )  # fmt: skip


@torch.no_grad()
def _run(codec: Codec, bucket: Named, step: int, wait: Callable[[], None]) -> list[float]:
    """The seconds of each part, for one bucket. The other ranks send what this one does."""
    names, grads = [name for name, _ in bucket], [grad.clone() for _, grad in bucket]
    exchange, value, parts = codec.average(names, grads, step), None, list[float]()
    while True:
        wait()
        begin_s, message = time.perf_counter(), None
        try:
            message = exchange.send(value)  # type: ignore[arg-type]
        except StopIteration:
            pass
        wait()
        parts.append(time.perf_counter() - begin_s)
        if message is None:
            return parts
        kind, tensor = message
        value = torch.stack([tensor] * codec.world_size) if kind == GATHER else tensor.clone()
