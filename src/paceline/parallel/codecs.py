"""What ranks send instead of their gradients: bfloat16, int8 and int4 blocks, top-k, PowerSGD; and what is left over.

A codec averages one bucket in a generator. It yields a message, a pair of the kind of a collective and a tensor, and
gets the result of that collective back. So the same code runs between ranks, with futures (`run_in_background`), and
for replicas in one process (`run_together`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.strategy import BLOCK, QUANTIZED_BITS, Strategy, as_matrix, count_kept

SUM, GATHER, SWAP = "all-reduce", "all-gather", "all-to-all"
Exchange = Generator[tuple[str, torch.Tensor], torch.Tensor, None]
# Below this many elements, top-k looks at all of them; above, at those beyond a threshold that a sample gives.
_SAMPLED = 1 << 16
_SAMPLES = 1 << 14


class Codec:
    """Averages gradients over the ranks, in place. `errors` is what each parameter has not sent yet, by its name, and
    `common` what all ranks hold alike. Both are kept only if the average is finite."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        self.strategy, self.rank, self.world_size = strategy, rank, world_size
        self.errors: dict[str, torch.Tensor] = {}
        self.common: dict[str, torch.Tensor] = {}

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        """Leave the average over the ranks in `grads`, the gradients of one bucket. `step` counts from 0."""
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            same = [grad for grad in grads if grad.dtype == dtype]
            total = yield SUM, torch.cat([grad.reshape(-1) for grad in same]).mul_(1 / self.world_size)
            _spread(total, same)

    def _load(self, names: Sequence[str], grads: Sequence[torch.Tensor], kind: str = "") -> torch.Tensor:
        """The errors of these parameters as one vector."""
        parts = [
            self.errors[kind + name].to(grad.device) if kind + name in self.errors else _zeros(grad)
            for name, grad in zip(names, grads, strict=True)
        ]
        return torch.cat(parts)

    def _keep(
        self,
        names: Sequence[str],
        grads: Sequence[torch.Tensor],
        errors: torch.Tensor,
        average: torch.Tensor,
        kind: str = "",
    ) -> None:
        """Keep errors if the average is finite: else no rank uses it, and what was not sent before still is not."""
        if not self.strategy.feedback:
            return
        is_finite = torch.isfinite(torch.linalg.vector_norm(average, torch.inf))
        if errors.device.type == "cpu":
            if not is_finite:
                return
            found = errors
        else:  # without waiting for the GPU
            found = torch.where(is_finite, errors, self._load(names, grads, kind))
        sizes = [grad.numel() for grad in grads]
        for name, part in zip(names, found.split(sizes), strict=True):
            self.errors[kind + name] = part


class BFloat16(Codec):
    """Halves the bytes. Divided before it is rounded, summed in float32 and rounded once more."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        flat = torch.cat([_as_vector(grad) for grad in grads]).mul_(1 / self.world_size).bfloat16()
        if self.world_size <= 2 or self.sums_precisely:
            total = yield SUM, flat
        else:  # a ring would round at every hop
            size = flat.numel()
            parts = functional.pad(flat, (0, -size % self.world_size)).view(self.world_size, -1)
            received = yield SWAP, parts
            gathered = yield GATHER, received.float().sum(0).bfloat16()
            total = gathered.view(-1)[:size]
        _spread(total, grads)

    sums_precisely = False


class Quantized(Codec):
    """int8 or int4 with one scale for a block. Each rank sums one part of the vector in float32, and sends the result
    quantised, too. The owner of a part adds the error of the result to its own, once for each rank."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        n, bits = self.world_size, QUANTIZED_BITS[self.strategy.codec]
        flat = torch.cat([_as_vector(grad) for grad in grads])
        if self.strategy.feedback:
            flat += self._load(names, grads)
        size = flat.numel()
        parts = functional.pad(flat, (0, -size % (n * BLOCK))).view(n, -1)
        sent = quantize(parts, bits)
        errors = parts - dequantize(sent, bits)
        received = yield SWAP, sent
        total = dequantize(received, bits).sum(0).mul_(1 / n)
        result = quantize(total[None], bits)
        errors[self.rank] += (total - dequantize(result, bits)[0]) * n
        gathered = yield GATHER, result[0]
        average = dequantize(gathered, bits).view(-1)[:size]
        self._keep(names, grads, errors.view(-1)[:size], average)
        _spread(average, grads)


class TopK(Codec):
    """The largest elements of each gradient, with their places. The rest waits in the error. With `dgc`, momentum is
    applied before (Deep Gradient Compression): then the optimizer must have none."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        n, strategy = self.world_size, self.strategy
        flat = torch.cat([_as_vector(grad) for grad in grads])
        velocity = None
        if strategy.dgc:
            velocity = self._load(names, grads, "momentum ").mul_(strategy.dgc).add_(flat)
            flat = velocity.clone()
        if strategy.feedback:
            flat += self._load(names, grads)
        density, start, places = self._density(step), 0, []
        for grad in grads:
            part = flat[start : start + grad.numel()]
            places.append(find_largest(part, count_kept(part.numel(), density)) + start)
            start += grad.numel()
        place = torch.cat(places)
        values = flat[place]
        payload = torch.cat([values.mul(1 / n).view(torch.uint8), place.int().view(torch.uint8)])
        gathered = yield GATHER, payload
        average = torch.zeros_like(flat)
        for row in gathered:
            theirs, there = row.view(2, -1)
            average.index_add_(0, there.view(torch.int32), theirs.view(torch.float32))
        flat[place] = 0
        self._keep(names, grads, flat, average)
        if velocity is not None:
            velocity[place] = 0
            self._keep(names, grads, velocity, average, "momentum ")
        _spread(average, grads)

    def _density(self, step: int) -> float:
        """DGC's warm-up: from a quarter of the elements down to the share, in equal factors."""
        amount, warmup = self.strategy.amount, self.strategy.warmup
        return max(amount, 0.25 * (amount / 0.25) ** (step / warmup)) if step < warmup else amount


class PowerSGD(Codec):
    """Matrices as a product of two thin ones, by one step of power iteration from the factor of the step before. All
    else is sent as it is."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        n, rank = self.world_size, int(self.strategy.amount)
        shapes = [as_matrix(grad.shape, rank) for grad in grads]
        flat = torch.cat([_as_vector(grad) for grad in grads])
        if self.strategy.feedback:
            flat += self._load(names, grads)
        parts = flat.split([grad.numel() for grad in grads])
        matrices = [
            (name, part.view(shape[:2]), shape[2])
            for name, part, shape in zip(names, parts, shapes, strict=True)
            if shape
        ]
        rest = [part for part, shape in zip(parts, shapes, strict=True) if not shape]
        rights = [self._first(name, matrix, r) for name, matrix, r in matrices]
        lefts = [matrix @ right for (_, matrix, _), right in zip(matrices, rights, strict=True)]
        payload = torch.cat([*(left.reshape(-1) for left in lefts), *rest]).mul_(1 / n)
        total = yield SUM, payload
        pieces = total.split([left.numel() for left in lefts] + [part.numel() for part in rest])
        average = torch.empty_like(flat)
        into = average.split([grad.numel() for grad in grads])
        for part, piece in zip(
            [i for i, s in zip(into, shapes, strict=True) if not s], pieces[len(lefts) :], strict=True
        ):
            part.copy_(piece)
        if matrices:
            bases = [_orthonormal(piece.view_as(left)) for piece, left in zip(pieces, lefts, strict=False)]
            rights = [matrix.t() @ base for (_, matrix, _), base in zip(matrices, bases, strict=True)]
            total = yield SUM, torch.cat([right.reshape(-1) for right in rights]).mul_(1 / n)
            found = [p.view_as(r) for p, r in zip(total.split([r.numel() for r in rights]), rights, strict=True)]
            outs = [part for part, shape in zip(into, shapes, strict=True) if shape]
            for out, base, right in zip(outs, bases, found, strict=True):
                torch.mm(base, right.t(), out=out.view(base.size(0), right.size(0)))
            if torch.isfinite(torch.linalg.vector_norm(average, torch.inf)) or flat.device.type != "cpu":
                self.common |= {name: right for (name, _, _), right in zip(matrices, found, strict=True)}
        self._keep(names, grads, flat - average, average)
        _spread(average, grads)

    def _first(self, name: str, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The factor of the step before, or a random one that is the same on all ranks, from a generator of its own."""
        known = self.common.get(name)
        if known is not None and known.shape == (matrix.size(1), rank):
            return known.to(matrix)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(matrix.size(1), rank, generator=generator).to(matrix)


_KINDS = {"dense": Codec, "bf16": BFloat16, "int8": Quantized, "int4": Quantized, "topk": TopK, "powersgd": PowerSGD}


def build_codec(strategy: Strategy, rank: int, world_size: int) -> Codec:
    return _KINDS[strategy.codec](strategy, rank, world_size)


def run_together(exchanges: Sequence[Exchange]) -> None:
    """Run the exchanges of replicas that are all in this process, as ranks would."""
    values: list[Any] = [None] * len(exchanges)
    while True:
        messages = []
        for exchange, value in zip(exchanges, values, strict=True):
            try:
                messages.append(exchange.send(value))
            except StopIteration:
                continue
        if not messages:
            return
        kind, tensors = messages[0][0], [tensor for _, tensor in messages]
        if kind == SUM:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            values = [total.clone() for _ in tensors]
        elif kind == GATHER:
            values = [torch.stack(tensors) for _ in tensors]
        else:
            values = [torch.stack([tensor[index] for tensor in tensors]) for index in range(len(tensors))]


def quantize(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of bytes: for each block its scale in float32, and its numbers."""
    rows = parts.size(0)
    blocks = parts.reshape(-1, BLOCK).float()
    most = 2 ** (bits - 1) - 1
    scale = blocks.abs().amax(1, keepdim=True) / most
    numbers = (blocks / torch.where(scale > 0, scale, 1)).round_().clamp_(-most, most).to(torch.int8)
    if bits == 4:
        low, high = numbers.view(-1, BLOCK // 2, 2).unbind(-1)
        numbers = (low & 15) | (high << 4)
    return torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1).view(rows, -1)


def dequantize(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows that `quantize` was given, rounded."""
    blocks = rows.reshape(-1, 4 + BLOCK * bits // 8)
    scale = blocks[:, :4].contiguous().view(torch.float32)
    numbers = blocks[:, 4:].view(torch.int8)
    if bits == 4:
        numbers = torch.stack([(numbers << 4) >> 4, numbers >> 4], -1).flatten(1)
    return (numbers * scale).view(rows.size(0), -1)


def find_largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` elements that are largest in magnitude."""
    size = values.numel()
    if count >= size:
        return torch.arange(size, device=values.device)
    sizes = values.abs()
    if size > _SAMPLED and count < size // 8 and values.device.type == "cpu":
        sample = sizes[:: max(1, size // _SAMPLES)]
        kept = min(sample.numel(), math.ceil(1.3 * count / size * sample.numel()) + 4)
        places = (sizes >= sample.topk(kept).values[-1]).nonzero().view(-1)
        if places.numel() >= count:
            return places[sizes[places].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(matrix).all():  # which the factorisation refuses
        return torch.full_like(matrix, torch.nan)
    base: torch.Tensor = torch.linalg.qr(matrix.float()).Q
    return base.to(matrix)


def _as_vector(grad: torch.Tensor) -> torch.Tensor:
    return grad.reshape(-1).float()


def _zeros(grad: torch.Tensor) -> torch.Tensor:
    return torch.zeros(grad.numel(), device=grad.device)


def _spread(flat: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view(grad.shape))
