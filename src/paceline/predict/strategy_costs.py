"""The costs of strategies' codecs, the fastest strategy, and the bandwidths at which the fastest one changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.predict.curves import Resample
from paceline.predict.job import Job
from paceline.predict.predictor import Prediction, calibrate
from paceline.predict.search import PLATEAU
from paceline.predict.sending import LARGE_BYTES, Sending
from paceline.predict.simulate import MachineCosts
from paceline.records import CodecRecord
from paceline.strategy import DENSE, Strategy, parse_strategies

ALL = (
    "bf16", "int8", "int4", "topk:0.01", "powersgd:4", "localsgd:8", "diloco:100", "diloco:100+int8", "zero1",
    "zero1+bf16",
)  # fmt: skip
EVERY = ("all",)
# The strategies that a profile measures; other parameters of a codec are assumed to cost the same.
MEASURED = ("dense", "bf16", "int8", "int4", "topk:0.01", "powersgd:4", "localsgd:1", "diloco:1", "zero1")
BF16 = Strategy.parse("bf16")
# Range of a codec's time in a step, relative to its time alone.
_FACTORS = (0.5, 5.0)
# Bandwidth range in which crossings are searched, in bits per second.
BANDWIDTHS = tuple(rate * 1e9 for rate in (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400))


def list_strategies(given: str | Sequence[str], can_shard: bool = True) -> tuple[Strategy, ...]:
    """Parse `all` or a list; dense and bf16 come first. Without `can_shard`, `all` excludes sharded optimizers."""
    texts = given.strip(" ,;") if isinstance(given, str) else tuple(given)
    if not texts:
        raise ConfigError("no strategy: use all, or a list such as bf16,powersgd:4", code="strategy")
    named = parse_strategies(ALL if texts in ("all", EVERY) else texts)
    if texts in ("all", EVERY) and not can_shard:
        named = tuple(strategy for strategy in named if not strategy.is_sharded)
    return tuple(dict.fromkeys((DENSE, BF16, *named)))


# Ordered by how much they change the update.
UPDATES = ("exact", "rounded", "lossy", "schedule")


def describe_update(strategy: Strategy) -> str:
    """How a strategy changes the update: `exact`, `rounded` (to bfloat16, once), `lossy`, or `schedule`."""
    if strategy.outer:
        return UPDATES[3]
    return UPDATES[0] if strategy.is_exact else UPDATES[1] if strategy.codec == "bf16" else UPDATES[2]


def prefer(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Strategies in order of preference among equally fast ones: the smallest change to the update first."""
    return sorted(strategies, key=lambda strategy: UPDATES.index(describe_update(strategy)))


def choose_fastest(steps_s: Mapping[str, float]) -> str:
    """The first strategy in the mapping that is within 1 % of the fastest."""
    least_s = min(steps_s.values())
    return next(name for name, step_s in steps_s.items() if step_s <= least_s * (1 + PLATEAU))


def find_codec(records: Sequence[CodecRecord], strategy: Strategy) -> str:
    """The measured strategy with the same codec and the nearest parameter; empty if there is none."""
    parsed = [Strategy.parse(record.strategy) for record in records]
    alike = [one for one in parsed if one.is_sharded] if strategy.is_sharded else []  # any codec
    alike = alike or [one for one in parsed if one.codec == strategy.codec and not (one.outer or one.is_sharded)]
    found = min(alike, key=lambda one: abs(math.log((one.amount or 1) / (strategy.amount or 1))), default=None)
    if found is None or (strategy.codec == "dense" and not (strategy.outer or found.is_sharded)):
        return ""
    return found.text


def fit_sending(
    strategy: Strategy, world_size: int, records: Sequence[CodecRecord], resample: Resample | None = None,
    factor: float = 1.0, is_in_place: bool = False, ranks_per_host: int = 1,
) -> Sending | None:  # fmt: skip
    """How ranks send with a strategy, with the median costs of its codec times a factor; None if they send dense
    gradients or nothing. Measurements with one bucket and with many separate the cost per bucket from the cost per
    byte. Measurements with few ranks and with many separate the cost that grows with the number of ranks."""
    if strategy.between_hosts and world_size > ranks_per_host > 1:
        flat = replace(strategy, between_hosts=False)
        found = fit_sending(flat, world_size // ranks_per_host, records, resample, factor) or Sending(flat, world_size)
        return replace(found, strategy=strategy, world_size=world_size, ranks_per_host=ranks_per_host)
    if world_size == 1 or strategy.is_dense or (strategy.between_hosts and ranks_per_host > 1):
        return None
    plain = Sending(strategy, world_size, is_in_place=is_in_place, ranks_per_host=ranks_per_host)
    if plain.is_plain:
        return plain if strategy.is_sharded else None
    resample, name = resample or Resample(), find_codec(records, strategy)
    mine = sorted((r for r in records if r.strategy == name), key=lambda r: (r.world_size, r.num_buckets))
    if not mine:
        return plain
    large = [record for record in mine if record.num_buckets == 1 and record.num_bytes > LARGE_BYTES]
    if len(large) == len(mine):  # one large gradient
        large = []
    mine = [record for record in mine if record not in large]
    count, medians = mine[0].world_size, {id(r): [resample.median(part) for part in r.parts] for r in mine}
    one, each = mine[0], [record for record in mine if record.world_size == count][-1]
    more = max(1, each.num_buckets - one.num_buckets)
    pairs = zip(medians[id(each)], medians[id(one)], strict=True)
    fixed = [max(0.0, many_s - one_s) / more for many_s, one_s in pairs]

    def fit(record: CodecRecord) -> list[float]:
        own = fixed if len(record.parts) == len(fixed) else [fixed[0], *[fixed[-1]] * (len(record.parts) - 1)]
        times = zip(medians[id(record)], own, strict=True)
        return [max(0.0, time_s - bucket_s * record.num_buckets) / record.num_bytes for time_s, bucket_s in times]

    rates, wide = fit(one), mine[-1]
    if world_size > count < wide.world_size:
        there = fit(wide)
        if len(there) == len(rates):
            share = (world_size - count) / (wide.world_size - count)
            rates = [here + max(0.0, more_s - here) * share for here, more_s in zip(rates, there, strict=True)]
        else:  # few ranks exchange other messages
            rates, fixed = there, [fixed[0], *[fixed[-1]] * (len(there) - 1)]
    large_factor = 1.0
    if large:
        here_s, there_s = (sum(resample.median(part) for part in record.parts) for record in (one, large[0]))
        large_factor = max(1.0, (there_s / large[0].num_bytes) / (here_s / one.num_bytes)) if here_s else 1.0
    parts = list(zip(fixed, rates, strict=True))
    round_s = _fit_round(strategy, records, resample)
    if name and Strategy.parse(name).is_sharded:  # the last part is for the parameters
        _, round_s = parts.pop()
    sending = Sending(strategy, world_size, tuple(parts), is_in_place, large_factor, ranks_per_host)
    return replace(sending.scale(factor), round_s_per_byte=round_s)


def _fit_round(strategy: Strategy, records: Sequence[CodecRecord], resample: Resample) -> float:
    """Seconds per byte of parameters that a round of the schedule computes, without its codec."""
    if not strategy.outer:
        return 0.0
    name = "localsgd:1" if strategy.outer == "localsgd" else "diloco:1"  # without and with momentum
    rounds = [record for record in records if record.strategy == name]
    dense = [record for record in records if record.strategy == "dense" and record.num_buckets == 1]
    totals = [
        [sum(map(resample.median, record.parts)) / record.num_bytes for record in found] for found in (rounds, dense)
    ]
    return max(0.0, totals[0][0] - min(totals[1], default=0.0)) if rounds else 0.0


def fit_factor(job: Job, cuts: Sequence[int], costs: MachineCosts, step_s: float) -> float:
    """The slowdown of a codec in a step with these cuts that took `step_s`: threads share the core, and ranks wait."""
    sending = costs.sending
    if not isinstance(sending, Sending) or not any(map(sum, sending.parts)):
        return 1.0
    return calibrate(job, lambda by: replace(costs, sending=sending.scale(by)), [(cuts, step_s)], _FACTORS).factor


def describe_strategies(job: Job, strategies: Sequence[Strategy], records: Sequence[CodecRecord]) -> list[str]:
    lines, codecs = [], {one.text: find_codec(records, one) for one in strategies if one.codec != "dense" or one.outer}
    if unknown := [name for name, found in codecs.items() if not found]:
        what = "is assumed to be free, so its step is a lower bound: profile the layers again to measure the codec"
        lines.append(f"the codec of {', '.join(unknown)} {what}")
    for name, found in codecs.items():
        one = Strategy.parse(name)
        if found and Strategy.parse(found).amount != one.amount:
            lines.append(f"the codec of {name} is assumed to cost as much as that of {found}")
    if any(one.codec == "powersgd" for one in strategies):
        lacking = [gradient for gradient in job.gradients if not gradient.shape and gradient.num_elements > 1]
        if lacking:
            what = f"{len(lacking)} gradients have unknown shapes, and PowerSGD is assumed to send them uncompressed"
            lines.append(f"{what}: profile the layers again")
    if any(one.outer for one in strategies):
        is_known = any(Strategy.parse(record.strategy).outer for record in records)
        costs = "takes as long as it did alone" if is_known else "is free: profile the layers again to measure it"
        blocks = "an exchange without delay blocks"
        lines.append(f"strategies with a period: the mean step; {blocks}, and the compute of a round {costs}")
    if any(one.between_hosts for one in strategies):
        lines.append("+hosts: the ranks of a host share its link, and their copies are assumed to be free")
    if any(one.is_sharded for one in strategies):
        gathers = "parameters are gathered during the next forward"
        is_known = any(Strategy.parse(record.strategy).is_sharded for record in records)
        copies = "" if is_known else "; its copies are assumed to be free: profile the layers again to measure them"
        lines.append(f"zero1: the optimizer takes 1/n of its time; {gathers}{copies}")
    return lines


def is_worth_it(row: Prediction) -> bool:
    ratio = row.ratios[BF16.text]
    return ratio.value < 1 - PLATEAU and ratio.high < 1


def compare_rows(rows: Mapping[str, Prediction], strategies: Sequence[Strategy]) -> list[Prediction]:
    """Compare strategies, each with its best buckets, on one network and number of ranks. `rows` maps the text of each
    strategy to its prediction. `ratios` are relative to dense gradients and to bf16."""
    bases = {base.text: rows[base.text] for base in (DENSE, BF16)}
    found = []
    for one in strategies:
        row = replace(rows[one.text], strategy=one)
        found.append(replace(row, ratios={name: row.compare(base) for name, base in bases.items()}))
    return found


def _choose_each_step(steps_s: Mapping[str, float]) -> str:
    return choose_fastest({name: step_s for name, step_s in steps_s.items() if not Strategy.parse(name).outer})


@dataclass(frozen=True)
class Sweep:
    """Step times by bandwidth (bits per second) and strategy, in the order of `prefer`; and the crossings where the
    fastest changes: (bandwidth, fastest below, fastest above). Schedules are excluded: they send so little that they
    would be fastest at nearly every bandwidth, but they guarantee less."""

    steps_s: Mapping[float, Mapping[str, float]]
    crossings: tuple[tuple[float, str, str], ...]

    @property
    def rows(self) -> list[tuple[float, str, Mapping[str, float]]]:
        return [(rate, _choose_each_step(steps_s), steps_s) for rate, steps_s in self.steps_s.items()]


def sweep_bandwidths(
    estimate: Callable[[float], Mapping[str, float]], bandwidths: Sequence[float] = BANDWIDTHS
) -> Sweep:
    """`estimate` returns the steps at a bandwidth. Crossings of the fastest strategy are located to within 2 %."""
    steps_s = {rate: estimate(rate) for rate in bandwidths}
    crossings = []

    def look(low: float, first: str, high: float, last: str) -> None:
        if first == last:
            return
        middle = math.sqrt(low * high)
        if high / low < 1.02:
            crossings.append((middle, first, last))
            return
        found = _choose_each_step(estimate(middle))
        look(low, first, middle, found)
        look(middle, found, high, last)

    places = [(rate, _choose_each_step(found)) for rate, found in steps_s.items()]
    for (low, first), (high, last) in itertools.pairwise(places):
        look(low, first, high, last)
    return Sweep(steps_s, tuple(crossings))
