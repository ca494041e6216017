"""Checks whether this machine is ready to train: one check per requirement, up to a real all-reduce.

Imports torch late, because torch itself may be broken.
"""

from __future__ import annotations

import dataclasses
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
from paceline.measure.bench_settings import CollectiveSettings
from paceline.records import CollectiveRecord
from paceline.records.environment import Environment
from paceline.records.findings import describe_load
from paceline.records.kinds import CheckRecord
from paceline.runtime.ranks.launch import RankPool
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.units import MIB, format_duration, format_memory, format_number_of, format_rate

# Oldest and newest tested versions, as in pyproject.toml.
TESTED_PYTHON = (3, 11), (3, 13)
TESTED_TORCH = (2, 11), (2, 15)
_INSTALL = "pip install 'torch>=2.11,<2.16'"
_report = CheckRecord.build


def check_health(environment: Environment) -> Iterator[CheckRecord]:
    """Run all checks, cheap ones first, and yield each result. Read `environment` beforehand: checks cause load."""
    stolen = machine.StolenTime()
    yield from _check_parts()
    yield _check_load(dataclasses.replace(environment, stolen=stolen.read_share()))


def _check_parts() -> Iterator[CheckRecord]:
    yield from _check_host()
    yield _check_launcher()
    yield _check_interface()
    try:
        import torch  # noqa: F401
    except Exception as error:
        yield _report("torch", f"cannot be imported: {error}", f"reinstall it: {_INSTALL}", "fail")
        return
    yield from _check_torch()
    yield _check_allreduce("gloo", 2, "2-rank all-reduce")
    if not transport.why_not():
        yield _check_allreduce("shm", 2, "in shared memory")
    if machine.count_gpus():
        yield _check_allreduce("nccl", 1, "NCCL all-reduce")


def _advise_version(name: str, version: tuple[int, ...], tested: tuple[tuple[int, int], tuple[int, int]]) -> str:
    first, last = (".".join(map(str, bound)) for bound in tested)
    return "" if tested[0] <= version <= tested[1] else f"Paceline is tested with {name} {first} to {last}"


def _check_host() -> Iterator[CheckRecord]:
    found = f"{platform.python_version()} ({sys.implementation.name}, {platform.machine()})"
    yield _report("Python", found, _advise_version("Python", sys.version_info[:2], TESTED_PYTHON))
    cores, all_cores, quota = machine.count_cores(), os.cpu_count() or 1, machine.read_quota()
    limited = f" of {all_cores} (limited by affinity or the container)" if cores < all_cores else ""
    advice = f"the container's CPU quota is {quota:g} cores, and throttling looks like noise: raise the quota"
    is_limited = quota < min(all_cores, cores + 1)  # the quota, not affinity, is the limit
    yield _report("cores", f"{cores}{limited}, {machine.cpu_name()}", advice if is_limited else "")
    free, total = machine.available_memory_bytes(), machine.total_memory_bytes()
    advice = "two ranks and a model need more: stop other programs, or use a larger host" if free < 1.5 * 2**30 else ""
    yield _report("memory", f"{format_memory(free)} free of {format_memory(total)}", advice)
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        advice = "data loaders with workers may fail: start the container with --shm-size=2g"
        found = f"{format_memory(usage.free)} free of {format_memory(usage.total)}"
        yield _report("/dev/shm", found, advice if usage.free < 256 * MIB else "")
    else:
        yield _report("/dev/shm", "missing", "data loaders with workers need it: mount a tmpfs there")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "many ranks or loader workers need more: ulimit -n 4096" if 0 <= soft < 1024 else ""
    yield _report("open files", f"limit {soft}", advice)


def _check_load(environment: Environment) -> CheckRecord:
    """Check for other load that would distort measurements. Uses the wording of the warning about a run."""
    busy, quiet = [part for found in describe_load(environment) for part in found], "not known"
    if environment.load_average is not None:
        quiet = f"{environment.load_average:.1f} on {format_number_of(environment.cores, 'core')}"
    advice = "measurements would include other work: stop it, or wait until it ends"
    return _report("load", ", ".join(busy) or quiet, advice if busy else "")


def _check_launcher() -> CheckRecord:
    try:
        place = read_place()
    except PacelineError as error:
        return _report("launcher", str(error), "unset these variables, or let the launcher set all of them", "fail")
    if place.launcher == "none":
        return _report("launcher", "none: commands start their own ranks (--ranks N)")
    found = f"{place.launcher}: rank {place.rank} of {place.world_size}"
    if place.world_size == place.local_world_size or os.environ.get("PACELINE_SECRET"):
        return _report("launcher", found)
    advice = "start it with `paceline run`, or give all ranks one random PACELINE_SECRET (docs/trust.md)"
    return _report("launcher", f"{found}; ranks on several hosts without a secret, so anyone can join", advice)


def _check_interface() -> CheckRecord:
    """Check gloo's address: that of GLOO_SOCKET_IFNAME or, if unset, the one that the host's name resolves to."""
    interfaces, loopback = psutil.net_if_addrs(), machine.loopback_interface()
    others = [name for name, stats in psutil.net_if_stats().items() if stats.isup and name != loopback]
    choose = f"set GLOO_SOCKET_IFNAME to one of: {', '.join(others)}" if others else "bring up a network interface"
    if loopback is None:
        return _report("network", "no loopback interface", "ranks need it to connect: ip link set lo up", "fail")
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        missing = [name for name in chosen.split(",") if name not in interfaces]
        if missing:
            return _report("network", f"GLOO_SOCKET_IFNAME={chosen}: no interface {', '.join(missing)}", choose, "fail")
        return _report("network", f"gloo uses {chosen} (GLOO_SOCKET_IFNAME)")
    host = socket.gethostname()
    local = f"ranks on one host use {loopback}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return _report("network", f"{local}; between hosts gloo would fail: {host!r} does not resolve", choose)
    if address.startswith("127."):
        found = f"{local}; {host!r} resolves to {address}, a loopback address: for several hosts, {choose}"
        return _report("network", found)
    owner = next((n for n, found in interfaces.items() if any(a.address == address for a in found)), None)
    if owner is None:
        return _report("network", f"{local}; between hosts gloo would use {address}, which no interface has", choose)
    return _report("network", f"{local}; between hosts gloo uses {owner} ({address})")


def _describe_missing() -> str:
    """The private names missing from this torch and the features that need them."""
    try:
        from paceline.torch_internals import find_missing
    except PacelineError as error:
        return str(error)
    return ", ".join(f"{path} ({why})" for path, why in find_missing().items())


def _check_torch() -> Iterator[CheckRecord]:
    import torch
    import torch.distributed as dist

    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    missing = _describe_missing()
    advice = _advise_version("torch", version, TESTED_TORCH)
    advice = "; ".join(filter(None, (advice, missing and f"it lacks {missing}")))
    is_unsupported = missing or version < TESTED_TORCH[0]
    yield _report("torch", found, advice and f"{advice}: {_INSTALL}", "fail" if is_unsupported else "warn")
    cores, asked = machine.count_cores(), os.environ.get("OMP_NUM_THREADS")
    found = f"{torch.get_num_threads()} in one process" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    is_more, advice = asked and asked.isdigit() and int(asked) > cores, "slow each other down: unset OMP_NUM_THREADS"
    found += "" if is_more else "; ranks divide the cores evenly"
    yield _report("threads", found, f"more threads than cores ({cores}) {advice}" if is_more else "")
    if dist.is_available() and dist.is_gloo_available():
        names = {"gloo": True, "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
        yield _report("backends", ", ".join(name for name, there in names.items() if there))
    else:
        yield _report("backends", "torch is built without gloo", "install a build of torch that includes it", "fail")
    if reason := transport.why_not():
        yield _report("shared memory", f"ranks on this host use gloo: {reason}", "see docs/transport.md")
    else:
        kernels = transport.native.load_library().pln_cpu().decode()
        yield _report("shared memory", f"shm backend, {kernels} kernels: the default for ranks on one host")
    if torch.cuda.is_available():
        gpus = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "missing"
        yield _report("GPU", f"{torch.cuda.device_count()} x {', '.join(gpus)}, NCCL {nccl}")
    elif seen := machine.count_gpus():
        yield _report("GPU", f"the driver lists {seen}, but torch uses none", "install a build of torch with CUDA")
    else:
        yield _report("GPU", "none: training runs on the CPU")


def _check_allreduce(backend: str, ranks: int, name: str) -> CheckRecord:
    """An end-to-end check: ranks start, connect, reduce 1 MiB a few times, and verify every element."""
    from paceline.measure.collectives import measure_collectives

    if is_launched() and read_place().world_size > 1:
        return _report(name, "skipped inside a launched world", "run doctor again without the launcher")
    settings = CollectiveSettings(backends=(backend,), ranks=(ranks,), sizes=(MIB,), iters=10, warmup=2)
    try:
        settings.check()
        with RankPool(ranks) as pool:  # `run_ranks` would join a launched single-rank world
            record = pool.run(measure_collectives, (settings,), timeout_s=90)[0].records[0]
    except PacelineError as error:
        return _report(name, str(error).splitlines()[0], "run again with --debug, and see docs/measuring.md", "fail")
    assert isinstance(record, CollectiveRecord)
    rate = f", busbw {format_rate(record.busbw_bytes_per_s)} GB/s" if ranks > 1 else ""
    checked = f"{record.num_checked} elements checked, {record.num_wrong} wrong"
    advice = "data is corrupted in transit: do not train here; test the memory" if record.num_wrong else ""
    return _report(name, f"1 MiB in {format_duration(record.time_s)}{rate}, {checked}", advice, "fail")
