"""What the ranks hold in common: which parameters, whether they are the same, and whether the model has changed.

A difference is raised on every rank with the same text: all of them compare the same gathered facts.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.channel import Channel
from paceline.plan import Gradient

_MAX_LISTED = 5


class NothingToTrainError(ConfigError, RuntimeError):
    """No parameter of the module needs a gradient. torch raises RuntimeError here, so this is one, too."""

    code = "nothing-to-train"


@dataclass(frozen=True)
class Replica:
    """What is kept equal on all ranks: trained parameters, frozen parameters, and buffers.

    A tied parameter is one entry with several names: `names[i]` belongs to `params[i]`, the first name first.
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
        """As they were when the model was wrapped: `read_replica` reads this at once."""
        return [(param.shape, param.dtype, param.device) for param in self.params]

    def kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        """As it was when the model was wrapped."""
        return self._layouts[index][1:]

    def zeros(self, index: int) -> torch.Tensor:
        """A gradient of zeros, as it was when the model was wrapped, even if the parameter has changed since."""
        shape, dtype, device = self._layouts[index]
        if self.params[index].shape == shape:
            return torch.zeros_like(self.params[index], dtype=dtype, device=device, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device=device)

    def check(self, index: int, grad: torch.Tensor) -> None:
        """Refuse a gradient that is sparse, or that has another shape, dtype or device than the ranks agreed on."""
        shape, dtype, device = self._layouts[index]
        if grad.dtype == dtype and grad.layout == torch.strided and grad.shape == shape and grad.device == device:
            return
        if grad.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {self.name(index)} is sparse, and only dense gradients are supported: build its "
                "layer with sparse=False, or put the parameter in `ignore`",
                code="sparse-gradient",
            )
        now = f"{tuple(grad.shape)} {str(grad.dtype).removeprefix('torch.')} on {grad.device}"
        was = f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
        raise ConfigError(
            f"the gradient of {self.name(index)} is {now}, and was {was} when the model was wrapped: call rebuild() "
            "on all ranks after such a change",
            code="model-changed",
        )

    def check_all(self) -> None:
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.check(index, param.grad)

    def build_late_error(self, late: Sequence[int]) -> CollectiveError:
        """The error for gradients that changed after they had been sent, which cannot be repaired."""
        more = f" and {len(late) - _MAX_LISTED} more" if len(late) > _MAX_LISTED else ""
        return CollectiveError(
            f"the gradient of {', '.join(self.name(index) for index in late[:_MAX_LISTED])}{more} changed after it had "
            "been sent: the graph differs from the steps before; reducer='flat' always waits for the end of backward",
            code="late-gradient",
        )

    def tensors(self) -> list[torch.Tensor]:
        return [*self.params, *self.frozen, *self.buffers]

    def tensor_names(self) -> list[str]:
        return [*(names[0] for names in self.names), *self.frozen_names, *self.buffer_names]


def read_replica(module: nn.Module, ignored: Iterable[str] = ()) -> Replica:
    """The replica that a module is; `ignored` are full names of parameters and buffers that are not synchronised."""
    ignored = set(ignored)
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers())
    unknown = ignored - {name for name, _ in parameters} - {name for name, _ in buffers}
    if unknown:
        raise ConfigError(f"ignore={sorted(unknown)}: the module has no parameter or buffer of this name")
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
    replica = Replica(
        tuple(trained),
        tuple(trained.values()),
        tuple(frozen),
        tuple(frozen.values()),
        tuple(buffer for _, buffer in shared),
        tuple(name for name, _ in shared),
    )
    assert replica._layouts is not None  # read now: parameters may change later
    return replica


# -- comparing the ranks ----------------------------------------------------------------------------------------------


def _describe(replica: Replica) -> list[tuple[str, str]]:
    """One line of facts per tensor, in order; ranks must agree on every one of them."""
    lines = []
    for number, (name, tensor) in enumerate(zip(replica.tensor_names(), replica.tensors(), strict=True)):
        is_param = number < len(replica.params) + len(replica.frozen)
        kind = ("trained " if tensor.requires_grad else "frozen ") if is_param else "buffer "
        strides = tuple(tensor.stride()) if is_param and tensor.numel() else ()
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append((name, f"{kind}{tuple(tensor.shape)} {dtype} on {tensor.device.type}, strides {strides}"))
    return lines


def check_same_model(replica: Replica, options: dict[str, Any], channel: Channel) -> None:
    """Raise on every rank unless all hold the same parameters in the same order, and the same options. Collective."""
    lines = [*_describe(replica), *((f"the option {name}", repr(value)) for name, value in options.items())]
    digest = hashlib.sha256(repr(lines).encode()).hexdigest()
    if len(set(channel.share(digest))) == 1:
        if not replica.params:
            raise NothingToTrainError("no parameter of the module needs a gradient: there is nothing to synchronise")
        return
    all_lines = channel.share(lines)
    for rank, theirs in enumerate(all_lines):
        if theirs != all_lines[0]:
            difference = _first_difference(all_lines[0], theirs, rank)
            raise ConfigError(f"the ranks hold different models: {difference}", code="mismatch")


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]], rank: int) -> str:
    first, other = dict(ours), dict(theirs)
    for name in [*first, *other]:
        here, there = first.get(name, "missing"), other.get(name, "missing")
        if here != there:
            return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    pairs = zip(ours, theirs, strict=True)
    number, (a, b) = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"the same tensors in another order: number {number} is {a[0]} on rank 0 and {b[0]} on rank {rank}"


def verify_values(replica: Replica, channel: Channel) -> None:
    """Raise on every rank, naming parameter and rank, if the values differ between the ranks. Collective."""
    mine = [_hash(tensor) for tensor in replica.tensors()]
    together = hashlib.sha256("".join(mine).encode()).hexdigest()
    if len(set(channel.share(together))) > 1:
        found = _compare(replica, channel.share(mine))
        text = f"the replicas differ: {found}; set the same seed on all ranks, or use init='broadcast'"
        raise ConfigError(text, code="mismatch")


def _hash(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().cpu().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest() if values.numel() else ""


def _compare(replica: Replica, table: Sequence[Sequence[Any]]) -> str:
    """Which tensors differ from rank 0's, and on which ranks, as text. A row may end before the buffers."""
    found = []
    for index, name in enumerate(replica.tensor_names()[: len(table[0])]):
        ranks = [rank for rank, row in enumerate(table) if row[index] != table[0][index]]
        if ranks:
            found.append(f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return f"{'; '.join(found[:_MAX_LISTED])}{more} (compared with rank 0)"


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digests(replica: Replica) -> list[int]:
    """For each parameter the sum of the bits of its elements: integers, so the order of adding does not matter."""
    digests = []
    for tensor in (*replica.params, *replica.frozen):
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        digests.append(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))
    if not digests:
        return []
    return [int(value) for value in torch.stack([digest.to(digests[0].device) for digest in digests]).tolist()]


def digest_replica(replica: Replica) -> int:
    """48 bits that differ where parameters differ. One pass over the parameters."""
    text = ",".join(map(str, _digests(replica))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") | 1


def build_drift_error(replica: Replica, channel: Channel, step: int) -> CollectiveError:
    """The error that names the parameters and ranks. Collective: every rank must call this."""
    found = _compare(replica, channel.share(_digests(replica)))
    return CollectiveError(
        f"the replicas have drifted apart by step {step}: {found}; something changed parameters on some ranks only",
        code="drift",
    )


# -- changes after wrapping -------------------------------------------------------------------------------------------

_num_registrations = 0
_is_counting = False
_is_trained = operator.attrgetter("requires_grad")


def _count_registration(*_: object) -> None:
    global _num_registrations
    _num_registrations += 1


class StructureWatch:
    """Notices parameters that are added to, or set to be trained in, a module after it was wrapped.

    Walking a model takes longer than a step may spend on it. So registrations are counted where torch makes them, and
    only a changed count, or a changed `requires_grad` of a frozen parameter, leads to a walk.
    """

    def __init__(self, replica: Replica, ignored: Collection[str]) -> None:
        global _is_counting
        if not _is_counting:
            register_module_parameter_registration_hook(_count_registration)
            register_module_module_registration_hook(_count_registration)
            _is_counting = True
        self._replica, self._ignored = replica, ignored
        self._seen = _num_registrations

    def find_change(self, module: nn.Module) -> str:
        """The change, as text, because of which gradients would not be synchronised; empty for none."""
        frozen = self._replica.frozen
        if self._seen == _num_registrations and not (frozen and any(map(_is_trained, frozen))):
            return ""
        self._seen = _num_registrations
        present = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]}
        found = read_replica(module, present.intersection(self._ignored))
        known = {id(param) for param in self._replica.params}
        new = [names[0] for names, param in zip(found.names, found.params, strict=True) if id(param) not in known]
        if not new:
            return ""
        was_frozen = set(self._replica.frozen_names)
        more = f" and {len(new) - _MAX_LISTED} more" if len(new) > _MAX_LISTED else ""
        listed = [f"{name} was frozen and is now trained" if name in was_frozen else f"{name} is new" for name in new]
        self._seen = -1  # check again in every forward, until `rebuild`
        return ", ".join(listed[:_MAX_LISTED]) + more
