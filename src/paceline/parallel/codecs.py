"""Gradient compression with error feedback: bfloat16, int8 and int4 blocks, top-k, and PowerSGD.

A codec averages one bucket in a generator. It yields messages, each a collective's name and a tensor, and receives the
collective's result. The same code therefore runs between ranks, with futures (`Exchanges`), and for replicas in one
process (`run_together`). On a GPU nothing here makes the host wait, and a bucket is handled as one vector: each call
launches a kernel, and a launch takes longer than processing most gradients.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.strategy import BLOCK, QUANTIZED_BITS, Strategy, as_matrix, count_kept, count_shard_bytes, is_sent_whole
from paceline.transport import native

SUM, GATHER, SWAP = "all-reduce", "all-gather", "all-to-all"
SCATTER = "reduce-scatter"  # not supported by every backend: each rank gets its row, summed over the ranks
MOMENTUM = "momentum "  # prefix of a parameter's name in `errors`: DGC's momentum
Exchange = Generator[tuple[str, torch.Tensor], torch.Tensor, None]
Vectors = Sequence[torch.Tensor]
Sizes = Sequence[int]
# Up to this size, top-k examines all elements; beyond it, only those above a threshold estimated from a sample.
_SAMPLED = 1 << 16
_SAMPLES = 1 << 14
# A smaller scale has no finite inverse: such blocks are sent as zeros.
_LEAST_SCALE = 1e-37


class Codec:
    """Averages gradients over the ranks, in place. `errors` contains the residuals (gradients not sent yet), by
    parameter name and on the scale of gradients. `common` is state that is equal on all ranks. A step updates both only
    if all its averages are finite; otherwise no rank applies the averages. Read and set both between steps."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # dtypes of vectors; other gradients are converted to the first
    kinds: tuple[str, ...] = (SUM,)  # the collectives that the codec uses

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        self.strategy, self.rank, self.world_size = strategy, rank, world_size
        self._errors: dict[str, torch.Tensor] = {}
        self._common: dict[str, torch.Tensor] = {}
        # The step in flight: new state by name, and which averages are finite. Next, memory for the following step.
        self._new_errors: dict[str, torch.Tensor] = {}
        self._new_common: dict[str, torch.Tensor] = {}
        self._finite: list[Any] = []
        self._spare: dict[str, torch.Tensor] = {}
        self._payloads: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()  # payloads in use in this step
        self._step = -1

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        self._commit()
        return self._errors

    @errors.setter
    def errors(self, errors: dict[str, torch.Tensor]) -> None:
        self._commit()
        self._errors = errors

    @property
    def common(self) -> dict[str, torch.Tensor]:
        self._commit()
        return self._common

    @common.setter
    def common(self, common: dict[str, torch.Tensor]) -> None:
        self._commit()
        self._common = common

    @property
    def memory_bytes(self) -> int:
        """Bytes kept between steps, including memory for the next residuals."""
        kept = (self._errors, self._common, self._new_errors, self._new_common, self._spare, self._payloads)
        return sum(tensor.nbytes for tensors in kept for tensor in tensors.values())

    def rescale(self, names: Sequence[str], factor: Any) -> None:
        """Multiply these parameters' residuals by `factor`, the ratio of the last learning rate to the next one."""
        errors = self.errors
        found = [errors[name] for name in names if name in errors]
        if isinstance(factor, torch.Tensor):  # a tensor on a GPU, which `_foreach_mul_` rejects
            for error in found:
                error.mul_(factor)
        elif found:
            torch._foreach_mul_(found, factor)

    def discard(self, names: Sequence[str] | None = None) -> None:
        """Undo the last step for these parameters (default: all), because its averages are not applied."""
        if names is None:
            names = [key.rpartition(" ")[2] for key in (*self._new_errors, *self._new_common)]
            self._finite = []
        for kind in ("", MOMENTUM):
            found = {kind + name: self._new_errors.pop(kind + name, None) for name in names}
            self._spare |= {name: value for name, value in found.items() if value is not None}
        for name in names:
            self._new_common.pop(name, None)

    def average(self, names: Sequence[str], grads: Vectors, step: int) -> Exchange:
        """Average `grads`, the gradients of one bucket, over the ranks, in place. `step` counts from 0."""
        if self.strategy.codec == "dense":
            for dtype in dict.fromkeys(grad.dtype for grad in grads if grad.numel()):  # in their own precision
                same = [grad for grad in grads if grad.dtype == dtype]
                total = yield SUM, torch.cat([grad.reshape(-1) for grad in same]).mul_(1 / self.world_size)
                _spread(total, same)
            return
        if step != self._step:
            self._payloads = {name: self._payloads[name] for name in self._used}
            self._used.clear()
        if step != self._step or not self._new_errors.keys().isdisjoint(names):
            self._commit()
            self._step = step
        # Views where possible, so that computations run in the gradients' own memory.
        known = self.dtypes if len({grad.dtype for grad in grads}) == 1 else self.dtypes[:1]
        flat = (grad.detach().reshape(-1) for grad in grads)
        vectors = [vector if vector.dtype in known else vector.to(known[0]) for vector in flat]
        if any(vector.numel() for vector in vectors):
            yield from self._average(names, vectors, [grad.shape for grad in grads])
        moved = [(g, v.view(g.shape)) for g, v in zip(grads, vectors, strict=True) if v.data_ptr() != g.data_ptr()]
        _copy_all(moved)

    def _average(self, names: Sequence[str], vectors: list[torch.Tensor], shapes: Sequence[torch.Size]) -> Exchange:
        """Average the vectors in place, or replace them in the list with their averages."""
        raise NotImplementedError

    def check(self, averages: torch.Tensor) -> None:
        """Include `averages` in this step's check for values that are not finite."""
        if self.strategy.codec not in ("dense", "bf16"):  # these keep no state
            self._finite.append(_are_finite(averages))

    def _load(self, names: Sequence[str], vectors: Vectors, kind: str = "") -> list[torch.Tensor]:
        """The residuals of these parameters."""
        for name, vector in zip(names, vectors, strict=True):
            known = self._errors.get(kind + name)
            if known is None:
                self._errors[kind + name] = torch.zeros_like(vector)
            elif known.device != vector.device:
                self._errors[kind + name] = known.to(vector.device)
        return [self._errors[kind + name] for name in names]

    def _renew(self, names: Sequence[str], vectors: Vectors, kind: str = "") -> list[torch.Tensor]:
        """Memory for the step's new residuals, to be filled before the exchange ends."""
        for name, vector in zip(names, vectors, strict=True):
            spare = self._spare.pop(kind + name, None)
            fits = spare is not None and spare.device == vector.device and spare.numel() == vector.numel()
            self._new_errors[kind + name] = spare if fits and spare is not None else torch.empty_like(vector)
        return [self._new_errors[kind + name] for name in names]

    def _keep(self, names: Sequence[str], flat: torch.Tensor, sizes: Sizes, kind: str = "") -> None:
        """Store the step's new residuals, concatenated in one vector."""
        for name, part in zip(names, flat.split(list(sizes)), strict=True):
            self._spare.pop(kind + name, None)
            self._new_errors[kind + name] = part

    def _payload(self, name: str, size: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a bucket's message, keyed by its first parameter. Allocating it would cost as much as a copy."""
        known = self._payloads.get(name)
        self._used.add(name)
        if known is None or known.numel() != size or known.device != like.device:
            known = self._payloads[name] = torch.zeros(size, dtype=dtype, device=like.device)
        return known

    def _commit(self) -> None:
        """Keep the step's new state if all its averages are finite. Otherwise keep the state before the step."""
        errors, common, finite = self._new_errors, self._new_common, self._finite
        self._new_errors, self._new_common, self._finite = {}, {}, []
        on_gpu = [mark for mark in finite if isinstance(mark, torch.Tensor)]
        if on_gpu:  # select on the GPU, so that the host does not wait
            is_finite = torch.stack([mark.view(()) for mark in on_gpu]).all()
            self._errors |= _choose(is_finite, errors, self._errors)
            self._common |= _choose(is_finite, common, self._common)
            return
        if all(finite):
            self._spare |= {name: self._errors[name] for name in errors if name in self._errors}
            self._errors |= errors
            self._common |= common
        else:
            self._spare |= errors


class BFloat16(Codec):
    """Halves the bytes. Divides before rounding, sums in float32, and rounds once more. The message is the only extra
    memory; contiguous bfloat16 gradients are sent in place."""

    sums_precisely = False  # whether the all-reduce itself adds in float32 and rounds once
    dtypes = (torch.float32, torch.bfloat16)
    kinds = (SUM, SWAP, GATHER)

    def _average(self, names: Sequence[str], vectors: list[torch.Tensor], shapes: Sequence[torch.Size]) -> Exchange:
        n, runs = self.world_size, [_join(run) for run in _list_runs(vectors)]
        size = sum(run.numel() for run in runs)
        in_parts = n > 2 and not self.sums_precisely  # a ring would round at every hop
        room = size + (-size % n if in_parts else 0)
        if len(runs) == 1 and room == size and runs[0].dtype == torch.bfloat16:
            sent = runs[0].mul_(1 / n)
        else:
            sent = self._encode(names[0], runs, room)
        if in_parts:
            received = yield SWAP, sent.view(n, -1)
            gathered = yield GATHER, _sum_rows(received).bfloat16()
            total = gathered.view(-1)[:size]
        else:
            total = yield SUM, sent
        if total.data_ptr() != runs[0].data_ptr():
            _spread(total[:size], runs)

    def _encode(self, name: str, runs: Vectors, room: int) -> torch.Tensor:
        core = _core(runs) if runs[0].dtype == torch.float32 else None
        if _is_on_cpu(runs):
            sent = self._payload(name, room, runs[0], torch.bfloat16)
        else:
            sent = runs[0].new_empty(room, dtype=torch.bfloat16)
        *parts, rest = sent.split([*(run.numel() for run in runs), room - sum(run.numel() for run in runs)])
        rest.zero_()
        for run, part in zip(runs, parts, strict=True):
            if core is None:
                torch.mul(run, 1 / self.world_size, out=part)
            else:
                core.pln_to_bf16(run.data_ptr(), 1 / self.world_size, run.numel(), part.data_ptr())
        return sent


class Quantized(Codec):
    """int8 or int4 with one scale per block. Each rank sums its shard of the vector in float32 and sends the result
    quantized as well. The owner of a shard adds the quantization error of the result, times the number of ranks, to its
    residual."""

    kinds = (SUM, SWAP, GATHER)

    def _average(self, names: Sequence[str], vectors: list[torch.Tensor], shapes: Sequence[torch.Size]) -> Exchange:
        n, bits, core = self.world_size, QUANTIZED_BITS[self.strategy.codec], _core(vectors)
        has_errors, sizes = self.strategy.feedback, [vector.numel() for vector in vectors]
        errors, size = self._load(names, vectors) if has_errors else [], sum(sizes)
        row_bytes = count_shard_bytes(size, n, bits)
        num_blocks = row_bytes // (4 + BLOCK * bits // 8)
        if core is not None:
            counts, num = _counts(vectors), len(vectors)
            lost = self._renew(names, vectors) if has_errors else []
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
        flat = _join(vectors) + _join(errors) if has_errors else _join(vectors)
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
            self._keep(names, parts.view(-1)[:size], sizes)
        gathered = yield GATHER, result[0]
        average, mark = _once(
            gathered, lambda: (dequantize(gathered, bits).view(-1)[:size], _are_finite(_scales(gathered, bits)))
        )
        vectors[:] = average.split(sizes)
        self._finite.append(mark)


class TopK(Codec):
    """Sends the largest elements of each gradient with their indices. The rest is the residual. Biases and norms
    are sent whole. `dgc` applies Nesterov momentum first (Deep Gradient Compression): the optimizer must then use no
    momentum."""

    kinds = (SUM, GATHER)

    def _average(self, names: Sequence[str], vectors: list[torch.Tensor], shapes: Sequence[torch.Size]) -> Exchange:
        density = self.strategy.find_density(self._step)
        chosen = [index for index, shape in enumerate(shapes) if not is_sent_whole(shape)]
        others = [index for index, shape in enumerate(shapes) if is_sent_whole(shape)]
        large = [vectors[index] for index in chosen]
        small = [vectors[index] for index in others]
        sizes = [vector.numel() for vector in large]
        counts = [count_kept(size, density) for size in sizes]
        nothing = vectors[0][:0]
        places, values = self._choose([names[index] for index in chosen], large, counts) if large else (nothing,) * 2
        whole = self._add_momentum([names[index] for index in others], small)[0] if small else nothing
        sent = torch.cat([values, whole]).mul_(1 / self.world_size)
        gathered = yield GATHER, torch.cat([sent.view(torch.int32), places.int()])
        rows, where = gathered[:, : sent.numel()].view(torch.float32), gathered[:, sent.numel() :]
        some, rest = rows[:, : values.numel()], rows[:, values.numel() :]
        if _is_on_cpu(vectors):
            for vector, part, place in zip(large, some.split(counts, 1), where.split(counts, 1), strict=True):
                _add_up(vector.zero_(), part, place)
            if small:
                _spread(_add_rows(rest), small)
        else:
            average, means = _once(gathered, lambda: (_place(some, where, sizes, counts), _add_rows(rest)))
            found = *average.split(sizes), *means.split([vector.numel() for vector in small])
            for number, mean in zip((*chosen, *others), found, strict=True):
                vectors[number] = mean
        self._finite.append(_are_finite(rows))

    def _add_momentum(self, names: Sequence[str], vectors: Vectors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Concatenate gradients. With `dgc`, add their new momentum, which is also returned."""
        flat = _join(vectors)
        if not self.strategy.dgc:
            return flat, None
        speed = _join(self._load(names, vectors, MOMENTUM)) * self.strategy.dgc + flat
        self._keep(names, speed, [vector.numel() for vector in vectors], MOMENTUM)
        return flat + speed * self.strategy.dgc, speed

    def _choose(self, names: Sequence[str], vectors: Vectors, counts: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of each gradient to send: indices and values. Keeps the rest. On a CPU it handles one gradient
        at a time, without concatenating them; on a GPU it uses few kernel launches."""
        sizes = [vector.numel() for vector in vectors]
        feedback, speed = self.strategy.feedback, None
        if not _is_on_cpu(vectors):
            flat, speed = self._add_momentum(names, vectors)
            if feedback:
                flat = flat + _join(self._load(names, vectors))
                self._keep(names, flat, sizes)
            places = find_largest(flat, sizes, counts)
            where = places + _list_starts(sizes, counts, flat.device)
            values = flat[where]
            for kept in (flat if feedback else None, speed):
                if kept is not None:
                    kept.index_fill_(0, where, 0)
            return places, values
        if self.strategy.dgc:
            flat, speed = self._add_momentum(names, vectors)
            vectors = flat.split(sizes)
        errors = self._load(names, vectors) if feedback else [torch.zeros(0)] * len(vectors)
        rests = self._renew(names, vectors) if feedback else list(vectors)
        found = [add_and_find(*one) for one in zip(vectors, errors, rests, counts, strict=True)]
        values = torch.cat([rest[place] for place, rest in zip(found, rests, strict=True)])
        for parts in (rests,) if speed is None else (rests, speed.split(sizes)):
            for place, part in zip(found, parts, strict=True):
                part[place] = 0
        return torch.cat(found), values


class PowerSGD(Codec):
    """Sends each matrix as a product of two thin factors, from one power iteration that starts at the last step's
    factor. Everything else is sent uncompressed."""

    def _average(self, names: Sequence[str], vectors: list[torch.Tensor], shapes: Sequence[torch.Size]) -> Exchange:
        n, feedback, on_cpu = self.world_size, self.strategy.feedback, _is_on_cpu(vectors)
        found = {index: as_matrix(shape, int(self.strategy.amount)) for index, shape in enumerate(shapes)}
        thin = {index: shape for index, shape in found.items() if shape is not None}
        rest = [index for index in found if index not in thin]
        # On a GPU, matrices of one shape form one tensor, because each call is a launch. On a CPU each matrix is a
        # separate tensor and stays in its own memory.
        order = list(thin) if on_cpu else sorted(thin, key=lambda index: thin[index])
        own_names, own = [names[index] for index in order], [vectors[index] for index in order]
        sizes = [vector.numel() for vector in own]
        flat = vectors[0][:0] if on_cpu or not own else _join(own)
        if feedback and on_cpu and own:
            torch._foreach_add_(own, self._load(own_names, own))
        elif feedback and own:
            flat = flat + _join(self._load(own_names, own))
        parts = own if on_cpu else flat.split(sizes)
        matrices: list[torch.Tensor] = []
        rights: list[torch.Tensor] = []
        for _, members in itertools.groupby(range(len(order)), lambda at: at if on_cpu else thin[order[at]]):
            alike = list(members)
            rows, columns, rank = thin[order[alike[0]]]
            matrices.append(_join([parts[at] for at in alike]).view(-1, rows, columns))
            rights.append(torch.stack([self._first(own_names[at], matrices[-1][0], rank) for at in alike]))
        lefts = [matrix @ right.mT for matrix, right in zip(matrices, rights, strict=True)]
        exact = [vectors[index] for index in rest]
        total = yield SUM, torch.cat([*(left.view(-1) for left in lefts), *exact]).mul_(1 / n)
        pieces = total.split([*(left.numel() for left in lefts), *(vector.numel() for vector in exact)])
        for index, piece in zip(rest, pieces[len(lefts) :], strict=True):
            vectors[index] = piece
        if not own:
            self._finite.append(_are_finite(total))
            return
        sums = [piece.view_as(left) for piece, left in zip(pieces, lefts, strict=False)]
        orthonormalize = _orthonormalize_each if on_cpu else orthonormalize_all
        bases = _once(total, lambda: orthonormalize(sums))
        rights = [basis.mT @ matrix for basis, matrix in zip(bases, matrices, strict=True)]
        first = total
        total = yield SUM, torch.cat([right.view(-1) for right in rights]).mul_(1 / n)
        self._finite.append(_are_finite(first, total))
        shares = total.split([right.numel() for right in rights])
        rights = [share.view_as(right) for share, right in zip(shares, rights, strict=True)]
        self._new_common |= zip(own_names, (one for right in rights for one in right.unbind()), strict=True)
        if on_cpu:
            lost = self._renew(own_names, own) if feedback else [None] * len(own)
            for matrix, residual, basis, right in zip(matrices, lost, bases, rights, strict=True):
                _subtract_product(matrix[0], residual, basis[0], right[0])
            return
        products = _once(
            total, lambda: torch.cat([(basis @ right).view(-1) for basis, right in zip(bases, rights, strict=True)])
        )
        if feedback:
            self._keep(own_names, flat - products, sizes)
        for index, product in zip(order, products.split(sizes), strict=True):
            vectors[index] = product

    def _first(self, name: str, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The last step's factor; initially a random one from a dedicated generator, equal on all ranks."""
        known = self._common.get(name)
        if known is not None and known.shape == (rank, matrix.size(1)):
            if known.device != matrix.device:  # loaded from a checkpoint
                known = self._common[name] = known.to(matrix.device)
            return known.to(matrix)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        first = torch.randn(rank, matrix.size(1), generator=torch.Generator().manual_seed(seed)).to(matrix)
        self._common[name] = first
        return first


_KINDS = {"dense": Codec, "bf16": BFloat16, "int8": Quantized, "int4": Quantized, "topk": TopK, "powersgd": PowerSGD}


def build_codec(strategy: Strategy, rank: int, world_size: int) -> Codec:
    return _KINDS[strategy.codec](strategy, rank, world_size)


def run_together(exchanges: Sequence[Exchange]) -> None:
    """Run the exchanges of several replicas in one process, as separate ranks would."""
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
            values = [total] * len(tensors)  # codecs do not modify the shared total
        elif kind == GATHER:
            values = [torch.stack(tensors)] * len(tensors)
        else:
            values = [torch.stack([tensor[index] for tensor in tensors]) for index in range(len(tensors))]


def reduce_scatter(
    rows: torch.Tensor, at_once: bool, name: Callable[[str], str] = str
) -> Generator[tuple[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """An exchange that returns this rank's row, summed by the backend if `at_once`, otherwise here, in rank order."""
    if at_once:
        return (yield name(SCATTER), rows)
    received = yield name(SWAP), rows
    total = received[0].float() if received.dtype in (torch.bfloat16, torch.float16) else received[0]
    for row in received[1:]:
        total = total + row
    return total.to(rows.dtype)


def quantize(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of bytes: each block has its scale in float32, then its numbers. With 4 bits, the low halves of the bytes
    hold the first half of the block. `pln_quantize` does the same in one pass. A block that is not finite decodes to
    NaN."""
    blocks = parts.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    is_usable = torch.isfinite(scale) & (scale > _LEAST_SCALE)
    numbers = torch.where(is_usable, blocks * (1 / torch.where(is_usable, scale, 1)), 0).round_().to(torch.int8)
    if bits == 4:
        low, high = numbers.view(-1, 2, BLOCK // 2).unbind(1)
        numbers = (low & 15) | (high << 4)
    return torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1).view(parts.size(0), -1)


def dequantize(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `quantize`, up to rounding."""
    numbers = rows.reshape(-1, 4 + BLOCK * bits // 8)[:, 4:].view(torch.int8)
    if bits == 4:
        numbers = torch.cat([(numbers << 4) >> 4, numbers >> 4], 1)
    return (numbers * _scales(rows, bits)).view(rows.size(0), -1)


def _scales(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return rows.reshape(-1, 4 + BLOCK * bits // 8)[:, :4].contiguous().view(torch.float32)


def add_and_find(values: torch.Tensor, errors: torch.Tensor, into: torch.Tensor, count: int) -> torch.Tensor:
    """Write the sum of values and errors (or the values, without errors) to `into`, which may be `values`. Returns the
    indices of the `count` elements with the largest magnitude."""
    size = values.numel()
    if values.device.type != "cpu" or size <= _SAMPLED or count >= size // 8:
        _add(values, errors, into)
        whole = torch.arange(size, device=values.device)
        return whole if count >= size else into.abs().topk(count, sorted=False).indices
    every = size // _SAMPLES | 1  # odd, to avoid aligning with the rows of a matrix
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
        candidates = (~(into.abs() < threshold)).nonzero().view(-1)  # includes NaN, which all ranks must see
        found = candidates.numel()
    if count <= found <= room:
        return candidates[into[candidates].abs().topk(count, sorted=False).indices]
    return into.abs().topk(count, sorted=False).indices


def _add(values: torch.Tensor, errors: torch.Tensor, into: torch.Tensor) -> None:
    if errors.numel():
        torch.add(values, errors, out=into)
    elif into is not values:
        into.copy_(values)


def find_largest(flat: torch.Tensor, sizes: Sizes, counts: Sizes) -> torch.Tensor:
    """For each part of the vector, the indices of its `counts` largest elements by magnitude, relative to the part."""
    parts = flat.abs().split(list(sizes))
    alike: dict[tuple[int, int], list[int]] = {}
    for index, key in enumerate(zip(sizes, counts, strict=True)):
        alike.setdefault(key, []).append(index)
    found: dict[int, torch.Tensor] = {}
    for (size, count), members in alike.items():
        if count >= size:
            places = torch.arange(size, device=flat.device).expand(len(members), -1)
        else:
            places = torch.stack([parts[index] for index in members]).topk(count, sorted=False).indices
        found |= zip(members, places.unbind(), strict=True)
    return torch.cat([found[index] for index in range(len(parts))])


def _list_starts(sizes: Sizes, counts: Sizes, device: torch.device) -> torch.Tensor:
    """For each element that is sent, the offset of its gradient in the joint vector."""
    starts = torch.tensor([0, *itertools.accumulate(sizes)][:-1])
    return starts.repeat_interleave(torch.tensor(counts), output_size=sum(counts)).to(device, non_blocking=True)


def _add_up(into: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scatter-add each rank's values into a vector of zeros."""
    into.index_copy_(0, places[0].long(), values[0])  # copied, because adding would lose the sign of negative zeros
    for value, place in zip(values[1:], places[1:], strict=True):
        into.index_add_(0, place, value)
    return into


def _place(values: torch.Tensor, places: torch.Tensor, sizes: Sizes, counts: Sizes) -> torch.Tensor:
    """The sum over ranks of the concatenated gradients. Indices are relative to each gradient."""
    if not sizes:
        return values.new_zeros(0)
    return _add_up(values.new_zeros(sum(sizes)), values, places + _list_starts(sizes, counts, values.device))


def orthonormalize_all(matrices: Vectors) -> list[torch.Tensor]:
    """Orthonormal bases of the column spaces, for several batches of matrices. Uses Cholesky QR in float64, twice, so
    that even nearly dependent columns become orthogonal. Exactly dependent columns end up near zero."""
    bases = [matrix.double() for matrix in matrices]
    for _ in range(2):
        inverses: dict[int, torch.Tensor] = {}
        for index, products in _group_by_rank([basis.mT @ basis for basis in bases]):
            diagonal = products.diagonal(dim1=-2, dim2=-1)
            diagonal += diagonal.sum(-1, keepdim=True) * 1e-14 + 1e-300
            factor = torch.linalg.cholesky_ex(products).L
            one = torch.eye(factor.size(-1), dtype=factor.dtype, device=factor.device)
            inverse = torch.linalg.solve_triangular(factor, one.expand_as(factor), upper=False)
            inverses |= zip(index, inverse.split([len(bases[i]) for i in index]), strict=True)
        bases = [basis @ inverses[index].mT for index, basis in enumerate(bases)]
    return [basis.float() for basis in bases]


def _group_by_rank(products: Vectors) -> list[tuple[list[int], torch.Tensor]]:
    ranks = dict.fromkeys(product.size(-1) for product in products)
    groups = [[index for index, product in enumerate(products) if product.size(-1) == rank] for rank in ranks]
    return [(group, torch.cat([products[index] for index in group])) for group in groups]


def _orthonormalize_each(matrices: Vectors) -> list[torch.Tensor]:
    """`orthonormalize_all`, faster on a CPU. NaN if a matrix is not finite, which the QR function rejects."""
    finite = [bool(torch.isfinite(matrix).all()) for matrix in matrices]
    pairs = zip(matrices, finite, strict=True)
    return [
        torch.linalg.qr(matrix).Q if is_finite else torch.full_like(matrix, torch.nan) for matrix, is_finite in pairs
    ]


def _subtract_product(
    matrix: torch.Tensor, lost: torch.Tensor | None, basis: torch.Tensor, right: torch.Tensor
) -> None:
    """Replace the matrix by the product and write the difference to `lost`."""
    if (core := _core([matrix])) is not None:
        basis, right, into = basis.contiguous(), right.contiguous(), 0 if lost is None else lost.data_ptr()
        sizes = *matrix.shape, right.size(0)
        core.pln_subtract_product(matrix.data_ptr(), basis.data_ptr(), right.data_ptr(), *sizes, into)
        return
    product = basis @ right
    if lost is not None:
        torch.sub(matrix, product, out=lost.view_as(matrix))
    matrix.copy_(product)


def _are_finite(*tensors: torch.Tensor) -> Any:
    """Whether all numbers are finite; on a GPU, as a device tensor."""
    marks = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    return bool(marks) if marks.device.type == "cpu" else marks


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum of a matrix's rows in float32, in order, without copying the matrix."""
    return rows.sum(0, dtype=torch.float32) if rows.device.type != "cpu" else _add_rows(rows)


def _add_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sum in a fixed order, because each rank computes the sum itself and devices may differ."""
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total


def _spread(flat: torch.Tensor, vectors: Vectors) -> None:
    parts = flat.split([vector.numel() for vector in vectors])
    _copy_all([(vector, part.view(vector.shape)) for vector, part in zip(vectors, parts, strict=True)])


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first, with one fused call for pairs of equal dtype and strides."""
    alike = [(to, given) for to, given in pairs if to.dtype == given.dtype and to.stride() == given.stride()]
    if alike:
        torch._foreach_copy_([to for to, _ in alike], [given for _, given in alike])
    for to, given in pairs if len(alike) < len(pairs) else ():
        if to.dtype != given.dtype or to.stride() != given.stride():
            to.copy_(given)


def _list_runs(vectors: Vectors) -> list[list[torch.Tensor]]:
    """Group vectors that follow each other in memory."""
    runs: list[list[torch.Tensor]] = []
    for vector in vectors:
        if runs and _follows(vector, runs[-1][-1]):
            runs[-1].append(vector)
        else:
            runs.append([vector])
    return runs


def _follows(vector: torch.Tensor, before: torch.Tensor) -> bool:
    is_next = vector.storage_offset() == before.storage_offset() + before.numel()
    return is_next and vector.untyped_storage()._cdata == before.untyped_storage()._cdata


def _join(vectors: Vectors) -> torch.Tensor:
    """The vectors as one: a view if they are contiguous in memory, otherwise a copy."""
    parts = [vector.view(-1) for vector in vectors]
    if len(_list_runs(parts)) == 1:
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,), parts[0].storage_offset())
    return torch.cat(parts)


def _choose(
    is_new: torch.Tensor, new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All new values or all old ones, selected by a flag on the GPU, in few launches."""
    chosen = dict(new)
    together: dict[int, list[str]] = {}
    for name, value in new.items():
        if name in old:
            together.setdefault(value.untyped_storage()._cdata, []).append(name)
    for names in together.values():
        values = torch.where(is_new, _join([new[name] for name in names]), _join([old[name] for name in names]))
        parts = values.split([new[name].numel() for name in names])
        chosen |= {name: part.view_as(new[name]) for name, part in zip(names, parts, strict=True)}
    return chosen


def _once(message: torch.Tensor, compute: Callable[[], Any]) -> Any:
    """Cache values computed from a message, which are equal on all ranks and never modified. Replicas in one process
    receive the same tensor, so the first replica computes them for all."""
    found = vars(message)
    if "computed" not in found:
        found["computed"] = compute()
    return found["computed"]


def _is_on_cpu(vectors: Vectors) -> bool:
    return vectors[0].device.type == "cpu"


@functools.cache
def _library() -> ctypes.CDLL | None:
    return None if native.why_not() else native.load_library()


def _core(vectors: Vectors) -> ctypes.CDLL | None:
    """The compiled core; None if it is unavailable or the vectors are not on the CPU."""
    return _library() if all(vector.device.type == "cpu" for vector in vectors) else None


def _addresses(vectors: Vectors) -> Any:
    return (ctypes.c_void_p * len(vectors))(*(vector.data_ptr() for vector in vectors)) if vectors else None


def _counts(vectors: Vectors) -> Any:
    return (ctypes.c_uint64 * len(vectors))(*(vector.numel() for vector in vectors))
