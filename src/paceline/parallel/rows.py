"""Embedding gradients sent as rows: a lookup's gradient is zero except in the rows of the batch's tokens.

These gradients are ready last. An output head that shares the weight adds a dense gradient, which is ready early.

Inside the wrapper's forward an embedding looks up an alias of its weight: a separate autograd leaf with the same
memory. Autograd therefore delivers two gradients: the gradient of all other uses accumulates in the weight, as usual,
and the gradient of the lookups arrives here, as rows. Rows are sent after the last bucket, whose control words contain
every rank's row counts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from paceline.errors import ConfigError
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Replica
from paceline.plan import INDEX_BYTES, Plan, Rows, are_rows_worth, compare_rows
from paceline.torch_internals import current_graph_task, will_execute
from paceline.units import format_bytes

# Below this size, a table is not worth a separate message.
_LEAST_BYTES = 256 << 10
# After this many consecutive steps in which rows saved no bytes, the table is sent dense permanently.
_PATIENCE = 3
# Reported in place of a row count: this rank's gradient may be dense.
DENSE = 2**32 - 1
_ALIGN_BYTES = 16
_LATE = "the bucket with its dense part is also the last to be complete; smaller buckets would send that part earlier"


class Table:
    """The weight of one or more embeddings. `is_sparse`: the user requested sparse gradients."""

    def __init__(self, index: int, param: torch.Tensor, is_sparse: bool) -> None:
        self.index, self.param, self.is_sparse = index, param, is_sparse
        self.modules: list[nn.Module] = []
        self.is_on = True  # lookups are intercepted
        self.is_plain = True  # the table's layers use it for lookups only
        self.has_other = False  # other uses of the weight contribute to its gradient
        self.why = ""  # why the table is sent dense
        self.sent: Rows | None = None  # the plan's entry, if the table is sent as rows
        self.pending: list[torch.Tensor] = []  # sparse gradients of this backward
        self.mine: tuple[torch.Tensor, torch.Tensor] | None = None  # distinct rows of this rank and their sums
        self.num_sent = 0  # rows sent by all ranks in the last step
        self._folded: tuple[torch.Tensor, int, list[torch.Tensor]] | None = None  # `.grad`, its version, its rows
        self._dense: torch.Tensor | None = None  # the averaged gradient, if it consists of rows only
        self._written: tuple[int, list[torch.Tensor]] | None = None  # the version of `_dense` and its nonzero rows
        self.misfits = 0

    @property
    def row_bytes(self) -> int:
        return self.param[0].nbytes

    @property
    def is_all_rows(self) -> bool:
        """Whether the table is sent as rows only."""
        return self.sent is not None and self.sent.is_all

    def pack(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The distinct rows of the pending gradients and the sum of each."""
        pending, self.pending = self.pending, []
        if not pending:
            return None
        rows = torch.cat([grad._indices()[0] for grad in pending]) if len(pending) > 1 else pending[0]._indices()[0]
        values = torch.cat([grad._values() for grad in pending]) if len(pending) > 1 else pending[0]._values()
        return add_up(rows, values)

    def fold(self) -> None:
        """Add the pending gradients to `.grad`, as autograd would have done."""
        pending, self.pending = self.pending, []
        for one in pending:
            self._add(one)

    def _add(self, found: torch.Tensor) -> None:
        grad, rows = self.param.grad, found._indices()[0]
        if self.is_sparse and (grad is None or grad.layout != torch.strided):
            self.param.grad = found if grad is None else grad + found
            return
        if grad is None:
            grad = self.param.grad = torch.zeros_like(self.param, requires_grad=False)
            known: list[torch.Tensor] | None = []
        else:
            known = self._known
        grad.index_add_(0, rows, found._values())
        self._folded = None if known is None else (grad, grad._version, [*known, rows])

    def count(self) -> int:
        """The number of distinct pending rows."""
        return len(torch.unique(torch.cat([one._indices()[0] for one in self.pending]))) if self.pending else 0

    @property
    def _known(self) -> list[torch.Tensor] | None:
        """The nonzero rows of `.grad`, if nothing else has modified it."""
        grad, version, rows = self._folded or (None, 0, [])
        return rows if grad is not None and grad is self.param.grad and grad._version == version else None

    def take(self, factor: float) -> int:
        """Take this rank's rows, scaled by `factor`. Returns their number, or DENSE."""
        grad = self.param.grad
        if not self.is_all_rows or grad is None:
            found = self.pack()
        elif grad.layout != torch.strided:
            self.fold()
            whole = self.param.grad.coalesce()  # type: ignore[union-attr]
            found = whole.indices()[0], whole.values().clone()
        else:
            self.fold()
            if (known := self._known) is None:
                return DENSE
            rows = torch.unique(torch.cat(known))
            found = rows, grad[rows]
        self._folded = None
        if found is not None:
            self.mine = found[0], found[1] if factor == 1.0 else found[1].mul_(factor)
        return 0 if found is None else len(found[0])

    def collect_dense(self, factor: float) -> torch.Tensor:
        """The table's entire gradient as one dense tensor, scaled by `factor`."""
        out, self._written = self._memory(), None
        if self.mine is None and self.is_all_rows and self.param.grad is not None:
            return torch.mul(self.param.grad.to_dense(), factor, out=out)
        out.zero_()
        return out if self.mine is None else out.index_add_(0, *self.mine)

    def _memory(self) -> torch.Tensor:
        if not self.is_all_rows:
            return torch.empty_like(self.param, requires_grad=False)
        if self._dense is None:
            self._dense = torch.zeros_like(self.param, requires_grad=False)
        return self._dense

    def finish_dense(self, total: torch.Tensor) -> None:
        if self.is_all_rows:
            self.param.grad = total
        else:
            self.param.grad.add_(total)  # type: ignore[union-attr]

    def finish_rows(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add the rows of all ranks, in rank order."""
        parts = [part for part in parts if len(part[0])]
        if self.is_all_rows and self.is_sparse:
            places = [rows.long() for rows, _ in parts] or [torch.zeros(0, dtype=torch.int64, device=self.param.device)]
            every = [values for _, values in parts] or [self.param.detach()[:0]]
            found, sums = add_up(torch.cat(places), torch.cat(every))
            self.param.grad = torch.sparse_coo_tensor(
                found[None], sums, self.param.shape, is_coalesced=True, check_invariants=False
            )
            return
        if self.is_all_rows:
            out = self._memory()
            if self._written is not None and self._written[0] == out._version:
                for rows in self._written[1]:
                    out.index_fill_(0, rows, 0.0)
            else:
                out.zero_()
            self.param.grad = out
        grad = self.param.grad
        assert grad is not None
        for rows, values in parts:
            grad.index_add_(0, rows, values)
        if self.is_all_rows:
            self._written = grad._version, [rows.long() for rows, _ in parts]

    def multiply(self, factor: float) -> None:
        if self.is_all_rows and self.param.grad is not None:
            self.param.grad.mul_(factor)
            if self._written is not None:
                self._written = self.param.grad._version, self._written[1]

    def release(self) -> None:
        self.mine, self._dense, self._written, self._folded = None, None, None, None


class Lookups:
    """The embedding tables of a model, in module order. While attached, it intercepts lookups and calls
    `arrive(index, rows)` for each gradient. If `why_dense` is not empty, no table is split, for this reason. If
    `why_not_worth` is not empty, only tables with sparse gradients are split, for this reason."""

    def __init__(
        self, module: nn.Module, params: Sequence[torch.Tensor], why_dense: str = "", why_not_worth: str = ""
    ) -> None:
        self.is_open = True
        self.task: int | None = None  # autograd's ID of the backward whose gradients are collected at its end
        self.tables: list[Table] = []
        self.whole: list[tuple[torch.Tensor, str]] = []  # embedding weights that are not split, with the reason
        self._live: collections.deque[torch.Tensor] = collections.deque(maxlen=64)  # aliases that may get gradients
        self._handles: list[Any] = []
        known: dict[torch.Tensor, Table] = {}
        places = {param: index for index, param in enumerate(params)}
        for part in module.modules():
            weight = part._parameters.get("weight") if isinstance(part, nn.Embedding | nn.EmbeddingBag) else None
            if weight is None or weight not in places or weight.nbytes < (0 if part.sparse else _LEAST_BYTES):
                continue
            if why := why_dense or _why_whole(part) or ("" if part.sparse else why_not_worth):
                self.whole.append((weight, why))
                continue
            if weight not in known:
                known[weight] = Table(places[weight], weight, bool(part.sparse))
                self.tables.append(known[weight])
            known[weight].modules.append(part)

    def attach(self, arrive: Callable[[int, torch.Tensor], None] | None = None) -> None:
        self._on_arrival = arrive
        for table in self.tables:
            for part in table.modules:
                hooks = _LookupHooks(self, table)
                self._handles.append(part.register_forward_pre_hook(hooks.before))
                self._handles.append(part.register_forward_hook(hooks.after, always_call=True))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Intercept lookups in this context."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    def note(self, alias: torch.Tensor, table: Table) -> None:
        alias.register_post_accumulate_grad_hook(functools.partial(self._arrive, table))  # type: ignore[no-untyped-call]
        self._live.append(alias)

    def _arrive(self, table: Table, alias: torch.Tensor) -> None:
        grad, alias.grad = alias.grad, None
        with torch.no_grad():
            if grad is not None and grad.layout == torch.strided:  # the layer uses its weight for more than lookups
                table.param.grad = grad if table.param.grad is None else table.param.grad + grad
                table.is_plain = table.is_on = False
                return
            assert grad is not None
            table.pending.append(grad)
            if current_graph_task() != self.task:
                table.fold()
            if self._on_arrival is not None:
                self._on_arrival(table.index, grad._indices()[0])

    def will_arrive(self) -> bool:
        """Whether this backward produces the gradient of a lookup."""
        return any(will_execute(get_gradient_edge(alias).node) for alias in self._live)

    def refuse_grad(self) -> None:
        """Raise if `torch.autograd.grad` requests the gradient of a table: it would lack the lookups' contribution."""
        for table in self.tables if self._live else ():
            if not table.param.requires_grad:
                continue
            try:
                will_execute(get_gradient_edge(table.param).node)
            except RuntimeError:
                text = f"the weight of {type(table.modules[0]).__name__}: its lookups are reduced separately"
                text = f"torch.autograd.grad of {text}; wrap with embeddings='dense'"
                raise ConfigError(text, code="autograd-grad") from None


class EmbeddingRows(Lookups):
    """The tables of a wrapped model and the exchange of their rows. Ranks have the same tables in the same order."""

    def __init__(
        self, module: nn.Module, replica: Replica, channel: Channel, why_dense: str, is_asked: bool = False
    ) -> None:
        why_not_worth = "ranks share memory" if channel.shares_memory and not is_asked else ""
        why_not_worth = why_not_worth if channel.world_size > 1 else "one rank"
        super().__init__(module, replica.params, why_dense, why_not_worth)
        self.replica, self.channel, self.is_open = replica, channel, False
        self.counts: list[int] = []
        self._factor = 1.0
        self._seen: list[Sequence[int]] = []  # last row counts, by rank and table
        self.attach()

    def begin(self) -> None:
        """Prepare for a synchronized backward."""
        for table in self.tables:
            table.pending.clear()
            table.mine = None

    def fold(self) -> None:
        """End a backward that is not synchronized."""
        with torch.no_grad():
            for table in self.tables:
                table.fold()

    def find_arrived(self) -> set[int]:
        """The parameters that received a gradient from lookups in this backward."""
        return {table.index for table in self.tables if table.pending}

    @property
    def is_used(self) -> bool:
        """Whether any table is sent as rows."""
        return any(table.sent is not None for table in self.tables)

    def use(self, plan: Plan, is_final: bool) -> None:
        """Send rows as planned. Until the plan is final, count the lookups of all tables."""
        sent = {part.gradient: part for part in plan.rows}
        for table in self.tables:
            table.sent = sent.get(table.index)
            table.is_on = table.is_plain and (table.sent is not None or not is_final)
            table.release()
            if is_final and table.sent is None and not table.why:
                family = plan.gradients[table.index].family
                alike = [held for held in plan.partition if plan.gradients[held[0]].family == family]
                is_late = table.has_other and table.index in alike[-1]
                table.why = _LATE if is_late else "the given plan does not send its rows"

    @torch.no_grad()
    def collect(self, factor: float, take_part: bool) -> None:
        """Store this rank's row count per table, or DENSE, in `counts`. Gradients not sent as rows are added to
        `.grad`."""
        self._factor, self.counts = factor, [0] * len(self.tables)
        for number, table in enumerate(self.tables):
            if not take_part:
                table.pending.clear()
            else:
                self.counts[number] = table.count() if table.sent is None else table.take(factor)
                table.fold()

    @torch.no_grad()
    def exchange(self, counts: Sequence[Sequence[int]], take_part: bool) -> None:
        """Send the rows of this step (`counts` by rank and table), or dense gradients if smaller. Collective."""
        self._seen = list(counts)
        started: list[tuple[Table, Any, Any, list[int]]] = []
        for number, table in enumerate(self.tables):
            if table.sent is None:
                continue
            each = [one[number] for one in counts]
            most = max(each)
            fits = most != DENSE and (table.is_sparse or self._compare(table, most) < 1)
            table.misfits = 0 if fits else table.misfits + 1
            if fits:
                table.num_sent = sum(each)
                sent = pack_rows(table, most)
                got = torch.empty(self.channel.world_size * sent.nbytes, dtype=torch.uint8, device=sent.device)
                work = self.channel.start_gather(got, sent) if most else None
                started.append((table, work, got, each))
            else:
                total = table.collect_dense(self._factor) if take_part else torch.zeros_like(table.param)
                started.append((table, self.channel.start_sum(total, gradient_bytes=total.nbytes), total, []))
        for table, work, got, each in started:
            if work is not None:
                self.channel.wait(work, f"the rows of {self.replica.name(table.index)}")
            if take_part:
                if each:
                    parts = zip(got.chunk(len(each)), each, strict=True) if work is not None else ()
                    table.finish_rows([unpack_rows(table, part, max(each), count) for part, count in parts])
                else:
                    table.finish_dense(got)
            table.mine = None

    def _compare(self, table: Table, most: int) -> float:
        return compare_rows(most, table.row_bytes, table.param.nbytes, self.channel.world_size)

    def choose_first(self) -> list[Rows]:
        """Tables that must be sent as rows from the first step onward: those with sparse gradients."""
        sparse = [table for table in self.tables if table.is_sparse and table.is_plain]
        return [Rows(table.index, 0, True) for table in sparse] if len(sparse) < len(self.replica.params) else []

    def choose(self, dense: set[int], num_params: int) -> list[Rows]:
        """Choose the tables worth sending as rows, based on the last step's counts. `dense` parameters also get dense
        gradients."""
        found = []
        for number, table in enumerate(self.tables):
            most = max(one[number] for one in self._seen)
            is_all = table.index not in dense
            share = self._compare(table, most)
            table.why = "" if table.is_plain else table.why
            table.has_other = not is_all
            if table.is_sparse and is_all and table.is_plain:
                found.append(Rows(table.index, min(most, len(table.param)), True))
            elif not most or most == DENSE or not table.is_plain:
                other = "sparse=True, and the weight has other uses"
                table.why = table.why or (other if table.is_sparse and most else "no lookups were recorded")
            elif not are_rows_worth(share, is_all):
                table.why = f"up to {most} rows of {len(table.param)} on each rank"
            else:
                found.append(Rows(table.index, most, is_all))
        if len([part for part in found if part.is_all]) == num_params:
            last = found.pop().gradient
            next(table for table in self.tables if table.index == last).why = "control words are sent in a bucket"
        return found

    def delay(self, ready_order: Sequence[int], rows: Sequence[Rows]) -> list[int]:
        """Adjust the ready order for a plan that sends `rows` separately: the other tables come last, because the
        recorded order does not include their lookups."""
        kept = {part.gradient for part in rows}
        late = {
            table.index
            for number, table in enumerate(self.tables)
            if table.index not in kept and (not table.is_plain or any(one[number] for one in self._seen))
        }
        return sorted(ready_order, key=late.__contains__)

    def limit(self, plan: Plan) -> Plan:
        """Move tables that cannot be sent as rows back into buckets, and return the plan."""
        usable = {table.index for table in self.tables if table.is_plain}
        return plan.without_rows({part.gradient for part in plan.rows} - usable)

    def drop_misfits(self) -> bool:
        """Stop splitting tables whose rows have not paid off for several steps. Returns whether there are any."""
        misfits = [table for table in self.tables if table.misfits >= _PATIENCE]
        for table in misfits:
            table.why = "for several steps its gradient was dense or had too many rows"
            table.is_plain, table.misfits = False, 0
        return bool(misfits)

    def multiply(self, factor: float) -> None:
        for table in self.tables:
            table.multiply(factor)

    def describe(self) -> list[str]:
        """Describe for the user how each table is sent."""
        params = self.replica.params
        places: dict[torch.Tensor, int] = {param: index for index, param in enumerate(params)}

        def name(index: int) -> str:
            return f"{self.replica.name(index)} ({format_bytes(params[index].nbytes)})"

        lines = [f"embedding {name(places[weight])} is sent whole: {why}" for weight, why in self.whole]
        for table in self.tables:
            size = name(table.index)
            if table.sent is None:
                why = f": {table.why}" if table.why else ""
                lines.append(f"embedding {size} is sent whole{why}")
                continue
            sent_bytes = table.num_sent * (table.row_bytes + INDEX_BYTES)
            other = "" if table.sent.is_all else "; gradients of its other uses are in the buckets"
            found = f"{table.num_sent} from all ranks, {format_bytes(sent_bytes)}"
            lines.append(f"embedding {size} sends rows: {found}{other}")
        return lines


class _LookupHooks:
    """The hooks of one embedding. In a copied or loaded module they do nothing."""

    def __init__(self, own: Lookups | None = None, table: Table | None = None) -> None:
        self._own: Callable[[], Lookups | None] = (lambda: None) if own is None else weakref.ref(own)
        self._table, self._was_sparse = table, False

    def __reduce__(self) -> tuple[Any, ...]:
        return _LookupHooks, ()

    def before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        own, table = self._own(), self._table
        if own is None or table is None or not own.is_open or not table.is_on or not torch.is_grad_enabled():
            return
        weight = module._parameters.get("weight")
        # A user's hook expects the whole gradient. During backward, checkpointing repeats lookups that were already
        # counted.
        is_other = weight is not table.param or not table.param.requires_grad or table.param._backward_hooks
        if is_other or _why_whole(module) or current_graph_task() != -1:
            return
        alias = table.param.detach().requires_grad_()
        self._was_sparse, module.sparse = module.sparse, True  # type: ignore[assignment]
        module.__dict__["weight"] = alias  # shadows the parameter
        own.note(alias, table)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.__dict__.pop("weight", None) is not None:
            module.sparse = self._was_sparse  # type: ignore[assignment]


def _why_whole(module: Any) -> str:
    """Why an embedding's lookups cannot produce rows; empty if they can."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_contiguous() or not weight.is_floating_point():
        return "the layout of its weight"
    if getattr(module, "mode", "sum") == "max":
        return "mode 'max'"
    options = {"max_norm": module.max_norm is not None, "scale_grad_by_freq": module.scale_grad_by_freq}
    return next((name for name, is_set in options.items() if is_set), "")


def add_up(rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each distinct row, in order, with the sum of its values."""
    unique, place = torch.unique(rows, return_inverse=True)
    return unique, values.new_zeros(len(unique), *values.shape[1:]).index_add_(0, place, values)


def pack_rows(table: Table, most: int) -> torch.Tensor:
    """This rank's rows, padded to the largest row count of any rank: indices, then values."""
    start = _find_start(most)
    total = -(-(start + most * table.row_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
    sent = torch.empty(total, dtype=torch.uint8, device=table.param.device)
    if table.mine is not None:
        rows, values = table.mine
        sent[: len(rows) * INDEX_BYTES].view(torch.int32).copy_(rows)
        sent[start : start + values.nbytes].view(values.dtype).copy_(values.reshape(-1))
    return sent


def unpack_rows(table: Table, part: torch.Tensor, most: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` rows that another rank packed with `pack_rows`."""
    start, param = _find_start(most), table.param
    values = part[start : start + count * table.row_bytes].view(param.dtype).view(count, param.shape[1])
    return part[: count * INDEX_BYTES].view(torch.int32), values


def _find_start(most: int) -> int:
    return -(-most * INDEX_BYTES // _ALIGN_BYTES) * _ALIGN_BYTES
