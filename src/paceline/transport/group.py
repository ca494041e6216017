"""The process group of the `shm` backend: shared memory between ranks of one host, and gloo for everything else.

The path of an operation depends only on facts known to all ranks (collective, dtype, sizes, hosts), never on how one
rank calls it.
"""

import contextlib
import ctypes
import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import machine
from paceline.errors import LaunchError
from paceline.torch_internals import c10d, is_recording
from paceline.transport import native, proof, works
from paceline.transport.hierarchy import TwoLevels
from paceline.transport.works import DTYPES, as_run, as_run_in_place, is_movable, is_reducible, is_wrapper_subclass

_SLOT_BYTES = 1 << 20  # two per rank; smaller slots bounce cache lines between cores, larger ones exceed the caches
_STOPPED_S = 1.2  # a process that stays suspended for this long counts as lost

# Keyed by hash, because reading the reduction from torch's options takes a microsecond, and its name another two.
_Op: Any = dist.ReduceOp
_OPS = {hash(_Op(getattr(_Op, name))): getattr(native, name) for name in ("SUM", "AVG", "MIN", "MAX")}
_SMALL = 16 << 10  # elements; smaller messages use one lane, and their Work may be reused
_AllreduceOptions, _Tensor = c10d.AllreduceOptions, torch.Tensor
# An operation of the core, with tensors instead of addresses.
_Operation = tuple[int, int, int, int, torch.Tensor, torch.Tensor, int]
_NOTHING = torch.empty(0, device="cpu")
_BARRIER: native.Operation = (native.BARRIER, 0, 0, 0, 0, 0, 0)

# torch types a group's methods with overloads that only its own class can have.
_TorchGroup: Any = dist.ProcessGroup


class PacelineGroup(_TorchGroup):
    """The group that `init_process_group("shm")` and `new_group(backend="shm")` create. Collective."""

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, options.timeout
        self._store, self._name = options.store, str(options.group_id)
        names = list(options.global_ranks_in_group) or list(range(size))
        gloo_store = dist.PrefixStore("gloo", self._store)
        self._gloo: Any = c10d.ProcessGroupGloo(gloo_store, rank, size, timeout=self._timeout)
        proof.check_pairs(self._gloo, options.group_id)
        self._plain = c10d.ProcessGroup(self._store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), kind, self._gloo)
            group._set_default_backend(kind)  # torch 2.15 reads the group's name from it, for the flight recorder
        self._cuda: Any = None
        self._futures, self._pending = works.Futures(), dict[int, works.NativeWork]()
        self._finished = works.FinishedWork([])  # shared by all small messages
        self._serial = self._num_started = 0
        _patch_built_in_hooks()
        self._open(names)

    def _open(self, names: list[int]) -> None:
        places = self._exchange_places()
        hosts = [place["host"] for place in places]
        mine = [rank for rank in range(self._size) if hosts[rank] == hosts[self._rank]]
        self._index, self._here = mine.index(self._rank), [names[rank] for rank in mine]
        wanted = native.load_library().pln_segment_bytes(len(mine), _SLOT_BYTES)
        self._pids = [places[rank]["pid"] for rank in mine]
        segments = []
        for lane in range(native.choose_lanes([places[rank]["cores"] for rank in mine], places[mine[0]]["lanes"])):
            by_store = functools.partial(self._pass_by_store, f"memory/{mine[0]}/{lane}")
            segments.append(self._share(-(-wanted // len(mine)), by_store))
        limits_s = self._timeout.total_seconds(), _STOPPED_S
        self._native = native.Lanes(segments, _SLOT_BYTES, self._index, self._here, self._pids, *limits_s)
        self._lane, self._run = self._native.first
        self._native.run(_BARRIER)  # raises an error that names the rank, unless every rank has the segments
        self._levels, self._is_quick = None, self._size > 1
        if len(set(hosts)) > 1:
            self._is_quick = False
            self._levels = TwoLevels(self._store, self._native, hosts, self._rank, names, self._timeout, self._name)

    def _exchange_places(self) -> list[dict[str, Any]]:
        """Every rank's host, process, cores and requested lanes, in rank order."""
        place: dict[str, Any] = {"host": machine.name_host(), "pid": os.getpid()}
        place |= {"cores": machine.count_cores(), "lanes": os.environ.get("PACELINE_LANES", "")}
        self._store.set(f"place/{self._rank}", json.dumps(place))
        return [json.loads(self._store.get(f"place/{other}")) for other in range(self._size)]

    def _share(self, part_bytes: int, pass_name: Callable[[str], str]) -> native.Mapping:
        return native.Mapping(self._index, self._here, self._pids, part_bytes, pass_name)

    def _pass_by_store(self, key: str, name: str) -> str:
        if name:
            self._store.set(key, name)
        limit_s = self._timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not self._store.check([key]):  # polled, because `wait` would log a page of errors
            native.check_alive(self._here[0], self._pids[0])
            if time.monotonic() > deadline:
                raise LaunchError(f"rank {self._here[0]} did not share its memory within {limit_s:g} s", code="timeout")
            time.sleep(0.002)
        return str(self._store.get(key), "utf-8")

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host, so that collectives use shared memory where possible."""
        return self._levels is None

    def getBackendName(self) -> str:
        return "shm"

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A zeroed byte tensor that collectives reduce in place. Collective: every rank must allocate the same size.

        It is this rank's part of memory shared by the ranks of the host, which lives as long as a tensor uses it.
        """
        if self._levels is not None:
            return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self._native.run((*_BARRIER[:-1], num_bytes))  # a different size on any rank is an error on all
        mapping = self._share(num_bytes, self._pass_by_broadcast)
        self._serial += 1
        self._native.run(_BARRIER)  # every rank has touched its own part, so it is on a nearby NUMA node
        mapping.populate(0, mapping.num_bytes)
        part = mapping.part(self._index)
        if self._native.add_arena(self._serial, mapping.address, mapping.part_bytes):
            weakref.finalize(part, self._native.remove_arena, self._serial)
        return torch.frombuffer(part, dtype=torch.uint8)[:num_bytes]

    def _pass_by_broadcast(self, name: str) -> str:
        text = ctypes.create_string_buffer(name.encode(), 64)
        address = ctypes.addressof(text)
        self._native.run((native.BROADCAST, native.BYTES, 0, 0, address, address, len(text)))
        return text.value.decode()

    def shutdown(self) -> None:
        """Leave the group. Ranks that still wait for this one get an error."""
        if self._levels is not None:
            self._levels.close()
        self._native.close()
        self._futures.close()
        self._pending.clear()
        for backend in filter(None, (self._gloo, self._cuda)):
            with contextlib.suppress(RuntimeError):
                backend.shutdown()

    abort = shutdown

    def __del__(self) -> None:
        for part in ("_levels", "_native"):  # the constructor may have failed halfway
            if getattr(self, part, None) is not None:
                getattr(self, part).close()

    def allreduce(self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        if self._is_quick and type(opts) is _AllreduceOptions and type(tensors) is list and len(tensors) == 1:
            # Fast path for common arguments. The code below handles all arguments, but its Python time would dominate
            # small messages.
            tensor = tensors[0]
            dtype, op = DTYPES.get(tensor.dtype), _OPS.get(hash(opts.reduceOp))
            address = 0
            if type(tensor) is _Tensor and dtype is not None and op is not None and tensor.is_cpu:
                try:
                    address = tensor.data_ptr() if tensor.is_contiguous() and not tensor.is_neg() else 0
                except RuntimeError:  # a sparse tensor, for example
                    pass
            if address:
                count = tensor.numel()
                assert dtype is not None and op is not None
                if count > _SMALL or self._pending or opts.asyncOp or is_recording():
                    values = native.ALL_REDUCE, dtype, op, 0, address, address, count
                    return self._start_one(values, opts, tensor)
                self._num_started += 1
                limit = opts.timeout
                limit_s = 0.0 if limit.days < 0 else limit.total_seconds()
                if code := self._run(self._lane, native.ALL_REDUCE, dtype, op, 0, address, address, count, limit_s):
                    raise self._native.build_error(code)
                self._finished.tensors = tensors
                return self._finished
        tensors, opts = _as_list(tensors), _as_options(_AllreduceOptions, opts, timeout)
        if len(tensors) > 1 or hash(opts.reduceOp) not in _OPS or not is_reducible(tensors[0]):
            return self._backend(tensors[0]).allreduce(tensors, opts)
        if self._size == 1:
            self._num_started += 1
            return works.FinishedWork(tensors)  # the result is the only operand, for every reduction
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if not tensors or not all(map(is_reducible, tensors)) or hash(opts.reduceOp) not in _OPS:
            return self._backend(_first_tensor(tensors)).allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        op, runs = _OPS[hash(opts.reduceOp)], [as_run_in_place(tensor) for tensor in tensors]
        operations = [(native.ALL_REDUCE, DTYPES[run.dtype], op, 0, run, run, run.numel()) for run, _ in runs]
        return self._start(operations, opts, tensors, *(after for _, after in runs))

    def average_rounded(self, tensor: torch.Tensor, words: torch.Tensor, opts: Any) -> Any:
        """Average a float32 vector as if ranks sent bfloat16 (values are rounded, then their sum), and sum `words`
        exactly. Takes one pass over the vector. Requires ranks that share memory."""
        operations = [(native.ALL_REDUCE, native.F32, native.ROUNDED, 0, tensor, tensor, tensor.numel())]
        if words.numel():
            operations.append((native.ALL_REDUCE, DTYPES[words.dtype], native.SUM, 0, words, words, words.numel()))
        return self._start(operations, opts, [tensor, words])

    def broadcast(self, tensors: list[torch.Tensor] | torch.Tensor, opts: Any = 0, timeout: Any = None) -> Any:
        tensors, opts = _as_list(tensors), _as_options(c10d.BroadcastOptions, opts, timeout)
        if len(tensors) > 1 or self._levels is not None or not is_movable(tensors[0]):
            return self._backend(tensors[0]).broadcast(tensors, opts)
        run, after = as_run_in_place(tensors[0])
        operation = native.BROADCAST, native.BYTES, 0, opts.rootRank, run, run, run.nbytes
        return self._start([operation], opts, tensors, after)

    def allgather(self, outputs: list[Any], inputs: list[torch.Tensor] | torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        outputs, inputs = ([outputs], [inputs]) if isinstance(inputs, torch.Tensor) else (outputs, inputs)
        into, tensor = outputs[0], inputs[0]
        is_even = len(into) == self._size
        is_even = is_even and all(out.numel() == tensor.numel() and out.dtype == tensor.dtype for out in into)
        if len(inputs) > 1 or self._levels is not None or not (is_even and is_movable(tensor)):
            return self._backend(tensor).allgather(outputs, inputs, opts)
        run, everything = as_run(tensor), tensor.new_empty(self._size, tensor.numel())

        def spread() -> None:
            for out, part in zip(into, everything, strict=True):
                out.data.copy_(part.view(out.shape))

        return self._start([(native.ALL_GATHER, native.BYTES, 0, 0, run, everything, run.nbytes)], opts, into, spread)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        fits = output.numel() == self._size * tensor.numel() and output.dtype == tensor.dtype
        if self._levels is not None or not (fits and is_movable(output) and is_movable(tensor)):
            return self._backend(tensor)._allgather_base(output, tensor, opts)
        (into, after), run = as_run_in_place(output), as_run(tensor)
        return self._start([(native.ALL_GATHER, native.BYTES, 0, 0, run, into, run.nbytes)], opts, [output], after)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        fits = tensor.numel() == self._size * output.numel() and output.dtype == tensor.dtype
        op = _OPS.get(hash(opts.reduceOp))
        if self._levels is not None or op is None or not (fits and is_reducible(output) and is_reducible(tensor)):
            return self._backend(tensor)._reduce_scatter_base(output, tensor, opts)
        (into, after), run = as_run_in_place(output), as_run(tensor)
        operation = native.REDUCE_SCATTER, DTYPES[tensor.dtype], op, 0, run, into, into.numel()
        return self._start([operation], opts, [output], after)

    def reduce_scatter(self, outputs: list[torch.Tensor] | torch.Tensor, inputs: list[Any], opts: Any = None) -> Any:
        opts = _as_options(c10d.ReduceScatterOptions, opts, None)
        outputs, inputs = ([outputs], [inputs]) if isinstance(outputs, torch.Tensor) else (outputs, inputs)
        output, parts = outputs[0], inputs[0]
        is_even = all(part.numel() == output.numel() and part.dtype == output.dtype for part in parts)
        if len(outputs) > 1 or self._levels is not None or not (is_even and is_reducible(output)):
            return self._backend(output).reduce_scatter(outputs, inputs, opts)
        return self._reduce_scatter_base(output, torch.cat([part.reshape(-1) for part in parts]), opts)

    def allgather_into_tensor_coalesced(self, outputs: works.Tensors, inputs: works.Tensors, opts: Any = None) -> Any:
        return _last_of([self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: works.Tensors, inputs: works.Tensors, opts: Any = None) -> Any:
        return _last_of([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    # torch's newer names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or c10d.BarrierOptions()
        if getattr(getattr(opts, "device", None), "type", "cpu") == "cuda":
            return self._cuda_backend().barrier(opts)
        if self._levels is not None:
            return self._gloo.barrier(opts)
        if self._pending and not _is_asynchronous(opts):  # as in other backends, earlier operations finish first
            for work in list(self._pending.values()):
                work.exception() if work.is_finished() else work.wait()
        return self._start_one(_BARRIER, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._gloo._get_sequence_number_for_group()
        return number + self._num_started

    @works.record_operation
    def _start(self, operations: Sequence[_Operation], opts: Any, result: works.Tensors, *after: works.After) -> Any:
        """Run or start operations, followed by the `after` actions."""
        self._num_started += len(operations)
        timeout_s = max(0.0, opts.timeout.total_seconds())  # negative: the group's own timeout
        actions = [action for action in after if action is not None]
        if self._pending:
            self._sweep()
        engine: Any = self._levels
        wanted: Sequence[Any] = operations
        if self._levels is None:
            engine = self._native
            wanted = [(a, b, c, d, run.data_ptr(), into.data_ptr(), n) for a, b, c, d, run, into, n in operations]
        if not _is_asynchronous(opts):
            for operation in wanted:
                engine.run(operation, timeout_s)
            for action in actions:
                action()
            return works.FinishedWork(result)
        work = works.NativeWork(engine, result, self._futures, actions, operations, self._pending)
        try:
            for operation in wanted:
                work.tickets = (*work.tickets, engine.submit(operation, timeout_s))
        except native.TransportError:
            if not work.tickets:
                self._pending.pop(id(work))
            raise
        return work

    @works.record_operation
    def _start_one(self, operation: native.Operation, opts: Any, *tensors: torch.Tensor) -> Any:
        """`_start` for one operation in shared memory on contiguous tensors, without `after` actions."""
        self._num_started += 1
        if self._pending:
            self._sweep()
        timeout_s = max(0.0, opts.timeout.total_seconds())
        if opts.asyncOp:
            ticket = self._native.submit(operation, timeout_s)
            return works.NativeWork(self._native, tensors, self._futures, (), tensors, self._pending, (ticket,))
        self._native.run(operation, timeout_s)
        return works.FinishedWork(tensors)

    def _sweep(self) -> None:
        """Finish works that have completed, since callers need not keep or wait for them."""
        for oldest in list(self._pending.values()):  # a copy, because the Futures thread may remove works concurrently
            if not oldest.try_finish():
                break
            oldest.find_error()

    def _backend(self, tensor: torch.Tensor) -> Any:
        if is_wrapper_subclass(tensor):
            return self._plain  # torch's dispatcher handles the tensors inside
        return self._cuda_backend() if tensor.is_cuda else self._gloo

    def _cuda_backend(self) -> Any:
        """The backend for GPU tensors, created lazily: NCCL for `cuda:nccl`, otherwise gloo."""
        if self._cuda is None:
            kind, self._cuda = dist.ProcessGroup.BackendType.GLOO, self._gloo
            if "cuda:nccl" in dist.get_backend_config(self):
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                store = dist.PrefixStore("nccl", self._store)
                self._cuda = c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
                kind = dist.ProcessGroup.BackendType.NCCL
            self._register_backend(torch.device("cuda"), kind, self._cuda)
        return self._cuda


def _as_list(tensors: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _as_options(kind: Any, opts: Any, timeout: timedelta | None) -> Any:
    """Return options. Builds them from a bare reduction or root and a timeout, which torch's groups also accept."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, int):
        made.rootRank = opts
    elif opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _last_of(started: Sequence[Any]) -> Any:
    """The last of several works. Waiting for it is enough for works of the core, which finish in order; waits for other
    works here."""
    if not all(isinstance(work, works.NativeWork | works.FinishedWork) for work in started):
        for work in started[:-1]:
            work.wait()
    return started[-1]


def _is_asynchronous(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


def _delegate(name: str) -> Callable[..., Any]:
    """A collective without a shared-memory version, delegated to the backend of its tensors."""

    def call(self: PacelineGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._backend(_first_tensor([*args, *kwargs.values()])), name)(*args, **kwargs)

    return call


def _first_tensor(values: Sequence[Any]) -> torch.Tensor:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list | tuple) and value:
            return _first_tensor(value)
    return _NOTHING


_DELEGATED = ("reduce", "gather", "scatter", "alltoall", "alltoall_base", "allgather_coalesced")
for _name in (*_DELEGATED, "send", "recv", "recv_anysource"):
    setattr(PacelineGroup, _name, _delegate(_name))
works.keep_from_compiler(PacelineGroup)


@functools.cache
def _patch_built_in_hooks() -> None:
    """torch's built-in hooks are C++ and reject Futures completed by Python: use their Python counterparts instead."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register_hook(self: Any, comm_hook_type: Any) -> Any:
        if not isinstance(self.process_group, PacelineGroup):
            return original(self, comm_hook_type)
        hook = getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
        return self.register_comm_hook(self.process_group, hook)

    DistributedDataParallel._register_builtin_comm_hook = register_hook  # type: ignore[method-assign]
