"""All private names of torch that Paceline uses, and the behavior if one is missing.

Module attributes are looked up here and used through this module. If a required one is missing, importing this module
raises a one-line error; the others have a fallback. Class members are used directly, and listed in `MEMBERS`.
`tests/unit/test_torch_internals.py` tests each on the installed torch, and `paceline doctor` reports missing ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.errors import ConfigError

_INSTALL = "pip install 'torch>=2.11,<2.16'"


def _find(path: str) -> Any:
    """The object at this dotted path in torch; AttributeError if there is none."""
    parts = path.split(".")
    # Look up modules first: torch.distributed.rendezvous is also a function.
    known = next(end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in sys.modules)
    return functools.reduce(getattr, parts[known:], sys.modules[".".join(parts[:known])])


def _need(path: str) -> Any:
    """The object at this dotted path; ConfigError if there is none."""
    try:
        return _find(path)
    except AttributeError:
        text = f"torch {torch.__version__} has no {path}, which Paceline needs: {_INSTALL}"
        raise ConfigError(text, code="torch-version") from None


# Options, works and backends of collectives. torch.distributed exports only some of these classes.
c10d = _need("torch._C._distributed_c10d")
# Futures completed by C++. torch.futures.Future is a subclass.
Future = _need("torch._C.Future")
JoinConfig = _need("torch.distributed.algorithms.join._JoinConfig")
BufferHookLocation = _need("torch.nn.parallel.distributed._BufferCommHookLocation")
StopRecomputation = _need("torch.utils.checkpoint._StopRecomputationError")
DataLoaderIterator = _need("torch.utils.data.dataloader._BaseDataLoaderIter")

if TYPE_CHECKING:
    from torch.nn.modules import batchnorm

    BatchNorm = batchnorm._BatchNorm
else:
    BatchNorm = _need("torch.nn.modules.batchnorm._BatchNorm")

# The ID of the current backward (-1: none), whether it will reach a node, and the function on the stack while it runs.
current_graph_task = _need("torch._C._current_graph_task_id")
will_execute = _need("torch._C._will_engine_execute_node")
run_backward = _need("torch.autograd.graph._engine_run_backward")
# Its `queue_callback` registers a callback for the end of backward.
engine = _need("torch.autograd.Variable._execution_engine")
count_storage_uses = _need("torch._C._storage_Use_Count")  # takes `storage._cdata`
has_internal_overlap = _need("torch._debug_has_internal_overlap")
tree_map_only = _need("torch.utils._pytree.tree_map_only")
broadcast_coalesced = _need("torch.distributed._broadcast_coalesced")
register_comm_hook = _need("torch.distributed._register_comm_hook")
get_default_store = _need("torch.distributed.distributed_c10d._get_default_store")
rendezvous_handlers = _need("torch.distributed.rendezvous._rendezvous_handlers")  # keyed by scheme
gpu_sleep = _need("torch.cuda._sleep")  # takes a number of cycles
_need("torch.distributed.distributed_c10d._world.pg_names")  # looked up on each use, because a program may replace it

# Names with a fallback. Without this one, no program appears to profile itself.
is_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: False)
# Without it, a buffer that a hook changes in place counts as changed, and autograd may reject a backward through it.
keep_versions = getattr(torch.autograd, "_unsafe_preserve_version_counter", lambda _: contextlib.nullcontext())
# Without it, ranks that lost contact wait for NCCL's own timeout.
abort_process_group = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)

_GROUP = "torch.distributed.ProcessGroup."
_DDP = "torch.nn.parallel.DistributedDataParallel."
# Class members, and the features that need them. `torch._foreach_*` are not listed: torch's public optimizers depend on
# these operators.
MEMBERS = {
    "torch.Tensor._version": "the wrapper, which detects changed gradients",
    "torch.Tensor._indices": "embedding rows",
    "torch.Tensor._values": "embedding rows",
    "torch.Tensor._backward_hooks": "embedding rows",
    "torch.nn.Module._parameters": "embedding rows",
    "torch.UntypedStorage._cdata": "buckets without copies",
    "torch.futures.Future._set_unwrap_func": "errors on the shm backend",
    _GROUP + "_device_types": "closing a world",
    _GROUP + "_get_backend": "authentication between ranks",
    _GROUP + "_get_sequence_number_for_group": "notebooks, and naming the rank with a mismatched collective on NCCL",
    _GROUP + "_register_backend": "the shm backend",
    _GROUP + "_set_default_backend": "the shm backend",
    "torch._C._distributed_c10d.Backend.Options._timeout": "GPU tensors on the shm backend",
    "torch.amp.GradScaler._unscale_grads_": "sharded optimizers with a GradScaler",
    "torch.distributed.algorithms.join.Joinable._join_config": "join()",
    _DDP + "_inside_ddp_forward": "torch.compile of a wrapped model",
    _DDP + "_assign_modules_buffers": "buffer hooks",
    _DDP + "_register_builtin_comm_hook": "torch's built-in hooks on the shm backend",
    _DDP + "_comm_hooks": "strategies as communication hooks of torch's wrapper",
    _DDP + "_get_ddp_logging_data": "attaching to a program",
    _DDP + "_has_rebuilt_buckets": "attaching to a program",
    _DDP + "_remove_autograd_hooks": "trying bucket sizes in a program",
    _DDP + "_build_params_for_reducer": "trying bucket sizes in a program",
    _DDP + "_build_debug_param_to_name_mapping": "trying bucket sizes in a program",
    _DDP + "_ddp_init_helper": "trying bucket sizes in a program",
    _DDP + "_set_static_graph": "trying bucket sizes in a program",
    "torch.utils.data.DataLoader._iterator": "data loaders with persistent workers",
}
# Attributes that torch or a program may have set, and what their absence means.
OPTIONAL = {
    "_bucket_config": "torch before 2.13, whose wrapper takes a single cap",
    "_ddp_params_and_buffers_to_ignore": "nothing is ignored",
    "_in_backward_optimizers": "the parameter is not updated in backward",
    "_orig_mod": "the model is not compiled",
    "_shutdown_workers": "the data loader has no worker processes",
    "_torchdynamo_disable": "set by us",
}


def find_missing() -> dict[str, str]:
    """Members that the installed torch lacks, and the features that need them."""
    return {path: why for path, why in MEMBERS.items() if not _has_member(path)}


def _has_member(path: str) -> bool:
    """Whether the class has the member, or one of its methods uses it: constructors set some of them."""
    owner, _, name = path.rpartition(".")
    try:
        kind = _find(owner)
    except AttributeError:
        return False
    functions = [function for function in vars(kind).values() if isinstance(function, FunctionType)]
    return hasattr(kind, name) or any(name in function.__code__.co_names for function in functions)


# -- groups ------------------------------------------------------------------------------------------------------------


def list_groups() -> dict[Any, str]:
    """The open groups of this rank and their names."""
    return dict(distributed_c10d._world.pg_names)


def find_counter(group: Any) -> Callable[[], int] | None:
    """Counts the collectives this rank has started in a group. Without it, a mismatch on NCCL names no rank."""
    return getattr(group, "_get_sequence_number_for_group", None)


def new_local_group(ranks: Sequence[int], backend: str) -> Any:
    """A group of a subset of ranks. Collective: call it on every rank of the subset, and on no other.

    torch names such a group by its ranks and a counter. Up to 2.13 this was the number of live groups in the process,
    which may differ between ranks. Since 2.14 it is the counter of whole-world groups: it advances on these ranks only,
    and the next whole-world group hangs. So this group gets its own name, unless torch moves the naming function.
    """
    digest = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    number = (get_default_store().add(f"paceline-groups/{digest}", 1) - 1) // len(ranks)
    with _naming(f"paceline-{digest}-{number}"):
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """In this context, groups that this thread creates get this name."""
    module: Any = distributed_c10d
    thread, original = threading.get_ident(), getattr(module, "_process_group_name", None)
    if original is None:
        yield
        return

    def name_group(*args: Any, **kwargs: Any) -> Any:
        return name if threading.get_ident() == thread else original(*args, **kwargs)

    module._process_group_name = name_group
    try:
        yield
    finally:
        module._process_group_name = original


# -- torch.compile and the profiler ------------------------------------------------------------------------------------


def skip_frames(code: CodeType, with_calls: bool) -> None:
    """Exclude this code from torch.compile, with or without the functions that it calls. Otherwise a compiled step may
    fail here."""
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    action, strategy = getattr(frames, "_FrameAction", None), getattr(frames, "_FrameExecStrategy", None)
    if frames is not None and action is not None and strategy is not None:
        frames.set_code_exec_strategy(code, strategy(action.SKIP, action.SKIP if with_calls else action.DEFAULT))


def is_delivered(iterator: Any) -> bool:
    """Whether the workers of a DataLoader iterator have delivered the next batch; False if unknown. With several
    workers, whether all have delivered one: the queue does not show which worker's batch comes next."""
    waiting, place = vars(iterator).get("_tasks_outstanding", 0), vars(iterator).get("_rcvd_idx")
    with contextlib.suppress(KeyError, AttributeError, TypeError, NotImplementedError):
        if len(iterator._task_info[place]) == 2:  # this batch was read before its turn
            return True
        return bool(0 < (1 if iterator._num_workers == 1 else waiting) <= iterator._data_queue.qsize())
    return False


def is_compiling() -> bool:
    """Whether torch.compile is running in this process, on any thread. Imports nothing. If torch renames its counter,
    this is False, and a long compilation is reported as a slow step."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return bool(getattr(handler, f"_{type(handler).__name__}__pending_callbacks_counter", 0))


def import_compiler() -> None:
    """Import torch.compile, which takes a second or two."""
    import torch._dynamo  # noqa: F401


def raise_recompile_limit(limit: int) -> None:
    """Let torch.compile recompile a code object at least this often."""
    import torch._dynamo

    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, limit)


def is_recording() -> bool:
    """Whether a torch profiler is recording ranges; True if unknown."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def extend_range(span: Any, future: torch.futures.Future) -> None:
    """End a profiler range when this future completes; without torch's support, it ends with its `with` block."""
    extend = getattr(span, "_call_end_callbacks_on_future", None)
    if extend is not None:
        extend(future)
