"""A backward pass from a profile of layers: gradients with the moments at which they are ready when nobody looks.

Measuring the profile is in `measure`; tables of layers come through `layerwise`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import ConfigError, RecordError
from paceline.plan import Gradient
from paceline.predict.layerwise import LayerwiseModel
from paceline.predict.simulate import Backward
from paceline.records import LayerProfileRecord
from paceline.units import format_bytes, format_ms

__all__ = ["GRADIENT_DTYPES", "build_backward", "draw_backwards"]

GRADIENT_DTYPES = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2)}


def build_backward(record: LayerProfileRecord, gradients: str | None = None) -> LayerwiseModel:
    """Gradients in ready order, and the plain step around them, by medians.

    Ready times are the profiled ones divided by what profiling cost. `gradients` is `fp32` or `bf16`; None leaves them
    as they were. A parameter that never had a gradient travels with the last.
    """
    if gradients is not None and gradients not in GRADIENT_DTYPES:
        raise ConfigError(f"gradients in {gradients!r}: known are {', '.join(GRADIENT_DTYPES)}")
    total_s, cost = record.backward.median_s, record.backward_cost.value
    if total_s <= 0 or cost <= 0:
        raise RecordError(f"{record.model}: a backward of {total_s} s hides nothing: profile a model that computes")
    found: list[Gradient] = []
    ready: list[float] = []
    for parameter in record.parameters:
        median_s = parameter.median_s
        ready.append(total_s if median_s is None else min(total_s, median_s / cost))
        if gradients is None:
            item_bytes = max(1, parameter.num_bytes // max(1, parameter.num_elements))
            found.append(Gradient(parameter.name, parameter.num_bytes, item_bytes, parameter.dtype, record.device))
        else:
            dtype, item_bytes = GRADIENT_DTYPES[gradients]
            found.append(
                Gradient(parameter.name, parameter.num_elements * item_bytes, item_bytes, dtype, record.device)
            )
    before_s, after_s = _around(record, range(record.timing.count))
    dtypes = sorted({gradient.dtype for gradient in found})
    num_bytes = sum(gradient.num_bytes for gradient in found)
    notes = [
        f"{record.model} on one {record.device} rank, batch size {record.batch_size}, {record.source}: "
        f"{len(found)} gradients, {format_bytes(num_bytes)} in {' and '.join(dtypes)}; step "
        f"{format_ms(before_s + total_s + after_s)} ms, of which backward {format_ms(total_s)} ms; "
        f"ready times divided by the profiler's cost, {cost:.3f}"
    ]
    if gradients is not None and {p.dtype for p in record.parameters} != set(dtypes):
        notes.append(f"gradients sent in {dtypes[0]}: the conversion is taken to cost nothing")
    if len(dtypes) > 1:
        notes.append(f"gradients of {' and '.join(dtypes)} share buckets here; in a wrapper they do not")
    if record.unused:
        notes.append(f"{len(record.unused)} parameters never had a gradient: taken as ready at the end of backward")
    return LayerwiseModel(tuple(found), tuple(ready), Backward(tuple(ready), total_s, before_s, after_s), tuple(notes))


def _around(record: LayerProfileRecord, repetitions: Sequence[int]) -> tuple[float, float]:
    """(what comes before backward, what comes after it) in the plain step; what is in no phase counts as before."""

    def median(name: str) -> float:
        times: tuple[float, ...] = getattr(record, name).reduced_s
        return statistics.median(times[number] for number in repetitions)

    after_s = median("optimizer")
    rest_s = max(0.0, median("timing") - median("forward") - median("backward") - after_s)
    return median("forward") + rest_s, after_s


def draw_backwards(record: LayerProfileRecord, model: LayerwiseModel, count: int, seed: int = 0) -> list[Backward]:
    """The same backward as other repetitions might have given it: a bootstrap over those of the profile.

    Whole repetitions are drawn, for their phases are slow together; ready times stretch with backward.
    """
    source = random.Random(seed)
    numbers = range(record.timing.count)
    draws = []
    for _ in range(count):
        chosen = source.choices(numbers, k=len(numbers))
        total_s = statistics.median(record.backward.reduced_s[number] for number in chosen)
        before_s, after_s = _around(record, chosen)
        stretch = total_s / model.backward.total_s
        ready = tuple(min(total_s, moment * stretch) for moment in model.ready_s)
        draws.append(replace(model.backward, ready_s=ready, total_s=total_s, before_s=before_s, after_s=after_s))
    return draws
