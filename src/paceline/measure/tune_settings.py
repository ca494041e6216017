"""What a tuning run is asked to do, checked before any rank starts and without torch. Measuring is in `tuning`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.predict.curves import CostCurve
from paceline.predict.networks import AssumedFabric, Network
from paceline.training.settings import TrainSettings
from paceline.units import MIB

__all__ = ["FULL", "QUICK", "Effort", "TuneSettings"]

KIB = 1 << 10


@dataclass(frozen=True)
class Effort:
    """How much is measured: caps of the job itself, rounds within a budget, and sizes of the messages that disturb."""

    num_caps: int
    min_rounds: int
    max_rounds: int
    budget_s: float
    confirm_s: float
    message_bytes: tuple[int, ...]


FULL = Effort(8, 12, 60, 75.0, 30.0, (64 * KIB, MIB, 8 * MIB))
QUICK = Effort(5, 8, 20, 20.0, 10.0, (256 * KIB, 4 * MIB))


@dataclass(frozen=True)
class TuneSettings:
    """A training job (None: a user's own), and how its plans are judged. Without `caps_bytes` a range is chosen.

    `confirms` is whether the job itself is run at all. With a `network`, one rank sends to `network_ranks - 1` others
    that do not exist. `takes_lists`: the wrapper can be given a cap for each bucket.
    """

    job: TrainSettings | None
    own_wrapper: str = "paceline"
    effort: Effort = FULL
    caps_bytes: tuple[int, ...] = ()
    confirms: bool = True
    iters: int | None = None
    network: Network | None = None
    network_ranks: int = 2
    takes_lists: bool = True

    @property
    def wrapper(self) -> str:
        """The wrapper whose buckets are tuned."""
        return self.own_wrapper if self.job is None else self.job.wrapper

    def build_curve(self) -> CostCurve | None:
        """What messages cost on the emulated network; None where they are measured."""
        if self.network is None:
            return None
        return AssumedFabric(self.network, self.network).build_curve(self.network_ranks)

    def check(self) -> None:
        self._check_effort()
        job = self.job
        if self.wrapper not in ("paceline", "torch"):
            raise ConfigError(f"--wrapper {self.wrapper} has no buckets to tune: use paceline or torch")
        if job is None:
            return
        if job.plan is not None:
            raise ConfigError(f"--plan {job.plan}: a plan is what is looked for here; leave it out")
        if job.batches.accumulate != 1:
            raise ConfigError(
                f"--accumulate {job.batches.accumulate}: gradients travel behind the last micro-batch alone, so tune "
                "without it; the plan is the same"
            )
        if self.network is None and job.ranks == 1:
            raise ConfigError("--ranks 1 sends nothing: tune 2 or more, or give a --network to emulate")
        if self.network is not None and (job.ranks != 1 or self.network_ranks < 2):
            raise ConfigError(
                f"--network {self.network.name} with --ranks {job.ranks} and {self.network_ranks} on the network: one "
                "rank sends, to at least one other that does not exist; use --ranks 1 and --network-ranks 2 or more"
            )

    def _check_effort(self) -> None:
        if self.iters is not None and self.iters < 2:
            raise ConfigError(f"--iters {self.iters}: at least 2 are needed to know the noise")
        if any(cap < 1 for cap in self.caps_bytes):
            raise ConfigError(f"--caps {self.caps_bytes}: at least 1 byte each")
