"""A bare model's step layer by layer: when each gradient is ready, and what each block takes.

Hooks and moments are in `layer_moments`; what is derived from the samples is in `records.layers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.measure.engine import no_garbage_collection, synchronize
from paceline.measure.layer_moments import LayerHooks, Moments
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes, Samples

__all__ = ["LayerStep", "measure_layers", "order_by_ready"]

Block = tuple[str, nn.Module]


@dataclass(frozen=True)
class LayerStep:
    """One training step of a bare module, taken apart: `forward` returns the loss, `update` steps and clears gradients.

    `model`, `dtype` and `batch_size` are labels for the record.
    """

    module: nn.Module
    forward: Callable[[], torch.Tensor]
    update: Callable[[], Any]
    model: str = "model"
    dtype: str = "float32"
    batch_size: int = 1


@dataclass
class _Steps:
    """The phases of every step of one sort, in seconds: whole step, forward, backward, optimizer."""

    phases_s: list[tuple[float, float, float, float]] = field(default_factory=list)

    def samples(self, phase: int, warmup: int) -> Samples:
        rows = tuple((phases[phase],) for phases in self.phases_s)
        return Samples(seconds=rows[warmup:], warmup_seconds=rows[:warmup])


@dataclass(frozen=True)
class _Seen:
    """What the hooks saw in one step: seconds since backward began by parameter, seconds by block."""

    ready_s: dict[int, float]
    forward_s: list[float]
    backward_s: list[float]


def measure_layers(
    step: LayerStep,
    blocks: Sequence[Block] | None = None,
    *,
    iters: int = 20,
    warmup: int = 3,
    tell: Callable[[float], None] | None = None,
) -> LayerProfileRecord:
    """Profile `iters` steps after `warmup` others, each beside a plain step: the record says what profiling costs.

    `blocks` are modules that do not contain each other, by name and in the order of the model's definition; by default
    the module's children. The steps train the module. Nothing is left on it. `tell` gets the share that is done.
    """
    if iters < 1 or warmup < 0:
        raise ConfigError(f"{iters} steps after {warmup} warm-ups: at least one step and no fewer than 0 warm-ups")
    module = step.module
    names = _name_parameters(module)
    device = _find_device(step.model, module, names)
    chosen = list(_find_children(module)) or [("model", module)] if blocks is None else list(blocks)
    _check_blocks(module, chosen)
    moments = Moments(device)
    hooks = LayerHooks(list(names), [block for _, block in chosen], moments)
    plain, profiled, seen = _Steps(), _Steps(), []
    with no_garbage_collection():
        for number in range(warmup + iters):
            # The order changes, so that neither sort always follows the other.
            for is_plain in (True, False) if number % 2 else (False, True):
                if is_plain:
                    plain.phases_s.append(_take_step(step, device, moments, None)[0])
                else:
                    phases, sight = _take_step(step, device, moments, hooks)
                    profiled.phases_s.append(phases)
                    seen.append(sight)
            if tell is not None and number >= warmup:
                tell((number + 1 - warmup) / iters)
    return _build_record(step, device, names, chosen, plain, profiled, seen[warmup:], warmup)


def _take_step(
    step: LayerStep, device: torch.device, moments: Moments, hooks: LayerHooks | None
) -> tuple[tuple[float, float, float, float], _Seen]:
    synchronize(device)
    moments.restart()
    with hooks.attached() if hooks else contextlib.nullcontext():
        begin = moments.mark()
        loss = step.forward()
        middle = moments.mark()
        if hooks:
            hooks.begin_backward(middle)
        loss.backward()
        end = moments.mark()
    # Hooks are taken off between two moments, and not in the optimizer's time.
    resume = moments.mark()
    step.update()
    over = moments.mark()
    del loss
    at_s = moments.read_s()
    forward_s, backward_s, optimizer_s = at_s[middle] - at_s[begin], at_s[end] - at_s[middle], at_s[over] - at_s[resume]
    phases = forward_s + backward_s + optimizer_s, forward_s, backward_s, optimizer_s
    return phases, _read_hooks(hooks, at_s, middle, end) if hooks else _Seen({}, [], [])


def _read_hooks(hooks: LayerHooks, at_s: list[float], middle: int, end: int) -> _Seen:
    ready_s = {index: at_s[moment] - at_s[middle] for index, moment in hooks.ready.items()}
    forward_s, backward_s = [0.0] * hooks.num_blocks, [0.0] * hooks.num_blocks
    for index, first, last in hooks.calls:
        forward_s[index] += at_s[last] - at_s[first]
    borders = [*(moment for moment, _ in hooks.owners[1:]), end]
    for (first, index), last in zip(hooks.owners, borders, strict=True):
        if index >= 0:
            backward_s[index] += at_s[last] - at_s[first]
    return _Seen(ready_s, forward_s, backward_s)


def _name_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The names of every trained parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names


def _find_device(model: str, module: nn.Module, names: dict[nn.Parameter, list[str]]) -> torch.device:
    if hasattr(module, "no_sync"):
        raise ConfigError(f"{model} is wrapped in {type(module).__name__}: pass the bare module, which sends nothing")
    devices = {parameter.device for parameter in names}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device, for nothing is trained"
        raise ConfigError(f"the trained parameters of {model} are on {found}: they must be on one device")
    return devices.pop()


def _find_children(module: nn.Module, prefix: str = "") -> Iterator[Block]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # never called itself
            yield from _find_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_blocks(module: nn.Module, blocks: Sequence[Block]) -> None:
    inside = set(module.modules())
    owner: dict[nn.Module, str] = {}
    for name, block in blocks:
        if block not in inside:
            raise ConfigError(f"block {name} is not a part of the module: pass blocks of the module that is profiled")
        for part in block.modules():
            if part in owner:
                raise ConfigError(f"blocks {owner[part]} and {name} share a module: blocks must not contain each other")
            owner[part] = name


def _build_record(
    step: LayerStep,
    device: torch.device,
    names: dict[nn.Parameter, list[str]],
    blocks: Sequence[Block],
    plain: _Steps,
    profiled: _Steps,
    seen: list[_Seen],
    warmup: int,
) -> LayerProfileRecord:
    block_of: dict[nn.Parameter, str] = {}
    for name, block in blocks:
        for parameter in block.parameters():
            block_of.setdefault(parameter, name)
    parameters = [
        ParameterTimes(
            name=own[0],
            aliases=tuple(own[1:]),
            num_bytes=parameter.numel() * parameter.element_size(),
            num_elements=parameter.numel(),
            dtype=str(parameter.dtype).removeprefix("torch."),
            block=block_of.get(parameter, ""),
            ready_s=tuple(sight.ready_s.get(index) for sight in seen),
        )
        for index, (parameter, own) in enumerate(names.items())
    ]
    num_frozen = sum(not parameter.requires_grad for parameter in step.module.parameters())
    return LayerProfileRecord(
        model=step.model,
        device=device.type,
        dtype=step.dtype,
        batch_size=step.batch_size,
        parameters=tuple(order_by_ready(parameters)),
        blocks=tuple(
            BlockTimes(name, tuple(s.forward_s[index] for s in seen), tuple(s.backward_s[index] for s in seen))
            for index, (name, _) in enumerate(blocks)
        ),
        timing=plain.samples(0, warmup),
        forward=plain.samples(1, warmup),
        backward=plain.samples(2, warmup),
        optimizer=plain.samples(3, warmup),
        profiled_step=profiled.samples(0, warmup),
        profiled_forward=profiled.samples(1, warmup),
        profiled_backward=profiled.samples(2, warmup),
        note=f"{num_frozen} parameters are not trained" if num_frozen else "",
    )


def order_by_ready(parameters: list[ParameterTimes]) -> list[ParameterTimes]:
    """By median; equal ones in the reverse of the model's order, which is the usual order of backward."""
    late = float("inf")
    medians = {p.name: late if p.median_s is None else p.median_s for p in parameters}
    return sorted(reversed(parameters), key=lambda parameter: medians[parameter.name])
