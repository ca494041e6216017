"""What this host has: cores, memory, GPUs, the loopback interface; and the names of backends. Imports no torch."""

import ctypes
import math
import os
import platform
import re
import time
from pathlib import Path

import psutil

# This variable, set to 1, lets several NCCL ranks share a GPU, to test and measure with more ranks than GPUs.
SHARE_GPUS = "PACELINE_SHARE_GPUS"
_CGROUP = Path("/sys/fs/cgroup")


def canonical_backend(text: str) -> str:
    """A backend as `World.backend` and records name it: `paceline` is `shm`, `cpu:paceline,cuda:nccl` is
    `cpu:shm,cuda:nccl`. Anything else stays as it is; whether it exists is not checked here."""
    parts = []
    for part in text.split(","):
        device, colon, name = part.strip().rpartition(":")
        parts.append(device + colon + ("shm" if name.lower() == "paceline" else name))  # once called as the package is
    return ",".join(parts)


def name_host() -> str:
    """A name that two processes share if they can share memory: they have one kernel and one user, and namespaces in
    which they find each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, str(os.geteuid()), *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))])
    except OSError:
        return platform.node()


def _cgroup_value(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


def read_quota() -> float:
    """Cores that the container's CPU quota allows at a time; infinite without one."""
    quota = re.fullmatch(r"(\d+) (\d+)", _cgroup_value("cpu.max"))
    return int(quota[1]) / int(quota[2]) if quota else math.inf


def count_cores() -> int:
    """Cores that this process may use: its affinity, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return int(min(cores, max(1, read_quota())))


def total_memory_bytes() -> int:
    """Memory of the host or, if smaller, of the container."""
    total, limit = int(psutil.virtual_memory().total), _cgroup_value("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory_bytes() -> int:
    """Memory that new allocations can take now without swapping, inside the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    return min(available, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def read_stolen_s() -> float:
    """Seconds of all cores since boot that the host of this virtual machine gave to others; 0 where it does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def find_load() -> float | None:
    """How many processes want to compute: the load average, or how many cores are busy now where those are fewer.

    The average remembers a minute, and with it what has ended since, such as the run before this one.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return min(load, psutil.cpu_percent(0.1) / 100 * cores) if load > cores / 4 else load


class StolenTime:
    """The share of all cores' time, from its making on, that the host of this virtual machine gave to others."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic(), read_stolen_s()

    def read_share(self) -> float:
        """Of a second at least, for the counter is coarse."""
        since_s, stolen_s = self._begun_s
        return (read_stolen_s() - stolen_s) / (max(1.0, time.monotonic() - since_s) * (os.cpu_count() or 1))


def count_gpus() -> int:
    """NVIDIA GPUs visible to this process, asked of the driver itself so that it takes milliseconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def can_serve_nccl(gpus: int, local_ranks: int) -> bool:
    """Whether NCCL can run this host's ranks: with one GPU each, or with fewer if the user lets ranks share them."""
    return gpus >= local_ranks or (gpus > 0 and os.environ.get(SHARE_GPUS) == "1")


def must_share_gpus(gpus: int, local_ranks: int) -> bool:
    """Whether ranks of this host share a GPU now, or may do so in a later world (one GPU, and the user allows it)."""
    return gpus < local_ranks or (gpus == 1 and os.environ.get(SHARE_GPUS) == "1")


def gpu_name() -> str:
    """The first visible GPU's name as the driver tells it; empty where there is none."""
    if not count_gpus():
        return ""
    driver, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(128)
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0 or driver.cuDeviceGetName(name, len(name), device) != 0:
        return ""
    return name.value.decode(errors="replace")


def cpu_name() -> str:
    """The processor's name as the kernel tells it, or the architecture where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    if names := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return names[1].strip()
    part = re.search(r"^CPU part\s*:\s*(\S+)$", text, re.MULTILINE)
    arm = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return f"{platform.machine()} {arm.get(part[1], part[1]) if part else ''}".strip()


def loopback_interface() -> str | None:
    """The name of the loopback interface (`lo`, `lo0`), which local ranks meet on."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None
