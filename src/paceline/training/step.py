"""One training step, top to bottom: forward, backward and optimizer, each timed as a phase."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError, refuse
from paceline.parallel import DataParallel, SyncBatchNorm
from paceline.runtime.ranks.moments import between_s, mark
from paceline.training.loader import LoadedBatch
from paceline.workloads.data import Batch, DataForm
from paceline.workloads.external import own_errors
from paceline.workloads.models import compute_outcome

_OVER_RANKS = (SyncBatchNorm, nn.SyncBatchNorm)


class PhaseTimes:
    """Seconds of each phase of one step; repeated phases are summed."""

    def __init__(self, moments: Sequence[tuple[str, Any]] = ()) -> None:
        self.moments = moments

    def read(self) -> dict[str, float]:
        """Read the seconds by phase. On a GPU the step must have finished: reading does not wait for events."""
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(self.moments):
            seconds[phase] = seconds.get(phase, 0.0) + between_s(begin, end)
        return seconds


class Phases(Protocol):
    """Receives the start of each phase of a step (`forward`, `backward` with its waits, `optimizer`) and its end."""

    def enter(self, phase: str) -> None:
        return

    def end(self) -> PhaseTimes:
        return PhaseTimes()


class NoPhases(Phases):
    pass


class PhaseClock:
    """Records the start of each phase, by the host's clock or by CUDA events, without waiting for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        self._moments.append((phase, mark(self._device)))

    def end(self) -> PhaseTimes:
        self.enter("end")
        moments, self._moments = self._moments, []
        return PhaseTimes(moments)


def fixed_kernels(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Turn oneDNN off in this context if it does not support the precision on this CPU.

    Otherwise torch would turn it off in the middle of the first step, and a resumed run would use different kernels.
    """
    supports = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    if device.type != "cpu" or precision not in supports or getattr(torch.ops.mkldnn, supports[precision])():
        return contextlib.nullcontext()
    return torch.backends.mkldnn.flags(False, None, None, None)  # type: ignore[no-untyped-call, no-any-return]


class OwnState:
    """The state of a user's step, saved and loaded like an optimizer. `parts` is None if the user returned none."""

    def __init__(self, name: str, parts: Mapping[str, Any] | None) -> None:
        self._name, self.parts = name, parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in (self.parts or {}).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        odd = ", ".join(sorted(state.keys() ^ (self.parts or {}).keys()))
        found = f"model {self._name} and the checkpoint have different state: {odd}"
        if self.parts is None:
            found = f"model {self._name} did not return the state of its optimizers, so the checkpoint lacks it"
        refuse((self.parts is None or odd, f"{found}; return it in a dict, and start a new run"), code="mismatch")
        for name, part in (self.parts or {}).items():
            part.load_state_dict(state[name])


@dataclass
class Learner:
    """One rank's training objects: the wrapped model, the bare module, the optimizer and numeric settings.

    `name` is the model's name. With a user's step, `optimizer` is an `OwnState`.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    form: DataForm
    device: torch.device
    world_size: int
    precision: str
    clip: float | None
    label_smoothing: float = 0.0
    name: str = ""
    own_step: Callable[..., Any] | None = None
    own_evaluate: Callable[..., Any] | None = None
    workers: Any = None  # several learners that step together: see `workers.Workers`

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    @property
    def can_evaluate(self) -> bool:
        return self.own_step is None or self.own_evaluate is not None

    @property
    def can_resume(self) -> bool:
        """Whether the state can be saved: a user's step may not return the state of its optimizers."""
        return not (isinstance(self.optimizer, OwnState) and self.optimizer.parts is None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, or those in the state of a user's step."""
        parts = (self.optimizer.parts or {}).values() if isinstance(self.optimizer, OwnState) else [self.optimizer]
        return [part for part in parts if isinstance(part, torch.optim.Optimizer)]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def fill(self, loaded: LoadedBatch) -> Batch:
        """The batch to compute. A rank without samples gets a filler with zero weight, or an empty batch if the model
        normalizes over all ranks, because its statistics would include the filler."""
        if loaded.num_counted or not any(isinstance(layer, _OVER_RANKS) for layer in self.module.modules()):
            return loaded.batch
        return loaded.batch.map(lambda tensor: tensor[:0])

    def call_own(self, what: str, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Call the user's step or evaluation. Returns its mean loss over the batch."""
        function: Any = {"step": self.own_step, "evaluate": self.own_evaluate}[what]
        with own_errors(self.name, always=True):
            loss = function(model, batch.content)
        if isinstance(loss, int | float) or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            return torch.as_tensor(loss, dtype=torch.float32, device=self.device).detach().reshape(())
        found = f"a {type(loss).__name__}{list(loss.shape) if isinstance(loss, torch.Tensor) else ''}"
        needed = "it must return its mean loss over the batch, a number or a tensor with one element"
        raise ConfigError(f"the {what} of {self.name} returned {found}: {needed}", code="own-type")

    def sync_parameters(self) -> None:
        """Synchronize replicas that may differ under their sync schedule. Collective: call on every rank."""
        for model in (*list_models(self.model), self.workers):
            if hasattr(model, "sync_parameters"):
                model.sync_parameters()

    def check_last_step(self) -> None:
        """Raise other ranks' errors from the last step, which the wrapper reads late on a GPU.
        Collective: call on every rank."""
        for model in list_models(self.model):
            if isinstance(model, DataParallel):
                model.check_last_step()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate. Call before backward: strategies rescale their residuals to the new rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def update(self) -> None:
        """Apply and clear the averaged gradients."""
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            if isinstance(self.model, DataParallel):  # also handles sharded gradients
                self.model.clip_grad_norm_(self.clip)
            else:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class StepOutcome:
    """The result of one step on this rank: sums over its samples, still on the device."""

    loss_sum: torch.Tensor
    num_correct: torch.Tensor | None
    bad_parameter: str = ""

    def add(self, other: StepOutcome) -> StepOutcome:
        """The sum of two outcomes."""
        correct = self.num_correct
        if correct is not None and other.num_correct is not None:
            correct = correct + other.num_correct
        return StepOutcome(self.loss_sum + other.loss_sum, correct, self.bad_parameter or other.bad_parameter)


def take_step(
    learner: Learner, window: Sequence[LoadedBatch], num_targets: int, rate: float, phases: Phases
) -> StepOutcome:
    """Train on this rank's micro-batches of one global batch, which has `num_targets` targets over all ranks.

    Each loss is a sum divided by the number of targets in the global batch. This weights micro-batches, ranks and a
    short tail by their size, so their gradients add up to the gradient of one large batch. The factor `world_size`
    undoes the wrapper's average. Gradients are sent once, with the last micro-batch.
    Collective: call on every rank, with the same number of micro-batches.
    """
    if learner.workers is not None:
        learner.workers.set_rate(rate)
        outcome: StepOutcome = learner.workers.take_step(window, num_targets, rate, phases)
        return outcome
    if learner.own_step is not None:
        return _take_own_step(learner, window, phases)
    learner.set_rate(rate)
    total = compute_gradients(learner, window, num_targets, phases)
    phases.enter("optimizer")
    learner.update()
    return total


def compute_gradients(learner: Learner, window: Sequence[LoadedBatch], num_targets: int, phases: Phases) -> StepOutcome:
    """Run the forward and backward passes of a step; see `take_step`."""
    # A rank without samples in a short tail has 0 correct predictions, but regression has no accuracy at all.
    correct = torch.zeros((), dtype=torch.int64, device=learner.device) if learner.form.num_classes else None
    total = StepOutcome(torch.zeros((), device=learner.device), correct)
    no_sync = getattr(learner.model, "no_sync", contextlib.nullcontext)
    for number, loaded in enumerate(window):
        with contextlib.nullcontext() if number == len(window) - 1 else no_sync():
            phases.enter("forward")
            batch, smoothing = learner.fill(loaded), learner.label_smoothing
            with learner.autocast(), own_errors(learner.name):
                outcome = compute_outcome(learner.model, batch, learner.form, label_smoothing=smoothing)
            weight = 1.0 if loaded.num_counted else 0.0
            loss = outcome.loss_sum * (weight * learner.world_size / num_targets)
            phases.enter("backward")
            learner.scaler.scale(loss).backward()
        if loaded.num_counted:
            total = total.add(StepOutcome(outcome.loss_sum.detach(), outcome.num_correct))
    if learner.device.type == "cpu" and not math.isfinite(total.loss_sum.item()):
        total.bad_parameter = find_bad_parameter(learner.module)
    return total


def _take_own_step(learner: Learner, window: Sequence[LoadedBatch], phases: Phases) -> StepOutcome:
    """Run a user's step: forward, backward and update on one batch."""
    (loaded,) = window
    with mark_phases(learner.model, phases):
        loss = learner.call_own("step", learner.model, loaded.batch)
    outcome = StepOutcome(loss * loaded.num_counted, None)
    if learner.device.type == "cpu" and not math.isfinite(outcome.loss_sum.item()):
        outcome.bad_parameter = find_bad_parameter(learner.module)
    return outcome


def list_models(model: nn.Module) -> list[nn.Module]:
    """A step's models: one, or the entries of an `nn.ModuleDict`, each in its own wrapper."""
    # A ModuleDict that defines forward is a model itself.
    if isinstance(model, nn.ModuleDict) and type(model).forward is nn.ModuleDict.forward:
        return list(model.values())
    return [model]


@contextlib.contextmanager
def mark_phases(model: nn.Module, phases: Phases) -> Iterator[None]:
    """Mark the phases of a user's step by hooking the model's forward, `torch.autograd.backward` and optimizer
    steps. The time before the first forward is `data_wait`."""
    if isinstance(phases, NoPhases):
        yield
        return
    phases.enter("data_wait")
    backward, depth = torch.autograd.backward, 0
    handles = [
        # Prepended, so that the time of profiling hooks counts as forward.
        *(
            part.register_forward_pre_hook(lambda *_: None if depth else phases.enter("forward"), prepend=True)
            for part in list_models(model)
        ),
        register_optimizer_step_pre_hook(lambda *_: phases.enter("optimizer")),
    ]

    @functools.wraps(backward)
    def run_backward(*args: Any, **kwargs: Any) -> None:
        nonlocal depth  # reentrant checkpointing runs a nested backward
        if not depth:
            phases.enter("backward")
        depth += 1
        try:
            backward(*args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            phases.enter("optimizer")

    torch.autograd.backward = run_backward
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


def find_bad_parameter(module: nn.Module) -> str:
    """Find the first non-finite parameter or buffer, else the first non-finite gradient, else ""."""
    params = list(module.named_parameters())
    grads = [(f"the gradient of {name}", param.grad) for name, param in params if param.grad is not None]
    tensors = [(name, tensor.detach()) for name, tensor in (*params, *module.named_buffers(), *grads) if tensor.numel()]
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    # One fused pass over all tensors, then a single wait for the GPU.
    norms = torch._foreach_norm([tensor for _, tensor in named], ord=float("inf"))
    finite = torch.isfinite(torch.stack([norm.float() for norm in norms])).tolist()
    return next((name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite), "")
