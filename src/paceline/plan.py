"""Buckets and plans: pure functions from gradients in ready order to a Plan, for the wrapper and the simulator."""

from __future__ import annotations

import bisect
import itertools
import json
import sys
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.errors import ConfigError, RecordError
from paceline.units import MIB, format_bytes

# Defaults of torch's DistributedDataParallel. An explicit `bucket_cap_mb` also applies to the first bucket.
TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES = 25 * MIB, MIB
FORMAT, VERSION = "paceline-plan", 1
# Bytes of a row index.
INDEX_BYTES = 4
# Rows are sent if they take at most this fraction of the dense bytes. If the gradient has other parts, it is also sent
# dense, so its rows are additional bytes.
_WORTH_ALONE, _WORTH_WITH_OTHERS = 0.5, 0.25


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter. Buckets have one dtype and device. `shape` is empty if unknown."""

    name: str
    num_bytes: int
    item_bytes: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    shape: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.item_bytes

    @property
    def family(self) -> tuple[str, str]:
        return self.dtype, self.device


@dataclass(frozen=True)
class Piece:
    """Bytes `start_bytes` to `end_bytes` of the gradient with this index in `Plan.gradients`."""

    gradient: int
    start_bytes: int
    end_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, in ready order."""

    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True)
class Rows:
    """The part of a gradient that comes from embedding lookups, sent after the last bucket as rows of the batch: about
    `num_rows` on any rank. With `is_all`, the gradient has no other part and is in no bucket."""

    gradient: int
    num_rows: int
    is_all: bool = False


def compare_rows(num_rows: int, row_bytes: int, dense_bytes: int, world_size: int) -> float:
    """Bytes per link for gathering this many rows from each rank, relative to a dense all-reduce."""
    return world_size * num_rows * (row_bytes + INDEX_BYTES) / max(1, 2 * dense_bytes)


def are_rows_worth(share: float, is_all: bool) -> bool:
    """Whether a plan sends rows that take this fraction of the dense bytes."""
    return share <= (_WORTH_ALONE if is_all else _WORTH_WITH_OTHERS)


@dataclass(frozen=True)
class Plan:
    """All gradients (in model order) and their buckets (in launch order). Every byte of every gradient is in exactly
    one bucket, except for gradients that are sent only as `rows`. `rule` describes how the plan was made."""

    gradients: tuple[Gradient, ...]
    buckets: tuple[Bucket, ...]
    rule: str = ""
    rows: tuple[Rows, ...] = ()

    def __post_init__(self) -> None:
        found: dict[int, list[Piece]] = {}
        for number, bucket in enumerate(self.buckets):
            families = set()
            for piece in bucket.pieces:
                if not 0 <= piece.gradient < len(self.gradients):
                    raise ConfigError(f"bucket {number} refers to gradient {piece.gradient} of {len(self.gradients)}")
                gradient = self.gradients[piece.gradient]
                families.add(gradient.family)
                if piece.start_bytes % gradient.item_bytes or piece.end_bytes % gradient.item_bytes:
                    raise ConfigError(f"bucket {number} splits an element of {gradient.name}")
                found.setdefault(piece.gradient, []).append(piece)
            if len(families) != 1:
                raise ConfigError(f"bucket {number} is empty or mixes dtypes or devices: {sorted(families)}")
        alone = self.alone
        for index, gradient in enumerate(self.gradients):
            if index in alone and index not in found:
                continue
            if gradient.num_bytes < 0 or gradient.item_bytes < 1 or gradient.num_bytes % gradient.item_bytes:
                size = f"{gradient.num_bytes} bytes, not a multiple of {gradient.item_bytes}"
                raise ConfigError(f"{gradient.name} has {size}")
            end = 0
            for piece in sorted(found.get(index, ()), key=lambda piece: (piece.start_bytes, piece.end_bytes)):
                if piece.start_bytes != end or piece.end_bytes < end:
                    raise ConfigError(f"the plan omits or duplicates bytes of {gradient.name} at byte {end}")
                end = piece.end_bytes
            if end != gradient.num_bytes or index not in found or index in alone:
                raise ConfigError(f"the plan contains {end} of the {gradient.num_bytes} bytes of {gradient.name}")

    @property
    def alone(self) -> frozenset[int]:
        """The gradients that have no bucket."""
        return frozenset(part.gradient for part in self.rows if part.is_all)

    @property
    def num_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        return tuple(bucket.num_bytes for bucket in self.buckets)

    @property
    def is_split(self) -> bool:
        return sum(len(bucket.pieces) for bucket in self.buckets) > len(self.gradients) - len(self.alone)

    @property
    def partition(self) -> tuple[tuple[int, ...], ...]:
        """The gradient indices of each bucket. Two caps that produce the same partition are the same plan."""
        return tuple(tuple(piece.gradient for piece in bucket.pieces) for bucket in self.buckets)

    def without_rows(self, gradients: Collection[int]) -> Plan:
        """The plan in which these gradients are sent whole, in a bucket."""
        buckets = list(self.buckets)
        for index in sorted(self.alone & set(gradients)):
            whole = Piece(index, 0, self.gradients[index].num_bytes)
            family = self.gradients[index].family
            last = self.gradients[buckets[-1].pieces[0].gradient].family if buckets else None
            if last == family:
                buckets[-1] = Bucket((*buckets[-1].pieces, whole))
            else:
                buckets.append(Bucket((whole,)))
        rows = tuple(part for part in self.rows if part.gradient not in gradients)
        return replace(self, buckets=tuple(buckets), rows=rows)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            document = json.loads(text)
            if (document["format"], document["version"]) != (FORMAT, VERSION):
                found = f"{document['format']!r} of version {document['version']!r}"
                raise RecordError(f"not a plan of version {VERSION}: {found}; tune again to write one", code="version")
            gradients = tuple(Gradient(**g | {"shape": tuple(g["shape"])}) for g in document["gradients"])
            buckets = tuple(Bucket(tuple(Piece(**piece) for piece in b["pieces"])) for b in document["buckets"])
            return cls(gradients, buckets, document["rule"], tuple(Rows(**part) for part in document["rows"]))
        except (ConfigError, RecordError):
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"not a plan: {type(error).__name__}: {error}") from None

    def as_torch_kwargs(self) -> dict[str, Any]:
        """Arguments that make torch's DistributedDataParallel use this plan, from its second iteration on:
        `bucket_cap_mb` if one cap suffices, otherwise `bucket_cap_mb_list` (torch 2.13). ConfigError if torch cannot
        express the plan: it never splits a gradient, and applies caps to each dtype separately."""
        if self.rows:
            raise ConfigError("torch's wrapper cannot send embedding rows, but this plan does")
        if self.is_split:
            raise ConfigError("torch's wrapper cannot split a gradient across buckets, but this plan does")
        order = [index for indices in self.partition for index in indices]
        # A bucket closes when its size reaches the cap, so the cap is at most its size but more than its size without
        # the last gradient.
        low = max((bucket.num_bytes - bucket.pieces[-1].num_bytes + 1 for bucket in self.buckets), default=1)
        high = min(self.bucket_bytes[:-1], default=max(low, self.num_bytes))
        uniform = [high] if low <= high else []
        for caps in (uniform, list(self.bucket_bytes)):
            if caps and plan_like_torch(self.gradients, order, caps).partition == self.partition:
                sizes = [cap / MIB for cap in caps]  # exact: a division by a power of two
                return {"bucket_cap_mb": sizes[0]} if caps is uniform else {"bucket_cap_mb_list": sizes}
        raise ConfigError("torch's bucketing rule cannot produce this plan for its mix of dtypes")

    @property
    def fits_torch(self) -> bool:
        try:
            return bool(self.as_torch_kwargs())
        except ConfigError:
            return False


def plan_like_torch(
    gradients: Sequence[Gradient], ready_order: Iterable[int],
    caps_bytes: Sequence[int] = (TORCH_FIRST_CAP_BYTES, TORCH_CAP_BYTES), rows: Sequence[Rows] = (),
    keeps_rows: bool = False,
) -> Plan:  # fmt: skip
    """The buckets of torch's DistributedDataParallel after its rebuild, from the gradients in ready order. For each
    dtype and device: append gradients, and close the bucket once its size reaches the cap. A bucket therefore
    overshoots by up to one gradient, and no gradient is split. Each family goes through the caps separately, and the
    last cap applies to all further buckets. Buckets are in closing order, followed by those that never closed.
    Gradients that are sent only as `rows` have no bucket. Late rows are dropped unless `keeps_rows`."""
    if not caps_bytes or min(caps_bytes) < 1:
        raise ConfigError(f"bucket caps {list(caps_bytes)}: pass at least one, each of at least 1 byte")
    alone = {part.gradient for part in rows if part.is_all}
    order = [index for index in ready_order if index not in alone]
    if sorted([*order, *alone]) != list(range(len(gradients))):
        raise ConfigError(f"the ready order must list each of the {len(gradients)} gradients once, not {len(order)}")
    open_: dict[tuple[str, str], list[Piece]] = {}
    num_closed: Counter[tuple[str, str]] = Counter()
    buckets: list[Bucket] = []
    for index in order:
        family = gradients[index].family
        pieces = open_.setdefault(family, [])
        pieces.append(Piece(index, 0, gradients[index].num_bytes))
        if sum(piece.num_bytes for piece in pieces) >= caps_bytes[min(num_closed[family], len(caps_bytes) - 1)]:
            buckets.append(Bucket(tuple(open_.pop(family))))
            num_closed[family] += 1
    buckets += [Bucket(tuple(pieces)) for pieces in open_.values()]
    caps = ", ".join(format_bytes(cap) for cap in caps_bytes)
    plan = Plan(tuple(gradients), tuple(buckets), f"torch's rule, caps {caps}", tuple(rows))
    return plan if keeps_rows else drop_late_rows(plan, order)


def find_late(partition: Sequence[Container[int]], last: int, tied: Iterable[int]) -> set[int]:
    """The `tied` gradients in the bucket of gradient `last`, which is ready last, or in a later one. Buckets are sent
    in order, so sending such a gradient in two parts takes more bytes without being any earlier."""
    first = next((number for number, bucket in enumerate(partition) if last in bucket), len(partition))
    return {index for index in tied if any(index in bucket for bucket in partition[first:])}


def drop_late_rows(plan: Plan, ready_order: Sequence[int]) -> Plan:
    """Drop row transfers that cannot pay off: gradients whose dense part is late are sent whole."""
    tied = [part.gradient for part in plan.rows if not part.is_all]
    return plan.without_rows(find_late(plan.partition, ready_order[-1], tied)) if tied else plan


def plan_torch_start(gradients: Sequence[Gradient], rows: Sequence[Rows] = (), is_limited: bool = False) -> Plan:
    """The buckets of the first step, before the ready order is known: one per dtype and device, or several if
    limited."""
    cap_bytes = TORCH_CAP_BYTES if is_limited else sys.maxsize
    whole = plan_like_torch(gradients, range(len(gradients)), [cap_bytes], rows)
    return replace(whole, buckets=whole.buckets[::-1], rule="torch's first iteration: one bucket per dtype")


def cut_by_cap(totals: Sequence[int], cap_bytes: int) -> tuple[int, ...]:
    """The number of gradients up to each bucket's end, by torch's rule. `totals[k]` is the size of the first k
    gradients."""
    cuts, place, count = [], 0, len(totals) - 1
    while place < count:
        place = min(count, bisect.bisect_left(totals, totals[place] + cap_bytes, lo=place + 1))
        cuts.append(place)
    return tuple(cuts)


def cut_like(totals: Sequence[int], bucket_bytes: Iterable[int]) -> tuple[int, ...]:
    """Cut gradients into buckets of about these sizes: the number of gradients up to the end of each bucket."""
    count = len(totals) - 1
    ends = itertools.accumulate(bucket_bytes)
    return tuple(sorted({count, *(min(count, max(1, bisect.bisect_left(totals, end))) for end in ends)}))


def plan_by_cuts(
    gradients: Sequence[Gradient], ready_order: Sequence[int], cuts: Sequence[int], rule: str, rows: Sequence[Rows] = ()
) -> Plan:
    """The plan whose buckets end after these numbers of gradients in ready order, which leaves out gradients that are
    sent only as `rows`. Late rows are dropped (`drop_late_rows`)."""
    pieces = [Piece(index, 0, gradients[index].num_bytes) for index in ready_order]
    edges = [0, *sorted(set(cuts) | {len(pieces)})]
    buckets: list[Bucket] = []
    for start, end in itertools.pairwise(edges):
        # Gradients of different dtypes cannot share a bucket, so a cut makes one bucket per dtype.
        families: dict[tuple[str, str], list[Piece]] = {}
        for piece in pieces[start:end]:
            families.setdefault(gradients[piece.gradient].family, []).append(piece)
        buckets += [Bucket(tuple(together)) for together in families.values()]
    return drop_late_rows(Plan(tuple(gradients), tuple(buckets), rule, tuple(rows)), ready_order)
