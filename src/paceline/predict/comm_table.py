"""What the gradients of a model cost on a network, beside its computation. How that prints is in `report.comm_tables`.

Everything here is simulated: one message for all gradients, and nothing but the network's own speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.predict.networks import MeasuredNetwork, Network, estimate_allreduce
from paceline.records import LayerProfileRecord

__all__ = ["CommRow", "ModelStep", "build_comm_table", "build_model_step"]


@dataclass(frozen=True)
class ModelStep:
    """One step of a model on one rank: the bytes of its gradients, and what it computes.

    `backward_s` is the part of `compute_s` that can hide communication, None where nobody knows; `source` says where
    the times come from: `measured`, or `given` by a person.
    """

    model: str
    gradient_bytes: int
    compute_s: float
    backward_s: float | None = None
    source: str = "given"

    def __post_init__(self) -> None:
        backward_s = 0.0 if self.backward_s is None else self.backward_s
        if self.gradient_bytes < 1 or not 0 < self.compute_s < math.inf or not 0 <= backward_s <= self.compute_s:
            raise ConfigError(
                f"{self.model} with {self.gradient_bytes} bytes of gradients, {self.compute_s} s of computation and "
                f"{self.backward_s} s of backward: bytes and computation must be above 0, and backward a part of it"
            )


@dataclass(frozen=True)
class CommRow:
    """One model on one network with so many ranks. `comm_s` is the all-reduce of all its gradients at once."""

    step: ModelStep
    network: str
    world_size: int
    comm_s: float
    assumption: str
    source: str = "simulated"

    @property
    def overhead(self) -> float:
        """Communication as a share of the step where nothing overlaps."""
        return self.comm_s / (self.comm_s + self.step.compute_s)

    @property
    def exposed_s(self) -> float | None:
        """What is left of it where all of backward hides communication: no plan of buckets can do better."""
        return None if self.step.backward_s is None else max(0.0, self.comm_s - self.step.backward_s)

    @property
    def exposed_overhead(self) -> float | None:
        """The exposed part as a share of the step that it leaves."""
        return None if self.exposed_s is None else self.exposed_s / (self.exposed_s + self.step.compute_s)


def build_model_step(profile: LayerProfileRecord) -> ModelStep:
    """The medians of the plain steps of a profile."""
    return ModelStep(
        profile.model, profile.num_bytes, profile.timing.median_s, profile.backward.median_s, profile.source
    )


def build_comm_table(
    steps: Sequence[ModelStep], networks: Sequence[Network | MeasuredNetwork], ranks: Sequence[int]
) -> list[CommRow]:
    """A row for each model, network and number of ranks; a measured network has rows only for its own ranks."""
    for network in networks:
        if isinstance(network, MeasuredNetwork) and network.world_size not in ranks:
            asked = ", ".join(map(str, ranks))
            raise ConfigError(
                f"{network.name} was measured on {network.world_size} ranks, not on {asked}: ask for those it has"
            )
    return [
        CommRow(step, network.name, count, estimate_allreduce(step.gradient_bytes, count, network), network.assumption)
        for step in steps
        for network in networks
        for count in ranks
        if not isinstance(network, MeasuredNetwork) or network.world_size == count
    ]
