"""Plans that our planners never create but the wrapper accepts: strict caps and gradients split across buckets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from paceline.plan import Bucket, Gradient, Piece, Plan
from paceline.units import MIB


def pack(gradients: Sequence[Gradient], pieces: Iterable[Piece], cap_bytes: int) -> list[Bucket]:
    """Fill buckets in order, with one open bucket per dtype; close a bucket before it would exceed the cap."""
    open_: dict[tuple[str, str], list[Piece]] = {}
    closed: list[Bucket] = []
    for piece in pieces:
        family = gradients[piece.gradient].family
        waiting = open_.get(family, [])
        if waiting and sum(p.num_bytes for p in waiting) + piece.num_bytes > cap_bytes:
            closed.append(Bucket(tuple(waiting)))
            del open_[family]
        open_.setdefault(family, []).append(piece)
    return closed + [Bucket(tuple(waiting)) for waiting in open_.values()]


def plan_by_cap(gradients: Sequence[Gradient], ready_order: Iterable[int], cap_bytes: int) -> Plan:
    """Buckets of at most `cap_bytes`; a larger gradient gets its own bucket."""
    pieces = [Piece(index, 0, gradients[index].num_bytes) for index in ready_order]
    return Plan(tuple(gradients), tuple(pack(gradients, pieces, cap_bytes)), "at most")


def plan_in_pieces(
    gradients: Sequence[Gradient], ready_order: Iterable[int], cap_bytes: int, tail_bytes: int = MIB
) -> Plan:
    """Split gradients larger than the cap into equal pieces and end each dtype with a small bucket."""
    pieces = [piece for index in ready_order for piece in split(gradients[index], index, cap_bytes)]
    tails: dict[tuple[str, str], list[Piece]] = {}
    body: list[Piece] = []
    full: set[tuple[str, str]] = set()
    for piece in reversed(pieces):
        family = gradients[piece.gradient].family
        tail = tails.setdefault(family, [])
        if family in full or sum(p.num_bytes for p in tail) + piece.num_bytes > tail_bytes:
            full.add(family)
            body.append(piece)
        else:
            tail.append(piece)
    buckets = pack(gradients, reversed(body), cap_bytes)
    buckets += [Bucket(tuple(reversed(tail))) for tail in tails.values() if tail]
    return Plan(tuple(gradients), tuple(buckets), "split")


def split(gradient: Gradient, index: int, cap_bytes: int) -> list[Piece]:
    """The smallest number of pieces within the cap, as equal as the element size allows."""
    elements = gradient.num_bytes // gradient.item_bytes
    parts = max(1, math.ceil(elements / max(1, cap_bytes // gradient.item_bytes)))
    edges = [elements * part // parts * gradient.item_bytes for part in range(parts + 1)]
    return [Piece(index, start, end) for start, end in itertools.pairwise(edges)]
