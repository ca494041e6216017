"""Which parameters the ranks hold in common, and whether they really are the same. Gradients do not belong here.

Whatever is found is raised on every rank with the same text: all of them compare the same gathered facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.channel import Channel
from paceline.plan import Gradient

__all__ = ["Members", "NothingToTrainError", "check_alike", "digest_replica", "find_members", "locate_drift", "verify"]

_LISTED = 5


class NothingToTrainError(ConfigError, RuntimeError):
    """No parameter of the module needs a gradient. torch raises RuntimeError here, so this is one, too."""


@dataclass(frozen=True)
class Members:
    """What is kept equal: the parameters to be trained, those that are frozen, and the buffers.

    A tied parameter is one member with several names; `names[i]` belongs to `params[i]`, the first name first.
    """

    params: tuple[nn.Parameter, ...]
    names: tuple[tuple[str, ...], ...]
    frozen: tuple[nn.Parameter, ...]
    frozen_names: tuple[str, ...]
    buffers: tuple[torch.Tensor, ...]
    buffer_names: tuple[str, ...]

    def name(self, index: int) -> str:
        return " = ".join(self.names[index])

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The parameters as the planner sees them, in the module's order."""
        return tuple(
            Gradient(
                names[0],
                param.numel() * param.element_size(),
                param.element_size(),
                str(param.dtype).removeprefix("torch."),
                str(param.device),
            )
            for names, param in zip(self.names, self.params, strict=True)
        )

    @cached_property
    def _layouts(self) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
        return [(param.shape, param.dtype, param.device) for param in self.params]

    def remember(self) -> Members:
        """Note now what the parameters are like; `zeros` and `check` refer to it ever after."""
        assert self._layouts is not None
        return self

    def kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        """As it was at the time of wrapping."""
        return self._layouts[index][1:]

    def zeros(self, index: int) -> torch.Tensor:
        """A gradient of nothing, as it was at the time of wrapping, whatever the parameter is like now."""
        shape, dtype, device = self._layouts[index]
        if self.params[index].shape == shape:
            return torch.zeros_like(self.params[index], dtype=dtype, device=device, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device=device)

    def check(self, index: int, grad: torch.Tensor) -> None:
        """Refuse a gradient that cannot travel as it was agreed at the time of wrapping."""
        shape, dtype, device = self._layouts[index]
        if grad.dtype == dtype and grad.layout == torch.strided and grad.shape == shape and grad.device == device:
            return
        if grad.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {self.name(index)} is sparse, and only dense ones are averaged: build its layer with "
                "sparse=False, or put the parameter in `ignore`"
            )
        now = f"{tuple(grad.shape)} {str(grad.dtype).removeprefix('torch.')} on {grad.device}"
        was = f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
        raise ConfigError(
            f"the gradient of {self.name(index)} is {now}, and at the time of wrapping it was {was}: after such a "
            "change call rebuild() on all ranks"
        )

    def check_all(self) -> None:
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.check(index, param.grad)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.params, *self.frozen, *self.buffers]

    def tensor_names(self) -> list[str]:
        return [*(names[0] for names in self.names), *self.frozen_names, *self.buffer_names]


def find_members(module: nn.Module, ignored: Iterable[str] = ()) -> Members:
    """The members of a module; `ignored` are full names of parameters and buffers that are left alone."""
    ignored = set(ignored)
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers())
    unknown = ignored - {name for name, _ in parameters} - {name for name, _ in buffers}
    if unknown:
        raise ConfigError(
            f"ignored are {', '.join(sorted(unknown))}: the module has no parameter or buffer of the name"
        )
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, param in parameters:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet (a lazy module): run one batch through it before wrapping")
        names_of.setdefault(param, []).append(name)
    kept = {param: names for param, names in names_of.items() if not ignored.intersection(names)}
    trained = {param: tuple(names) for param, names in kept.items() if param.requires_grad}
    frozen = {param: names[0] for param, names in kept.items() if not param.requires_grad}
    shared = [(name, buffer) for name, buffer in buffers if name not in ignored]
    for name, tensor in [*((names[0], param) for param, names in kept.items()), *shared]:
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device and has no values: materialise the module before wrapping")
    return Members(
        tuple(trained),
        tuple(trained.values()),
        tuple(frozen),
        tuple(frozen.values()),
        tuple(buffer for _, buffer in shared),
        tuple(name for name, _ in shared),
    ).remember()


def _describe(members: Members) -> list[tuple[str, str]]:
    """One line of facts per tensor, in order; ranks must agree on every one of them."""
    lines = []
    for number, (name, tensor) in enumerate(zip(members.tensor_names(), members.tensors(), strict=True)):
        is_param = number < len(members.params) + len(members.frozen)
        kind = ("trained " if tensor.requires_grad else "frozen ") if is_param else "buffer "
        strides = tuple(tensor.stride()) if is_param and tensor.numel() else ()
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append((name, f"{kind}{tuple(tensor.shape)} {dtype} on {tensor.device.type}, strides {strides}"))
    return lines


def check_alike(members: Members, options: dict[str, Any], channel: Channel) -> None:
    """Raise ConfigError on every rank unless all hold the same parameters in the same order, and the same options.

    Collective: every rank must call this.
    """
    lines = [*_describe(members), *((f"the option {name}", repr(value)) for name, value in options.items())]
    digest = hashlib.sha256(repr(lines).encode()).hexdigest()
    if len(set(channel.share(digest))) == 1:
        if not members.params:
            raise NothingToTrainError("no parameter of the module needs a gradient: there is nothing to synchronise")
        return
    all_lines = channel.share(lines)
    for rank, theirs in enumerate(all_lines):
        if theirs != all_lines[0]:
            raise ConfigError(f"the ranks hold different models: {_first_difference(all_lines[0], theirs, rank)}")


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]], rank: int) -> str:
    first, other = dict(ours), dict(theirs)
    for name, fact in ours:
        if name not in other:
            return f"{name} ({fact}) is on rank 0 and not on rank {rank} ({len(ours)} and {len(theirs)} entries)"
        if other[name] != fact:
            return f"{name} is {fact} on rank 0, and {other[name]} on rank {rank}"
    for name, fact in theirs:
        if name not in first:
            return f"{name} ({fact}) is on rank {rank} and not on rank 0 ({len(theirs)} and {len(ours)} entries)"
    pairs = zip(ours, theirs, strict=True)
    number, (a, b) = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"the same tensors in another order: number {number} is {a[0]} on rank 0 and {b[0]} on rank {rank}"


def verify(members: Members, channel: Channel) -> None:
    """Raise ConfigError (a ValueError) on every rank, naming parameter and rank, if the replicas' values differ.

    Collective: every rank must call this.
    """
    mine = [_hash(tensor) for tensor in members.tensors()]
    together = hashlib.sha256("".join(mine).encode()).hexdigest()
    if len(set(channel.share(together))) > 1:
        found = _compare(members, channel.share(mine))
        raise ConfigError(f"the replicas differ: {found}; set the same seed on all ranks, or use init='broadcast'")


def _hash(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().cpu().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest() if values.numel() else ""


def _compare(members: Members, table: Sequence[Sequence[Any]]) -> str:
    """In words, which tensors differ from rank 0's, and on which ranks."""
    names, found = members.tensor_names(), []
    for index, name in enumerate(names):
        ranks = [rank for rank, row in enumerate(table) if row[index] != table[0][index]]
        if ranks:
            found.append(f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"{'; '.join(found[:_LISTED])}{more} (compared with rank 0)"


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of all elements: whole numbers, so it does not depend on the order of adding."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return values.view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def _digests(members: Members) -> list[int]:
    tensors = [tensor for tensor in (*members.params, *members.frozen) if tensor.numel()]
    if not tensors:
        return []
    return [int(value) for value in torch.stack([_digest(t).to(tensors[0].device) for t in tensors]).tolist()]


def digest_replica(members: Members) -> int:
    """48 bits that differ where parameters differ. One pass over the parameters."""
    digests = _digests(members)
    text = ",".join(map(str, digests)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") | 1


def locate_drift(members: Members, channel: Channel, step: int) -> CollectiveError:
    """The error that names the parameters and ranks. Collective: every rank must call this."""
    own = [_digest(tensor).item() for tensor in (*members.params, *members.frozen)]
    found = _compare(members, [[*row, *[0] * len(members.buffers)] for row in channel.share(own)])
    return CollectiveError(
        f"the replicas have drifted apart by step {step}: {found}; something changed parameters on some ranks only"
    )
