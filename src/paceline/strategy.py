"""Communication strategies: the messages of a data-parallel step, their schedule, and the placement of optimizer state.
Imports no torch.

A strategy is written as parts joined by `+`, each with an optional number and options: `powersgd:4`, `topk:0.001,dgc`,
`diloco:100,lr=0.7+int8`, `zero1+bf16`. Its traffic depends only on sizes (`Strategy.traffic`), so the simulator and the
wrapper count the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.errors import ConfigError
from paceline.plan import Gradient
from paceline.records.samples import group_by

# Elements per block of int8 and int4. Each block has a scale of 4 bytes.
BLOCK = 256
# Bytes per element that top-k sends: the value and its index in the bucket.
ENTRY_BYTES = 8
# Vectors longer than this are not biases or norms, so top-k selects elements from them as well.
_LARGEST_WHOLE = 1 << 16
# Cache line size. No two ranks write to one line, and shards of a bucket start at aligned addresses.
LINE_BYTES = 64
QUANTIZED_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Message:
    """One collective (`all-reduce`, `all-gather`, `all-to-all` or `reduce-scatter`), and the bytes that each rank
    passes to it. With two levels, `ranks` is the number of participants (0: all); if it `is_inside`, they are on one
    host."""

    kind: str
    num_bytes: int
    ranks: int = 0
    is_inside: bool = False

    def sent_bytes(self, world_size: int) -> int:
        """Bytes that a rank sends, and receives, in the optimal algorithm (a ring for an all-reduce)."""
        n = self.ranks or world_size
        parts = {"all-reduce": 2, "all-gather": n, "all-to-all": 1, "reduce-scatter": 1}
        return -(-parts[self.kind] * (n - 1) * self.num_bytes // n)

    def as_all_reduce(self, world_size: int) -> int:
        """The size of the all-reduce that transfers the same number of bytes."""
        n = self.ranks or world_size
        return math.ceil(self.sent_bytes(n) * n / (2 * (n - 1))) if n > 1 else self.num_bytes


@dataclass(frozen=True)
class Strategy:
    """A strategy consists of four choices. `codec`: `dense`, `bf16`, `int8`, `int4`, `topk` or `powersgd`; `amount` is
    top-k's density or PowerSGD's rank. `period`: 1 sends gradients in every step; a longer period sends parameter
    differences every `period` steps, applied by the optimizer `outer` (`localsgd`, `slowmo` or `diloco`). `is_sharded`:
    each rank keeps and updates its shard of the optimizer state (ZeRO-1). `between_hosts`: gradients are dense inside a
    host, and the strategy applies between hosts."""

    codec: str = "dense"
    amount: float = 0.0
    feedback: bool = True
    dgc: float = 0.0
    warmup: int = 0
    outer: str = ""
    period: int = 1
    after: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5
    is_sharded: bool = False
    between_hosts: bool = False

    @classmethod
    def parse(cls, text: str | Strategy | None) -> Strategy:
        """Parse a strategy; ConfigError explains the problem with the text."""
        if text is None:
            return cls()
        if isinstance(text, Strategy):
            return text._confirm()
        if not isinstance(text, str):
            raise ConfigError(f"strategy {text!r}: pass a text such as 'int8', or a Strategy", code="strategy")
        found: dict[str, Any] = {}
        seen: dict[str, str] = {}
        for word in text.replace(" ", "").split("+"):
            head, *options = word.split(",")
            name, colon, number = head.partition(":")
            if name not in _PARTS:
                raise _reject(text, f"{name!r} is unknown; use {', '.join(_PARTS)}")
            part = _PARTS[name]
            if part.slot in seen:
                raise _reject(text, f"{seen[part.slot]} and {name} cannot be combined; choose one")
            seen[part.slot] = name
            found |= part.read(text, name, colon + number, options)
        strategy = cls(**found)
        if "mixing" in found and not strategy.delay:
            raise _reject(text, "mixing has no effect without a delay; add delay=STEPS, or leave mixing out")
        strategy.check()
        return strategy

    @property
    def text(self) -> str:
        """The canonical text, which is the same for equal strategies."""
        words: list[str] = []
        codec = "" if self.codec == "dense" else self.codec
        for name in (self.outer, "zero1" * self.is_sharded, codec, "hosts" * self.between_hosts):
            if name:
                part = _PARTS[name]
                word = name + (f":{_show(getattr(self, part.number))}" if part.number else "")
                for key, implied in part.options.items():
                    value = getattr(self, key)
                    if value != part.fixed.get(key, _DEFAULTS[key]):
                        word += f",{key}" if value == implied else f",{key}={_show(value)}"
                words.append(word)
        return "+".join(words) or "dense"

    def _confirm(self) -> Strategy:
        """Reject a Strategy that cannot be written as text."""
        known = all(name in _PARTS for name in (self.codec, self.outer or self.codec))
        if not known or self.parse(self.text) != self:
            raise ConfigError(f"{self!r}: not a valid combination; use Strategy.parse('...')", code="strategy")
        return self

    def check(self) -> None:
        """Reject undefined combinations."""
        is_lossy = self.codec in ("topk", "powersgd")
        powersgd_rank = self.amount if self.codec == "powersgd" else 1
        cases = (
            (self.outer and is_lossy, f"{self.codec} cannot be combined with {self.outer}; use bf16, int8 or int4"),
            (
                self.outer and self.is_sharded,
                f"zero1 needs the gradients of every step, but {self.outer} sends none; choose one",
            ),
            (
                self.is_sharded and self.codec not in ("dense", "bf16"),
                "zero1 needs exact sums; use it alone or with bf16",
            ),
            (self.codec == "topk" and not 0 < self.amount <= 1, "top-k needs a density above 0 and at most 1"),
            (powersgd_rank < 1 or powersgd_rank % 1 > 0, "the rank must be an integer of at least 1"),
            (self.delay >= self.period, f"delay={self.delay} must be below the period of {self.period} steps"),
            (
                self.dgc > 0 and not self.feedback,
                "dgc needs the residuals that feedback=0 drops; leave one out",
            ),
            (max(self.dgc, self.momentum) >= 1, "a momentum of 1 grows without bound; it must be below 1"),
            (
                self.between_hosts and self.outer,
                f"{self.outer} does not average gradients inside a host; leave out +hosts",
            ),
            (self.between_hosts and self.is_sharded, "zero1 shards over all ranks; leave out +hosts or zero1"),
            (self.outer and not self.lr, "with lr=0 a round changes nothing; it must be above 0"),
            (self.fragments > self.period, f"more fragments than steps in a period ({self.period})"),
        )
        for is_undefined, why in cases:
            if is_undefined:
                raise _reject(self.text, why)

    @property
    def is_dense(self) -> bool:
        """Whether this strategy is a plain all-reduce of every gradient in every step."""
        return self == DENSE

    def count_sent_bytes(
        self, gradients: Sequence[Gradient], world_size: int, ranks_per_host: int = 1, num_steps: int = 0
    ) -> float:
        """Mean bytes per step that a rank sends, if each dtype is one bucket: over a period, or over the first
        `num_steps` of a run, including those before the schedule begins or before top-k reaches its density."""
        families = group_by(gradients, lambda gradient: gradient.family)

        def count(strategy: Strategy) -> float:
            traffic = (strategy.traffic(family, world_size, ranks_per_host) for family in families.values())
            messages = [message for found in traffic for message in found]
            return sum(message.sent_bytes(world_size) for message in messages) / strategy.period

        first = range(min(num_steps, max(self.after, self.warmup)))
        early = [DENSE if self.outer else replace(self, amount=self.find_density(step)) for step in first]
        later, sizes = count(self), {strategy: count(strategy) for strategy in dict.fromkeys(early)}
        return later + sum(sizes[strategy] - later for strategy in early) / max(1, num_steps)

    def find_density(self, step: int) -> float:
        """The fraction of elements that top-k sends in a step. DGC's warm-up decreases it from a quarter to `amount`,
        by a constant factor per step."""
        amount, warmup = self.amount, self.warmup
        return max(amount, 0.25 * (amount / 0.25) ** (step / warmup)) if step < warmup else amount

    @property
    def is_hook(self) -> bool:
        """Whether a communication hook can implement this strategy: it has no outer optimizer and no sharding."""
        return not (self.outer or self.is_sharded)

    @property
    def is_exact(self) -> bool:
        """Whether the update equals that of a plain all-reduce."""
        return self.codec == "dense" and not self.outer

    @property
    def is_plain_in_memory(self) -> bool:
        """Whether ranks that share memory all-reduce whole buckets (bf16 is rounded while summing)."""
        return self.codec in ("dense", "bf16") and not (self.outer or self.between_hosts)

    def traffic(
        self, gradients: Sequence[Gradient], world_size: int, ranks_per_host: int = 1, in_memory: bool = False
    ) -> tuple[Message, ...]:
        """The messages for gradients that are sent together: a bucket or, with a period, the whole model once per
        period. `ranks_per_host` matters only for two levels. `in_memory`: the ranks share memory."""
        if self.between_hosts:
            return self._traffic_by_level(gradients, world_size, min(world_size, ranks_per_host))
        num = sum(gradient.num_elements for gradient in gradients)
        exact = sum(gradient.num_bytes for gradient in gradients)
        is_plain = in_memory and self.is_plain_in_memory
        if self.is_sharded:
            item_bytes = max((gradient.item_bytes for gradient in gradients), default=1)
            each = count_each(exact, 1, world_size)
            num_bytes = each if self.codec == "dense" else 2 * each // item_bytes
            first = Message("all-reduce", exact) if is_plain else Message("reduce-scatter", world_size * num_bytes)
            return first, Message("all-gather", min(each, exact))
        if is_plain or self.codec == "dense":
            return (Message("all-reduce", exact),)
        if self.codec == "bf16":
            if world_size <= 2:
                return (Message("all-reduce", 2 * num),)
            part = 2 * -(-num // world_size)  # summed in float32 by one rank: a ring would round at every hop
            return Message("all-to-all", part * world_size), Message("all-gather", part)
        if self.codec in QUANTIZED_BITS:
            part = count_shard_bytes(num, world_size, QUANTIZED_BITS[self.codec])
            return Message("all-to-all", part * world_size), Message("all-gather", part)
        if self.codec == "topk":
            whole = sum(g.num_elements for g in gradients if is_sent_whole(g.shape))
            kept = sum(count_kept(g.num_elements, self.amount) for g in gradients if not is_sent_whole(g.shape))
            return (Message("all-gather", ENTRY_BYTES * kept + 4 * whole),)
        matrices = [found for g in gradients if (found := as_matrix(g.shape, int(self.amount))) is not None]
        rest = num - sum(rows * columns for rows, columns, _ in matrices)
        left = 4 * (sum(rows * rank for rows, _, rank in matrices) + rest)
        right = 4 * sum(columns * rank for _, columns, rank in matrices)
        return tuple(Message("all-reduce", size) for size in (left, right) if size)

    def _traffic_by_level(self, gradients: Sequence[Gradient], world_size: int, per_host: int) -> tuple[Message, ...]:
        hosts, rest = divmod(world_size, per_host)
        if rest:
            raise _reject(self.text, f"{world_size} ranks do not fill hosts of {per_host} ranks each")
        if hosts == 1:
            return DENSE.traffic(gradients, world_size)
        flat = replace(self, between_hosts=False)
        if per_host == 1:
            return flat.traffic(gradients, world_size)
        parts = []
        for gradient in gradients:
            shape = self.cut(gradient.shape or (gradient.num_elements, 1), per_host)[0]
            parts.append(replace(gradient, num_bytes=math.prod(shape) * gradient.item_bytes, shape=shape))
        part_bytes = sum(part.num_bytes for part in parts)
        return (
            Message("reduce-scatter", per_host * part_bytes, per_host, is_inside=True),
            *(replace(message, ranks=hosts) for message in flat.traffic(parts, hosts)),
            Message("all-gather", part_bytes, per_host, is_inside=True),
        )

    def cut(self, shape: Sequence[int], num: int) -> tuple[tuple[int, ...], bool]:
        """The shape of each of `num` equal parts of a gradient (the last is padded with zeros), and whether the
        gradient is transposed first. PowerSGD gets matrices, cut along the longer side: every part sends the shorter
        side's factor whole."""
        rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
        if self.codec != "powersgd" or len(shape) < 2:
            flat = -(-rows * columns // num)
            return (flat,) if is_sent_whole(shape) else (flat, 1), False
        is_transposed = num > 1 and columns > rows > 0
        long, short = (columns, rows) if is_transposed else (rows, columns)
        return (-(-long // num), short), is_transposed


def _reject(text: str, why: str) -> ConfigError:
    return ConfigError(f"strategy {text!r}: {why}", code="strategy")


def parse_strategies(texts: str | Sequence[str]) -> tuple[Strategy, ...]:
    """Parse a list such as `bf16,topk:0.01,dgc,int8`, separated by commas or semicolons, without duplicates. An item
    that is not a part's name is an option of the previous one."""
    parts: list[str] = []
    for item in texts.replace(";", ",").split(",") if isinstance(texts, str) else texts:
        name = item.strip().partition("+")[0].partition(":")[0]
        if isinstance(texts, str) and parts and name not in _PARTS:
            parts[-1] += f",{item.strip()}"
        else:
            parts.append(item.strip())
    return tuple(dict.fromkeys(map(Strategy.parse, parts)))


def count_each(num_elements: int, item_bytes: int, world_size: int) -> int:
    """How many elements of a bucket each rank updates with a sharded optimizer. The last ranks may have fewer."""
    line = max(1, LINE_BYTES // item_bytes)
    return -(-num_elements // (world_size * line)) * line


def count_shard_bytes(num_elements: int, world_size: int, bits: int) -> int:
    """Bytes of the part of a vector that one rank sums, in blocks with one scale each."""
    blocks = -(-num_elements // (world_size * BLOCK))
    return blocks * (BLOCK * bits // 8 + 4)


def count_kept(num_elements: int, density: float) -> int:
    """How many elements of a gradient top-k sends: at least one, unless it is empty."""
    return min(num_elements, max(1, math.ceil(density * num_elements))) if num_elements else 0


def is_sent_whole(shape: Sequence[int]) -> bool:
    """Whether top-k sends all of a gradient with this shape: biases and norms, which are small and should not be
    delayed. An unknown shape counts as a matrix."""
    return len(shape) == 1 and shape[0] <= _LARGEST_WHOLE


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int, int] | None:
    """Rows, columns and rank of a gradient for PowerSGD; None if it is sent uncompressed."""
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None


DENSE = Strategy()


@dataclass(frozen=True)
class _Part:
    """One part of a strategy's text: the choice it makes and its options with their defaults."""

    slot: str
    fixed: Mapping[str, Any]
    number: str = ""  # the field that `:NUMBER` sets, if any
    options: Mapping[str, Any] = field(default_factory=dict)  # option names and their values without `=VALUE`

    def read(self, text: str, name: str, number: str, options: Sequence[str]) -> dict[str, Any]:
        """Read the fields that a part sets. `number` includes its colon; empty if there is none."""
        found, seen = dict(self.fixed), set[str]()
        if bool(number) != bool(self.number):
            raise _reject(text, f"write {name}:NUMBER" if self.number else f"write {name}")
        if number:
            found[self.number] = _read(text, self.number, number[1:], name)
        for option in options:
            key, sign, value = option.partition("=")
            if key not in self.options:
                raise _reject(text, f"{name} has no option {key!r}; it has {', '.join(self.options) or 'none'}")
            if key in seen:
                raise _reject(text, f"{key} is set twice; leave one out")
            seen.add(key)
            default = self.options[key]
            if not sign and default is None:
                raise _reject(text, f"write {key}=NUMBER")
            found[key] = _read(text, key, value) if sign else default
        return found


# The smallest and largest value of each number.
_RANGES: Mapping[str, tuple[float, float]] = {
    "topk": (0, 1), "powersgd": (1, 1 << 20), "period": (1, 10**9), "after": (0, 10**12), "warmup": (0, 10**9),
    "dgc": (0, 1), "lr": (0, 100), "momentum": (0, 1), "fragments": (1, 10**4), "delay": (0, 10**6), "mixing": (0, 1),
    "feedback": (0, 1),
}  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(Strategy)}


def _show(value: float) -> str:
    if not isinstance(value, float):
        return str(int(value))
    short = f"{value:.12g}"
    return short if float(short) == value else repr(value)  # parsing the text must yield the same strategy


def _read(text: str, name: str, value: str, part: str = "") -> Any:
    kind = type(_DEFAULTS[name])
    least, most = _RANGES.get(part) or _RANGES[name]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most or (kind is not float and not number.is_integer()):
        what = "an integer" if kind is int else "0 or 1" if kind is bool else "a number"
        what = {"topk": "a fraction, such as 0.01,", "powersgd": "an integer"}.get(part, what)
        span = "" if kind is bool else f" from {least:g} to {most:g}"
        raise _reject(text, f"{value!r} must be {what}{span}")
    return kind(number)


_OUTER = {"after": None, "lr": None, "momentum": None}
_PARTS: Mapping[str, _Part] = {
    "dense": _Part("codec", {"codec": "dense"}),
    "bf16": _Part("codec", {"codec": "bf16"}),
    "int8": _Part("codec", {"codec": "int8"}, "", {"feedback": True}),
    "int4": _Part("codec", {"codec": "int4"}, "", {"feedback": True}),
    "topk": _Part("codec", {"codec": "topk"}, "amount", {"feedback": True, "dgc": 0.9, "warmup": None}),
    "powersgd": _Part("codec", {"codec": "powersgd"}, "amount", {"feedback": True}),
    "localsgd": _Part("outer", {"outer": "localsgd"}, "period", {"after": None}),
    "slowmo": _Part("outer", {"outer": "slowmo", "momentum": 0.5}, "period", _OUTER),
    "diloco": _Part(
        "outer", {"outer": "diloco", "lr": 0.7, "momentum": 0.9}, "period",
        {**_OUTER, "fragments": None, "delay": None, "mixing": None},
    ),
    "zero1": _Part("placement", {"is_sharded": True}),
    "hosts": _Part("levels", {"between_hosts": True}),
}  # fmt: skip
