"""One rank's step without communication: the simulator's job, built from profiles and from tables of layers.

For a tuning run, `predictor` fits the job together with its costs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.errors import ConfigError, RecordError
from paceline.plan import INDEX_BYTES, Gradient, Rows, are_rows_worth, compare_rows, cut_by_cap
from paceline.predict.curves import Resample
from paceline.records import LayerProfileRecord, LayerSizeRecord, LayerTimeRecord, ParameterTimes
from paceline.records.layers import OUTSIDE
from paceline.records.samples import UNSTABLE
from paceline.strategy import Message
from paceline.units import format_bytes, format_ms

GRADIENT_DTYPES = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2)}


@dataclass(frozen=True)
class Lookup:
    """The part of a gradient that comes from embedding lookups: some rows per rank, ready at the end of backward.
    `rest_s` is when the contribution of the weight's other uses is ready; None if the weight has no other uses."""

    name: str
    num_rows: int
    row_bytes: int
    rest_s: float | None = None


@dataclass(frozen=True)
class Job:
    """Gradients in ready order and the rest of the step, for a single rank. `ready_s` counts from the start of
    backward, which takes `backward_s`; `before_s` is data and forward, `after_s` the optimizer. `device` is empty if
    unknown; `notes` are the assumptions made. `lookups` are parts that `split` can send as rows: it moves them to
    `tail`, after the last bucket, each with the size of an all-reduce that moves the same number of bytes."""

    gradients: tuple[Gradient, ...]
    ready_s: tuple[float, ...]
    backward_s: float
    before_s: float = 0.0
    after_s: float = 0.0
    device: str = ""
    notes: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    tail: tuple[tuple[Lookup, int], ...] = ()
    whole: Job | None = field(default=None, compare=False)  # the job before it was split

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(gradient.num_bytes for gradient in self.gradients)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The bytes of the first k gradients, for k from 0."""
        return (0, *itertools.accumulate(self.sizes))

    @cached_property
    def latest_s(self) -> tuple[float, ...]:
        """When gradients 0 to k are all ready, for each k."""
        return tuple(itertools.accumulate(self.ready_s, max))

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """The positions of the gradients that have one part in the tail and another in a bucket."""
        names = {one.name for one, _ in self.tail if one.rest_s is not None}
        return tuple(place for place, gradient in enumerate(self.gradients) if gradient.name in names)

    @property
    def num_bytes(self) -> int:
        return self.totals[-1]

    @property
    def computing_s(self) -> float:
        """The compute time of a rank before it needs the other ranks."""
        return self.before_s + self.backward_s

    @property
    def local_s(self) -> float:
        return self.computing_s + self.after_s

    def cut(self, cap_bytes: int) -> tuple[int, ...]:
        """The bucket boundaries that torch's rule gives for this cap, as positions in the ready order."""
        return cut_by_cap(self.totals, cap_bytes)

    def accumulate(self, count: int) -> Job:
        """A step of several micro-batches; only the last backward communicates."""
        if count < 1:
            raise ConfigError(f"a step needs at least 1 micro-batch, not {count}")
        return replace(self, before_s=count * self.before_s + (count - 1) * self.backward_s)

    def stretch(self, factor: float) -> Job:
        times = {name: getattr(self, name) * factor for name in ("backward_s", "before_s", "after_s")}
        lookups = tuple(replace(one, rest_s=one.rest_s and one.rest_s * factor) for one in self.lookups)
        return replace(self, ready_s=tuple(moment * factor for moment in self.ready_s), lookups=lookups, **times)

    def split(self, world_size: int) -> Job:
        """The job with embedding lookups sent as rows, if Paceline's wrapper would do so on this number of ranks."""
        sizes = {gradient.name: gradient.num_bytes for gradient in self.gradients}
        tail, ready = list[tuple[Lookup, int]](), dict(zip(sizes, self.ready_s, strict=True))
        for one in self.lookups if world_size > 1 else ():
            share = compare_rows(one.num_rows, one.row_bytes, sizes[one.name], world_size)
            if not are_rows_worth(share, one.rest_s is None) or (one.rest_s is None and len(ready) == 1):
                continue
            message = Message("all-gather", one.num_rows * (one.row_bytes + INDEX_BYTES))
            tail.append((one, message.as_all_reduce(world_size)))
            if one.rest_s is None:
                del ready[one.name]
            else:
                ready[one.name] = min(self.backward_s, one.rest_s)
        kept = {gradient.name: gradient for gradient in self.gradients if gradient.name in ready}
        order = sorted(kept, key=ready.__getitem__) if tail else list(kept)
        moments = tuple(ready[name] for name in order)
        gradients = tuple(kept[name] for name in order)
        return replace(self, gradients=gradients, ready_s=moments, tail=tuple(tail), whole=self)

    def list_rows(self, gradients: Sequence[Gradient]) -> list[Rows]:
        place = {gradient.name: index for index, gradient in enumerate(gradients)}
        return [Rows(place[one.name], one.num_rows, one.rest_s is None) for one, _ in self.tail]

    def order(self, gradients: Sequence[Gradient]) -> list[int]:
        """The ready order as indices into `gradients`; unknown ones come last, and those only in the tail are
        omitted."""
        place = {gradient.name: index for index, gradient in enumerate(gradients)}
        order = [place[gradient.name] for gradient in self.gradients]
        known = {*order, *(part.gradient for part in self.list_rows(gradients))}
        return order + [index for index in range(len(gradients)) if index not in known]


def build_job_from_profile(record: LayerProfileRecord, gradients: str | None = None) -> Job:
    """The job of a profile, from medians; ready times are divided by the profiling overhead. `gradients` is `fp32` or
    `bf16`; None keeps the profiled dtypes. Parameters without a gradient are sent with the last bucket."""
    if gradients is not None and gradients not in GRADIENT_DTYPES:
        raise ConfigError(f"unknown gradient dtype {gradients!r}: use {', '.join(GRADIENT_DTYPES)}")
    total_s, cost = record.backward.median_s, record.backward_cost.value

    def place(moment_s: float) -> float:
        return min(total_s, moment_s / cost)

    dtype = None if gradients is None else GRADIENT_DTYPES[gradients]
    found, ready, lookups = read_parameters(record.parameters, place, total_s, record.device, dtype)
    before_s, after_s = _find_around(record, Resample())
    dtypes = sorted({gradient.dtype for gradient in found})
    size = format_bytes(sum(gradient.num_bytes for gradient in found))
    notes = [
        f"{record.model} on one {record.device} rank, batch size {record.batch_size}, {record.source}: "
        f"{len(found)} gradients, {size} in {' and '.join(dtypes)}; step {format_ms(before_s + total_s + after_s)} ms, "
        f"including {format_ms(total_s)} ms of backward; ready times divided by the profiling overhead, {cost:.3f}"
    ]
    if gradients is not None and {p.dtype for p in record.parameters} != set(dtypes):
        notes.append(f"gradients are sent in {dtypes[0]}; the conversion is assumed to be free")
    if len(dtypes) > 1:
        notes.append(f"gradients of {' and '.join(dtypes)} share buckets here, unlike in a wrapper")
    if record.unused:
        notes.append(f"{len(record.unused)} parameters never received a gradient: assumed ready at the end of backward")
    return Job(found, ready, total_s, before_s, after_s, record.device, tuple(notes), lookups)


def read_parameters(
    parameters: Sequence[ParameterTimes],
    place: Callable[[float], float],
    unused_s: float,
    device: str = "cpu",
    dtype: tuple[str, int] | None = None,
) -> tuple[tuple[Gradient, ...], tuple[float, ...], tuple[Lookup, ...]]:
    """The gradients of profiled parameters, their ready times, and their lookups. `place` maps a time in the profiled
    backward to the job's; parameters without a gradient are ready at `unused_s`. `dtype` is a name and its bytes."""
    gradients = []
    lookups = []
    for one in parameters:
        own = one.dtype, max(1, one.num_bytes // max(1, one.num_elements))
        name, item_bytes = dtype or own
        num_bytes = one.num_elements * item_bytes if dtype else one.num_bytes
        gradients.append(Gradient(one.name, num_bytes, item_bytes, name, device, one.shape))
        if one.num_rows:
            rest_s = None if one.median_rest_s is None else place(one.median_rest_s)
            lookups.append(Lookup(one.name, one.num_rows, num_bytes // one.shape[0], rest_s))
    ready = tuple(unused_s if one.median_s is None else place(one.median_s) for one in parameters)
    return tuple(gradients), ready, tuple(lookups)


def _find_around(record: LayerProfileRecord, resample: Resample) -> tuple[float, float]:
    """The time before and after backward in the plain step. Time outside any phase counts as time before backward."""
    forward_s, after_s = resample.median(record.forward), resample.median(record.optimizer)
    rest_s = max(0.0, resample.median(record.timing) - forward_s - resample.median(record.backward) - after_s)
    return forward_s + rest_s, after_s


def draw_jobs(record: LayerProfileRecord, job: Job, count: int, seed: int = 0) -> list[Job]:
    """Bootstrap draws of the job from the repetitions of its profile. They use whole repetitions, because the phases of
    one repetition are correlated, or single repetitions if the profile is unstable; ready times scale with backward."""
    source, draws = random.Random(seed), []
    for resample in (Resample(source, record.timing.noise > UNSTABLE) for _ in range(count)):
        total_s = resample.median(record.backward)
        before_s, after_s = _find_around(record, resample)
        drawn = replace(job.stretch(total_s / job.backward_s), backward_s=total_s, before_s=before_s, after_s=after_s)
        draws.append(replace(drawn, ready_s=tuple(min(total_s, moment) for moment in drawn.ready_s)))
    return draws


# The tensors of a GPT-2 block in the order in which their gradients are ready, with parameter counts in units of
# width^2 and of width. Ready times are proportional to the number of matrix products done by then: two per weight take
# nearly all the time.
_GPT2_BLOCK = (
    ("mlp.c_proj", 4, 1), ("mlp.c_fc", 4, 4), ("ln_2", 0, 2), ("attn.c_proj", 1, 1), ("attn.c_attn", 3, 3),
    ("ln_1", 0, 2),
)  # fmt: skip


def build_job_from_tables(
    sizes: Sequence[LayerSizeRecord], times: Sequence[LayerTimeRecord], untied: bool = False
) -> Job:
    """The job described by two tables. Layers run backward in the reverse of their order in `sizes`; a layer without a
    time is assumed to take none. If the first and the last layer of a language model have equal sizes, they are treated
    as one tied tensor, whose gradient is complete only when the first layer's is. They count as two tensors if `untied`
    is set or the `total` row includes both. Blocks of GPT-2's size are divided into their tensors, since buckets
    consist of tensors."""
    if not sizes:
        raise RecordError("no layers: the table of sizes is empty")
    totals = [record.num_params for record in sizes if record.layer.strip().lower() == "total"]
    sizes = [record for record in sizes if record.layer.strip().lower() != "total"]
    if not sizes:
        raise RecordError("no layers: the table of sizes has only a total")
    phases = {record.layer: record.timing.center_s for record in times}
    seconds = {_normalize(layer): time_s for layer, time_s in phases.items() if layer.endswith(" grad")}
    first, last = sizes[0], sizes[-1]
    is_head = "head" in last.layer.lower() and "embedding" in first.layer.lower()
    is_like_tied = is_head and last.num_params == first.num_params and len(sizes) > 1
    counts_both = sum(record.num_params for record in sizes) in totals
    is_tied = is_like_tied and not untied and not counts_both
    notes: list[str] = []
    all_params = sum(record.num_params for record in sizes) - is_tied * last.num_params
    if totals and not counts_both and totals != [all_params]:
        raise RecordError(f"the `total` row has {totals[0]:,} parameters, but the layers have {all_params:,}")
    lookups: list[Lookup] = []
    if is_tied:
        known = "the total counts one" if totals else "assumed, since their sizes are equal; --untied counts both"
        once = f"are one tied tensor ({known}): counted once, ready at the end of backward"
        notes.append(f"{last.layer} and {first.layer} {once}")
    elif is_like_tied:
        why = "as specified" if untied else "the total counts both"
        notes.append(f"{last.layer} and {first.layer} are two tensors ({why})")
    if untimed := [record.layer for record in sizes if _normalize(record.layer) not in seconds]:
        notes.append(f"no times for {', '.join(untimed)}: assumed to take 0 s")
    unknown = sorted(set(seconds) - {_normalize(record.layer) for record in sizes})
    if unknown and set(untimed) - {OUTSIDE}:  # otherwise they are assumed to have no parameters
        raise RecordError(f"no sizes for the timed layers {', '.join(unknown)}")
    if unknown:
        notes.append(f"no size for {', '.join(unknown)}: assumed to have no parameters")
    gradients, ready = [], []
    widths = {width for record in sizes if (width := _find_width(record))}
    now_s, taken_apart, factor = 0.0, 0, 1.0
    for record in reversed(sizes):
        took_s = seconds.get(_normalize(record.layer), 0.0)
        pieces = _take_apart(record)
        if is_tied and record is last and widths:
            lookups = [Lookup(first.layer, 0, 4 * widths.pop(), now_s + took_s)]
        taken_apart += len(pieces) > 1
        if not (is_tied and record is last):
            gradients += [Gradient(name, num_params * 4) for name, num_params, _ in pieces]
            ready += [now_s + share * took_s for _, _, share in pieces]
        now_s += took_s
    if now_s == 0:
        raise RecordError("no layer times: each layer needs a row `NAME grad` with the seconds of its backward")
    if taken_apart:
        notes.append(f"{taken_apart} blocks are divided into GPT-2's tensors, ready in proportion to matrix products")
    # The `backward` row is the time outside any layer. In some tables it is only the time of the call, which on a GPU
    # is microseconds.
    whole_s = now_s + phases.get("backward", 0.0) + math.fsum(seconds[layer] for layer in unknown)
    if whole_s > 1.001 * now_s:
        took = f"layers with gradients take {format_ms(now_s)} of {format_ms(whole_s)} ms of backward"
        notes.append(f"{took}; the rest is distributed in proportion")
        factor = whole_s / now_s
        ready, now_s = [ready_s * factor for ready_s in ready], whole_s
    size = format_bytes(sum(gradient.num_bytes for gradient in gradients))
    notes.append(f"{len(gradients)} gradients, {size} in float32; backward takes {format_ms(now_s)} ms on one rank")
    around_s = phases.get("forward", 0.0), phases.get("step", 0.0)
    lookups = [replace(one, rest_s=(one.rest_s or 0.0) * factor) for one in lookups]
    return Job(tuple(gradients), tuple(ready), now_s, *around_s, notes=tuple(notes), lookups=tuple(lookups))


def _normalize(layer: str) -> str:
    name = layer.removesuffix(" grad").strip().lower().replace(" ", "_")
    return "ln_f" if name == "layernorm_final" else name


def _find_width(record: LayerSizeRecord) -> int:
    """The width w of a GPT-2 block, which has 12 w^2 + 13 w parameters; 0 for other layers."""
    near = round(math.sqrt(record.num_params / 12))
    widths = [w for w in (near - 1, near, near + 1) if w > 0 and 12 * w**2 + 13 * w == record.num_params]
    return widths[0] if widths and "block" in record.layer.lower() else 0


def _take_apart(record: LayerSizeRecord) -> list[tuple[str, int, float]]:
    """(name, parameters, fraction of the layer's backward) per tensor. A weight and its bias are ready together."""
    width = _find_width(record)
    if not width:
        return [(record.layer, record.num_params, 1.0)]
    work = list(itertools.accumulate(squares for _, squares, _ in _GPT2_BLOCK))
    pieces = []
    for (name, squares, lines), done in zip(_GPT2_BLOCK, work, strict=True):
        name, share = f"{record.layer}.{name}", done / work[-1]
        if squares:
            pieces.append((f"{name}.weight", squares * width**2, share))
        pieces.append((f"{name}.bias" if squares else name, lines * width, share))
    return pieces
