"""Host properties within a container's limits, on a simulated host."""

import ctypes
from types import SimpleNamespace

import pytest

from paceline import machine


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A host with 8 cores and 1000 bytes of memory, 600 of them free, in a container with limits set by the test."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=600))
    return lambda name, text: (tmp_path / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
    ],
)
def test_cores_are_the_affinity_limited_by_the_quota(cgroup, quota, cores):
    if quota is not None:
        cgroup("cpu.max", quota)
    assert machine.count_cores() == cores


@pytest.mark.parametrize(("limit", "total"), [(None, 1000), ("max", 1000), ("700", 700), ("5000", 1000)])
def test_total_memory_is_the_smaller_of_host_and_container(cgroup, limit, total):
    if limit is not None:
        cgroup("memory.max", limit)
    assert machine.total_memory_bytes() == total


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [
        (None, None, 600),
        ("max", "300", 600),
        ("700", "300", 400),
        ("700", "50", 600),
        ("700", "900", 0),
        ("700", None, 600),
    ],
)
def test_available_memory_is_what_the_container_leaves(cgroup, limit, used, available):
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            cgroup(name, text)
    assert machine.available_memory_bytes() == available


@pytest.mark.parametrize(
    ("interfaces", "found"),
    [
        ({"eth0": ["10.0.0.2"], "lo": ["127.0.0.1", "::1"]}, "lo"),
        ({"lo0": ["::1", "127.0.0.1"]}, "lo0"),
        ({"eth0": ["10.0.0.2"]}, None),
        ({}, None),
    ],
)
def test_loopback_is_the_interface_with_the_loopback_address(monkeypatch, interfaces, found):
    addresses = {name: [SimpleNamespace(address=a) for a in several] for name, several in interfaces.items()}
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: addresses)
    assert machine.loopback_interface() == found


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", refuse)
    assert machine.count_gpus() == 0


@pytest.mark.parametrize(("init", "get_count", "gpus"), [(0, 0, 3), (100, 0, 0), (0, 3, 0)])
def test_gpus_are_counted_by_the_driver_unless_it_fails(monkeypatch, init, get_count, gpus):
    def count(reference):
        reference._obj.value = 3
        return get_count

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert machine.count_gpus() == gpus


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast CPU @ 3GHz\nmodel name\t: Other\n", "Fast CPU @ 3GHz"),
        ("CPU part\t: 0xd40\n", "aarch64 Neoverse-V1"),
        ("CPU part\t: 0xfff\n", "aarch64 0xfff"),
        ("", "aarch64"),
    ],
)
def test_cpu_name_comes_from_the_kernel(monkeypatch, cpuinfo, name):
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    with monkeypatch.context() as patch:
        patch.setattr(machine.Path, "read_text", lambda path: cpuinfo)
        assert machine.cpu_name() == name


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("auto", "auto"), ("gloo", "gloo"), ("paceline", "shm"), ("Paceline", "shm"), ("shm", "shm"),
        ("cpu:paceline,cuda:nccl", "cpu:shm,cuda:nccl"), ("cuda:nccl, cpu:paceline", "cuda:nccl,cpu:shm"), ("x", "x"),
    ],
)  # fmt: skip
def test_canonical_backend(given, canonical):
    assert machine.canonical_backend(given) == canonical


@pytest.mark.parametrize(("times", "stolen_s"), [({"user": 9.0, "steal": 2.5}, 2.5), ({"user": 9.0}, 0.0)])
def test_stolen_time_is_zero_if_the_system_does_not_report_it(monkeypatch, times, stolen_s):
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda: SimpleNamespace(**times))
    assert machine.read_stolen_s() == stolen_s


def test_the_stolen_share_is_over_all_cores_and_at_least_a_second(monkeypatch):
    now_s, stolen_s = iter((10.0, 10.1, 14.0)), iter((5.0, 6.0, 7.0))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    monkeypatch.setattr(machine, "read_stolen_s", lambda: next(stolen_s))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    stolen = machine.StolenTime()
    assert stolen.read_share() == pytest.approx(1 / 2) and stolen.read_share() == pytest.approx(2 / (4 * 2))


@pytest.mark.parametrize(("average", "percent", "load"), [(0.4, 90.0, 0.4), (3.0, 5.0, 0.1), (1.0, 100.0, 1.0)])
def test_finished_work_does_not_count_as_load(monkeypatch, average, percent, load):
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: percent)
    assert machine.find_load() == pytest.approx(load)
