"""A synthetic machine and job with known costs, and the records a measurement of them would produce."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.plan import Gradient
from paceline.records import (
    ChunksRecord,
    CollectiveRecord,
    LayerProfileRecord,
    ParameterTimes,
    Record,
    Samples,
    StepRecord,
)
from paceline.units import MIB

KIB = 1 << 10
# The profiler makes backward longer by this factor, on which no fit may depend.
PROFILER_COST = 1.25


@dataclass(frozen=True)
class MadeJob:
    """Gradients of these sizes in ready order, evenly over backward; `disturbed` is (compute rate, message rate)."""

    sizes: tuple[int, ...] = (MIB,) * 8
    alpha_s: float = 1e-3
    bytes_per_s: float = 1e9
    forward_s: float = 0.020
    backward_s: float = 0.040
    optimizer_s: float = 0.010
    gather_s: float = 0.002
    launch_s: float = 0.0005
    pair_rate: float = 0.8
    extra_s: float = 0.0
    disturbed: tuple[tuple[int, float, float], ...] = ((64 * KIB, 0.5, 0.6), (MIB, 0.8, 0.9))
    wrapper: str = "paceline"
    backend: str = "gloo"
    device: str = "cpu"
    idle_s: float = 0.0  # for a message; not counted twice in a pair on a GPU
    count: int = 9
    noise: float = 0.0  # of step times
    message_noise: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def plain_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def ready_s(self) -> tuple[float, ...]:
        return tuple(self.backward_s * (place + 1) / len(self.sizes) for place in range(len(self.sizes)))

    @property
    def sweep_sizes(self) -> list[int]:
        return [4 * KIB << power for power in range(20) if 4 * KIB << power < self.num_bytes] + [self.num_bytes]

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """The gradients in definition order, the reverse of the ready order."""
        names = [f"layer{place}" for place in range(len(self.sizes))]
        return tuple(Gradient(name, size) for name, size in reversed(list(zip(names, self.sizes, strict=True))))

    def message_s(self, num_bytes: int) -> float:
        return self.alpha_s + num_bytes / self.bytes_per_s

    def build_calibration(self) -> list[Record]:
        """All records that a prediction may use."""
        draw = random.Random(5)
        count = len(self.sizes)
        launches_s = (self.launch_s, count * self.launch_s)
        one, each = (self.backward_s + self.gather_s + launch_s for launch_s in launches_s)
        steps = [
            self.build_step(draw, "plain", "plain", self.backward_s),
            self.build_step(draw, "local", "a bucket each", each, bucket_bytes=self.sizes),
            self.build_step(draw, "local", "one bucket", one, bucket_bytes=(self.num_bytes,)),
        ]
        where: dict[str, Any] = {"backend": self.backend, "device": self.device, "world_size": 2, "dtype": "float32"}
        whole: dict[str, Any] = {"collective": "all_reduce", "op": "sum", **where}
        messages: list[Record] = [
            CollectiveRecord(
                num_bytes=size, timing=self._samples(draw, self.message_s(size), self.message_noise), **whole
            )
            for size in self.sweep_sizes
        ]
        pair_s = self.message_s(MIB) / self.pair_rate
        if self.device == "cuda":
            pair_s = 2 * self.message_s(MIB) - self.idle_s
        messages.append(
            ChunksRecord(
                total_bytes=2 * MIB, chunk_bytes=MIB, timing=self._samples(draw, pair_s, self.message_noise), **where
            )
        )
        if self.extra_s:
            timing = self._samples(draw, self.extra_s, self.message_noise)
            messages.append(CollectiveRecord(num_bytes=400, timing=timing, note="buffers", **whole))
        disturbed = [self.build_disturbed(draw, *rates) for rates in self.disturbed]
        return [*messages, *steps, *disturbed, self._build_profile(draw)]

    def build_step(self, draw: random.Random, role: str, label: str, backward_s: float, **more: Any) -> StepRecord:
        step_s = self.forward_s + backward_s + self.optimizer_s
        phases = {"timing": step_s, "forward": self.forward_s, "backward": backward_s, "optimizer": self.optimizer_s}
        samples = {name: self._samples(draw, seconds, self.noise) for name, seconds in phases.items()}
        return StepRecord(
            model="made", wrapper=self.wrapper, backend=self.backend, device=self.device, world_size=2,
            batch_size=4,
            role=role, label=label, **samples, **more,
        )  # fmt: skip

    def build_disturbed(
        self, draw: random.Random, num_bytes: int, compute_rate: float, message_rate: float, share: float = 1.0
    ) -> StepRecord:
        """Three messages during backward, each with the fraction `share` of its bytes sent before backward ends."""
        alone_s = self.message_s(num_bytes)
        overlapped_s = share * alone_s / message_rate
        under_way_s = overlapped_s + (1 - share) * alone_s
        backward_s = self.backward_s + 3 * overlapped_s * (1 - compute_rate)

        def wait_first(seconds: float) -> Samples:
            # Rank 0 starts its message early and waits for its peer, which costs nothing.
            return Samples(seconds=((seconds + 0.1, seconds),) * self.count)

        return self.build_step(
            draw, "disturbed", f"messages of {num_bytes}", backward_s, message_bytes=num_bytes, num_messages=3,
            under_way=wait_first(under_way_s), overlapped=wait_first(overlapped_s), alone=wait_first(alone_s),
        )  # fmt: skip

    def build_carried(self, slowed: float = 0.0) -> list[Record]:
        """The contents of a two-rank profile; with `slowed`, four ranks take that many times as long to compute."""
        found = [r for r in self.build_calibration() if isinstance(r, StepRecord | LayerProfileRecord)]
        step = self.build_step(random.Random(0), "together", "ranks", self.backward_s)
        for count, factor in ((2, 1.0), (4, slowed)) if slowed else ():
            seconds = ((factor * self.plain_s,) * count,) * self.count
            plain = {"timing": Samples(seconds=seconds), "forward": None, "backward": None, "optimizer": None}
            found.append(replace(step, world_size=count, **plain))
        return found

    def build_plan_step(self, label: str, times_s: Sequence[float], **more: Any) -> StepRecord:
        """Steps of the job itself, used to score predictions."""
        step = self.build_step(random.Random(0), "job", label, self.backward_s)
        rows = {name: Samples(seconds=tuple((time_s,) * 2 for time_s in times_s)) for name in ("timing", "forward")}
        rows |= {name: rows["forward"] for name in ("backward", "optimizer")}
        return replace(step, **rows, **more)

    def _samples(self, draw: random.Random, seconds: float, noise: float) -> Samples:
        times_s = [seconds * max(0.1, 1 + noise * draw.gauss(0, 1)) for _ in range(self.count)]
        return Samples(seconds=tuple((time_s, 0.9 * time_s) for time_s in times_s))

    def _build_profile(self, draw: random.Random) -> LayerProfileRecord:
        def alone(seconds: float) -> Samples:
            return Samples(seconds=((seconds,),) * self.count)

        parameters = tuple(
            ParameterTimes(f"layer{place}", size, size // 4, "float32", "", (PROFILER_COST * ready_s,) * self.count)
            for place, (size, ready_s) in enumerate(zip(self.sizes, self.ready_s, strict=True))
        )
        return LayerProfileRecord(
            model="made", device="cpu", dtype="fp32", batch_size=4, parameters=parameters, blocks=(),
            timing=alone(self.plain_s), forward=alone(self.forward_s), backward=alone(self.backward_s),
            optimizer=alone(self.optimizer_s), profiled_step=alone(PROFILER_COST * self.plain_s),
            profiled_forward=alone(self.forward_s), profiled_backward=alone(PROFILER_COST * self.backward_s),
        )  # fmt: skip
