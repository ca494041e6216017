"""A backward pass from tables of layers: sizes and times by name become gradients with the moments they are ready.

Reading the tables is in `records.exchange`. A profile of our own has ready times already and does not come this way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RecordError
from paceline.plan import Gradient
from paceline.predict.simulate import Backward
from paceline.records import LayerSizeRecord, LayerTimeRecord
from paceline.units import format_bytes, format_ms

__all__ = ["LayerwiseModel", "build_layerwise_model"]

_ITEM_BYTES = 4
_SYNONYMS = {"layernorm_final": "ln_f"}
# The tensors of a GPT-2 block in the order in which their gradients are ready, as (multiples of width^2, of width),
# and the share of the block's backward that has passed by then. Matrix products take the time: two for each weight.
_GPT2_BLOCK = (
    ("mlp.c_proj", 4, 1), ("mlp.c_fc", 4, 4), ("ln_2", 0, 2), ("attn.c_proj", 1, 1), ("attn.c_attn", 3, 3),
    ("ln_1", 0, 2),
)  # fmt: skip


@dataclass(frozen=True)
class LayerwiseModel:
    """Gradients in ready order with their moments, and what had to be assumed. Times are of one rank alone."""

    gradients: tuple[Gradient, ...]
    ready_s: tuple[float, ...]
    backward: Backward
    notes: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        return [gradient.num_bytes for gradient in self.gradients]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


def build_layerwise_model(sizes: Sequence[LayerSizeRecord], times: Sequence[LayerTimeRecord]) -> LayerwiseModel:
    """Layers run backward in the reverse of their order in `sizes`; one without a time is taken to need none.

    Two layers of equal size at both ends of a language model are one tied tensor, whose gradient is complete only when
    the first layer's is. A block of GPT-2's size is taken apart into its tensors, for buckets are made of those.
    """
    if not sizes:
        raise RecordError("no layers: the table of sizes is empty")
    seconds = {_normalize(record.layer): _median(record) for record in times if record.layer.endswith(" grad")}
    notes: list[str] = []
    tied = _find_tied(sizes)
    if tied is not None:
        notes.append(
            f"{tied.layer} and {sizes[0].layer} are one tied tensor: counted once, ready at the end of backward"
        )
    untimed = [record.layer for record in sizes if _normalize(record.layer) not in seconds]
    if untimed:
        notes.append(f"no times for {', '.join(untimed)}: taken as 0, at their place in backward")
    unknown = sorted(set(seconds) - {_normalize(record.layer) for record in sizes})
    if unknown:
        raise RecordError(f"times for layers that have no size: {', '.join(unknown)}")
    gradients: list[Gradient] = []
    ready: list[float] = []
    now_s = 0.0
    taken_apart = 0
    for record in reversed(sizes):
        took_s = seconds.get(_normalize(record.layer), 0.0)
        pieces = _take_apart(record)
        taken_apart += len(pieces) > 1
        for name, num_params, share in pieces:
            if record is not tied:
                gradients.append(Gradient(name, num_params * _ITEM_BYTES))
                ready.append(now_s + share * took_s)
        now_s += took_s
    if taken_apart:
        notes.append(f"{taken_apart} blocks taken apart into GPT-2's tensors; ready by their share of matrix products")
    phases = {record.layer: _median(record) for record in times}
    backward = Backward(tuple(ready), now_s, phases.get("forward", 0.0), phases.get("step", 0.0))
    notes.append(
        f"{len(gradients)} gradients, {format_bytes(sum(g.num_bytes for g in gradients))} in float32; "
        f"backward of one rank {format_ms(now_s)} ms"
    )
    return LayerwiseModel(tuple(gradients), tuple(ready), backward, tuple(notes))


def _normalize(layer: str) -> str:
    name = layer.removesuffix(" grad").strip().lower().replace(" ", "_")
    return _SYNONYMS.get(name, name)


def _median(record: LayerTimeRecord) -> float:
    timing = record.timing
    value = timing.median_s if timing.median_s is not None else timing.mean_s
    if value is None:
        raise RecordError(f"{record.layer} has neither a median nor a mean")
    return value


def _find_tied(sizes: Sequence[LayerSizeRecord]) -> LayerSizeRecord | None:
    """The head of a language model, where it is as large as the embedding that it shares."""
    first, last = sizes[0], sizes[-1]
    is_head = "head" in last.layer.lower() and "embedding" in first.layer.lower()
    return last if is_head and last.num_params == first.num_params and len(sizes) > 1 else None


def _take_apart(record: LayerSizeRecord) -> list[tuple[str, int, float]]:
    """(name, parameters, share of the layer's backward) for each tensor; weights and biases of one layer go together.

    A block of width w has 12 w^2 + 13 w parameters.
    """
    width = round(math.sqrt(record.num_params / 12))
    for candidate in (width - 1, width, width + 1):
        if (
            candidate > 0
            and 12 * candidate**2 + 13 * candidate == record.num_params
            and "block" in record.layer.lower()
        ):
            work = list(itertools.accumulate(squares for _, squares, _ in _GPT2_BLOCK))
            pieces = []
            for (name, squares, lines), done in zip(_GPT2_BLOCK, work, strict=True):
                share = done / work[-1]
                if squares:
                    pieces.append((f"{record.layer}.{name}.weight", squares * candidate**2, share))
                    pieces.append((f"{record.layer}.{name}.bias", lines * candidate, share))
                else:
                    pieces.append((f"{record.layer}.{name}", lines * candidate, share))
            return pieces
    return [(record.layer, record.num_params, 1.0)]
