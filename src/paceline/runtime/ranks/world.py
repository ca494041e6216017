"""The world: `init` opens a process group from a launcher's variables, and `get` returns this process's ranks in it."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline import machine
from paceline.errors import ConfigError, LaunchError, PacelineError, refuse
from paceline.runtime.faults import pulse
from paceline.runtime.faults.processes import describe_failure
from paceline.runtime.ranks import messages
from paceline.runtime.ranks import rendezvous as meeting
from paceline.runtime.ranks.place import Place, read_place
from paceline.torch_internals import abort_process_group, get_default_store, list_groups
from paceline.transport import proof, register, why_not
from paceline.units import format_number_of

SHARE_S = 120.0  # how long `share_first` waits for the other ranks
_DESTROY_S, _ABORT_S = 2.0, 10.0  # timeouts for a failed rank's groups to be destroyed, and for NCCL's to be aborted
# Backends whose collectives fail when a rank is lost. With other backends they wait forever and must be aborted.
_NOTICE_LOSS = frozenset(("gloo", "shm", "paceline"))
_LOOK_S = (0.02, 1.0)  # how often to check the references to a group: initially, and later


@dataclass(frozen=True)
class World(contextlib.AbstractContextManager["World"]):
    """This rank's open world. Leaving the `with` block, `close()` and the end of the process all destroy it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str
    threads: int
    hosts: tuple[str, ...]
    control: dist.ProcessGroup = field(repr=False)
    departures: dist.Store = field(repr=False)

    @property
    def shares_clock(self) -> bool:
        """Whether all ranks run on one host, so that their monotonic clocks are comparable."""
        return len(set(self.hosts)) == 1

    @pulse.waits
    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, over the control group. Collective: every rank must call this."""
        if _open is not self:
            raise LaunchError("this world is closed", code="closed")
        return messages.share(value, self.control, torch.device("cpu"))

    @pulse.waits
    def gather(self, value: Any) -> list[Any]:
        """`share`, but only rank 0 gets the values; the others get an empty list. Collective."""
        return messages.gather(value, self.control, torch.device("cpu"))

    @pulse.waits
    def barrier(self) -> None:
        """Wait for every rank, over the control group. Collective: every rank must call this."""
        dist.barrier(group=self.control)

    def close(self) -> None:
        """Destroy the process groups; idempotent."""
        self.__exit__(None, None, None)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _open
        if _open is not self:
            return
        if self.world_size > 1:
            how = "closed its world" if error is None else f"failed with {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):
                self.departures.set(str(self.rank), how)
        _open = None
        if isinstance(error, Exception):
            failure = describe_failure(self.rank, error)
            pulse.fail(failure.summary, failure.is_secondary)
        pulse.close_page()
        atexit.unregister(shutdown)
        _destroy_groups(failed=error is not None)
        proof.use_key(b"")


_open: World | None = None
_lost = threading.Event()  # another rank is lost, and this world's collectives were aborted


def current_world() -> World | None:
    """The world that `init` opened in this process, if it is still open."""
    return _open


def init(
    backend: str = "auto", device: str = "auto", *, rendezvous: str = "env://", rank: int | None = None,
    world_size: int | None = None, threads: int | None = None, timeout_s: float = 600.0,
    rendezvous_timeout_s: float = 120.0,
    announce: Callable[[str], None] | None = lambda line: print(f"paceline: {line}", file=sys.stderr, flush=True),
) -> World:  # fmt: skip
    """Join the world and return it. Collective: every rank must call this.

    The world comes from torchrun's, Slurm's or mpirun's variables, or from `rank` and `world_size`; without
    either it is a world of one. Use it as a context manager, or call `paceline.shutdown()` at the end.

    Args:
        backend: `auto` means nccl on CUDA and, on CPU, shm if all ranks share a host, otherwise gloo. Also accepts a
            name, or a list such as `cpu:shm,cuda:nccl`. `paceline` is another name for shm.
        device: cpu or cuda. `auto` uses GPUs if there is one for each rank.
        rendezvous: `env://`, `tcp://HOST:PORT`, or `file:///PATH` where TCP does not work.
        rank: This process's rank, if there is no launcher.
        world_size: The number of ranks, if there is no launcher.
        threads: torch's threads per rank. By default this host's cores divided by its number of ranks.
        timeout_s: Timeout of each collective.
        rendezvous_timeout_s: How long to wait for the other ranks.
        announce: Called on rank 0 with one line that describes the world.
    """
    global _open
    limits = f"timeout_s={timeout_s}, rendezvous_timeout_s={rendezvous_timeout_s}"
    refuse(
        (_open is not None, "a world is already open in this process: call paceline.shutdown() first"),
        # Opened by the program or by Ray Train, so `shutdown` does not close it.
        (dist.is_initialized(), "a process group is already open: remove paceline.init(), paceline.DDP uses it"),
        (timeout_s <= 0 or rendezvous_timeout_s <= 0, f"{limits}: both must be above 0"),
    )
    place, backend = _find_place(rank, world_size), machine.canonical_backend(backend)
    register()
    _lost.clear()
    pulse.watch_lost(abort_collectives)
    store = meeting.open_store(rendezvous, place, rendezvous_timeout_s)
    limit = timedelta(seconds=timeout_s)
    try:
        hosts = meeting.await_ranks(store, place, rendezvous_timeout_s)
        local_rank, local_size = _find_local(place, hosts)
        torch_device, chosen, reason, refusal = torch.device("cpu"), backend, "", ""
        try:
            torch_device, reason = _choose_device(device, backend, local_rank, local_size)
            chosen = backend if backend != "auto" else _choose_backend(torch_device, local_size, hosts)
            check_backend(chosen, torch_device.type, local_size)
            num_threads, why = _choose_threads(threads, local_size)
        except PacelineError as error:
            refusal = str(error)
        meeting.agree_on_backend(store, place, chosen, refusal, rendezvous_timeout_s)
        if torch_device.type == "cuda":
            # Before any collective: NCCL and object collectives use the current device and hang on the wrong one.
            torch.cuda.set_device(torch_device)
            shorten_nccl_dump()
            if machine.must_share_gpus(torch.cuda.device_count(), local_size):  # now or in a later group
                separate_hosts()
        torch.set_num_threads(num_threads)
        default = dist.PrefixStore("default", store)
        proof.use_key(meeting.find_key(store), store)
        dist.init_process_group(chosen, store=default, rank=place.rank, world_size=place.world_size, timeout=limit)
        proof.check_group(dist.group.WORLD)
        # A separate group, so that control traffic never queues behind gradients and never needs a GPU.
        control = dist.new_group(backend="gloo", timeout=limit)
        proof.check_group(control)
    except BaseException:
        _destroy_groups(failed=True)
        raise
    _open = World(
        place.rank, place.world_size, local_rank, local_size, torch_device, chosen, place.launcher, num_threads,
        tuple(hosts), control, dist.PrefixStore("departures", store),
    )  # fmt: skip
    atexit.register(shutdown)
    if announce is not None and place.rank == 0:
        ranks, per_rank = format_number_of(place.world_size, "rank"), format_number_of(num_threads, "thread")
        announce(f"{ranks} on {chosen} ({torch_device.type}{reason}), {per_rank} per rank ({why})")
    return _open


@contextlib.contextmanager
def join_world(backend: str = "auto", device: str = "auto", threads: int | None = None) -> Iterator[World]:
    """The open world; else one around the process group that the program opened; else a new one.

    A group that was already open stays open, on its backend; requesting another backend raises ConfigError. Collective:
    every rank must call this.
    """
    global _open
    if _open is not None or dist.is_initialized():
        found = _open.backend if _open is not None else machine.canonical_backend(str(dist.get_backend()))
        if machine.canonical_backend(backend) not in ("auto", found):
            text = f"backend {backend} requested, but the open group uses {found}: omit it, or close that group first"
            raise ConfigError(text, code="already-open")
    if _open is not None:
        yield _open
    elif not dist.is_initialized():
        with init(backend, device, threads=threads, announce=None) as world:
            yield world
    else:
        register()
        _open = world = _adopt(device)
        try:
            yield world
        finally:
            _open = None
            dist.destroy_process_group(world.control)


def share_first(place: Place, value: Any) -> Any:
    """Give every rank rank 0's value, over the open group or the launcher's store. Collective."""
    if dist.is_initialized():
        with join_world() as world:
            return world.share(value)[0]
    return meeting.gather(place, lambda: value, SHARE_S, meeting.ABSENT)[0]


def _adopt(device: str) -> World:
    """A world around torch's open default group, with its own control group."""
    rank, world_size, control = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    hosts = messages.share(machine.name_host(), control, torch.device("cpu"))
    local = _find_local(Place(rank, world_size, None, None, "torch"), hosts)
    backend = machine.canonical_backend(str(dist.get_backend()))
    departures = dist.PrefixStore("paceline-adopted", get_default_store())
    return World(
        rank, world_size, *local, _choose_device(device, backend, *local)[0], backend, "torch",
        torch.get_num_threads(), tuple(hosts), control, departures,
    )  # fmt: skip


def shutdown() -> None:
    """Close the world that `init` opened, if any."""
    if _open is not None:
        _open.close()


def abandon() -> None:
    """Destroy all groups within seconds, including those that wait for collectives that will never complete."""
    if _open is not None:
        _open.__exit__(LaunchError, LaunchError("this world was abandoned"), None)
    _destroy_groups(failed=True)


def has_lost_rank() -> bool:
    """Whether another rank of this world (or the last one, if none is open) was lost and collectives were aborted.

    An aborted collective raises nothing: its kernel ends and leaves its memory half written.
    """
    return _lost.is_set()


def abort_collectives() -> bool:
    """Abort the collectives that would wait forever for a lost rank; False if there is no such group yet.

    This releases everything that waits for them on the GPU and the host. Their results are invalid (`has_lost_rank`).
    The GPU stays usable; the groups do not.
    """
    groups = [group for group in list_groups() if not _notices_loss(group)]
    if groups:
        _lost.set()  # first, because threads that return from a wait check it
    abort_groups(groups)
    return bool(groups)


def _notices_loss(group: Any) -> bool:
    names = str(dist.get_backend_config(group)).split(",")
    return {name.rpartition(":")[2] for name in names} <= _NOTICE_LOSS


def abort_groups(groups: Iterable[Any]) -> None:
    """Abort these groups in separate threads: while one frees memory, others must not wait for a lost rank."""
    for group in groups:
        threading.Thread(target=_abort_group, args=(group,), daemon=True, name="paceline-abort").start()


def _abort_group(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the group is being destroyed
        group.abort()


def find_departed_ranks() -> dict[int, str]:
    """The ranks that closed the open world, with the reason; does not include ranks that died."""
    if _open is None:
        return {}
    departed = {}
    with contextlib.suppress(RuntimeError):  # the store is gone, together with the rank that served it
        for rank in range(_open.world_size):
            if rank != _open.rank and _open.departures.check([str(rank)]):
                departed[rank] = _open.departures.get(str(rank)).decode()
    return departed


def _destroy_groups(failed: bool) -> None:
    """Destroy all groups. After a failure, do not wait long for collectives that will never complete."""
    if not dist.is_initialized():
        return
    keep_groups(list_groups())
    if not failed:
        dist.destroy_process_group()
        return
    destroy, limit_s = dist.destroy_process_group, _DESTROY_S
    if "nccl" in str(dist.get_backend_config()):
        abort_groups([group for group in list_groups() if not _notices_loss(group)])
        destroy, limit_s = abort_process_group, _ABORT_S
    thread = threading.Thread(target=destroy, daemon=True, name="paceline-destroy")
    thread.start()
    thread.join(limit_s)


def keep_groups(groups: Iterable[Any]) -> None:
    """Keep references to these groups, which are about to be destroyed, until no others are left.

    A callback on a gloo thread may still reference its group; if that were the last reference, the thread would join
    itself and the process would abort. Safe to call anywhere, even during garbage collection: it takes no lock.
    """
    for group in groups:
        _arriving.put(group)
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                _arriving.put(group._get_backend(device))
    _start_keeper()


def _start_keeper() -> None:
    """Start the keeper thread unless it is running. It holds `_keeping` while it runs."""
    if _keeping.acquire(blocking=False):
        try:
            threading.Thread(target=_run_keeper, daemon=True, name="paceline-groups").start()
        except RuntimeError:  # Python 3.12 does not start threads at interpreter exit
            _keeping.release()


def _run_keeper() -> None:
    looks = 0
    while not _is_leaving.wait(_LOOK_S[looks > 100]):
        looks = looks + 1 if _arriving.empty() else 0
        _drop_unreferenced()
        if not _kept:
            break
    _keeping.release()
    if not _arriving.empty() and not _is_leaving.is_set():  # queued since the last check
        _start_keeper()


def _drop_unreferenced() -> None:
    """Take over queued groups and drop those without other references.

    Each is dropped on its own thread: the destructor of a gloo group waits for a running collective, which may fail
    only once other ranks notice that another group is gone.
    """
    while not _arriving.empty():
        group = _arriving.get()
        if all(group is not other for other in _kept):  # with two references here, neither would be the last
            _kept.append(group)
        del group
    (alone,) = _count_holders([object()])
    counts = _count_holders(_kept)
    dropped = [[group] for group, held in zip(_kept, counts, strict=True) if held <= alone]
    _kept[:] = [group for group, held in zip(_kept, counts, strict=True) if held > alone]
    _ending[:] = [thread for thread in _ending if thread.is_alive()]
    for group in dropped:
        thread = threading.Thread(target=group.clear, daemon=True, name="paceline-group")
        try:
            thread.start()
        except RuntimeError:  # at interpreter exit, as above
            group.clear()
        else:
            _ending.append(thread)


def _count_holders(items: list[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


def _leave() -> None:
    """At interpreter exit: do not end a thread in the middle of a group's destruction."""
    _is_leaving.set()
    if _keeping.acquire(timeout=_DESTROY_S):  # never released, so that no new keeper starts
        _drop_unreferenced()
    deadline = time.monotonic() + _DESTROY_S
    for thread in _ending:
        thread.join(max(0.0, deadline - time.monotonic()))


_arriving, _kept = queue.SimpleQueue[Any](), list[Any]()  # `_kept` and `_ending` belong to the keeper
_ending = list[threading.Thread]()
_keeping, _is_leaving = threading.Lock(), threading.Event()
os.register_at_fork(after_in_child=_keeping._at_fork_reinit)  # type: ignore[attr-defined]  # the child has no keeper
atexit.register(_leave)  # runs after open worlds are closed, since `init` registers later


def _find_place(rank: int | None, world_size: int | None) -> Place:
    if rank is None and world_size is None:
        return read_place()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"init got rank={rank} and world_size={world_size}: pass both, with 0 <= rank < world_size")
    master_addr, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return Place(rank, world_size, None, None, "arguments", master_addr, int(port) if port.isdigit() else None)


def _find_local(place: Place, hosts: list[str]) -> tuple[int, int]:
    """The rank among those on its host, and their number, if the launcher did not set them."""
    here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    local_rank = here.index(place.rank) if place.local_rank is None else place.local_rank
    return local_rank, len(here) if place.local_world_size is None else place.local_world_size


def _choose_device(device: str, backend: str, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """The device and a suffix for the announcement."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        if "nccl" in backend or "cuda" in backend or (backend == "auto" and machine.can_serve_nccl(gpus, local_size)):
            device = "cuda"
        elif backend == "auto" and gpus:
            return torch.device("cpu"), f"; {gpus} GPU for {local_size} ranks: pass device='cuda' to share it"
        else:
            device = "cpu"
    if device == "cpu":
        return torch.device("cpu"), ""
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:INDEX")
    if gpus == 0:
        built = "" if torch.backends.cuda.is_built() else f" and torch {torch.__version__} is built without CUDA"
        raise ConfigError(f"device {device!r} needs a GPU, but none is visible{built}: use the cpu device")
    number = int(index) if index else local_rank % gpus
    if number >= gpus:
        raise ConfigError(f"device {device!r} does not exist: GPUs are numbered 0 to {gpus - 1} here")
    return torch.device("cuda", number), ""


def separate_hosts() -> None:
    """Let NCCL ranks share a GPU. NCCL refuses two ranks with the same host and bus id, so each process presents itself
    as a separate host, connected through loopback sockets. NCCL reads these variables when it creates its first
    communicator."""
    os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{os.getpid()}"
    os.environ["NCCL_SHM_DISABLE"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def shorten_nccl_dump() -> None:
    """After an NCCL error, such as collectives of different sizes, torch's watchdog waits four times this long for its
    flight recorder before it ends the process. By default that is a minute, during which the other ranks wait."""
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")


def _choose_backend(device: torch.device, local_size: int, hosts: list[str]) -> str:
    if device.type == "cuda":
        can_serve = machine.can_serve_nccl(torch.cuda.device_count(), local_size)
        return "nccl" if can_serve and dist.is_nccl_available() else "gloo"
    return "shm" if len(hosts) > 1 and len(set(hosts)) == 1 and not why_not() else "gloo"


def check_backend(backend: str, device_type: str, local_world_size: int) -> None:
    """Raise ConfigError for a backend that cannot work with these devices, before torch fails later.

    `cpu:gloo,cuda:nccl` names one backend per device; a bare name applies to every device.
    """
    backend, gpus = machine.canonical_backend(backend), torch.cuda.device_count()
    listed = [known for known in dist.Backend.backend_list if known not in (dist.Backend.UNDEFINED, "fake")]
    known = [known for known in listed if known == "nccl" or dist.is_backend_available(known)]
    for part in backend.split(","):
        device, _, name = part.strip().rpartition(":")
        if name.lower() not in known:
            raise ConfigError(f"backend {name!r} is unknown: torch knows {', '.join(known)} here")
        if device not in ("", "cpu", "cuda"):
            raise ConfigError(f"backend {backend!r} names the unknown device {device!r}: use cpu and cuda")
        if name == "nccl":
            if not (torch.cuda.is_available() and dist.is_nccl_available()):
                raise ConfigError("the nccl backend needs CUDA, but torch sees no GPU here: use the gloo backend")
            if not machine.can_serve_nccl(gpus, local_world_size):
                found = f"the nccl backend needs one GPU per rank: {local_world_size} ranks and {gpus} GPU here"
                shared = f"{machine.SHARE_GPUS}=1 to share GPUs"
                hint = f"use at most {gpus}, the gloo backend with the cuda device, or {shared}"
                raise ConfigError(f"{found}; {hint}")
            if backend == "nccl" and device_type != "cuda":
                raise ConfigError("the nccl backend works only on GPUs, but the device is cpu: use the gloo backend")
        if name == "shm" and (why := why_not()):
            raise ConfigError(f"the shm backend is not available here: {why}; use the gloo backend")


def _choose_threads(threads: int | None, local_size: int) -> tuple[int, str]:
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads}: a rank needs at least 1")
        return threads, "as requested"
    requested = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 if the user set nothing, so under torchrun 1 is not a request.
    by_torchrun = requested == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if requested.isdigit() and int(requested) > 0 and not by_torchrun:
        return int(requested), "OMP_NUM_THREADS"
    cores = machine.count_cores()
    return max(1, cores // local_size), f"{format_number_of(cores, 'core')} / {local_size} local"


@dataclass(frozen=True)
class Ranks:
    """The numbers that identify this process. With a mesh, `rank` (-1 outside the mesh) and `world_size` refer to its
    group."""

    rank: int
    world_size: int
    global_rank: int
    local_rank: int


def _need_world() -> None:
    if not dist.is_initialized():
        raise LaunchError("no process group is open: call paceline.init() first")


def _find_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group that has exactly the mesh's ranks; a mesh of several dimensions has one only if it spans the world."""
    long = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(long) <= 1:
        return mesh.get_group(long[0] if long else 0)
    if sorted(mesh.mesh.flatten().tolist()) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return None


def ranks(mesh: DeviceMesh | None = None) -> Ranks:
    """Find this process's ranks, in the world or in a mesh with any number of dimensions."""
    _need_world()
    mesh = get.mesh if mesh is None else mesh
    text = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    local_rank = _open.local_rank if _open is not None else int(text) if text.isdigit() else 0
    rank = global_rank = dist.get_rank()
    if mesh is None:
        return Ranks(rank, dist.get_world_size(), global_rank, local_rank)
    members = mesh.mesh.flatten().tolist()
    rank = members.index(global_rank) if global_rank in members else -1
    if rank >= 0 and (group := _find_group(mesh)) is not None:
        rank = dist.get_rank(group)  # the rank used by collectives, regardless of the mesh's order
    return Ranks(rank, len(members), global_rank, local_rank)


_FACTS = {"ws": "world_size", "rank": "rank", "grank": "global_rank", "lrank": "local_rank"}


class _Get:
    """`get(what, mesh=None)` returns one fact about this process.

    `ws`: size of the mesh or the world. `rank`: this process's rank in the mesh or the world. `grank`: its rank in the
    world. `lrank`: its rank on its host, regardless of the mesh. `pg`: the process group of the mesh, or None for the
    world, as torch's functions accept it.
    """

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._world: dist.ProcessGroup | None = None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The registered mesh; None once the world in which it was registered is closed."""
        return self._mesh if dist.is_initialized() and self._world is dist.group.WORLD else None

    def __call__(self, what: str, mesh: DeviceMesh | None = None) -> Any:
        mesh = self.mesh if mesh is None else mesh
        if what in _FACTS:
            return getattr(ranks(mesh), _FACTS[what])
        if what != "pg":
            raise ConfigError(f"get({what!r}) is unknown: use 'ws', 'rank', 'grank', 'lrank' or 'pg'")
        _need_world()
        if mesh is None:
            return None
        if (rank := dist.get_rank()) not in mesh.mesh.flatten().tolist():
            raise ConfigError(f"rank {rank} is not part of the mesh {mesh.mesh.tolist()}: it has no group there")
        if (group := _find_group(mesh)) is None:
            text = f"a mesh of shape {tuple(mesh.mesh.shape)} has one group per dimension but none for the whole mesh"
            raise ConfigError(f"{text}: use one dimension, such as mesh[{(mesh.mesh_dim_names or (0,))[0]!r}]")
        return group

    def register_mesh(self, mesh: DeviceMesh | None) -> _Get:
        """Use this mesh by default; None resets to the world."""
        _need_world()
        self._mesh, self._world = mesh, dist.group.WORLD
        return self


get = _Get()


def set_seed(seed: int, per_rank: bool = False) -> int:
    """Seed torch (every device), numpy and random, and return the seed used.

    `per_rank` gives each rank its own seed, for noise that must differ between ranks; the default yields equal models.
    Rank 0 uses `seed` itself.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed}: use 0 to 2^32 - 1, numpy's range")
    if per_rank:
        _need_world()
        # Far apart, because callers increment seeds: rank 1 in epoch 0 must not draw the numbers of rank 0 in epoch 1.
        seed = (seed + 0x9E3779B9 * dist.get_rank()) % 2**32
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed
