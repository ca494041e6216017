"""Builders of small records and environments that the unit tests share."""

import pytest

from paceline.records import ChunksRecord, CollectiveRecord, MemoryRecord, Samples, StepRecord
from paceline.records.environment import Environment


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One torch thread: test tensors are small, and test processes would compete for cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def build_samples():
    """Samples in which every rank takes `times_s`."""

    def build(*times_s, ranks=2, **fields):
        return Samples(seconds=tuple((time_s,) * ranks for time_s in times_s or (1e-3,) * 10), **fields)

    return build


@pytest.fixture(scope="session")
def build_collective(build_samples):
    def build(**changes):
        fields = {
            "collective": "all_reduce", "backend": "gloo", "device": "cpu", "world_size": 2, "num_bytes": 2**20,
            "dtype": "float32", "op": "sum", "num_wrong": 0, "num_checked": 2**18,
        }  # fmt: skip
        fields["timing"] = build_samples(ranks=changes.get("world_size", 2))
        return CollectiveRecord(**{**fields, **changes})

    return build


@pytest.fixture(scope="session")
def build_pass(build_samples):
    """A pass over memory in which every rank takes `time_s`."""

    def build(operation="add", time_s=1e-4, **changes):
        fields = {
            "operation": operation, "device": "cpu", "world_size": 2, "num_bytes": 2**20, "dtype": "float32",
            "num_wrong": 0, "num_checked": 2**18,
        }  # fmt: skip
        fields["timing"] = build_samples(*(time_s,) * 10, ranks=changes.get("world_size", 2))
        return MemoryRecord(**{**fields, **changes})

    return build


@pytest.fixture(scope="session")
def build_chunks(build_samples):
    def build(**changes):
        fields = {
            "backend": "gloo", "device": "cpu", "world_size": 2, "total_bytes": 4000, "chunk_bytes": 1000,
            "dtype": "float32", "timing": build_samples(), "num_wrong": 0, "num_checked": 1000,
        }  # fmt: skip
        return ChunksRecord(**{**fields, **changes})

    return build


@pytest.fixture(scope="session")
def build_wrapper(build_samples):
    """Steps of a wrapper that take `times_s`, a quarter of each in forward and half in backward."""

    def build(wrapper="paceline", times_s=(1e-3,) * 10, **changes):
        ranks = changes.get("world_size", 2)
        fields = {
            "model": "cnn", "wrapper": wrapper, "configuration": "defaults", "backend": "gloo", "device": "cpu",
            "world_size": 2, "precision": "fp32", "batch_size": 8, "num_parameters": 100, "num_bytes": 4000,
            "num_wrong": 0, "num_checked": 200, "timing": build_samples(*times_s, ranks=ranks),
        }  # fmt: skip
        for phase, share in (("forward", 0.25), ("backward", 0.5), ("optimizer", 0.25)):
            fields[phase] = build_samples(*(share * time_s for time_s in times_s), ranks=ranks)
        return StepRecord(**{**fields, **changes})

    return build


@pytest.fixture(scope="session")
def build_phases(build_samples):
    """Steps of 10 ms with 2 ms of exposed communication; marked steps take 10.1 ms."""

    def build(**changes):
        ranks = changes.get("world_size", 2)
        times = {
            "timing": 0.010, "marked": 0.0101, "no_comm": 0.008, "no_comm_backward": 0.004, "data_wait": 0.001,
            "forward": 0.002, "backward": 0.006, "optimizer": 0.001,
        }  # fmt: skip
        fields = {
            "model": "cnn", "data": "synthetic", "wrapper": "paceline", "backend": "gloo", "device": "cpu",
            "world_size": 2, "precision": "fp32", "batch_size": 16, "accumulate": 2, "num_parameters": 8,
            "num_bytes": 4_000_000, "num_messages": 3, "busy": build_samples(*(0.005,) * 10, ranks=ranks),
            **{name: build_samples(*(time_s,) * 10, ranks=ranks) for name, time_s in times.items()},
        }  # fmt: skip
        return StepRecord(**{**fields, **changes})

    return build


@pytest.fixture(scope="session")
def build_environment():
    def build(**changes):
        fields = {
            "host": "box", "system": "Linux 6 x86_64", "cpu": "Some CPU", "cores": 8, "memory_bytes": 2**34,
            "python": "3.11.7", "versions": {"torch": "2.13.0"}, "variables": {"OMP_NUM_THREADS": "1"},
            "command_line": "paceline bench allreduce", "git_commit": "abc", "load_average": 0.0,
            "details": {"hosts": 1},
        }  # fmt: skip
        return Environment(**{**fields, **changes})

    return build
