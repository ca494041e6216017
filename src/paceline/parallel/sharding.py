"""ZeRO-1: each rank keeps the optimizer's state of its piece of every bucket, and updates that piece of the parameters.

A `Placement` says which elements are whose, and gives every rank the updated values. Where the ranks share memory, the
parameters are one copy that all of them read: a rank writes its pieces there, between two messages that all ranks take
part in. Elsewhere the pieces are gathered at the end of a step; or, if the user allows it, while the next forward runs,
and each block of the model waits for its own.

The optimizer is the user's, with this rank's ranges of the parameters in its groups. It must work element by element,
or take its norms from `compute_norms`, as LARS and LAMB do.
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
from paceline.parallel.channel import Channel, alias, naming_lost_peers
from paceline.parallel.codecs import GATHER, SWAP, Exchange
from paceline.parallel.flat import FlatGradients
from paceline.parallel.levels import SCATTER
from paceline.parallel.replicas import Replica, list_some
from paceline.parallel.strategies import Exchanges, start_message
from paceline.plan import Plan
from paceline.strategy import LINE_BYTES, Strategy, count_each
from paceline.units import name_ranks

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
)
# How long a rank waits for the others to put the state together: one that asks alone must not wait for ever.
_MEET_S = 120.0
# Parts of a state that are one number for a parameter, which may be a scalar itself.
_COUNTERS = ("step", "eta", "mu", "mu_product")


class Range(NamedTuple):
    """Elements of a parameter, in the order of its memory."""

    param: int
    start: int
    end: int


def cut_plan(flat: FlatGradients, plan: Plan, rank: int, world_size: int) -> list[list[Range]]:
    """The ranges of a rank, by bucket. A parameter without elements is rank 0's."""
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


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(param, device="meta").stride()


def _flatten(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The elements in the order of memory, without a copy where the tensor already has these strides."""
    if tensor.stride() != strides:
        twin = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
        tensor = twin.copy_(tensor)
    return alias(tensor.detach()).as_strided((tensor.numel(),), (1,))


def scatter(
    buffer: torch.Tensor, rank: int, world_size: int, rounds: bool = False, sums: bool = False, is_whole: bool = False
) -> Exchange:
    """Average a vector: this rank gets its piece, or `is_whole` all of it. `rounds`: to bfloat16. `sums`: the backend
    adds up; if not, ranks do, in their order."""
    n, each = world_size, count_each(buffer.numel(), buffer.element_size(), world_size)
    flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    each *= flat.numel() // max(1, buffer.numel())
    sent = flat.new_empty(n * each, dtype=torch.bfloat16 if rounds else flat.dtype)
    torch.mul(flat, 1 / n, out=sent[: flat.numel()])
    sent[flat.numel() :].zero_()
    parts = sent.view(n, each)
    if sums:
        total = yield SCATTER, parts
    else:
        received = yield SWAP, parts
        total = received[0].float() if received.dtype in (torch.bfloat16, torch.float16) else received[0]
        for row in received[1:]:
            total = total + row
        total = total.to(parts.dtype)
    if is_whole:
        gathered = yield GATHER, total
        flat.copy_(gathered.view(-1)[: flat.numel()])
    else:
        mine = flat[rank * each : (rank + 1) * each]
        mine.copy_(total[: mine.numel()])


def join(pieces: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> torch.Tensor:
    """Vectors one after the other, in a new one of this size, as all ranks send."""
    given, at = like.detach().new_empty(size), 0
    for piece in pieces:
        given[at : at + piece.numel()] = piece
        at += piece.numel()
    given[at:].zero_()
    return given


class Placement:
    """Which elements each rank updates, where the parameters are, and the messages that this needs."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._optimizer: Callable[[], ShardedOptimizer | None] = lambda: None
        self.share_parameters, self.overlaps = True, False
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False  # nothing is computed meanwhile, and another thread would only take time
        self._homes: dict[nn.Parameter, torch.Tensor] = {}  # of each parameter: its place in the shared copy
        self._versions: list[int] = []
        self._gathers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._hooks: list[Any] = []
        self._called: set[nn.Module] = set()  # blocks that forward has called while it was recorded
        self._needs: dict[nn.Module, set[int]] = {}  # of modules: the buckets to wait for
        self.is_reduced = False  # the gradients since `zero_grad` are averages, in this rank's pieces
        self._mark: torch.Tensor | None = None  # an element of a gradient that is no average here
        self._has_warned = False
        self.sync: Callable[[], Any] = lambda: None  # the step logic, to ask whether gradients wait to be averaged

    def use(self, replica: Replica, channel: Channel, rounds: bool) -> None:
        """Begin again with this replica; `rounds`: the sum for all ranks rounds to bfloat16. Sends nothing."""
        self.release()
        self._homes.clear()
        self.replica, self.channel, self.is_planned = replica, channel, False
        self.exchanges = Exchanges(channel)
        # Whether gradients are scattered. In shared memory a sum for all ranks is as fast.
        self.needs_hook = not (channel.shares_memory and (rounds or self.strategy.codec == "dense"))
        if self.optimizer is not None:
            self.optimizer.check(replica)

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds this

    @property
    def held_bytes(self) -> int:
        """The optimizer's state on this rank."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def is_shared(self) -> bool:
        """Whether all ranks read one copy of the parameters."""
        return self.channel.shares_memory and self.share_parameters and self.channel.world_size > 1

    def lay_out(self, flat: FlatGradients, plan: Plan, is_planned: bool) -> None:
        """Cut the buckets. With a plan this is collective: the optimizer's state moves to its new owners."""
        self.flat, self.plan, self.is_planned = flat, plan, is_planned
        self._needs.clear()
        self._mark = None
        if is_planned and self.optimizer is not None:
            self.optimizer.cut(self.cut())

    def cut(self) -> list[list[list[Range]]]:
        """The ranges of all ranks, by rank and bucket."""
        n = self.channel.world_size
        return [cut_plan(self.flat, self.plan, rank, n) for rank in range(n)]

    def attach(self) -> None:
        """The gradients are averages now."""
        self.is_reduced = True
        if self.optimizer is not None:
            self.optimizer.attach()
        if (mark := self._find_mark()) is not None:
            mark.fill_(1)

    def _find_mark(self) -> torch.Tensor | None:
        """Where this rank has averages in its pieces alone, the first element of another's. Its value is of no use, so
        that it can show whether someone scaled whole gradients."""
        channel = self.channel
        if self._mark is None and self.is_planned and self.needs_hook and channel.device.type == "cpu":
            others = (cut_plan(self.flat, self.plan, rank, channel.world_size) for rank in range(channel.world_size))
            found = (part for rank, cut in enumerate(others) if rank != channel.rank for parts in cut for part in parts)
            if (part := next((part for part in found if part.start < part.end), None)) is not None:
                view = self.flat.views[part.param]
                self._mark = alias(view.as_strided((1,), (1,), view.storage_offset() + part.start))
        return self._mark

    def check_mark(self) -> None:
        """Warn once of gradients that were scaled as a whole since backward: torch's clipping takes the norm of what is
        in memory here, which is another on each rank."""
        if self._mark is None or not self.is_reduced or self._has_warned:
            return
        if (factor := self._mark.item()) not in (0, 1):
            self._has_warned = True
            text = f"rank {self.channel.rank} multiplied gradients by {factor:.3g} since backward, and a rank has"
            advice = "clip with model.clip_grad_norm_(); a factor that is the same on all ranks is no mistake"
            warnings.warn(f"zero1: {text} averages of its own pieces alone: {advice}", stacklevel=4)

    def find_misuse(self) -> ConfigError | None:
        """Gradients of which a rank may have averages in its pieces alone cannot be added to, unless they are zeros. In
        shared memory they could be, but a program must not depend on where its ranks are."""
        grads = [param.grad for param in self.replica.params if param.grad is not None] if self.is_reduced else []
        if not any(grad.any() for grad in grads):
            return None
        text = "these gradients are averages already, of this rank's pieces alone, and cannot be added to"
        return ConfigError(
            f"zero1: {text}: use no_sync() for all backwards but the last, then optimizer.zero_grad()", code="strategy"
        )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def scatter(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket: this rank gets its piece. Without a plan all get everything, as pieces will change."""
        buffer = bucket.buffer()
        return self.exchanges.start(self._scatter(buffer, not self.is_planned), buffer)

    def _scatter(self, buffer: torch.Tensor, is_whole: bool) -> Exchange:
        channel, rounds = self.channel, self.strategy.codec == "bf16" and buffer.dtype == torch.float32
        sums = channel.shares_memory or (channel.is_nccl and not rounds)  # NCCL rounds at every hop
        return scatter(buffer, channel.rank, channel.world_size, rounds, sums, is_whole)

    def gather_words(self, words: torch.Tensor) -> torch.Tensor:
        """A row of float64 of each rank. Collective: every rank must call this."""
        n, rank = self.channel.world_size, self.channel.rank
        rows = torch.zeros(n, words.numel(), dtype=torch.float64, device=self.channel.device)
        rows[rank] = words
        if n > 1:
            with naming_lost_peers("the ranks cannot take a step of the optimizer together"):
                work = self.channel.group.allreduce([rows], self._options)
                if work is not None:  # None on NCCL: a synchronous collective runs on the current stream
                    work.wait()
        return rows

    def pieces_of_gradients(self) -> list[torch.Tensor]:
        """This rank's pieces of all gradients, in the memory in which they travel."""
        cut = cut_plan(self.flat, self.plan, self.channel.rank, self.channel.world_size)
        parts = [part for bucket in cut for part in bucket if part.start < part.end]
        return [self.gradient_piece(part) for part in parts if self.replica.params[part.param].grad is not None]

    def gradient_piece(self, part: Range) -> torch.Tensor:
        """A range of a gradient, from the parameter if its gradient is elsewhere."""
        param, view = self.replica.params[part.param], self.flat.views[part.param]
        if param.grad is not None and param.grad is not view:
            param.grad = view.copy_(param.grad)
        return view.as_strided((part.end - part.start,), (1,), view.storage_offset() + part.start)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        pieces, power = self.pieces_of_gradients(), float(norm_type)
        norms = torch.stack([n.double() for n in torch._foreach_norm(pieces, power)]) if pieces else torch.zeros(1)
        norms = norms.to(self.channel.device, torch.float64)
        # The norm of the norms, first here and then over the ranks.
        total: torch.Tensor = torch.linalg.vector_norm(self.gather_words(torch.linalg.vector_norm(norms, power)), power)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the total norm of the gradients is {total.item()}, so they cannot be clipped")
        total = total.to(torch.float32)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if pieces:
            torch._foreach_mul_(pieces, factor)
        return total

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _move_in(self, params: Sequence[nn.Parameter]) -> None:
        """Make the shared copy. Collective."""
        line, starts, end = LINE_BYTES, [], 0
        for param in params:
            starts.append(end)
            end += -(-param.nbytes // line) * line
        memory = self.channel.group.allocate_common(max(end, 1))  # type: ignore[attr-defined]
        for param, start in zip(params, starts, strict=True):
            self._homes[param] = memory[start : start + param.nbytes].view(param.dtype)

    def _is_home(self, param: nn.Parameter) -> bool:
        home = self._homes.get(param)
        return home is not None and param.data_ptr() == home.data_ptr()

    def piece(self, param: nn.Parameter, part: Range) -> torch.Tensor:
        """A range of a parameter, where this rank updates it."""
        home = self._homes.get(param)
        if home is None and param.stride() != _strides(param):
            param.data = param.data.clone()
        return alias((_flatten(param, param.stride()) if home is None else home)[part.start : part.end])

    def address(self, param: nn.Parameter, part: Range) -> int:
        return self._homes.get(param, param).data_ptr() + part.start * param.element_size()

    def begin_step(self, params: Sequence[nn.Parameter], mine: Sequence[tuple[nn.Parameter, Range]]) -> None:
        """All ranks are here, and may change their pieces. Collective where the parameters are one copy."""
        self.wait()
        if not self.is_shared:
            return
        if not self._homes:
            self._move_in(params)
        away = [not self._is_home(param) for param in params]
        seen = self._versions or [0] * len(params)
        changed = [
            index
            for index, param in enumerate(params)
            if not away[index] and param._version != seen[index] and param.numel()
        ]
        rows = self.gather_words(torch.tensor([float(len(changed)), float(sum(away))], dtype=torch.float64))
        if rows[:, 0].any():
            names = {id(param): names[0] for param, names in zip(self.replica.params, self.replica.names, strict=True)}
            found = list_some([names[id(params[index])] for index in changed], ", ") or "parameters of another rank"
            text = "the ranks of a host have one copy, so that a change in place counts once for each of them"
            raise ConfigError(
                f"zero1: {found} changed in place since the last step: {text}; use shard_optimizer(..., shared=False)",
                code="strategy",
            )
        if (rows[:, 1] != rows[0, 1]).any():
            text = "were loaded or replaced on some ranks only: do it on all of them"
            raise ConfigError(f"zero1: parameters {text}", code="mismatch")
        if any(away):
            for param, part in mine:
                if not self._is_home(param):
                    self._homes[param][part.start : part.end] = _flatten(param, _strides(param))[part.start : part.end]

    def end_step(self, params: Sequence[nn.Parameter], cuts: Sequence[Sequence[Sequence[Range]]]) -> None:
        """Give the new values to all ranks. Collective."""
        if self.is_shared:
            self.gather_words(torch.zeros(1))  # all have written
            for param in params:
                if not self._is_home(param):
                    param.data = self._homes[param].as_strided(param.size(), _strides(param))
        elif self.channel.world_size > 1:
            self._cuts = cuts
            # What forward needs first is in the last bucket.
            for number in reversed(range(len(cuts[0]))):
                self._start_gather(number, [cut[number] for cut in cuts])
            if not self.overlaps:
                self.wait()
        if params:
            torch.autograd.graph.increment_version(params)
        self._versions = [param._version for param in params]

    def _start_gather(self, number: int, by_rank: Sequence[Sequence[Range]]) -> None:
        most = max(sum(part.end - part.start for part in parts) for parts in by_rank)
        if not most:
            return
        params, rank, n = self.replica.params, self.channel.rank, self.channel.world_size
        first = params[next(part.param for parts in by_rank for part in parts)]
        given = join([self.piece(params[part.param], part) for part in by_rank[rank]], first, most)
        self._gathers[number] = start_message(GATHER, given, self.channel.group, n)
        self.exchanges.count(GATHER, given.nbytes, n)

    @torch.no_grad()
    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Have the new values of all parameters, or of those in these buckets."""
        if not self._gathers:
            return
        for number in list(self._gathers) if numbers is None else numbers:
            if number not in self._gathers:
                continue
            work, rows = self._gathers.pop(number)
            self.channel.wait(work, f"the parameters of bucket {number}")
            for rank in range(self.channel.world_size):
                at = 0
                for part in self._cuts[rank][number] if rank != self.channel.rank else ():
                    size = part.end - part.start
                    self.piece(self.replica.params[part.param], part).copy_(rows[rank, at : at + size])
                    at += size

    def release(self) -> None:
        """Give this rank its own copy of the parameters until the next step, so that it may change them."""
        self.wait()
        for param in self._homes:
            if self._is_home(param):
                param.data = param.data.clone()

    def watch(self, module: nn.Module) -> None:
        """Wait for new values in forward, and before they are saved or loaded."""
        while self._hooks:
            self._hooks.pop().remove()
        for part in module.modules():
            saving = _Hook(self, lambda own, *_: own.wait())
            self._hooks.append(part.register_state_dict_pre_hook(saving))  # type: ignore[no-untyped-call]
            loading = _Hook(self, lambda own, *_: own.release())
            self._hooks.append(part.register_load_state_dict_pre_hook(loading))  # type: ignore[no-untyped-call]
        if self.channel.world_size == 1 or self.is_shared or not self.overlaps:
            return
        self._needs.clear()
        self._hooks.append(module.register_forward_pre_hook(_Hook(self, Placement._wait_outside)))
        self._hooks += [
            block.register_forward_pre_hook(_Hook(self, Placement._wait_block)) for block in find_blocks(module)
        ]

    def _find_needs(self, params: set[nn.Parameter]) -> set[int]:
        plan, known = self.plan, self.replica.params
        return {
            number for number, indices in enumerate(plan.partition) if not params.isdisjoint(known[i] for i in indices)
        }

    def _wait_outside(self, module: nn.Module, *_: Any) -> None:
        """Before forward: for all that is not in a block which waits itself, because the first forward called it."""
        if not self._gathers:
            self._called.clear()  # a forward that has all values shows which blocks are called
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
    """The outermost modules in lists and sequences: those whose parameters only their own forward uses."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += find_blocks(child)
    return found


class _Hook:
    """A hook of a module that calls a placement as long as there is one. Copies of the module have none."""

    def __init__(self, placement: Placement | None, call: Callable[..., None]) -> None:
        self._placement, self._call = (lambda: None) if placement is None else weakref.ref(placement), call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if (placement := self._placement()) is not None:
            self._call(placement, *args)

    def __reduce__(self) -> Any:
        return _Hook, (None, Placement.wait)


def scatter_hook(placement: Placement, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The communication hook of a sharded optimizer."""
    return placement.scatter(bucket)


class ShardedOptimizer(Optimizer):
    """What `DDP.shard_optimizer` makes of an optimizer: the same, on this rank's ranges of the parameters.

    `step`, `state_dict` and `clip_grad_norm_` of the wrapper are collective: call them on every rank. For programs that
    ask one rank alone for the state there is `consolidate_state_dict`, as in torch's ZeroRedundancyOptimizer.
    """

    _placement: Placement
    _members: list[list[nn.Parameter]]  # of the model, by group
    _parts: dict[nn.Parameter, tuple[nn.Parameter, Range]]  # by this rank's parameters
    cuts: list[list[list[Range]]]  # by rank and bucket, of these parameters:
    _params: tuple[nn.Parameter, ...]
    _has_norms: bool
    _names: dict[int, str]  # of all parameters that were ever trained here

    def begin(self, placement: Placement) -> None:
        self._placement, self._members = placement, [list(group["params"]) for group in self.param_groups]
        self._parts, self.cuts, self._names = {}, [], {}
        self._num_steps = self._num_asked = 0  # steps, and questions for the state since the last
        self._whole: dict[int, dict[str, Any]] | None = None  # since `consolidate_state_dict`
        self.check(placement.replica)
        self.cut(placement.cut())

    @property
    def members(self) -> list[nn.Parameter]:
        return [param for group in self._members for param in group]

    def check(self, replica: Replica) -> None:
        if self.cuts and len(self.cuts) != self._placement.channel.world_size:
            text = f"the optimizer is cut for {len(self.cuts)} ranks: save its state, and load it in another"
            raise ConfigError(f"zero1: {text}", code="strategy")
        known = set(replica.params)
        self._names |= {id(param): names[0] for param, names in zip(replica.params, replica.names, strict=True)}
        for number, params in enumerate(self._members):
            for param in params:
                if param not in known:
                    name = self._names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
                    text = f"group {number} of the optimizer has {name}, which is not trained here"
                    advice = "give the optimizer the parameters of model; to freeze some, save state_dict() and shard"
                    raise ConfigError(f"zero1: {text}: {advice} a new one", code="strategy")

    def cut(self, cuts: list[list[list[Range]]]) -> None:
        """Take the ranges of a plan. Collective if there is a state, which goes to the new owners."""
        full = self._collect() if self.cuts and any(self._placement.channel.share(bool(self.state))) else None
        self.cuts, self._params = cuts, self._placement.replica.params
        self._bind()
        if full is not None:
            self._load(full)

    def _bind(self) -> None:
        """Make this rank's parameters, as ranges of the model's."""
        placement = self._placement
        index_of = {id(param): index for index, param in enumerate(placement.replica.params)}
        parts: dict[int, list[Range]] = {}
        for bucket in self.cuts[placement.channel.rank]:
            for part in bucket:
                parts.setdefault(part.param, []).append(part)
        self._parts = {}
        for group, params in zip(self.param_groups, self._members, strict=True):
            group["params"] = []
            for param in params:
                index = index_of[id(param)]
                # For norms of whole parameters all ranks need the same list.
                none = [Range(index, 0, 0)] if self._has_norms else []
                for part in parts.get(index, none):
                    own = nn.Parameter(placement.piece(param, part))
                    self._parts[own] = param, part
                    group["params"].append(own)

    def attach(self) -> None:
        """Make the gradients of this rank's parameters what is in the model's."""
        views = self._placement.flat.views
        for own, (param, part) in self._parts.items():
            if param.grad is None:
                own.grad = None
            elif own.grad is None or param.grad is not views[part.param]:
                own.grad = self._placement.gradient_piece(part)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A step of all ranks. Collective: every rank must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        placement = self._placement
        if not placement.is_planned or getattr(placement.sync(), "is_pending", False):
            text = "the gradients are not averaged: step() must follow a backward that is synchronised"
            raise ConfigError(f"zero1: {text}", code="strategy")
        placement.check_mark()
        self._num_steps, self._num_asked, self._whole = self._num_steps + 1, 0, None
        with torch.no_grad():
            placement.begin_step(self.members, list(self._parts.values()))
            self._follow()
            self.attach()
            super().step()
            placement.end_step(self.members, self.cuts)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the inner one calls the hooks of steps

    def _follow(self) -> None:
        """Where parameters are elsewhere than before, so are this rank's."""
        for own, (param, part) in self._parts.items():
            if part.start < part.end and own.data_ptr() != self._placement.address(param, part):
                own.data = self._placement.piece(param, part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._placement.is_reduced = False
        for own in self._parts:
            own.grad = None
        for param in self.members:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.requires_grad_(False).zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "zero1: a group was added after sharding: give all groups to shard_optimizer", code="strategy"
        )

    def wait(self) -> None:
        """With `overlap=True`: have the new values of all parameters, before the program reads them. The wrapper does
        so itself in forward and to save or copy."""
        self._placement.wait()

    def compute_norms(self, params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norms of whole parameters, of which these are this rank's ranges. Collective. Summed in float64: where
        parameters are cut does not show in float32, except in the last bit."""
        own: Any = params
        indices = torch.tensor([self._parts[param][1].param for param in own], device=tensors[0].device)
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        squares = norms.new_zeros(len(self._placement.replica.params)).index_add_(0, indices, norms.square())
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return self._placement.gather_words(squares).sum(0)[indices].sqrt().to(dtype)

    def state_dict(self, to: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The whole state, as of the optimizer without shards. Collective, unless `consolidate_state_dict` was called
        since the last step. With `to` only that rank gets it, and the others what they would have before the first
        step."""
        groups, count = [], 0
        for group, params in zip(self.param_groups, self._members, strict=True):
            groups.append({**group, "params": list(range(count, count + len(params)))})
            count += len(params)
        if self._whole is not None:
            return {"state": dict(self._whole), "param_groups": groups}
        if absent := self._placement.channel.meet(f"state {self._num_steps}-{self._num_asked}", _MEET_S):
            text = f"state_dict() needs all ranks, and {name_ranks(absent)} did not call it within {_MEET_S:g} s"
            advice = "call it on all of them, or consolidate_state_dict() on all and then state_dict() on one"
            raise ConfigError(f"zero1: {text}: {advice}", code="strategy")
        self._num_asked += 1
        return {"state": self._collect(to), "param_groups": groups}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Put the whole state together on one rank. Until the next step `state_dict()` there needs no other rank, and
        on the others has what it would have before the first step. Collective: every rank must call this."""
        self._whole = None
        self._whole = self.state_dict(to)["state"]

    @torch.no_grad()
    def _collect(self, to: int | None = None) -> dict[int, dict[str, Any]]:
        """The state of whole parameters, by their places in the groups. Collective."""
        channel, params = self._placement.channel, self._params
        place_of = {id(param): place for place, param in enumerate(self.members)}
        mine: dict[int, dict[str, Any]] = {}  # None for what has a value for each element
        for own, (param, _) in self._parts.items():
            if own in self.state:
                found = {key: _describe(value, own) for key, value in self.state[own].items()}
                mine.setdefault(place_of[id(param)], found)
        known: dict[int, dict[str, Any]] = {}
        for facts in channel.share(mine):
            for place, found in facts.items():
                known.setdefault(place, found)
        is_wanted = to in (None, channel.rank)
        state: dict[int, dict[str, Any]] = {place: {} for place in sorted(known)} if is_wanted else {}
        for key in dict.fromkeys(key for place in sorted(known) for key in known[place]):
            parts = [
                [part for bucket in cut for part in bucket if _has_values(known, place_of, params[part.param], key)]
                for cut in self.cuts
            ]
            rows = self._gather_state(key, parts)
            for place, found in known.items():
                if is_wanted and key in found and not isinstance(found[key], torch.dtype):
                    state[place][key] = found[key]
            for rank, cut in enumerate(parts if is_wanted else ()):
                at = 0
                for part in cut:
                    param = params[part.param]
                    place = place_of[id(param)]
                    dtype = known[place][key]
                    if key not in state[place]:
                        size, strides = param.size(), _strides(param)
                        state[place][key] = torch.empty_strided(size, strides, dtype=dtype, device=param.device)
                    num_bytes = (part.end - part.start) * dtype.itemsize
                    values = rows[rank, at : at + num_bytes].clone().view(dtype)
                    whole = state[place][key]
                    _flatten(whole, whole.stride())[part.start : part.end] = values
                    at += num_bytes
        return state

    def _gather_state(self, key: str, parts: Sequence[Sequence[Range]]) -> torch.Tensor:
        """The bytes of this part of the state, in a row for each rank."""
        channel = self._placement.channel
        own_of = {part: own for own, (_, part) in self._parts.items()}
        mine = [self.state[own_of[part]][key].reshape(-1).view(torch.uint8) for part in parts[channel.rank]]
        sizes = channel.share(sum(tensor.numel() for tensor in mine))
        given = torch.zeros(max(sizes), dtype=torch.uint8, device=channel.device)
        if mine:
            given[: sizes[channel.rank]] = torch.cat(mine)
        work, rows = start_message(GATHER, given, channel.group, channel.world_size)
        if work is not None:
            channel.wait(work, "the state of the optimizer")
        return rows

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take this rank's ranges of a whole state, of any number of ranks or of none."""
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        if saved != [len(params) for params in self._members]:
            text = f"the state has groups of {saved} parameters, and the optimizer of {[*map(len, self._members)]}"
            raise ConfigError(f"zero1: {text}: it is of another model or other groups", code="strategy")
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
    """The dtype of what has a value for each element of a parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype if value.shape == own.shape else value.cpu()


def _has_values(
    known: Mapping[int, Mapping[str, Any]], place_of: Mapping[int, int], param: torch.Tensor, key: str
) -> bool:
    return isinstance(known.get(place_of.get(id(param), -1), {}).get(key), torch.dtype)


def _cut_value(key: str, value: Any, param: torch.Tensor, part: Range) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or key in _COUNTERS:
        return value
    return _flatten(value, _strides(param))[part.start : part.end].clone()


@functools.cache
def _make_kind(kind: type[Optimizer]) -> type[ShardedOptimizer]:
    _agree_on_overflow()
    return type(f"Sharded{kind.__name__}", (ShardedOptimizer, kind), {"_has_norms": hasattr(kind, "compute_norms")})


def shard(placement: Placement, optimizer: Optimizer) -> ShardedOptimizer:
    """Turn an optimizer of the model's parameters into one of this rank's ranges."""
    kind = type(optimizer)
    name = kind.__name__
    if kind not in _ELEMENTWISE and not hasattr(optimizer, "compute_norms"):
        known = ", ".join(sorted(other.__name__ for other in _ELEMENTWISE))
        text = f"{name} may need whole parameters, and a rank has ranges of them"
        raise ConfigError(f"zero1: {text}: use {known}, LARS or LAMB", code="strategy")
    if optimizer.state:
        raise ConfigError(
            f"zero1: this {name} has a state: shard it before its first step, and load its state after that",
            code="strategy",
        )
    if "step" in vars(optimizer):
        raise ConfigError(f"zero1: a schedule already uses this {name}: shard it first", code="strategy")
    optimizer.__class__ = _make_kind(kind)  # type: ignore[arg-type]
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer.begin(placement)
    return optimizer


@functools.cache
def _agree_on_overflow() -> None:
    """Let torch's GradScaler skip a step on all ranks where one of them found an infinity in its ranges."""
    scaler: Any = torch.amp.GradScaler
    original = scaler._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = original(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, ShardedOptimizer):
            found = found or {args[1].device: args[1]}  # none of its ranges has a gradient
            flags = list(found.values())
            mine = torch.stack([flag.double().reshape(()) for flag in flags]).amax()
            worst = optimizer._placement.gather_words(mine).amax()
            for flag in flags:
                flag.copy_(worst)
        return found

    scaler._unscale_grads_ = unscale
