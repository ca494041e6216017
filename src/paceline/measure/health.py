"""Is this machine ready to train? One check per thing that ranks need, the last of them a real all-reduce.

A check says what it found and, where that is bad, how to fix it. Imports torch late, because torch is one of the things
that may be broken.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator

import psutil

from paceline import machine, transport
from paceline.errors import PacelineError
from paceline.measure.settings import CollectiveSettings
from paceline.records import CollectiveRecord
from paceline.records.kinds import CheckRecord
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.launch import RankPool
from paceline.units import MIB, format_duration, format_memory, format_rate

_TESTED = ((2, 11), (2, 13))


def _report(name: str, status: str, found: str, advice: str = "") -> CheckRecord:
    return CheckRecord(name=name, status=status, found=found, advice=advice)


def check_health() -> Iterator[CheckRecord]:
    """All checks, cheap ones first, each when it is done."""
    yield _check_python()
    yield _check_cores()
    yield _check_memory()
    yield _check_shm()
    yield _check_open_files()
    yield _check_launcher()
    yield _check_interface()
    try:
        import torch  # noqa: F401
    except Exception as error:
        yield _report("torch", "fail", f"cannot be imported: {error}", "reinstall it: pip install 'torch>=2.11'")
        return
    yield _check_torch()
    yield _check_threads()
    yield _check_backends()
    yield _check_transport()
    yield _check_gpus()
    yield _check_allreduce("gloo", 2, "2-rank all-reduce")
    if not transport.why_not():
        yield _check_allreduce("shm", 2, "in shared memory")
    if machine.count_gpus():
        yield _check_allreduce("nccl", 1, "NCCL all-reduce")


def _check_python() -> CheckRecord:
    found = f"{platform.python_version()} ({sys.implementation.name}, {platform.machine()})"
    return _report("Python", "ok", found)


def _check_cores() -> CheckRecord:
    cores, all_cores = machine.count_cores(), os.cpu_count() or 1
    limited = f" of {all_cores} (limited by affinity or the container)" if cores < all_cores else ""
    return _report("cores", "ok", f"{cores}{limited}, {machine.cpu_name()}")


def _check_memory() -> CheckRecord:
    free, total = machine.available_memory_bytes(), machine.total_memory_bytes()
    found = f"{format_memory(free)} free of {format_memory(total)}"
    if free < 1.5 * 2**30:
        return _report(
            "memory",
            "warn",
            found,
            "two ranks and a model need more: close something, or use a larger machine",
        )
    return _report("memory", "ok", found)


def _check_shm() -> CheckRecord:
    if not os.path.isdir("/dev/shm"):
        return _report("/dev/shm", "warn", "missing", "data loaders with workers need it: mount a tmpfs there")
    usage = shutil.disk_usage("/dev/shm")
    found = f"{format_memory(usage.free)} free of {format_memory(usage.total)}"
    if usage.free < 256 * MIB:
        return _report(
            "/dev/shm",
            "warn",
            found,
            "data loaders with workers may fail: start the container with --shm-size=2g",
        )
    return _report("/dev/shm", "ok", found)


def _check_open_files() -> CheckRecord:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        return _report("open files", "warn", f"limit {soft}", "many ranks or loader workers need more: ulimit -n 4096")
    return _report("open files", "ok", f"limit {soft}")


def _check_launcher() -> CheckRecord:
    try:
        place = read_place()
    except PacelineError as error:
        return _report("launcher", "fail", str(error), "unset the variables named, or let the launcher set all of them")
    if place.launcher == "none":
        return _report("launcher", "ok", "none: commands start their own ranks (--ranks N)")
    return _report("launcher", "ok", f"{place.launcher}: rank {place.rank} of {place.world_size}")


def _check_interface() -> CheckRecord:
    """gloo listens on GLOO_SOCKET_IFNAME or, without it, on the address that the host's own name resolves to."""
    interfaces = psutil.net_if_addrs()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    local = f"ranks of one host meet on {machine.loopback_interface() or 'loopback'}"
    others = [
        name for name, stats in psutil.net_if_stats().items() if stats.isup and name != machine.loopback_interface()
    ]
    choose = f"set GLOO_SOCKET_IFNAME to one of: {', '.join(others)}" if others else "bring up a network interface"
    if machine.loopback_interface() is None:
        return _report("network", "fail", "no loopback interface", "ranks meet on it: ip link set lo up")
    if chosen:
        missing = [name for name in chosen.split(",") if name not in interfaces]
        if missing:
            return _report("network", "fail", f"GLOO_SOCKET_IFNAME={chosen}: no interface {', '.join(missing)}", choose)
        return _report("network", "ok", f"gloo uses {chosen} (GLOO_SOCKET_IFNAME)")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return _report(
            "network",
            "warn",
            f"{local}; between hosts gloo would fail, because {host!r} does not resolve",
            choose,
        )
    owner = next((n for n, found in interfaces.items() if any(a.address == address for a in found)), None)
    if owner is None and not address.startswith("127."):
        return _report(
            "network",
            "warn",
            f"{local}; between hosts gloo would use {address}, which no interface has",
            choose,
        )
    if address.startswith("127."):
        note = f"{host!r} resolves to {address}, which other hosts cannot reach; for several hosts, {choose}"
        return _report("network", "ok", f"{local}; {note}")
    return _report("network", "ok", f"{local}; between hosts gloo uses {owner} ({address})")


def _check_torch() -> CheckRecord:
    import torch

    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    if version < _TESTED[0]:
        return _report("torch", "fail", found, "torch 2.11 or newer is needed: pip install 'torch>=2.11'")
    if version > _TESTED[1]:
        return _report("torch", "warn", found, "newer than what Paceline was tested with (2.11 to 2.13)")
    return _report("torch", "ok", found)


def _check_threads() -> CheckRecord:
    import torch

    cores, asked = machine.count_cores(), os.environ.get("OMP_NUM_THREADS")
    found = f"{torch.get_num_threads()} in one process" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if asked and asked.isdigit() and int(asked) > cores:
        return _report("threads", "warn", found, f"more threads than the {cores} cores slow each other down: unset it")
    return _report("threads", "ok", f"{found}; ranks share the cores evenly")


def _check_backends() -> CheckRecord:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return _report(
            "backends",
            "fail",
            "torch is built without gloo",
            "install a build of torch with distributed support",
        )
    names = {"gloo": True, "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return _report("backends", "ok", ", ".join(name for name, there in names.items() if there))


def _check_transport() -> CheckRecord:
    reason = transport.why_not()
    if reason:
        return _report("shared memory", "warn", f"ranks of this host use gloo: {reason}", "see docs/transport.md")
    kernels = transport.describe_kernels()
    return _report("shared memory", "ok", f"backend paceline, {kernels} kernels: the default for ranks of one host")


def _check_gpus() -> CheckRecord:
    import torch

    seen = machine.count_gpus()
    if not torch.cuda.is_available():
        if seen:
            return _report(
                "GPU",
                "warn",
                f"the driver shows {seen}, torch uses none",
                "install a build of torch with CUDA",
            )
        return _report("GPU", "ok", "none: training runs on the CPU")
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"
    return _report("GPU", "ok", f"{torch.cuda.device_count()} x {', '.join(names)}, NCCL {nccl}")


def _check_allreduce(backend: str, ranks: int, name: str) -> CheckRecord:
    """The proof: ranks start, meet, reduce 1 MiB a few times, and every element is right."""
    from paceline.measure.collectives import measure_collectives

    settings = CollectiveSettings(backends=(backend,), ranks=(ranks,), sizes=(MIB,), iters=10, warmup=2)
    advice = "run again with --debug, and see docs/measuring.md"
    if is_launched() and read_place().world_size > 1:
        return _report(name, "warn", "not run inside a launched world", "run doctor once more without the launcher")
    try:
        settings.check()
        with RankPool(ranks) as pool:  # also in a launched world of one, which `run_ranks` would run in
            record = pool.run(measure_collectives, (settings,), timeout_s=90)[0].records[0]
    except PacelineError as error:
        return _report(name, "fail", str(error).splitlines()[0], advice)
    assert isinstance(record, CollectiveRecord)
    rate = f", busbw {format_rate(record.busbw_bytes_per_s)} GB/s" if ranks > 1 else ""
    checked = f"{record.num_checked} elements checked, {record.num_wrong} wrong"
    found = f"1 MiB in {format_duration(record.time_s)}{rate}, {checked}"
    if record.num_wrong:
        return _report(name, "fail", found, "data is corrupted on its way: do not train here; test the memory")
    return _report(name, "ok", found)
