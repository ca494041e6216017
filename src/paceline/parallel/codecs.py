"""What ranks send instead of their gradients: bfloat16, int8 and int4 blocks, top-k, PowerSGD; and what is left over.

A codec averages one bucket in a generator. It yields a message, a pair of the kind of a collective and a tensor, and
gets the result of that collective back. So the same code runs between ranks, with futures (`Exchanges`), and for
replicas in one process (`run_together`). On a GPU nothing here makes the host wait.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.strategy import BLOCK, QUANTIZED_BITS, Strategy, as_matrix, count_kept, count_shard_bytes
from paceline.transport import native

SUM, GATHER, SWAP = "all-reduce", "all-gather", "all-to-all"
Exchange = Generator[tuple[str, torch.Tensor], torch.Tensor, None]
Vectors = Sequence[torch.Tensor]
# Below this many elements, top-k looks at all of them; above, at those beyond a threshold that a sample gives.
_SAMPLED = 1 << 16
_SAMPLES = 1 << 14
# Below it a scale has no finite inverse: such numbers are sent as zeros.
_LEAST_SCALE = 1e-37


class Codec:
    """Averages gradients over the ranks, in place. `errors` is what each parameter has not sent yet, by its name, in
    units of gradients; `common` is what all ranks hold alike. Both are kept only if all averages of a step are finite:
    else no rank applies them. Read and set them between steps."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        self.strategy, self.rank, self.world_size = strategy, rank, world_size
        self._errors: dict[str, torch.Tensor] = {}
        self._common: dict[str, torch.Tensor] = {}
        # Of the step under way, by name; which of its averages are finite; and memory for the next step.
        self._new_errors: dict[str, torch.Tensor] = {}
        self._new_common: dict[str, torch.Tensor] = {}
        self._finite: list[Any] = []
        self._spare: dict[str, torch.Tensor] = {}
        self._payloads: dict[str, torch.Tensor] = {}
        self._step = -1

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        self._settle()
        return self._errors

    @errors.setter
    def errors(self, errors: dict[str, torch.Tensor]) -> None:
        self._settle()
        self._errors = errors

    @property
    def common(self) -> dict[str, torch.Tensor]:
        self._settle()
        return self._common

    @common.setter
    def common(self, common: dict[str, torch.Tensor]) -> None:
        self._settle()
        self._common = common

    @property
    def memory_bytes(self) -> int:
        """What is kept between steps, and the memory for what the next one leaves over."""
        kept = (self._errors, self._common, self._new_errors, self._new_common, self._spare, self._payloads)
        return sum(tensor.nbytes for tensors in kept for tensor in tensors.values())

    def rescale(self, names: Sequence[str], factor: Any) -> None:
        """Multiply the errors of these parameters: the learning rate of the step before is `factor` times the next."""
        for name in names:
            if name in self.errors:
                self._errors[name].mul_(factor)

    def average(self, names: Sequence[str], grads: Vectors, step: int) -> Exchange:
        """Leave the average over the ranks in `grads`, the gradients of one bucket. `step` counts from 0."""
        if self.strategy.codec == "dense":
            for dtype in dict.fromkeys(grad.dtype for grad in grads if grad.numel()):  # as precise as they are
                same = [grad for grad in grads if grad.dtype == dtype]
                total = yield SUM, torch.cat([grad.reshape(-1) for grad in same]).mul_(1 / self.world_size)
                _spread(total, same)
            return
        if step != self._step or not self._new_errors.keys().isdisjoint(names):
            self._settle()
            self._step = step
        # Views where they can be: then the gradients themselves are the memory to compute in.
        vectors = [grad.detach().reshape(-1).float() for grad in grads]
        if any(vector.numel() for vector in vectors):
            yield from self._average(names, vectors, [grad.shape for grad in grads])
        for grad, vector in zip(grads, vectors, strict=True):
            if vector.data_ptr() != grad.data_ptr():
                grad.copy_(vector.view(grad.shape))

    def _average(self, names: Sequence[str], vectors: Vectors, shapes: Sequence[torch.Size]) -> Exchange:
        raise NotImplementedError

    def check(self, averages: torch.Tensor) -> None:
        """These belong to the averages of the step, too."""
        if self.strategy.codec not in ("dense", "bf16"):  # they keep nothing
            self._finite.append(_are_finite(averages))

    def _load(self, names: Sequence[str], vectors: Vectors, kind: str = "") -> list[torch.Tensor]:
        """The errors of these parameters."""
        for name, vector in zip(names, vectors, strict=True):
            known = self._errors.get(kind + name)
            if known is None:
                self._errors[kind + name] = torch.zeros_like(vector)
            elif known.device != vector.device:
                self._errors[kind + name] = known.to(vector.device)
        return [self._errors[kind + name] for name in names]

    def _renew(self, names: Sequence[str], vectors: Vectors, kind: str = "") -> list[torch.Tensor]:
        """Memory for the errors that this step leaves, to be filled before the exchange is over."""
        for name, vector in zip(names, vectors, strict=True):
            spare = self._spare.pop(kind + name, None)
            fits = spare is not None and spare.device == vector.device and spare.numel() == vector.numel()
            self._new_errors[kind + name] = spare if fits and spare is not None else torch.empty_like(vector)
        return [self._new_errors[kind + name] for name in names]

    def _payload(self, name: str, size: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the message of a bucket, by its first parameter: new memory would cost as much as a copy."""
        known = self._payloads.get(name)
        if known is None or known.numel() != size or known.device != like.device:
            known = self._payloads[name] = torch.zeros(size, dtype=dtype, device=like.device)
        return known

    def _settle(self) -> None:
        """Keep what the step left over if all its averages are finite. Else what was not sent before still is not."""
        errors, common, finite = self._new_errors, self._new_common, self._finite
        self._new_errors, self._new_common, self._finite = {}, {}, []
        on_gpu = [mark for mark in finite if isinstance(mark, torch.Tensor)]
        if on_gpu:  # chosen there, without waiting for it
            is_finite = torch.stack([mark.view(()) for mark in on_gpu]).all()
            for kept, new in ((self._errors, errors), (self._common, common)):
                for name, value in new.items():
                    kept[name] = torch.where(is_finite, value, kept[name]) if name in kept else value
            return
        if all(finite):
            self._spare |= {name: self._errors[name] for name in errors if name in self._errors}
            self._errors |= errors
            self._common |= common
        else:
            self._spare |= errors


class BFloat16(Codec):
    """Halves the bytes. Divided before it is rounded, summed in float32 and rounded once more."""

    sums_precisely = False  # whether the all-reduce itself adds in float32 and rounds once

    def _average(self, names: Sequence[str], vectors: Vectors, shapes: Sequence[torch.Size]) -> Exchange:
        n, core = self.world_size, _core(vectors)
        size = sum(vector.numel() for vector in vectors)
        in_parts = n > 2 and not self.sums_precisely  # a ring would round at every hop
        room = size + (-size % n if in_parts else 0)
        sent = self._payload(names[0], room, vectors[0], torch.bfloat16)
        for vector, part in zip(vectors, sent[:size].split([v.numel() for v in vectors]), strict=True):
            if core is None:
                part.copy_(vector * (1 / n))
            else:
                core.pln_to_bf16(vector.data_ptr(), 1 / n, vector.numel(), part.data_ptr())
        if in_parts:
            received = yield SWAP, sent.view(n, -1)
            gathered = yield GATHER, received.float().sum(0).bfloat16()
            total = gathered.view(-1)[:size]
        else:
            total = yield SUM, sent
        _spread(total, vectors)


class Quantized(Codec):
    """int8 or int4 with one scale for a block. Each rank sums one part of the vector in float32, and sends the result
    quantised, too. The owner of a part adds the error of the result to its own, once for each rank."""

    def _average(self, names: Sequence[str], vectors: Vectors, shapes: Sequence[torch.Size]) -> Exchange:
        n, bits, core = self.world_size, QUANTIZED_BITS[self.strategy.codec], _core(vectors)
        has_errors = self.strategy.feedback
        errors = self._load(names, vectors) if has_errors else []
        lost = self._renew(names, vectors) if has_errors else []
        size = sum(vector.numel() for vector in vectors)
        row_bytes = count_shard_bytes(size, n, bits)
        num_blocks = row_bytes // (4 + BLOCK * bits // 8)
        if core is not None:
            counts, num = _counts(vectors), len(vectors)
            sent = self._payload(names[0], n * row_bytes, vectors[0], torch.uint8).view(n, row_bytes)
            result = torch.empty(row_bytes, dtype=torch.uint8)
            where = _addresses(vectors), _addresses(errors), _addresses(lost), counts, num
            core.pln_quantize(*where, bits, n * num_blocks, sent.data_ptr())
            received = (yield SWAP, sent).contiguous()
            arguments = received.data_ptr(), n, bits, num_blocks, result.data_ptr(), _addresses(lost), counts, num
            core.pln_average_quantized(*arguments, self.rank * num_blocks * BLOCK)
            gathered = (yield GATHER, result).contiguous()
            whole = gathered.data_ptr(), bits, n * num_blocks, _addresses(vectors), counts, num
            self._finite.append(bool(core.pln_dequantize(*whole)))
            return
        flat = torch.cat(list(vectors))
        if has_errors:
            flat += torch.cat(errors)
        parts = functional.pad(flat, (0, n * num_blocks * BLOCK - size)).view(n, -1)
        sent = quantize(parts, bits)
        parts -= dequantize(sent, bits)
        received = yield SWAP, sent
        total, *others = dequantize(received, bits)
        for other in others:
            total = total + other
        total = total * (1 / n)
        result = quantize(total[None], bits)
        parts[self.rank] += (total - dequantize(result, bits)[0]) * n
        if has_errors:
            _spread(parts.view(-1)[:size], lost)
        gathered = yield GATHER, result[0]
        _spread(dequantize(gathered, bits).view(-1)[:size], vectors)
        self._finite.append(_are_finite(_scales(gathered, bits)))


class TopK(Codec):
    """The largest elements of each gradient, with their places. The rest waits in the error. With `dgc`, momentum is
    applied before (Deep Gradient Compression): then the optimizer must have none."""

    def _average(self, names: Sequence[str], vectors: Vectors, shapes: Sequence[torch.Size]) -> Exchange:
        n, strategy, density = self.world_size, self.strategy, self._density(self._step)
        speeds: list[torch.Tensor] = []
        if strategy.dgc:
            speeds = self._renew(names, vectors, "momentum ")
            for vector, old, speed in zip(vectors, self._load(names, vectors, "momentum "), speeds, strict=True):
                vector.copy_(torch.mul(old, strategy.dgc, out=speed).add_(vector))
        errors = self._load(names, vectors) if strategy.feedback else [torch.zeros(0)] * len(vectors)
        rests = self._renew(names, vectors) if strategy.feedback else list(vectors)
        places, values = [], []
        for vector, error, rest in zip(vectors, errors, rests, strict=True):
            place = add_and_find(vector, error, rest, count_kept(vector.numel(), density))
            places.append(place.int())
            values.append(rest[place])
        payload = torch.cat([torch.cat(values).mul_(1 / n).view(torch.int32), torch.cat(places)])
        for place, rest in zip(places, rests, strict=True):
            rest[place] = 0
        for place, speed in zip(places, speeds, strict=False):
            speed[place] = 0
        gathered = yield GATHER, payload
        rows = [row.view(2, -1) for row in gathered]
        sizes = [place.numel() for place in places]
        for index, row in enumerate(rows):
            for vector, value, place in zip(vectors, row[0].split(sizes), row[1].split(sizes), strict=True):
                if index == 0:  # not added to zeros: that would change the sign of a zero
                    vector.zero_().index_copy_(0, place.long(), value.view(torch.float32))
                else:
                    vector.index_add_(0, place, value.view(torch.float32))
        self._finite.append(_are_finite(*(row[0].view(torch.float32) for row in rows)))

    def _density(self, step: int) -> float:
        """DGC's warm-up: from a quarter of the elements down to the share, in equal factors."""
        amount, warmup = self.strategy.amount, self.strategy.warmup
        return max(amount, 0.25 * (amount / 0.25) ** (step / warmup)) if step < warmup else amount


class PowerSGD(Codec):
    """Matrices as a product of two thin ones, by one step of power iteration from the factor of the step before. All
    else is sent as it is."""

    def _average(self, names: Sequence[str], vectors: Vectors, shapes: Sequence[torch.Size]) -> Exchange:
        n, rank, has_errors = self.world_size, int(self.strategy.amount), self.strategy.feedback
        found = [as_matrix(shape, rank) for shape in shapes]
        thin = [(name, vector, shape) for name, vector, shape in zip(names, vectors, found, strict=True) if shape]
        rest = [vector for vector, shape in zip(vectors, found, strict=True) if not shape]
        sent_names, sent = [name for name, _, _ in thin], [vector for _, vector, _ in thin]
        if has_errors and sent:
            torch._foreach_add_(sent, self._load(sent_names, sent))
        matrices = [vector.view(shape[:2]) for _, vector, shape in thin]
        rights = [self._first(name, matrix, shape[2]) for (name, _, shape), matrix in zip(thin, matrices, strict=True)]
        lefts = [matrix @ right.t() for matrix, right in zip(matrices, rights, strict=True)]
        total = yield SUM, torch.cat([*(left.view(-1) for left in lefts), *rest]).mul_(1 / n)
        pieces = total.split([left.numel() for left in lefts] + [vector.numel() for vector in rest])
        for vector, piece in zip(rest, pieces[len(lefts) :], strict=True):
            vector.copy_(piece)
        checked = [total]
        if thin:
            bases = [orthonormalize(piece.view_as(left)) for piece, left in zip(pieces, lefts, strict=False)]
            rights = [base.t() @ matrix for matrix, base in zip(matrices, bases, strict=True)]
            total = yield SUM, torch.cat([right.view(-1) for right in rights]).mul_(1 / n)
            checked.append(total)
            parts = total.split([right.numel() for right in rights])
            rights = [part.view_as(right) for part, right in zip(parts, rights, strict=True)]
            self._new_common |= dict(zip(sent_names, rights, strict=True))
            lost = self._renew(sent_names, sent) if has_errors else [None] * len(sent)
            for pair in zip(matrices, lost, bases, rights, strict=True):
                _subtract_product(*pair)
        self._finite.append(_are_finite(*checked))

    def _first(self, name: str, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The factor of the step before, or a random one that is the same on all ranks, from a generator of its own."""
        known = self._common.get(name)
        if known is not None and known.shape == (rank, matrix.size(1)):
            return known.to(matrix)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        first = torch.randn(rank, matrix.size(1), generator=torch.Generator().manual_seed(seed)).to(matrix)
        self._common[name] = first
        return first


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
    """Rows of bytes: for each block its scale in float32, and its numbers; of 4 bits, the first half of the block in
    the lower ones. What `pln_quantize` does in one pass. A block that is not finite is NaN for the receiver."""
    blocks = parts.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    is_usable = torch.isfinite(scale) & (scale > _LEAST_SCALE)
    numbers = torch.where(is_usable, blocks * (1 / torch.where(is_usable, scale, 1)), 0).round_().to(torch.int8)
    if bits == 4:
        low, high = numbers.view(-1, 2, BLOCK // 2).unbind(1)
        numbers = (low & 15) | (high << 4)
    return torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1).view(parts.size(0), -1)


def dequantize(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows that `quantize` was given, rounded."""
    numbers = rows.reshape(-1, 4 + BLOCK * bits // 8)[:, 4:].view(torch.int8)
    if bits == 4:
        numbers = torch.cat([(numbers << 4) >> 4, numbers >> 4], 1)
    return (numbers * _scales(rows, bits)).view(rows.size(0), -1)


def _scales(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return rows.reshape(-1, 4 + BLOCK * bits // 8)[:, :4].contiguous().view(torch.float32)


def add_and_find(values: torch.Tensor, errors: torch.Tensor, into: torch.Tensor, count: int) -> torch.Tensor:
    """Write the sum of both (without errors, the values) to `into`, which may be the values, and return the places of
    the `count` elements that are largest in magnitude."""
    size = values.numel()
    if values.device.type != "cpu" or size <= _SAMPLED or count >= size // 8:
        _add(values, errors, into)
        whole = torch.arange(size, device=values.device)
        return whole if count >= size else into.abs().topk(count, sorted=False).indices
    every = size // _SAMPLES | 1  # odd: not in step with the rows of a matrix
    sample = values[::every].abs() if not errors.numel() else (values[::every] + errors[::every]).abs()
    expected = count / size * sample.numel()
    threshold = sample.topk(math.ceil(1.3 * expected + 3 * math.sqrt(expected)) + 4).values[-1]
    room = 4 * count + 4096
    if errors.numel() and (core := _core([values])) is not None:
        places = torch.empty(room, dtype=torch.int32)
        addresses = (tensor.data_ptr() for tensor in (values, errors, into))
        found = core.pln_select(*addresses, size, float(threshold), places.data_ptr(), room)
        candidates = places[: min(found, room)].long()
    else:
        _add(values, errors, into)
        candidates = (~(into.abs() < threshold)).nonzero().view(-1)  # with NaN, which must be seen by all ranks
        found = candidates.numel()
    if count <= found <= room:
        return candidates[into[candidates].abs().topk(count, sorted=False).indices]
    return into.abs().topk(count, sorted=False).indices


def _add(values: torch.Tensor, errors: torch.Tensor, into: torch.Tensor) -> None:
    if errors.numel():
        torch.add(values, errors, out=into)
    elif into is not values:
        into.copy_(values)


def orthonormalize(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal base of the columns; NaN where the matrix is not finite, which the factorisation refuses."""
    if matrix.device.type == "cpu" and not _are_finite(matrix):
        return torch.full_like(matrix, torch.nan)
    base: torch.Tensor = torch.linalg.qr(matrix).Q
    return base


def _subtract_product(matrix: torch.Tensor, lost: torch.Tensor | None, base: torch.Tensor, right: torch.Tensor) -> None:
    """The matrix becomes the product, and what it had more goes to `lost`."""
    if (core := _core([matrix])) is not None:
        base, right, into = base.contiguous(), right.contiguous(), 0 if lost is None else lost.data_ptr()
        sizes = *matrix.shape, right.size(0)
        core.pln_subtract_product(matrix.data_ptr(), base.data_ptr(), right.data_ptr(), *sizes, into)
        return
    product = base @ right
    if lost is not None:
        torch.sub(matrix, product, out=lost.view_as(matrix))
    matrix.copy_(product)


def _are_finite(*tensors: torch.Tensor) -> Any:
    """Whether all numbers are; on a GPU as a tensor there."""
    marks = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    return bool(marks) if marks.device.type == "cpu" else marks


def _spread(flat: torch.Tensor, vectors: Vectors) -> None:
    for vector, part in zip(vectors, flat.split([vector.numel() for vector in vectors]), strict=True):
        vector.copy_(part.view(vector.shape))


@functools.cache
def _library() -> ctypes.CDLL | None:
    return None if native.why_not() else native.load_library()


def _core(vectors: Vectors) -> ctypes.CDLL | None:
    """The compiled core, for vectors on the CPU and where there is one."""
    return _library() if all(vector.device.type == "cpu" for vector in vectors) else None


def _addresses(vectors: Vectors) -> Any:
    return (ctypes.c_void_p * len(vectors))(*(vector.data_ptr() for vector in vectors)) if vectors else None


def _counts(vectors: Vectors) -> Any:
    return (ctypes.c_uint64 * len(vectors))(*(vector.numel() for vector in vectors))
