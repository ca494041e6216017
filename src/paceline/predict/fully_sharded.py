"""Fully sharded data parallel, as in torch's `fully_shard`: its step time. Also the memory per rank of any strategy.

The schedule: each block is a unit, and all other parameters form the root unit. A rank holds a shard of every unit. It
gathers the root first and keeps it; it gathers each other unit while the unit before it computes, in forward and again
in backward, and reduce-scatters its gradients while the next unit computes. Collectives are sent one at a time, in the
order of their calls. Each rank then updates its shards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.predict.job import Job
from paceline.predict.simulate import Buckets, BucketSpan, Load, MachineCosts, Schedule, SimulatedStep, Timeline
from paceline.records import LayerProfileRecord
from paceline.strategy import Message, Strategy

FULLY_SHARDED = "fsdp"
# Tensors of optimizer state per parameter, by the name of the optimizer; SGD has one only with momentum.
_STATES = {"sgd": 1, "lars": 1, "adamw": 2, "lamb": 2}


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: their bytes, their fraction of the time before backward, and the seconds
    from the previous unit's last gradient to their last gradient."""

    num_bytes: int
    forward_share: float
    backward_s: float


@dataclass(frozen=True)
class Blocks:
    """The block of each parameter, and the fraction of forward that each block takes, in forward order, by name. The
    root unit has the empty name."""

    of_parameter: Mapping[str, str]
    forward_shares: Mapping[str, float]

    @classmethod
    def read(cls, record: LayerProfileRecord) -> Blocks:
        """Read the repeated blocks of a profile, whose names contain numbers. All other blocks belong to the root
        unit."""
        names = [block.name for block in record.blocks if any(part.isdigit() for part in block.name.split("."))]
        if not names:  # no layer is repeated: each one is a unit
            names = [block.name for block in record.blocks]
        forward_s = {block.name: statistics.median(block.forward_s) for block in record.blocks if block.name in names}
        whole_s = statistics.median(record.profiled_forward.reduced_s)
        shares = {name: seconds / max(whole_s, 1e-12) for name, seconds in forward_s.items()}
        owners = {one.name: one.block if one.block in shares else "" for one in record.parameters}
        return cls(owners, shares)

    def list_units(self, job: Job) -> tuple[Unit, list[Unit]]:
        sizes = dict.fromkeys(("", *self.forward_shares), 0)
        last_s = dict.fromkeys(sizes, 0.0)
        for gradient, ready_s in zip(job.gradients, job.ready_s, strict=True):
            owner = self.of_parameter[gradient.name]
            sizes[owner] += gradient.num_bytes
            last_s[owner] = max(last_s[owner], ready_s)
        units, now_s = [], 0.0
        for name in reversed([*self.forward_shares]):
            end_s = max(now_s, last_s[name])
            units.append(Unit(sizes[name], self.forward_shares[name], end_s - now_s))
            now_s = end_s
        root = Unit(sizes[""], max(0.0, 1 - sum(self.forward_shares.values())), job.backward_s - now_s)
        return root, units[::-1]


def simulate_fully_sharded(job: Job, blocks: Blocks, costs: MachineCosts, world_size: int) -> SimulatedStep:
    """The step in which every rank holds 1/n of the parameters, gradients and optimizer state. Backward counts from the
    end of forward, so `before_s` includes waits for gathered parameters."""
    root, units = blocks.list_units(job)
    line = Timeline(replace(costs, sending=None))
    spans: list[BucketSpan] = []

    def send(kind: str, unit: Unit) -> BucketSpan:
        shard = -(-unit.num_bytes // world_size)
        message = Message(kind, shard if kind == "all-gather" else shard * world_size)
        span = BucketSpan(unit.num_bytes, line.now_s)
        copies_s = costs.launch_s + costs.gather_s_per_byte * unit.num_bytes
        line.hand_over(span, (Load(message.as_all_reduce(world_size)),), copies_s)
        if job.device == "cpu":  # its collectives block
            line.wait_for(span)
        spans.append(span)
        return span

    # Time outside forward and backward, such as data loading, comes before the root is needed.
    line.compute(root.forward_share * job.before_s)
    line.wait_for(send("all-gather", root))
    gathered = [send("all-gather", unit) for unit in units[:1]]
    for number, unit in enumerate(units):
        line.wait_for(gathered.pop())
        gathered += [send("all-gather", after) for after in units[number + 1 : number + 2]]
        line.compute(unit.forward_share * job.before_s)
    before_s = line.now_s
    backward = units[::-1]
    gathered = [send("all-gather", unit) for unit in backward[:1]]
    for number, unit in enumerate(backward):
        line.wait_for(gathered.pop())
        gathered += [send("all-gather", after) for after in backward[number + 1 : number + 2]]
        line.compute(unit.backward_s)
        send("reduce-scatter", unit)
    line.compute(root.backward_s)
    backward_s = line.now_s - before_s
    send("reduce-scatter", root)
    line.drain()
    over_s = line.now_s - before_s
    local_s = job.computing_s - before_s  # so waits in forward also count as exposed
    return SimulatedStep(tuple(spans), backward_s, over_s, before_s, job.after_s / world_size, local_s)


@dataclass(frozen=True)
class FullySharded(Schedule):
    blocks: Blocks
    world_size: int

    @property
    def has_buckets(self) -> bool:
        return False

    def simulate(self, job: Job, buckets: Buckets, costs: MachineCosts) -> SimulatedStep:
        return simulate_fully_sharded(job, self.blocks, costs, self.world_size)


def count_states(optimizer: str, momentum: float) -> int:
    return 0 if optimizer == "sgd" and not momentum else _STATES[optimizer]


def estimate_memory(job: Job, strategy: Strategy | None, blocks: Blocks, num_states: int, world_size: int) -> int:
    """Bytes per rank of parameters, gradients, optimizer state and the strategy's state between steps. A strategy of
    None means fully sharded data parallel. Excludes activations and temporary memory."""
    size = job.num_bytes
    if strategy is None:
        root, units = blocks.list_units(job)
        largest = max((unit.num_bytes for unit in units), default=0)
        # Three units are in memory: one computes, the next is being gathered, and the last one's gradients are being
        # sent.
        whole = root.num_bytes + min(3, len(units)) * largest
        return math.ceil((2 + num_states) * size / world_size) + whole
    states = num_states * size / (world_size if strategy.is_sharded else 1)
    has_residuals = strategy.feedback and strategy.codec not in ("dense", "bf16")
    kept = 2 * size if has_residuals else 0  # residuals of the last step and of this one
    if strategy.outer:  # the parameters at the last exchange, and the momentum of the outer optimizer
        kept = size * (2 if strategy.momentum or strategy.outer == "diloco" else 1)
    return math.ceil(2 * size + states + kept)
