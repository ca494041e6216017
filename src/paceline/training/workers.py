"""Several workers of a data-parallel job in one process, to study a strategy's accuracy on a single device.

Each worker has a model and an optimizer, and computes its part of every batch. Workers exchange data with the same
codecs as ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.codecs import Codec, Exchange, build_codec, run_together
from paceline.parallel.outer import Outer
from paceline.strategy import DENSE, Strategy
from paceline.torch_internals import BatchNorm
from paceline.training.loader import LoadedBatch
from paceline.training.optimizers import match_strides
from paceline.training.step import Learner, Phases, StepOutcome, compute_gradients

BuildCodec = Callable[[Strategy, int, int], Codec]


class Workers:
    """Learners that step together, with their codecs and outer optimizers."""

    def __init__(self, learners: Sequence[Learner], strategy: Strategy, build: BuildCodec = build_codec) -> None:
        self.learners = learners
        self.strategy = strategy
        count = len(learners)
        self._codecs = [build(strategy, rank, count) for rank in range(count)]
        # With an outer optimizer, gradients are sent uncompressed until local steps begin.
        self._senders = [build(DENSE, rank, count) for rank in range(count)] if strategy.outer else self._codecs
        named = learners[0].module.named_parameters()
        self._names = [name for name, param in named if param.requires_grad]
        self._step = 0
        self._rate = 0.0
        self._outers = [
            Outer(strategy, self._names, learner.parameters, codec)
            for learner, codec in zip(learners, self._codecs, strict=True)
            if strategy.outer
        ]

    def take_step(self, window: Sequence[LoadedBatch], num_targets: int, rate: float, phases: Phases) -> StepOutcome:
        """Take one step of all workers, with equal parts of each micro-batch. Call `set_rate` first."""
        count = len(self.learners)
        total = None
        is_local = any(outer.is_local for outer in self._outers)
        for outer in self._outers:
            outer.begin_round()
        for number, learner in enumerate(self.learners):
            parts = [_cut(loaded, number, count) for loaded in window]
            outcome = compute_gradients(learner, parts, num_targets, phases)
            total = outcome if total is None else total.add(outcome)
        assert total is not None
        phases.enter("exchange")
        with torch.no_grad():
            if not is_local:
                self._average_gradients(rate)
                average_statistics([learner.module for learner in self.learners])
        phases.enter("optimizer")
        for learner in self.learners:
            learner.update()
        self._step += 1
        self._rate = rate or self._rate
        if any([outer.count() for outer in self._outers]):
            self._run([outer.advance(self._lrs) for outer in self._outers])
        return total

    @property
    def _lrs(self) -> list[float]:
        return [self._rate] * len(self._names)

    def _average_gradients(self, rate: float) -> None:
        if rate > 0 and rate != self._rate > 0:  # residuals have the scale of gradients
            for codec in self._senders:
                codec.rescale(self._names, self._rate / rate)
        grads = [[_gradient(param) for param in learner.parameters] for learner in self.learners]
        run_together(
            [codec.average(self._names, own, self._step) for codec, own in zip(self._senders, grads, strict=True)]
        )

    def _run(self, exchanges: Sequence[Exchange]) -> None:
        with torch.no_grad():
            run_together(exchanges)
            average_statistics([learner.module for learner in self.learners])

    def set_rate(self, rate: float) -> None:
        for learner in self.learners:
            learner.set_rate(rate)

    def state(self) -> dict[str, Any]:
        """All state that the next step depends on, except the first worker's model and optimizer."""
        memory = [outer.state() for outer in self._outers]
        memory = memory or [{"common": codec.common, "rank": codec.errors} for codec in self._codecs]
        others = [
            {"model": learner.module.state_dict(), "optimizer": learner.optimizer.state_dict()}
            for learner in self.learners[1:]
        ]
        state = {"step": self._step, "rate": self._rate, "strides": self._strides}
        return state | {"memory": memory, "others": others}

    @property
    def _strides(self) -> list[list[int]]:
        return [list(param.stride()) for param in self.learners[0].parameters]

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state with the same number of workers."""
        if state["strides"] != self._strides:
            text = "parameters and residuals have a different memory layout here, probably because the device differs"
            raise ConfigError(f"{text}: resume on the same type of device as before", code="mismatch")
        self._step, self._rate = state["step"], state["rate"]
        for learner, found in zip(self.learners[1:], state["others"], strict=True):
            learner.module.load_state_dict(found["model"])
            learner.optimizer.load_state_dict(found["optimizer"])
            match_strides(learner.optimizer)
        for number, found in enumerate(state["memory"]):
            if self._outers:
                self._outers[number].load(found, found["rank"])
            else:
                codec = self._codecs[number]
                codec.errors = {name: error.clone() for name, error in found["rank"].items()}
                codec.common = {name: value.clone() for name, value in found["common"].items()}

    def sync_parameters(self) -> None:
        """End the round: all workers then have the same parameters."""
        if any(outer.has_drifted for outer in self._outers):
            self._run([outer.complete(self._lrs) for outer in self._outers])


def build_workers(learner: Learner, count: int, strategy: Strategy, build: BuildCodec = build_codec) -> Learner:
    """Build a learner for `count` identical workers, the first of which is `learner`. Its steps run all workers."""
    learners = [replace(learner, world_size=count * learner.world_size)]
    for _ in range(count - 1):
        # Copy both together: the optimizer references the module's tensors.
        module, optimizer = copy.deepcopy((learner.module, learner.optimizer))
        learners.append(replace(learners[0], model=module, module=module, optimizer=optimizer))
    return replace(learners[0], workers=Workers(learners, strategy, build))


def average_statistics(modules: Sequence[nn.Module]) -> None:
    """Average the replicas' running statistics, as the wrapper does."""
    names = ("running_mean", "running_var")
    own = [
        [getattr(layer, name) for layer in module.modules() if isinstance(layer, BatchNorm) for name in names]
        for module in modules
    ]
    own = [[buffer for buffer in buffers if buffer is not None] for buffers in own]
    if own[0]:
        # A single operation, because every call on a GPU launches a kernel.
        mean = torch.stack([torch.cat([buffer.reshape(-1) for buffer in buffers]) for buffers in own]).mean(0)
        for buffers in own:
            torch._foreach_copy_(buffers, list(mean.split([buffer.numel() for buffer in buffers])))


def _gradient(param: nn.Parameter) -> torch.Tensor:
    """The gradient in memory order, as in the wrapper's buckets, regardless of the parameter's strides."""
    if param.grad is None or param.grad.stride() != param.stride():
        grad, param.grad = param.grad, torch.zeros_like(param)
        param.grad.copy_(grad if grad is not None else param.grad)
    if param.grad.is_contiguous():
        return param.grad
    return param.grad.as_strided((param.numel(),), (1,)).view(param.size())


def _cut(loaded: LoadedBatch, number: int, count: int) -> LoadedBatch:
    """Cut out one worker's part of a micro-batch for `count` workers; if it is empty, use a filler that does not
    count."""
    size = len(loaded.batch)
    start, end = (size * place // count for place in (number, number + 1))
    batch = loaded.batch.map(lambda tensor: tensor[start:end] if end > start else tensor[:1])
    return LoadedBatch(batch, min(end - start, max(0, loaded.num_counted - start)))
