"""Requests that benchmarks refuse before any rank starts, on a simulated host."""

import re

import pytest

from paceline import machine
from paceline.errors import ConfigError
from paceline.measure.bench_settings import SHARED_DTYPES, SHARED_OPS, ChunkSettings, CollectiveSettings
from paceline.runtime.ranks.launch import RANK_BYTES


@pytest.fixture
def host(monkeypatch):
    """A host with this number of GPUs and this much free memory."""

    def host(gpus=0, free_bytes=2**40):
        monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
        monkeypatch.setattr(machine, "available_memory_bytes", lambda: free_bytes)

    host()
    return host


def build(**changes):
    return CollectiveSettings(**{"sizes": (1024, 4096), **changes})


BOTH = ("ordinary", "shared")
SHARED = {"memories": ("shared",), "backends": ("paceline",)}


def build_chunked(**changes):
    return ChunkSettings(**{"total_bytes": 4096, "chunks": (1024, 4096), **changes})


@pytest.mark.parametrize("make", [build, build_chunked])
@pytest.mark.parametrize(
    ("gpus", "changes", "reason"),
    [
        (0, {"backends": ("nccl",)}, "nccl on CUDA needs a GPU and none is visible"),
        (0, {"backends": ("gloo", "nccl"), "device": "cuda"}, "gloo and nccl on CUDA needs a GPU"),
        (1, {"backends": ("nccl",)}, "one GPU per rank: 2 ranks on this host, 1 GPU here; use --ranks 1"),
    ],
)
def test_a_host_without_enough_gpus_is_refused(host, make, gpus, changes, reason):
    host(gpus=gpus)
    make(**changes).check()
    with pytest.raises(ConfigError, match=re.escape(reason)):
        make(**changes).check_host(2)


def test_a_launched_world_may_have_more_ranks_than_this_host_has_gpus(host):
    host(gpus=8)
    settings = build(backends=("nccl",), ranks=(16,))
    settings.check()
    settings.check_host(8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backends": ("nccl",), "device": "cpu"}, "nccl backend works on GPUs only"),
        (
            {"collective": "broadcast", "op": "max"},
            "--op max cannot be combined with --collective broadcast, which reduces nothing",
        ),
        ({"collective": "all_gather", "op": "avg"}, "--op avg cannot be combined with --collective all_gather"),
        ({"op": "avg", "dtype": "int32"}, "--op avg of int32 is not defined"),
        ({"op": "avg", "dtype": "uint8"}, "--op avg of uint8 is not defined"),
        ({"sizes": (1024, 1026)}, "(1026 bytes) is not a whole number of float32 elements of 4 bytes"),
        ({"sizes": (12,), "dtype": "float64"}, "not a whole number of float64 elements of 8 bytes"),
        ({"collective": "all_gather", "sizes": (12,), "ranks": (2, 4)}, "less than one element for each of 4 ranks"),
        ({"collective": "reduce_scatter", "sizes": (12,), "ranks": (4,)}, "which reduce_scatter needs"),
        ({"sizes": (0,)}, "size"),
        ({"memories": ("shared",)}, "gloo does not support it: leave it out, or add shm to --backend"),
        ({"memories": BOTH, "backends": ("gloo", "nccl")}, "--memory shared: gloo and nccl"),
        ({"memories": ("shared",), "backends": ("gloo", "paceline")}, "on gloo: use --memory ordinary,shared"),
        ({**SHARED, "collective": "broadcast"}, "--memory shared is for all_reduce: broadcast copies"),
        ({**SHARED, "device": "cuda"}, "--memory shared is host memory"),
        ({**SHARED, "dtype": "uint8"}, "--dtype uint8 is not reduced in shared memory"),
        ({**SHARED, "op": "prod"}, "--op prod is not reduced in shared memory"),
        ({"limit": True, "collective": "all_gather"}, "--limit applies only to all_reduce"),
    ],
)
def test_invalid_benchmarks_of_collectives_are_refused(host, changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build(**changes).check()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"total_bytes": 4097}, "total of 4097 bytes is not a whole number of float32 elements"),
        ({"total_bytes": 0}, "total of 0 bytes"),
        ({"chunks": (1024, 1023)}, "chunk of 1023 bytes"),
        ({"chunks": (0,)}, "chunk of 0 bytes"),
        ({"chunks": (1024, 8192)}, "a chunk of 8 KiB is larger than the total of 4 KiB"),
    ],
)
def test_invalid_benchmarks_of_chunks_are_refused(host, changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build_chunked(**changes).check()


@pytest.mark.parametrize(
    ("gpus", "settings"),
    [
        (0, build()),
        (0, build(iters=1, warmup=0, dtype="int64", op="prod")),
        (0, build(collective="broadcast", ranks=(1, 64))),
        (0, build(collective="all_gather", sizes=(16,), ranks=(2, 4))),
        (0, build_chunked(chunks=(4096, 4))),
        (0, build(**SHARED, dtype="bfloat16", op="avg", limit=True)),
        (0, build(backends=("gloo", "paceline"), memories=BOTH)),
        (1, build(backends=("nccl", "paceline"), memories=BOTH, ranks=(1,))),
        (2, build(backends=("nccl", "gloo"), ranks=(1, 2), op="avg")),
        (1, build(device="cuda", ranks=(4,))),  # ranks on gloo can share a GPU
    ],
)
def test_a_valid_request_is_accepted(host, gpus, settings):
    host(gpus=gpus)
    settings.check()
    settings.check_host(max(settings.ranks))


@pytest.mark.parametrize(
    ("device", "on_gloo", "on_nccl"), [("auto", "cpu", "cuda"), ("cuda", "cuda", "cuda"), ("cpu", "cpu", "cpu")]
)
def test_messages_live_where_the_backend_needs_them(device, on_gloo, on_nccl):
    settings = build(device=device)
    assert (settings.device_of("gloo"), settings.device_of("nccl")) == (on_gloo, on_nccl)


MESSAGE = 2**30


@pytest.mark.parametrize(
    ("free_bytes", "ranks", "reason"),
    [
        (RANK_BYTES + MESSAGE - 1, 1, "each rank needs 1024 MiB"),
        (3 * (RANK_BYTES + MESSAGE), 4, "at most 3 ranks of this size"),
        (2**40, 0, "at least 1"),
    ],
)
def test_a_request_that_the_host_cannot_hold_is_refused(host, free_bytes, ranks, reason):
    host(free_bytes=free_bytes)
    with pytest.raises(ConfigError, match=reason):
        build(sizes=(MESSAGE,)).check_host(ranks)


def test_a_request_that_just_fits_is_accepted(host):
    host(free_bytes=4 * (RANK_BYTES + MESSAGE))
    build(sizes=(MESSAGE,)).check_host(4)


def test_messages_on_gpus_take_no_memory_of_the_host_but_ranks_do(host):
    host(gpus=8, free_bytes=4 * RANK_BYTES)
    build(sizes=(MESSAGE,), backends=("nccl",)).check_host(4)
    with pytest.raises(ConfigError, match="5 ranks"):
        build(sizes=(MESSAGE,), backends=("nccl",)).check_host(5)
    with pytest.raises(ConfigError, match="each rank needs"):
        build(sizes=(MESSAGE,), backends=("nccl", "gloo")).check_host(4)


@pytest.mark.parametrize(
    ("collective", "dtype", "num_bytes", "ranks", "elements"),
    [
        ("all_reduce", "float32", 4096, 3, 1024),
        ("broadcast", "float64", 4096, 3, 512),
        ("all_gather", "float32", 4096, 3, 1023),
        ("reduce_scatter", "bfloat16", 4096, 3, 2046),
        ("all_gather", "float32", 4096, 4, 1024),
    ],
)
def test_shared_vectors_are_cut_to_a_multiple_of_the_ranks(collective, dtype, num_bytes, ranks, elements):
    assert build(collective=collective, dtype=dtype).num_elements(num_bytes, ranks) == elements


@pytest.mark.parametrize(
    ("collective", "num_bytes"),
    [("all_reduce", 8192), ("broadcast", 8192), ("all_gather", 2 * 8192 + 4096), ("reduce_scatter", 2 * 8192 + 4096)],
)
def test_memory_per_rank_counts_the_share_and_gloos_own_copy(collective, num_bytes):
    assert build(collective=collective, sizes=(8192, 1024), ranks=(4, 2)).bytes_per_rank == num_bytes


@pytest.mark.parametrize(
    ("memories", "limit", "vectors"),
    [
        (("ordinary",), False, 1), (("shared",), False, 1), (BOTH, False, 2),
        (("ordinary",), True, 2), (("shared",), True, 3), (BOTH, True, 3),
    ],
)  # fmt: skip
def test_memory_per_rank_counts_each_memory_and_what_the_limit_copies_to(memories, limit, vectors):
    settings = build(backends=("paceline",), memories=memories, limit=limit, sizes=(8192,))
    assert settings.bytes_per_rank == vectors * 8192


def test_only_our_backend_has_shared_memory():
    settings = build(backends=("gloo", "paceline"), memories=BOTH)
    assert (settings.memories_of("gloo"), settings.memories_of("shm")) == (("ordinary",), BOTH)


def test_reductions_in_shared_memory_match_the_transport():
    from torch.distributed import ReduceOp

    from paceline.transport import group, works

    assert set(SHARED_DTYPES) == {str(dtype).removeprefix("torch.") for dtype in works.DTYPES}
    known = {name.lower(): op for name, op in ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"}
    assert set(SHARED_OPS) == {name for name, op in known.items() if hash(ReduceOp(op)) in group._OPS}


def test_memory_per_rank_of_chunks_is_the_total():
    assert build_chunked(total_bytes=8192).bytes_per_rank == 8192
