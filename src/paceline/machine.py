"""Host properties: cores, memory, GPUs, the loopback interface; and backend names. Imports no torch."""

import ctypes
import math
import os
import platform
import re
import time
from pathlib import Path

import psutil

# If this variable is 1, several NCCL ranks may share a GPU, for tests and measurements with more ranks than GPUs.
SHARE_GPUS = "PACELINE_SHARE_GPUS"
_CGROUP = Path("/sys/fs/cgroup")


def canonical_backend(text: str) -> str:
    """The backend name used in `World.backend` and in records: `paceline` becomes `shm`, and `cpu:paceline,cuda:nccl`
    becomes `cpu:shm,cuda:nccl`. Other names are returned unchanged, without checking that they exist."""
    parts = []
    for part in text.split(","):
        device, colon, name = part.strip().rpartition(":")
        parts.append(device + colon + ("shm" if name.lower() == "paceline" else name))  # the backend's former name
    return ",".join(parts)


def name_host() -> str:
    """The host's name, extended so that two processes have the same one if and only if they can share memory: same
    kernel, user, and network and PID namespaces."""
    name = platform.node()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid")]
    except OSError:
        return name
    return " ".join([name, boot, str(os.geteuid()), *spaces])


def _cgroup_value(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


def read_quota() -> float:
    """The container's CPU quota in cores; infinite without a quota."""
    quota = re.fullmatch(r"(\d+) (\d+)", _cgroup_value("cpu.max"))
    return int(quota[1]) / int(quota[2]) if quota else math.inf


def count_cores() -> int:
    """How many cores this process may use: its affinity, limited by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return int(min(cores, max(1, read_quota())))


def total_memory_bytes() -> int:
    """Memory of the host or, if smaller, the container's limit."""
    total, limit = int(psutil.virtual_memory().total), _cgroup_value("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory_bytes() -> int:
    """Memory that can be allocated now without swapping, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    return min(available, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def read_stolen_s() -> float:
    """Stolen CPU time since boot, in seconds over all cores: time that the hypervisor gave to other guests; 0 if
    unknown."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def find_load() -> float | None:
    """The number of runnable processes: the load average or, if lower, the number of cores that are busy now.

    The average covers a minute, so it includes processes that have ended, such as the previous run.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return min(load, psutil.cpu_percent(0.1) / 100 * cores) if load > cores / 4 else load


class StolenTime:
    """Measures the fraction of all cores' time that the hypervisor has stolen since construction."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic(), read_stolen_s()

    def read_share(self) -> float:
        """The stolen fraction of CPU time, over an interval of at least a second because the counter is coarse."""
        since_s, stolen_s = self._begun_s
        return (read_stolen_s() - stolen_s) / (max(1.0, time.monotonic() - since_s) * (os.cpu_count() or 1))


def count_gpus() -> int:
    """The number of NVIDIA GPUs visible to this process. Queries the driver, which takes only milliseconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def can_serve_nccl(gpus: int, local_ranks: int) -> bool:
    """Whether NCCL can run this host's ranks: one GPU each, or fewer if the user lets ranks share them."""
    return gpus >= local_ranks or (gpus > 0 and os.environ.get(SHARE_GPUS) == "1")


def must_share_gpus(gpus: int, local_ranks: int) -> bool:
    """Whether ranks on this host share a GPU now, or may do so in a later world (one GPU, and sharing is allowed)."""
    return gpus < local_ranks or (gpus == 1 and os.environ.get(SHARE_GPUS) == "1")


def gpu_name() -> str:
    """The first visible GPU's name, as reported by the driver; empty without a GPU."""
    if not count_gpus():
        return ""
    driver, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(128)
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0 or driver.cuDeviceGetName(name, len(name), device) != 0:
        return ""
    return name.value.decode(errors="replace")


def cpu_name() -> str:
    """The processor's name, as reported by the kernel, or else the architecture."""
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
    """The name of the loopback interface (`lo`, `lo0`), which local ranks use."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None
