"""Layer profiles: when each gradient became ready, how long each block took, and the numbers derived from that.

Files of other formats are in `exchange`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import RecordError
from paceline.records.kinds import LayerSizeRecord, LayerTimeRecord, Record
from paceline.records.samples import Samples, quantile

# The name for what belongs to no block: parameters of the model itself, and the time between blocks.
OUTSIDE = "outside"


def _check_seconds(name: str, values: Iterable[float | None]) -> None:
    for value in values:
        if value is not None and (type(value) not in (float, int) or not 0 <= value < math.inf):
            raise RecordError(f"{name} has the time {value!r}; it must be finite and not negative")


@dataclass(frozen=True)
class ParameterTimes:
    """When the gradient of a parameter became ready: `ready_s[repetition]` seconds after backward began; None if it did
    not.

    `aliases` are further names of the same tensor. `block` is the first block that contains it, empty if none does.
    """

    name: str
    num_bytes: int
    num_elements: int
    dtype: str
    block: str
    ready_s: tuple[float | None, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready_s", tuple(self.ready_s))  # JSON has lists
        object.__setattr__(self, "aliases", tuple(self.aliases))
        _check_seconds(self.name, self.ready_s)
        if self.num_bytes < 0 or self.num_elements < 0:
            raise RecordError(f"{self.name} has {self.num_elements} elements in {self.num_bytes} bytes")

    @property
    def median_s(self) -> float | None:
        """Over the repetitions in which it had a gradient; None if it never had one."""
        known = [value for value in self.ready_s if value is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block in every repetition; 0 if it was not called, or got no gradient.

    Backward lasts from the gradient of the block's output to that of its input, including recomputed activations.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
            _check_seconds(f"{self.name}.{field}", getattr(self, field))


@dataclass(frozen=True)
class CostRatio:
    """Profiled over plain time in the same repetition: the median, and its spread from p10 to p90."""

    value: float
    p10: float
    p90: float

    @property
    def is_clear(self) -> bool:
        """Whether 1 lies outside the spread."""
        return not self.p10 <= 1 <= self.p90


def _compare(profiled: Samples, plain: Samples) -> CostRatio:
    pairs = zip(profiled.reduced_s, plain.reduced_s, strict=True)
    ratios = [here / there for here, there in pairs if there > 0] or [1.0]
    return CostRatio(statistics.median(ratios), quantile(ratios, 0.1), quantile(ratios, 0.9))


@dataclass(frozen=True, kw_only=True)
class LayerProfileRecord(Record):
    """Steps of a bare model on one device, plain and profiled in turns.

    `timing`, `forward`, `backward` and `optimizer` are the plain steps, without the profiler. `parameters` and `blocks`
    are of the profiled steps, whose own times are `profiled_*`. Repetitions with the same number are neighbours in
    time. `parameters` are in the order in which their gradients become ready, by median; those without a gradient come
    last. `blocks` are in the order of the model's definition. On CUDA all times are the device's. Frozen parameters are
    left out.
    """

    kind: ClassVar[str] = "layer_profile"
    model: str
    device: str
    dtype: str
    batch_size: int
    parameters: tuple[ParameterTimes, ...]
    blocks: tuple[BlockTimes, ...]
    timing: Samples
    forward: Samples
    backward: Samples
    optimizer: Samples
    profiled_step: Samples
    profiled_forward: Samples
    profiled_backward: Samples

    def __post_init__(self) -> None:
        super().__post_init__()
        count, names = self.timing.count, [block.name for block in self.blocks]
        if not self.parameters or self.batch_size < 1 or self.timing.median_s <= 0:
            raise RecordError(
                f"{self.model} with {len(self.parameters)} trained parameters and {self.batch_size} samples in "
                f"{self.timing.median_s} s are not valid: all must be positive"
            )
        if len(set(names)) < len(names) or OUTSIDE in names:
            raise RecordError(
                f"{self.model}: the blocks {', '.join(names)} must have different names, and none may be {OUTSIDE!r}"
            )
        for phase in ("forward", "backward", "optimizer", "profiled_step", "profiled_forward", "profiled_backward"):
            samples: Samples = getattr(self, phase)
            if (samples.count, samples.num_ranks, self.timing.num_ranks) != (count, 1, 1):
                raise RecordError(f"{self.model}: {phase} has other repetitions than the step, or several ranks")
        for parameter in self.parameters:
            if parameter.block and parameter.block not in names:
                raise RecordError(f"{parameter.name} is in the block {parameter.block!r}, which does not exist")
            self._check_within(parameter.name, parameter.ready_s, self.profiled_backward)
        medians = [math.inf if p.median_s is None else p.median_s for p in self.parameters]
        if medians != sorted(medians):
            raise RecordError(f"{self.model}: the parameters are not in ready order")
        for phase in ("forward", "backward"):
            rows = [getattr(block, f"{phase}_s") for block in self.blocks]
            if any(len(row) != count for row in rows):
                raise RecordError(f"{self.model}: a block has other repetitions than the step")
            sums = [math.fsum(values) for values in zip(*rows, strict=True)]
            self._check_within(
                f"the sum of all blocks' {phase}", sums or [0.0] * count, getattr(self, f"profiled_{phase}")
            )

    def _check_within(self, what: str, values: Sequence[float | None], whole: Samples) -> None:
        if len(values) != whole.count:
            raise RecordError(f"{self.model}: {what} has {len(values)} repetitions and the step has {whole.count}")
        for value, (limit,) in zip(values, whole.seconds, strict=True):
            if value is not None and value > limit * (1 + 1e-6) + 1e-9:
                raise RecordError(f"{self.model}: {what} is at {value} s, after the end at {limit} s")

    @property
    def num_bytes(self) -> int:
        """The bytes of all gradients; a tied parameter counts once."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def unused(self) -> tuple[ParameterTimes, ...]:
        """The parameters that never had a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.median_s is None)

    @property
    def is_order_stable(self) -> bool:
        """Whether gradients became ready in the same order in all repetitions, and the same ones in each."""
        used = [parameter for parameter in self.parameters if parameter.median_s is not None]
        if any(value is None for parameter in used for value in parameter.ready_s):
            return False
        return all(
            (here or 0.0) <= (there or 0.0)
            for first, second in itertools.pairwise(used)
            for here, there in zip(first.ready_s, second.ready_s, strict=True)
        )

    @property
    def timeline(self) -> tuple[tuple[float, int], ...]:
        """(seconds since backward began, bytes ready by then), one point per gradient, by medians.

        The seconds include the cost of the profiler: divide by `backward_cost.value` to remove it.
        """
        times = [(p.median_s, p.num_bytes) for p in self.parameters]
        used = [(time_s, num_bytes) for time_s, num_bytes in times if time_s is not None]
        ready = itertools.accumulate(num_bytes for _, num_bytes in used)
        return tuple((time_s, total) for (time_s, _), total in zip(used, ready, strict=True))

    def parameters_of(self, block: str) -> tuple[ParameterTimes, ...]:
        """The parameters of a block (for `OUTSIDE`: those in no block), in ready order."""
        wanted = "" if block == OUTSIDE else block
        return tuple(parameter for parameter in self.parameters if parameter.block == wanted)

    def ready_of(self, block: str) -> float | None:
        """When the last gradient of a block was ready; None if it has none."""
        known = [p.median_s for p in self.parameters_of(block) if p.median_s is not None]
        return max(known, default=None)

    @property
    def outside(self) -> BlockTimes:
        """The part of forward and backward that is in no block."""

        def rest(phase: str, whole: Samples) -> tuple[float, ...]:
            return tuple(
                max(0.0, total - math.fsum(getattr(block, phase)[number] for block in self.blocks))
                for number, (total,) in enumerate(whole.seconds)
            )

        return BlockTimes(OUTSIDE, rest("forward_s", self.profiled_forward), rest("backward_s", self.profiled_backward))

    @property
    def step_cost(self) -> CostRatio:
        """The cost of the profiler: profiled over plain steps."""
        return _compare(self.profiled_step, self.timing)

    @property
    def backward_cost(self) -> CostRatio:
        return _compare(self.profiled_backward, self.backward)

    @property
    def layer_sizes(self) -> tuple[LayerSizeRecord, ...]:
        """The trained elements of each block, in the order of the model's definition; a tied parameter counts once."""
        counts = [(b.name, sum(p.num_elements for p in self.parameters_of(b.name))) for b in self.blocks]
        counts.append((OUTSIDE, sum(p.num_elements for p in self.parameters_of(OUTSIDE))))
        return tuple(
            LayerSizeRecord(layer=name, num_params=count, source=self.source) for name, count in counts if count
        )

    @property
    def layer_times(self) -> tuple[LayerTimeRecord, ...]:
        """The rows of a `layer-times` file: `NAME grad` for each block, `backward` for the rest (together the
        whole backward), `forward`, and `step`, which is the optimizer."""

        def record(layer: str, values: Iterable[float]) -> LayerTimeRecord:
            timing = Samples(seconds=tuple((value,) for value in values))
            return LayerTimeRecord(layer=layer, timing=timing, source=self.source)

        return (
            record("backward", self.outside.backward_s),
            *(record(f"{block.name} grad", block.backward_s) for block in self.blocks),
            record("forward", self.forward.reduced_s),
            record("step", self.optimizer.reduced_s),
        )
