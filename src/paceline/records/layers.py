"""Layers: rows of imported tables, and profiles of when each gradient becomes ready and how long each block takes."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from paceline.records.checked import Checked, Count, PositiveCount, Seconds, one_of
from paceline.records.kinds import Record, Timed, Timing
from paceline.records.samples import Ratio, Samples, Summary, compare_times

# Everything outside a block: parameters of the model itself, and the time between blocks.
OUTSIDE = "outside"


def _find_median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True, kw_only=True)
class LayerSizeRecord(Record):
    """The number of parameters of one layer, in model definition order."""

    kind: ClassVar[str] = "layer_size"
    layer: str
    num_params: Count


@dataclass(frozen=True, kw_only=True)
class LayerTimeRecord(Record):
    """The backward time of one layer, or the time of one phase (`forward`, `backward`, `step`)."""

    kind: ClassVar[str] = "layer_time"
    layer: str
    timing: Samples | Summary


@dataclass(frozen=True, kw_only=True)
class CapTimeRecord(Record):
    """The time of a step, or of its backward with communication, at one bucket size; `of` says which."""

    kind: ClassVar[str] = "cap_time"
    cap_bytes: PositiveCount
    of: Annotated[str, one_of(("step", "backward"))]
    timing: Timing


@dataclass(frozen=True)
class ParameterTimes(Checked):
    """When the gradient of a parameter became ready: seconds after backward began, None without a gradient. `aliases`
    are further names of the same tensor. `block` is the first block that contains it, empty if none does. `shape` is
    empty if unknown. For an embedding, `num_rows` is the number of rows that a step looked up, and `rest_s` is when the
    part of the gradient that does not come from lookups was ready, if there is one."""

    name: str
    num_bytes: Count
    num_elements: Count
    dtype: str
    block: str
    ready_s: tuple[Seconds | None, ...]
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    num_rows: int = 0
    rest_s: tuple[Seconds | None, ...] = ()

    def find_faults(self) -> Iterator[str]:
        if self.shape and math.prod(self.shape) != self.num_elements:
            yield f"{self.num_elements} elements of shape {self.shape}"

    @cached_property
    def median_s(self) -> float | None:
        """Over repetitions with a gradient; None if there was none."""
        return _find_median(self.ready_s)

    @cached_property
    def median_rest_s(self) -> float | None:
        return _find_median(self.rest_s)

    @property
    def order_s(self) -> float:
        """The median; infinite if there was never a gradient."""
        return math.inf if self.median_s is None else self.median_s

    @property
    def names(self) -> str:
        return " = ".join((self.name, *self.aliases))


@dataclass(frozen=True)
class BlockTimes(Checked):
    """Seconds of one block in every repetition; 0 if it was not called or got no gradient. Backward runs from the
    gradient of the block's output to that of its input, including recomputed activations."""

    name: str
    forward_s: tuple[Seconds, ...]
    backward_s: tuple[Seconds, ...]


def _find_late(name: str, times_s: Sequence[float | None], whole: Samples) -> Iterator[str]:
    if len(times_s) != whole.count:
        yield f"{name} differs from the steps in repetitions"
        return
    for time_s, (limit_s, *_) in zip(times_s, whole.seconds, strict=True):
        if time_s is not None and time_s > limit_s * (1 + 1e-6) + 1e-9:
            yield f"{name} takes {time_s} s of a phase of {limit_s} s"


@dataclass(frozen=True, kw_only=True)
class LayerProfileRecord(Record):
    """Interleaved plain and profiled steps of a bare model on one device. `timing`, `forward`, `backward` and
    `optimizer` are times of plain steps, without the profiler. `parameters` (in ready order, by median, without frozen
    ones) and `blocks` (in model definition order) come from the profiled steps, whose own times are `profiled_*`. On
    CUDA, all times except those of whole steps are device times."""

    kind: ClassVar[str] = "layer_profile"
    model: str
    device: str
    dtype: str
    batch_size: PositiveCount
    parameters: tuple[ParameterTimes, ...]
    blocks: tuple[BlockTimes, ...]
    timing: Timed
    forward: Samples
    backward: Samples
    optimizer: Samples
    profiled_step: Samples
    profiled_forward: Samples
    profiled_backward: Samples

    def find_faults(self) -> Iterator[str]:
        if not self.parameters:
            yield "no trained parameters"
        phases = ("forward", "backward", "optimizer", "profiled_step", "profiled_forward", "profiled_backward")
        yield from self.find_uneven(*phases)
        names = [block.name for block in self.blocks]
        if self.timing.num_ranks != 1 or len(set(names)) < len(names) or OUTSIDE in names:
            found = f"{self.timing.num_ranks} ranks, and blocks {', '.join(names)}"
            yield f"{found}: expected one rank and distinct blocks"
        for phase in ("forward", "backward"):
            rows = [getattr(block, f"{phase}_s") for block in self.blocks]
            if any(len(row) != self.timing.count for row in rows):
                yield "a block differs from the steps in repetitions"
            sums = [math.fsum(times_s) for times_s in zip(*rows, strict=True)] or [0.0] * self.timing.count
            yield from _find_late(f"the sum of all blocks' {phase}", sums, getattr(self, f"profiled_{phase}"))
        for one in self.parameters:
            if one.block and one.block not in names:
                yield f"{one.name} is in the block {one.block!r}, which does not exist"
            yield from _find_late(one.name, one.ready_s, self.profiled_backward)
        if any(first.order_s > second.order_s for first, second in itertools.pairwise(self.parameters)):
            yield "the parameters are not in ready order"

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients; a tied parameter counts once."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def unused(self) -> tuple[ParameterTimes, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.median_s is None)

    @property
    def is_order_stable(self) -> bool:
        """Whether every repetition had the same gradients, ready in the same order."""
        used = [parameter.ready_s for parameter in self.parameters if parameter.median_s is not None]
        for repetition in zip(*used, strict=True):
            known = [time_s for time_s in repetition if time_s is not None]
            if len(known) < len(used) or known != sorted(known):
                return False
        return True

    def parameters_of(self, block: str) -> tuple[ParameterTimes, ...]:
        """The parameters of a block or, for `OUTSIDE`, those outside any block, in ready order."""
        return tuple(parameter for parameter in self.parameters if (parameter.block or OUTSIDE) == block)

    def ready_of(self, block: str) -> float | None:
        """When the last gradient of a block became ready; None if the block has no gradients."""
        return max((p.median_s for p in self.parameters_of(block) if p.median_s is not None), default=None)

    @property
    def outside(self) -> BlockTimes:
        """The time of forward and backward outside all blocks."""

        def rest(phase: str, whole: Samples) -> tuple[float, ...]:
            blocks = [[getattr(block, phase)[number] for block in self.blocks] for number in range(whole.count)]
            return tuple(max(0.0, total - math.fsum(of)) for (total,), of in zip(whole.seconds, blocks, strict=True))

        return BlockTimes(OUTSIDE, rest("forward_s", self.profiled_forward), rest("backward_s", self.profiled_backward))

    @property
    def step_cost(self) -> Ratio:
        """Overhead of the profiler: profiled steps divided by plain steps of the same repetition."""
        return compare_times(self.profiled_step.reduced_s, self.timing.reduced_s)

    @property
    def backward_cost(self) -> Ratio:
        return compare_times(self.profiled_backward.reduced_s, self.backward.reduced_s)

    @property
    def layer_sizes(self) -> tuple[LayerSizeRecord, ...]:
        """The trainable elements of each block, in model definition order; a tied parameter counts once."""
        names = (*(block.name for block in self.blocks), OUTSIDE)
        counts = [(name, sum(p.num_elements for p in self.parameters_of(name))) for name in names]
        return tuple(LayerSizeRecord(layer=name, num_params=n, source=self.source) for name, n in counts if n)

    @property
    def layer_times(self) -> tuple[LayerTimeRecord, ...]:
        """The rows of a `layer-times` file: `NAME grad` for each block, `backward` for the rest (together the whole
        backward, without profiler overhead), `forward`, and `step`, which is the optimizer."""
        rows = {"backward": self.outside.backward_s} | {f"{block.name} grad": block.backward_s for block in self.blocks}
        times = {layer: tuple(s / self.backward_cost.value for s in seconds) for layer, seconds in rows.items()}
        times |= {"forward": self.forward.reduced_s, "step": self.optimizer.reduced_s}
        return tuple(
            LayerTimeRecord(layer=layer, timing=Samples(tuple((value,) for value in values)), source=self.source)
            for layer, values in times.items()
        )


@dataclass(frozen=True, kw_only=True)
class CodecRecord(Record):
    """The computing time of a strategy's codec for gradients of `num_bytes`, as on `world_size` ranks, with synthetic
    messages. `parts` are the seconds before the first message and after each one; the ranks computed together."""

    kind: ClassVar[str] = "codec"
    strategy: str
    device: str
    world_size: PositiveCount
    num_bytes: PositiveCount
    num_buckets: PositiveCount
    parts: tuple[Samples, ...]
