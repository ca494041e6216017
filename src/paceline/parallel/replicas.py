"""Checks that ranks agree on parameters, their values, and the wrapper's options. Also detects later changes.

Every rank raises the same error for a mismatch, because all ranks compare the same gathered data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import operator
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from paceline.errors import CollectiveError, ConfigError
from paceline.machine import count_cores
from paceline.parallel.channel import Channel
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Gradient, Plan, Rows, plan_like_torch
from paceline.runtime.ranks.world import current_world
from paceline.strategy import DENSE, Strategy
from paceline.units import MIB, name_ranks

# On gloo, a message needs about this many bytes per rank to reach full bandwidth.
_GLOO_BYTES_PER_RANK = 4 * MIB
# Buckets are limited to about this fraction of the model, so that communication also overlaps with backward in small
# models. This yields about four messages; with more, the added latency would cancel the gain from overlap.
_SHARE = 2 / 7
# On NCCL over sockets, the latency of a message equals the time for about this many bytes per rank, on up to 8 ranks
# (larger counts were not measured). The first bucket has at least this size, the others at least four times this size.
_NCCL_LATENCY_BYTES, _MEASURED_RANKS = 5 * MIB // 16, 8
_NCCL_SHARE = 2 / 5  # about three messages
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MakePlan = Callable[[Sequence[int], Sequence[Rows]], Plan]


class NothingToTrainError(ConfigError, RuntimeError):
    """No parameter of the module requires a gradient. Also a RuntimeError, as in torch."""

    code = "nothing-to-train"


def list_some(items: Sequence[str], separator: str = "; ", most: int = 5) -> str:
    """List the first items and count the rest."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that must be the same on all ranks. `check_every` and `statistics_every` count synchronized steps."""

    reducer: str = "bucketed"
    init: str = "broadcast"
    average: str = "ranks"
    plan: Plan | None = None
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    allow_missing: bool = False
    manual: bool = False
    check_every: int = 100
    statistics_every: int = 1
    strategy: Strategy = DENSE
    embeddings: str = "auto"

    def __post_init__(self) -> None:
        known = {
            "reducer": ("bucketed", "simple"),
            "init": ("broadcast", "verify", "none"),
            "average": ("ranks", "samples"),
            "embeddings": ("auto", "dense", "rows"),
        }
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"{name}={value!r} is unknown: use {', '.join(values)}")
        if self.strategy.outer and (self.average != "ranks" or self.manual):
            what = "manual=True" if self.manual else f"average={self.average!r}"
            text = f"strategy={self.strategy.text!r} averages parameters after equal numbers of steps, but {what}"
            raise ConfigError(f"{text} applies to gradients: leave it out", code="strategy")
        given = [name for name in ("plan", "bucket_cap_mb", "bucket_cap_mb_list") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are mutually exclusive: pass one")
        if self.embeddings == "rows" and self.plan is not None and not self.plan.rows:
            raise ConfigError("embeddings='rows' conflicts with a plan that sends no rows: leave one of them out")
        given += ["embeddings='rows'"] if self.embeddings == "rows" else []
        if given and self.reducer == "simple":
            raise ConfigError(f"{given[0]} conflicts with reducer='simple', which sends one message per parameter")
        if self.reducer == "simple" and not self.strategy.is_dense:
            text = f"strategy={self.strategy.text!r} conflicts with reducer='simple', which sends raw gradients"
            raise ConfigError(text, code="strategy")
        if self.bucket_cap_mb_list == ():
            raise ConfigError("bucket_cap_mb_list=[] is empty: pass at least one cap in MiB")
        for cap in self.caps:
            if not (isinstance(cap, int | float) and math.isfinite(cap) and cap > 0):
                raise ConfigError(f"{given[0]}={cap!r}: must be a number of MiB above 0")
        for name, every in (("check_replicas_every", self.check_every), ("statistics_every", self.statistics_every)):
            if every < 0:
                raise ConfigError(f"{name}={every}: must be a number of steps, or 0 to disable")

    @property
    def caps(self) -> tuple[float, ...]:
        if self.bucket_cap_mb is not None:
            return (self.bucket_cap_mb,)
        return self.bucket_cap_mb_list or ()

    def make_planner(
        self, channel: Channel, gradients: Sequence[Gradient], with_hook: bool, needs_whole: bool = False
    ) -> MakePlan:
        """Return a function that plans buckets from the ready order of these gradients and the tables sent as rows."""
        if self.plan is not None:
            plan = check_plan(self.plan, gradients, needs_whole)
            return lambda order, rows: plan
        is_asked = self.embeddings == "rows"
        total = sum(gradient.num_bytes for gradient in gradients)
        if self.caps:
            caps = [max(1, int(cap * MIB)) for cap in self.caps]
        elif channel.is_nccl:
            latency = _NCCL_LATENCY_BYTES * min(channel.world_size, _MEASURED_RANKS)
            later = max(int(_NCCL_SHARE * total), 4 * latency)
            caps = [max(TORCH_FIRST_CAP_BYTES, latency), min(later, TORCH_CAP_BYTES)]
        elif with_hook:
            caps = [TORCH_FIRST_CAP_BYTES, TORCH_CAP_BYTES]
        elif channel.device.type != "cpu" or _has_spare_cores(channel.world_size):
            # Small buckets help only if spare cores can send them during backward. Otherwise they only add latency.
            largest = min(channel.world_size * _GLOO_BYTES_PER_RANK, TORCH_CAP_BYTES)
            caps = [TORCH_FIRST_CAP_BYTES, min(max(int(_SHARE * total), TORCH_FIRST_CAP_BYTES), largest)]
        else:
            caps = [TORCH_CAP_BYTES]
        return lambda order, rows: plan_like_torch(gradients, order, caps, rows, is_asked)


def check_plan(plan: Plan, gradients: Sequence[Gradient], needs_whole: bool) -> Plan:
    """Return the plan after checking that it fits this model and, if needed, does not split gradients."""
    if needs_whole and plan.is_split:
        text = "the plan splits a gradient across buckets, but a codec or communication hook needs whole gradients"
        raise ConfigError(f"{text}: use another plan", code="plan")
    if len(plan.gradients) != len(gradients):
        text = f"the plan is for {len(plan.gradients)} gradients, but the model has {len(gradients)}"
        raise ConfigError(text, code="plan")
    for index, pair in enumerate(zip(plan.gradients, gradients, strict=True)):
        there, here = (f"{g.num_bytes} bytes {g.dtype}" for g in pair)
        if there != here:
            names = " and ".join(dict.fromkeys(g.name for g in pair))
            differ = f"gradient {index} ({names}) has {there} in the plan and {here} in the model"
            text = f"the plan is for another model: {differ}"
            raise ConfigError(text, code="plan")
    return replace(plan, gradients=tuple(gradients))


_computing: list[int] = []


@contextlib.contextmanager
def only_computing(num_ranks: int) -> Iterator[None]:
    """In this context, wrappers assume that this host has `num_ranks` ranks, because the others wait without using a
    core."""
    _computing.append(num_ranks)
    try:
        yield
    finally:
        _computing.pop()


def _has_spare_cores(world_size: int) -> bool:
    """Whether this host has a spare core per local rank, in addition to the cores that compute."""
    world = current_world()
    local = world.local_world_size if world is not None else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return count_cores() >= min([local, *_computing]) * (torch.get_num_threads() + 1)


@dataclass(frozen=True)
class Replica:
    """The tensors to keep equal on all ranks. A tied parameter is one entry with several names, in definition order.
    `layouts` are those of the trained parameters at the time of wrapping."""

    params: tuple[nn.Parameter, ...]
    names: tuple[tuple[str, ...], ...]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    layouts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    gradients: tuple[Gradient, ...]

    def name(self, index: int) -> str:
        return " = ".join(self.names[index])

    def zeros(self, index: int) -> torch.Tensor:
        """A gradient of zeros with the layout at the time of wrapping, even if the parameter has changed since."""
        shape, dtype, device = self.layouts[index]
        if self.params[index].shape == shape:
            return torch.zeros_like(self.params[index], dtype=dtype, device=device, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device=device)

    def check(self, index: int, grad: torch.Tensor) -> None:
        """Reject a gradient that is sparse, or whose shape, dtype or device differs from the layout that the ranks
        agreed on."""
        was = self.layouts[index]
        if grad.layout != torch.strided:
            text = "is sparse: build its layer with sparse=False, or put the parameter in `ignore`"
            raise ConfigError(f"the gradient of {self.name(index)} {text}", code="sparse-gradient")
        if (grad.shape, grad.dtype, grad.device) != was:
            before, now = (f"{tuple(a)} {_name(b)} on {c}" for a, b, c in (was, (grad.shape, grad.dtype, grad.device)))
            text = f"is {now}, but was {before} when the model was wrapped: call rebuild() on all ranks"
            raise ConfigError(f"the gradient of {self.name(index)} {text}", code="model-changed")

    def build_late_error(self, late: Sequence[int]) -> CollectiveError:
        """The error for gradients that changed after they had been sent, when it is too late to send them again."""
        names = list_some([self.name(index) for index in late], ", ")
        why = "the graph differs from earlier steps: use one bucket (a large bucket_cap_mb), or reducer='simple'"
        text = f"the gradient of {names} changed after it had been sent: {why}"
        return CollectiveError(text, code="late-gradient")

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors: trained, frozen, buffers."""
        trained = {names[0]: param for names, param in zip(self.names, self.params, strict=True)}
        return {**trained, **self.frozen, **self.buffers}


def find_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides that torch gives a new tensor like this one, such as its gradient: its own strides if it is dense."""
    return torch.empty_like(param, device="meta").stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_replica(module: nn.Module, ignored: Collection[str] = ()) -> Replica:
    """Collect a module's tensors. `ignored` are full names of parameters and buffers not to synchronize."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet (a lazy module): run one batch through it before wrapping")
        if hasattr(param, "placements"):
            raise ConfigError(f"{name} is a DTensor, which is not supported: use torch's wrapper for this model")
        if hasattr(param, "_in_backward_optimizers"):
            text = "is updated in backward, before its gradient is averaged: use an optimizer that steps after backward"
            raise ConfigError(f"{name} {text}")
        names_of.setdefault(param, []).append(name)
    kept = {param: tuple(names) for param, names in names_of.items() if not set(names) & set(ignored)}
    trained = {param: names for param, names in kept.items() if param.requires_grad}
    frozen = {names[0]: param for param, names in kept.items() if not param.requires_grad}
    gradients = tuple(
        Gradient(names[0], param.nbytes, param.element_size(), _name(param.dtype), str(param.device), (*param.shape,))
        for param, names in trained.items()
    )
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    layouts = tuple((param.shape, param.dtype, param.device) for param in trained)
    replica = Replica(tuple(trained), tuple(trained.values()), frozen, buffers, layouts, gradients)
    for name, tensor in replica.tensors().items():
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device and has no values: materialize the module before wrapping")
    return replica


def check_same_model(replica: Replica, options: Options, channel: Channel) -> None:
    """Raise on every rank unless all have the same parameters in the same order and the same options. Collective."""
    lines = []
    for name, tensor in replica.tensors().items():
        kind = "buffer" if name in replica.buffers else "trained" if tensor.requires_grad else "frozen"
        strides = tuple(tensor.stride()) if kind != "buffer" and tensor.numel() else ()
        facts = f"{kind} {tuple(tensor.shape)} {_name(tensor.dtype)} on {tensor.device.type}, strides {strides}"
        lines.append((name, facts))
    shared = {**vars(options), "plan": "" if options.plan is None else options.plan.to_json()}
    shared["strategy"] = options.strategy.text
    lines += [(f"the option {name}", repr(value)) for name, value in shared.items()]
    if len(set(channel.share(hashlib.sha256(repr(lines).encode()).hexdigest()))) == 1:
        if not replica.params:
            raise NothingToTrainError("no parameter of the module requires a gradient: there is nothing to synchronize")
        return
    first, *others = channel.share(lines)
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            text = f"the ranks hold different models: {_first_difference(first, theirs, rank)}"
            raise ConfigError(text, code="mismatch")


def _first_difference(ours: list[tuple[str, str]], theirs: list[tuple[str, str]], rank: int) -> str:
    first, other = dict(ours), dict(theirs)
    for name in [*first, *other]:
        here, there = first.get(name, "missing"), other.get(name, "missing")
        if here != there:
            return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    here, there = next((a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True) if a != b)
    return f"the same tensors in a different order: {here} on rank 0, {there} on rank {rank}"


def verify_values(replica: Replica, channel: Channel) -> None:
    """Raise on every rank, naming parameters and ranks, if values differ between ranks. Collective."""
    mine = []
    for tensor in replica.tensors().values():
        values = tensor.detach().contiguous().cpu().reshape(-1)
        mine.append(hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest() if values.numel() else "")
    if found := _compare(replica, channel.share(mine)):
        text = f"the replicas differ: {found}; set the same seed on all ranks, or use init='broadcast'"
        raise ConfigError(text, code="mismatch")


def _compare(replica: Replica, table: Sequence[Sequence[Any]]) -> str:
    """Describe which tensors differ from rank 0's and on which ranks. A row may omit the buffers."""
    found = []
    for index, name in enumerate(list(replica.tensors())[: len(table[0])]):
        if ranks := [rank for rank, row in enumerate(table) if row[index] != table[0][index]]:
            found.append(f"{name} on {name_ranks(ranks)}")
    return f"{list_some(found)} (compared with rank 0)" if found else ""


def _digests(replica: Replica) -> list[int]:
    """For each parameter, the sum of its elements' bits as integers, which does not depend on summation order."""
    digests = []
    for tensor in (*replica.params, *replica.frozen.values()):
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        digests.append(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))
    return [int(value) for value in torch.stack([digest.to(digests[0].device) for digest in digests]).tolist()]


def digest_replica(replica: Replica) -> int:
    """A 48-bit hash of the parameters, computed in one pass over them."""
    text = ",".join(map(str, _digests(replica))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") | 1


def build_drift_error(replica: Replica, channel: Channel, step: int) -> CollectiveError:
    """The error that names the drifted parameters and ranks. Collective: every rank must call this."""
    found = _compare(replica, channel.share(_digests(replica)))
    text = f"the replicas have drifted apart by step {step}: {found}; parameters were changed on only some ranks"
    return CollectiveError(text, code="drift")


_is_trained = operator.attrgetter("requires_grad")


@functools.cache
def _count_registrations() -> list[int]:
    """The number of parameters and modules registered, in any module, since the first call."""
    count = [0]

    def add_one(*_: object) -> None:
        count[0] += 1

    torch_module.register_module_parameter_registration_hook(add_one)
    torch_module.register_module_module_registration_hook(add_one)
    return count


class StructureWatch:
    """Detects parameters that are added or unfrozen after a module was wrapped. Only a change in the number of
    registrations, or in `requires_grad`, triggers a slow full model scan."""

    def __init__(self, replica: Replica, ignored: Collection[str]) -> None:
        self._replica, self._ignored, self._frozen = replica, ignored, list(replica.frozen.values())
        self._count = _count_registrations()
        self._seen = self._count[0]

    def find_change(self, module: nn.Module) -> str:
        """Describe a change after which some gradients would not be synchronized; empty if there is none."""
        if self._seen == self._count[0] and not any(map(_is_trained, self._frozen)):
            return ""
        self._seen = self._count[0]
        found, known = read_replica(module, self._ignored), set(map(id, self._replica.params))
        new = [names[0] for names, param in zip(found.names, found.params, strict=True) if id(param) not in known]
        if new:
            self._seen = -1  # scan again in every forward, until `rebuild`
        was_frozen = "was frozen and is now trained"
        return list_some([f"{name} {was_frozen if name in self._replica.frozen else 'is new'}" for name in new], ", ")
