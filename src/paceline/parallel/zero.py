"""ZeRO-1: each rank keeps the optimizer state of its shard of every bucket and updates that shard of the parameters.

A `Sharding` maps elements to ranks, and distributes the updated values: at the end of a step or, if the user allows it,
during the next forward, in which each block of the model waits for its own parameters.

The optimizer is the user's, with this rank's ranges of the parameters in its groups. It must work elementwise, or get
its norms from `compute_norms`, as LARS and LAMB do.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.parallel.channel import Channel, alias, naming_lost_peers, start_exchange
from paceline.parallel.codecs import GATHER, SCATTER, SWAP, Exchange, reduce_scatter
from paceline.parallel.flat import FlatGradients
from paceline.parallel.graph import WeakHook
from paceline.parallel.replicas import Replica, find_strides
from paceline.parallel.strategies import Exchanges, start_message, watch_unscaling
from paceline.plan import Plan
from paceline.strategy import Strategy, count_each
from paceline.units import name_ranks

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
)
# Timeout for gathering the state: if only one rank requests it, that rank must not wait forever.
_STATE_TIMEOUT_S = 120.0
# Entries of an optimizer's state with one number per parameter, even if the parameter is itself a scalar.
_COUNTERS = ("step", "eta", "mu", "mu_product")


def _error(text: str) -> ConfigError:
    return ConfigError(f"zero1: {text}", code="strategy")


class Range(NamedTuple):
    """Elements of a parameter, in memory order."""

    param: int
    start: int
    end: int


def cut_plan(flat: FlatGradients, plan: Plan, rank: int, world_size: int) -> list[list[Range]]:
    """A rank's ranges, by bucket. Empty parameters belong to rank 0."""
    cuts = []
    for bucket, span in zip(plan.buckets, flat.ranges, strict=True):
        each = count_each(span.numel(), span.element_size(), world_size)
        first = span.storage_offset() + min(rank * each, span.numel())
        last = min(first + each, span.storage_offset() + span.numel())
        found = []
        for piece in bucket.pieces:
            item, offset = plan.gradients[piece.gradient].item_bytes, flat.views[piece.gradient].storage_offset()
            start = max(piece.start_bytes // item, first - offset)
            end = min(piece.end_bytes // item, last - offset)
            if start < end or (rank == 0 and not plan.gradients[piece.gradient].num_bytes):
                found.append(Range(piece.gradient, int(max(0, start)), int(max(0, end))))
        cuts.append(found)
    return cuts


def _flatten(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The elements in memory order, without a copy if the tensor already has these strides."""
    if tensor.stride() != strides:
        clone = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
        tensor = clone.copy_(tensor)
    return alias(tensor.detach()).as_strided((tensor.numel(),), (1,))


def scatter(
    buffer: torch.Tensor, rank: int, world_size: int, rounds: bool = False, sums: bool = False, is_whole: bool = False
) -> Exchange:
    """Average a vector: this rank gets its shard, or everything if `is_whole`. `rounds`: round to bfloat16. `sums`: the
    backend sums; otherwise the ranks do, in rank order."""
    n, each = world_size, count_each(buffer.numel(), buffer.element_size(), world_size)
    flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    each *= flat.numel() // max(1, buffer.numel())
    sent = flat.new_empty(n * each, dtype=torch.bfloat16 if rounds else flat.dtype)
    torch.mul(flat, 1 / n, out=sent[: flat.numel()])
    sent[flat.numel() :].zero_()
    parts = sent.view(n, each)
    total = yield from reduce_scatter(parts, sums)
    if is_whole:
        gathered = yield GATHER, total
        flat.copy_(gathered.view(-1)[: flat.numel()])
    else:
        mine = flat[rank * each : (rank + 1) * each]
        mine.copy_(total[: mine.numel()])


def join(pieces: Sequence[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Concatenate vectors into `given`, padded with zeros, because all ranks must send equal sizes."""
    at = 0
    for piece in pieces:
        given[at : at + piece.numel()] = piece
        at += piece.numel()
    given[at:].zero_()
    return given


class Sharding:
    """Assigns elements to ranks and exchanges their gradients and updated values."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._optimizer: Callable[[], ShardedOptimizer | None] = lambda: None
        self.overlaps = False
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False  # nothing overlaps it, and another thread would only add overhead
        self._gathers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._rows: dict[int, torch.Tensor] = {}  # by bucket: persistent memory for its values on all ranks
        self._hooks: list[Any] = []
        self._called: set[nn.Module] = set()  # blocks that were called in the recorded forward
        self._needs: dict[nn.Module, set[int]] = {}  # by module: the buckets to wait for
        self.is_reduced = False  # in this rank's shard, gradients since `zero_grad` are averages
        self._mark: torch.Tensor | None = None  # a gradient element outside this rank's shard
        self._has_warned = False
        self.sync: Callable[[], Any] = lambda: None  # the step logic, which tracks unaveraged gradients

    def use(self, replica: Replica, channel: Channel, rounds: bool) -> None:
        """Start over with this replica. `rounds`: the all-reduce rounds to bfloat16. Sends nothing."""
        self.wait()
        self.replica, self.channel, self.is_planned = replica, channel, False
        self._rows.clear()  # these rows belong to the previous group
        is_rounded = self.strategy.codec == "bf16"
        self.exchanges = Exchanges(channel, kinds=(SCATTER, SWAP, GATHER) if is_rounded else (SCATTER, GATHER))
        # Whether gradients are reduce-scattered. In shared memory an all-reduce is just as fast.
        self.needs_hook = not (channel.shares_memory and (rounds or self.strategy.codec == "dense"))
        if self.optimizer is not None:
            self.optimizer.check(replica)

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak, because the optimizer refers to this object

    @property
    def held_bytes(self) -> int:
        """The size of the optimizer's state on this rank."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def lay_out(self, flat: FlatGradients, plan: Plan, is_planned: bool) -> None:
        """Cut the buckets. Collective with a plan, because the optimizer's state moves to its new owners."""
        self.wait()
        self.flat, self.plan, self.is_planned = flat, plan, is_planned
        n = self.channel.world_size
        self.cuts = [cut_plan(flat, plan, rank, n) for rank in range(n)]  # by rank and bucket
        self._needs.clear()
        self._mark = None
        if is_planned and self.optimizer is not None:
            self.optimizer.cut()

    def attach(self) -> None:
        """Mark the gradients as averaged."""
        self.is_reduced = True
        if self.optimizer is not None:
            self.optimizer.attach()
        if (mark := self._find_mark()) is not None:
            mark.fill_(1)

    def _find_mark(self) -> torch.Tensor | None:
        """The first element of another rank's shard, if this rank averages only its own. The element is otherwise
        unused, so a changed value shows that whole gradients were scaled."""
        channel = self.channel
        if self._mark is None and self.is_planned and self.needs_hook and channel.device.type == "cpu":
            others = (cut for rank, cut in enumerate(self.cuts) if rank != channel.rank)
            found = (part for cut in others for parts in cut for part in parts)
            if (part := next((part for part in found if part.start < part.end), None)) is not None:
                view = self.flat.views[part.param]
                self._mark = alias(view.as_strided((1,), (1,), view.storage_offset() + part.start))
        return self._mark

    def check_mark(self) -> None:
        """Warn once if whole gradients were scaled since backward, for example by torch's clipping (a local norm)."""
        if self._mark is None or not self.is_reduced or self._has_warned:
            return
        if (factor := self._mark.item()) not in (0, 1):
            self._has_warned = True
            text = f"rank {self.channel.rank} scaled its gradients by {factor:.3g} since backward"
            advice = "clip with model.clip_grad_norm_(); ignore this if all ranks use the same factor"
            warnings.warn(f"zero1: {text}, but holds only its shard of the averages: {advice}", stacklevel=4)

    def find_misuse(self) -> ConfigError | None:
        """The error for accumulating into reduced gradients, which may be averages only in this rank's shard. Zeros are
        allowed. Ranks that share memory have all averages, but a program must not depend on the placement of its
        ranks."""
        grads = [param.grad for param in self.replica.params if param.grad is not None] if self.is_reduced else []
        if not any(grad.any() for grad in grads):
            return None
        text = "these gradients are already reduced, in this rank's shard only; you cannot accumulate into them"
        return _error(f"{text}: use no_sync() for all but the last backward, then optimizer.zero_grad()")

    # -- gradients ----------------------------------------------------------------------------------------------------

    def scatter(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """A communication hook: average a bucket, of which this rank gets its shard. Before there is a plan, every rank
        gets the whole bucket."""
        buffer = bucket.buffer()
        return self.exchanges.start(self._scatter(buffer, not self.is_planned), buffer)

    def _scatter(self, buffer: torch.Tensor, is_whole: bool) -> Exchange:
        channel = self.channel
        rounds = self.strategy.codec == "bf16" and buffer.dtype == torch.float32
        sums = channel.shares_memory or (channel.is_nccl and not rounds)  # NCCL would round at every hop
        return scatter(buffer, channel.rank, channel.world_size, rounds, sums, is_whole)

    def gather_words(self, words: torch.Tensor) -> torch.Tensor:
        """One float64 row per rank. Collective: every rank must call this."""
        n, rank = self.channel.world_size, self.channel.rank
        rows = torch.zeros(n, words.numel(), dtype=torch.float64, device=self.channel.device)
        rows[rank] = words
        if n > 1:
            with naming_lost_peers("the ranks cannot take an optimizer step together"):
                work = self.channel.group.allreduce([rows], self._options)
                if work is not None:  # None on NCCL: a synchronous collective runs on the current stream
                    work.wait()
        return rows

    def gradient_piece(self, part: Range) -> torch.Tensor:
        """A range of a gradient in the message buffer. A gradient stored elsewhere is moved there."""
        param, view = self.replica.params[part.param], self.flat.views[part.param]
        if param.grad is not None and param.grad is not view:
            param.grad = view.copy_(param.grad)
        return view.as_strided((part.end - part.start,), (1,), view.storage_offset() + part.start)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        power, params = float(norm_type), self.replica.params
        own = [part for bucket in self.cuts[self.channel.rank] for part in bucket if part.start < part.end]
        pieces = [self.gradient_piece(part) for part in own if params[part.param].grad is not None]
        norms = torch.stack([n.double() for n in torch._foreach_norm(pieces, power)]) if pieces else torch.zeros(1)
        norms = norms.to(self.channel.device, torch.float64)
        # The norm over this rank's tensors, then over the ranks.
        total: torch.Tensor = torch.linalg.vector_norm(self.gather_words(torch.linalg.vector_norm(norms, power)), power)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"cannot clip gradients: their total norm is {total.item()}")
        total = total.to(torch.float32)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if pieces:
            torch._foreach_mul_(pieces, factor)
        return total

    # -- parameters ---------------------------------------------------------------------------------------------------

    def piece(self, param: nn.Parameter, part: Range) -> torch.Tensor:
        """A range of a parameter, in the memory that this rank updates."""
        if param.stride() != find_strides(param):
            param.data = param.data.clone()
        return alias(_flatten(param, param.stride())[part.start : part.end])

    def end_step(self, params: Sequence[nn.Parameter]) -> None:
        """Distribute the new values to all ranks. Collective."""
        if self.channel.world_size > 1:
            # Forward needs the parameters of the last bucket first.
            for number in reversed(range(len(self.plan.buckets))):
                self._start_gather(number, [cut[number] for cut in self.cuts])
            if not self.overlaps:
                self.wait()
        if params:
            torch.autograd.graph.increment_version(params)

    def _start_gather(self, number: int, by_rank: Sequence[Sequence[Range]]) -> None:
        most = max(sum(part.end - part.start for part in parts) for parts in by_rank)
        if not most:
            return
        params, rank, n = self.replica.params, self.channel.rank, self.channel.world_size
        first = params[next(part.param for parts in by_rank for part in parts)].detach()
        pieces = [self.piece(params[part.param], part) for part in by_rank[rank]]
        if self.channel.shares_memory:
            rows = self._rows.get(number)
            if rows is None or rows.shape != (n, most) or rows.dtype != first.dtype:
                # Persistent, because getting new pages from the kernel in each step takes longer than copying.
                rows = self._rows[number] = self.channel.allocate(n * most, first.dtype, first.device).view(n, most)
            given = join(pieces, rows[rank])
            work = start_exchange(rows.view(torch.uint8), given.view(torch.uint8), self.channel.group)
            self._gathers[number] = work, rows
        else:
            given = join(pieces, first.new_empty(most))
            self._gathers[number] = start_message(GATHER, given, self.channel.group, n)
        self.exchanges.count(GATHER, given.nbytes, n)

    @torch.no_grad()
    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait for the new values of all parameters, or of those in these buckets."""
        if not self._gathers:
            return
        for number in list(self._gathers) if numbers is None else numbers:
            if number not in self._gathers:
                continue
            work, rows = self._gathers.pop(number)
            self.channel.wait(work, f"the parameters of bucket {number}")
            for rank in range(self.channel.world_size):
                at = 0
                for part in self.cuts[rank][number] if rank != self.channel.rank else ():
                    size = part.end - part.start
                    self.piece(self.replica.params[part.param], part).copy_(rows[rank, at : at + size])
                    at += size

    def watch(self, module: nn.Module) -> None:
        """Hook the module to wait for new values in forward, and before saving or loading."""
        while self._hooks:
            self._hooks.pop().remove()
        for part in module.modules():
            hook = WeakHook(self._wait_for_all)
            self._hooks.append(part.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
            self._hooks.append(part.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        if self.channel.world_size == 1 or not self.overlaps:
            return
        self._needs.clear()
        self._hooks.append(module.register_forward_pre_hook(WeakHook(self._wait_outside_blocks)))
        self._hooks += [block.register_forward_pre_hook(WeakHook(self._wait_block)) for block in find_blocks(module)]

    def _wait_for_all(self, *_: Any) -> None:
        self.wait()

    def _find_needs(self, params: set[nn.Parameter]) -> set[int]:
        plan, known = self.plan, self.replica.params
        return {
            number for number, indices in enumerate(plan.partition) if not params.isdisjoint(known[i] for i in indices)
        }

    def _wait_outside_blocks(self, module: nn.Module, *_: Any) -> None:
        """Before forward, wait for all parameters except those of blocks that a recorded forward called."""
        if not self._gathers:
            self._called.clear()  # this forward has all values, and records which blocks it calls
            self._needs.pop(module, None)
            return
        if module not in self._needs:
            inside = {param for block in self._called for param in block.parameters()}
            self._needs[module] = self._find_needs(set(module.parameters()) - inside)
        self.wait(self._needs[module])

    def _wait_block(self, block: nn.Module, *_: Any) -> None:
        if not self._gathers:
            self._called.add(block)
            return
        if block not in self._needs:
            self._needs[block] = self._find_needs(set(block.parameters()))
        self.wait(self._needs[block])


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules in ModuleLists and Sequentials, whose parameters are used only by their own forward."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += find_blocks(child)
    return found


class ShardedOptimizer(Optimizer):
    """The optimizer that `DDP.shard_optimizer` returns: the user's class, on this rank's ranges of the parameters.

    `step`, `state_dict` and the wrapper's `clip_grad_norm_` are collective: call them on every rank. Programs that need
    the state on one rank only can call `consolidate_state_dict`, as in torch's ZeroRedundancyOptimizer.
    """

    _sharding: Sharding
    _members: list[list[nn.Parameter]]  # the model's parameters, by group
    _parts: dict[nn.Parameter, tuple[nn.Parameter, Range]]  # keyed by this rank's parameters
    cuts: list[list[list[Range]]]  # ranges of `_params`, by rank and bucket
    _params: tuple[nn.Parameter, ...]
    _has_norms: bool
    _names: dict[int, str]  # names of all parameters ever trained by this optimizer

    def begin(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._members = [list(group["params"]) for group in self.param_groups]
        self._parts, self.cuts, self._names = {}, [], {}
        self._num_steps = 0
        self._num_requests = 0  # requests for the state since the last step
        self._whole: dict[int, dict[str, Any]] | None = None  # the state gathered by `consolidate_state_dict`
        self.check(sharding.replica)
        self.cut()

    @property
    def members(self) -> list[nn.Parameter]:
        return [param for group in self._members for param in group]

    def check(self, replica: Replica) -> None:
        if self.cuts and len(self.cuts) != self._sharding.channel.world_size:
            text = f"the optimizer is sharded for {len(self.cuts)} ranks: save its state and load it into a new one"
            raise _error(text)
        known = set(replica.params)
        self._names |= {id(param): names[0] for param, names in zip(replica.params, replica.names, strict=True)}
        for number, params in enumerate(self._members):
            for param in params:
                if param not in known:
                    name = self._names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
                    text = f"group {number} of the optimizer has {name}, which this model does not train"
                    advice = "pass parameters of the model; to freeze some, save state_dict() and shard a new optimizer"
                    raise _error(f"{text}: {advice}")

    def cut(self) -> None:
        """Use the ranges of the plan. Collective if there is state, which moves to its new owners."""
        full = self._collect() if self.cuts and any(self._sharding.channel.share(bool(self.state))) else None
        self.cuts, self._params = self._sharding.cuts, self._sharding.replica.params
        self._bind()
        if full is not None:
            self._load(full)

    def _bind(self) -> None:
        """Create this rank's parameters as ranges of the model's."""
        sharding = self._sharding
        index_of = {id(param): index for index, param in enumerate(sharding.replica.params)}
        parts: dict[int, list[Range]] = {}
        for bucket in self.cuts[sharding.channel.rank]:
            for part in bucket:
                parts.setdefault(part.param, []).append(part)
        self._parts = {}
        for group, params in zip(self.param_groups, self._members, strict=True):
            group["params"] = []
            for param in params:
                index = index_of[id(param)]
                # Norms of whole parameters need the same parameters on all ranks.
                none = [Range(index, 0, 0)] if self._has_norms else []
                for part in parts.get(index, none):
                    own = nn.Parameter(sharding.piece(param, part))
                    self._parts[own] = param, part
                    group["params"].append(own)

    def attach(self) -> None:
        """Point the gradients of this rank's parameters to the model's."""
        views = self._sharding.flat.views
        for own, (param, part) in self._parts.items():
            if param.grad is None:
                own.grad = None
            elif own.grad is None or param.grad is not views[part.param]:
                own.grad = self._sharding.gradient_piece(part)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step on all ranks. Collective: every rank must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharding = self._sharding
        if not sharding.is_planned or getattr(sharding.sync(), "is_pending", False):
            raise _error("the gradients are not averaged: step() must follow a synchronized backward")
        sharding.check_mark()
        self._num_steps += 1
        self._num_requests = 0
        self._whole = None
        with torch.no_grad():
            sharding.wait()
            self._follow()
            self.attach()
            super().step()
            sharding.end_step(self.members)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the user's class calls the step hooks itself

    def _follow(self) -> None:
        """Rebind this rank's parameters after the model's moved in memory."""
        for own, (param, part) in self._parts.items():
            address = param.data_ptr() + part.start * param.element_size()
            if part.start < part.end and own.data_ptr() != address:
                own.data = self._sharding.piece(param, part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sharding.is_reduced = False
        for own in self._parts:
            own.grad = None
        for param in self.members:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.requires_grad_(False).zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise _error("a group was added after sharding: pass all groups to shard_optimizer")

    def wait(self) -> None:
        """Wait for the new values. With `overlap=True`, call this before reading parameters outside the wrapper."""
        self._sharding.wait()

    def compute_norms(self, params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norms of whole parameters, from this rank's ranges of them. Collective. Summed in float64, so that the
        cuts change at most the last bit in float32."""
        own: Any = params
        indices = torch.tensor([self._parts[param][1].param for param in own], device=tensors[0].device)
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        squares = norms.new_zeros(len(self._sharding.replica.params)).index_add_(0, indices, norms.square())
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return self._sharding.gather_words(squares).sum(0)[indices].sqrt().to(dtype)

    def state_dict(self, to: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The full state, as the unsharded optimizer would return it. Collective, unless `consolidate_state_dict` was
        called since the last step. With `to`, only that rank gets it, and the others get the state of an optimizer
        before its first step."""
        groups, count = [], 0
        for group, params in zip(self.param_groups, self._members, strict=True):
            groups.append({**group, "params": list(range(count, count + len(params)))})
            count += len(params)
        if self._whole is not None:
            return {"state": dict(self._whole), "param_groups": groups}
        name = f"state {self._num_steps}-{self._num_requests}"
        if absent := self._sharding.channel.wait_for_ranks(name, _STATE_TIMEOUT_S):
            text = f"state_dict() needs all ranks, but {name_ranks(absent)} did not call it in {_STATE_TIMEOUT_S:g} s"
            advice = "call it on all ranks, or consolidate_state_dict() on all and then state_dict() on one"
            raise _error(f"{text}: {advice}")
        self._num_requests += 1
        return {"state": self._collect(to), "param_groups": groups}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on one rank. Until the next step, `state_dict()` works on that rank without the others,
        and returns an empty state on the others. Collective: every rank must call this."""
        self._whole = None
        self._whole = self.state_dict(to)["state"]

    @torch.no_grad()
    def _collect(self, to: int | None = None) -> dict[int, dict[str, Any]]:
        """The state of whole parameters, by their position in the groups. Collective."""
        channel, params = self._sharding.channel, self._params
        place_of = {id(param): place for place, param in enumerate(self.members)}
        mine: dict[int, dict[str, Any]] = {}  # tensors with a value per element are replaced by their dtype
        for own, (param, _) in self._parts.items():
            if own in self.state:
                found = {key: _describe(value, own) for key, value in self.state[own].items()}
                mine.setdefault(place_of[id(param)], found)
        known: dict[int, dict[str, Any]] = {}
        for facts in reversed(channel.share(mine)):
            known |= facts
        state: dict[int, dict[str, Any]] = {place: {} for place in sorted(known)}
        dtypes: dict[str, dict[int, torch.dtype]] = {}  # by key, then by parameter
        for place in state:
            for key, value in known[place].items():
                if isinstance(value, torch.dtype):
                    dtypes.setdefault(key, {})[place] = value
                else:
                    state[place][key] = value
        is_wanted = to in (None, channel.rank)
        for key, kinds in dtypes.items():
            parts = [
                [part for bucket in cut for part in bucket if place_of.get(id(params[part.param])) in kinds]
                for cut in self.cuts
            ]
            rows = self._gather_state(key, parts)
            for row, cut in zip(rows, parts, strict=True) if is_wanted else ():
                at = 0
                for part in cut:
                    param = params[part.param]
                    place = place_of[id(param)]
                    dtype = kinds[place]
                    if (whole := state[place].get(key)) is None:
                        whole = torch.empty_strided(param.size(), find_strides(param), dtype=dtype, device=param.device)
                        state[place][key] = whole
                    end = at + (part.end - part.start) * dtype.itemsize
                    _flatten(whole, whole.stride())[part.start : part.end] = row[at:end].clone().view(dtype)
                    at = end
        return state if is_wanted else {}

    def _gather_state(self, key: str, parts: Sequence[Sequence[Range]]) -> torch.Tensor:
        """The bytes of one entry of the state, one row per rank."""
        channel = self._sharding.channel
        own_of = {part: own for own, (_, part) in self._parts.items()}
        mine = [self.state[own_of[part]][key].reshape(-1).view(torch.uint8) for part in parts[channel.rank]]
        most = max(channel.share(sum(tensor.numel() for tensor in mine)))
        given = join(mine, torch.empty(most, dtype=torch.uint8, device=channel.device))
        work, rows = start_message(GATHER, given, channel.group, channel.world_size)
        if work is not None:
            channel.wait(work, "the optimizer state")
        return rows

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load this rank's ranges from a full state, sharded over any number of ranks or not at all."""
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        if saved != [len(params) for params in self._members]:
            text = f"the state has groups of {saved} parameters, but the optimizer has {[*map(len, self._members)]}"
            raise _error(f"{text}: it belongs to another model or to other groups")
        self._whole = None
        order = [place for group in state_dict["param_groups"] for place in group["params"]]
        state = {place: state_dict["state"][key] for place, key in enumerate(order) if key in state_dict["state"]}
        self._load(state, state_dict["param_groups"])

    def _load(self, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]] = ()) -> None:
        place_of = {id(param): place for place, param in enumerate(self.members)}
        ranges: dict[int, dict[str, Any]] = {}
        local, count = [], 0
        for group, source in zip(self.param_groups, groups or self.param_groups, strict=True):
            first = count
            for own in group["params"]:
                param, part = self._parts[own]
                if (found := state.get(place_of[id(param)])) is not None:
                    ranges[count] = {key: _cut_value(key, value, param, part) for key, value in found.items()}
                count += 1
            local.append({**source, "params": list(range(first, count))})
        super().load_state_dict({"state": ranges, "param_groups": local})


def _describe(value: Any, own: torch.Tensor) -> Any:
    """The dtype of a tensor with a value per element of the parameter. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype if value.shape == own.shape else value.cpu()


def _cut_value(key: str, value: Any, param: torch.Tensor, part: Range) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or key in _COUNTERS:
        return value
    return _flatten(value, find_strides(param))[part.start : part.end].clone()


@functools.cache
def _make_kind(kind: type[Optimizer]) -> type[ShardedOptimizer]:
    watch_unscaling(_agree_on_overflow)
    return type(f"Sharded{kind.__name__}", (ShardedOptimizer, kind), {"_has_norms": hasattr(kind, "compute_norms")})


def shard(sharding: Sharding, optimizer: Optimizer) -> ShardedOptimizer:
    """Turn an optimizer over the model's parameters into one over this rank's ranges."""
    kind = type(optimizer)
    name = kind.__name__
    if kind not in _ELEMENTWISE and not hasattr(optimizer, "compute_norms"):
        known = ", ".join(sorted(other.__name__ for other in _ELEMENTWISE))
        text = f"{name} may need whole parameters, but a rank has only ranges of them"
        raise _error(f"{text}: use {known}, LARS or LAMB")
    if optimizer.state:
        raise _error(f"this {name} already has state: shard it before its first step, then load the state")
    if "step" in vars(optimizer):
        raise _error(f"a scheduler already uses this {name}: shard it first")
    optimizer.__class__ = _make_kind(kind)  # type: ignore[arg-type]
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer.begin(sharding)
    return optimizer


def _agree_on_overflow(scaler: Any, optimizer: Optimizer, found_inf: torch.Tensor, flags: Any) -> Any:
    """Let a GradScaler skip a step on all ranks if one of them found an infinity in its ranges."""
    if isinstance(optimizer, ShardedOptimizer):
        flags = flags or {found_inf.device: found_inf}  # no gradient in this rank's ranges
        mine = torch.stack([flag.double().reshape(()) for flag in flags.values()]).amax()
        worst = optimizer._sharding.gather_words(mine).amax()
        for flag in flags.values():
            flag.copy_(worst)
    return flags
