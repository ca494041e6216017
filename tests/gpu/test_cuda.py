"""The CUDA paths, on one GPU: NCCL in a world of one, and several gloo ranks that share the GPU."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import ConfigError, machine
from paceline.measure.bench_settings import CollectiveSettings
from paceline.measure.collectives import measure_collectives
from paceline.transport import register, why_not

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def describe(backend: str, device: str) -> tuple:
    with paceline.init(backend, device, announce=None) as world:
        total = torch.ones(4, device=world.device)
        dist.all_reduce(total)
        torch.cuda.synchronize()
        shared = world.share(world.rank)
        return world.backend, str(world.device), total.tolist(), shared, dist.get_backend(world.control)


def test_nccl_in_a_world_of_one_is_what_auto_chooses(on_ranks):
    assert on_ranks(1, describe, "auto", "auto") == [("nccl", "cuda:0", [1.0] * 4, [0], "gloo")]


def test_a_list_of_backends_is_accepted(on_ranks):
    assert on_ranks(1, describe, "cpu:gloo,cuda:nccl", "auto")[0][1:3] == ("cuda:0", [1.0] * 4)


def reduce_on_both(backend: str, names_gpu: bool) -> tuple:
    """One group for tensors in both kinds of memory, as a torch program opens it."""
    register()
    dist.init_process_group(backend)
    torch.cuda.set_device(0)
    here, there, received = torch.ones(4), torch.ones(4, device="cuda"), torch.full((3,), 7.0, device="cuda")
    dist.all_reduce(here)
    dist.all_reduce(there)
    dist.broadcast(received, 0)
    parts = [torch.zeros(3, device="cuda") for _ in range(dist.get_world_size())]
    dist.all_gather(parts, received)
    torch.cuda.synchronize()
    dist.barrier(device_ids=[0] if names_gpu else None)
    dist.destroy_process_group()
    return here.tolist(), there.tolist(), torch.stack(parts).sum().item()


@pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")
@pytest.mark.parametrize(
    ("backend", "num_ranks", "names_gpu"),
    [("cpu:paceline,cuda:nccl", 1, True), ("cuda:nccl,cpu:paceline", 1, False), ("paceline", 2, False)],
)
def test_paceline_on_the_cpu_with_a_backend_for_the_gpu(on_ranks, backend, num_ranks, names_gpu):
    wanted = [float(num_ranks)] * 4, [float(num_ranks)] * 4, 21.0 * num_ranks
    assert on_ranks(num_ranks, reduce_on_both, backend, names_gpu) == [wanted] * num_ranks


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there is a GPU for each rank")
def test_gloo_ranks_share_one_gpu(on_ranks):
    assert on_ranks(2, describe, "auto", "cuda") == [("gloo", "cuda:0", [2.0] * 4, [0, 1], "gloo")] * 2


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there is a GPU for each rank")
def test_two_nccl_ranks_on_one_gpu_are_refused_with_advice(on_ranks):
    with pytest.raises(ConfigError, match="2 ranks and 1 GPU"):
        on_ranks(2, describe, "nccl", "cuda")


def raise_after_a_collective() -> None:
    with paceline.init("nccl", announce=None) as world:
        dist.all_reduce(torch.ones(4, device=world.device))
        raise ValueError("after a collective")


def test_an_exception_under_nccl_leaves_the_rank_usable(on_ranks):
    with pytest.raises(paceline.LaunchError, match="after a collective"):
        on_ranks(1, raise_after_a_collective)
    assert on_ranks(1, describe, "nccl", "auto")[0][0] == "nccl"


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_the_engine_checks_data_on_the_gpu(on_ranks, backend, ranks, collective):
    wanted = CollectiveSettings(
        sizes=(2**20,), backends=(backend,), ranks=(ranks,), device="cuda", collective=collective, iters=3, warmup=1
    )
    wanted.check()
    record = on_ranks(ranks, measure_collectives, wanted)[0].records[0]
    assert (record.device, record.num_wrong) == ("cuda", 0)


def test_the_driver_counts_as_torch_does():
    assert machine.count_gpus() == torch.cuda.device_count()


def test_bench_interleaves_nccl_and_gloo(command, tmp_path):
    both = ("--backend", "nccl,gloo", "--ranks", "1", "--sizes", "1MiB")
    answer = command("bench", "allreduce", *both, "--json", "--out", str(tmp_path))
    rows = json.loads(answer.out)["rows"]
    assert [(row["backend"], row["device"], row["nwrong"]) for row in rows] == [("nccl", "cuda", 0), ("gloo", "cpu", 0)]


def test_the_limit_is_measured_where_the_messages_are(command, tmp_path):
    asked = ("--backend", "gloo", "--device", "cuda", "--ranks", "2", "--sizes", "4MiB", "--limit")
    answer = command("bench", "allreduce", *asked, "--json", "--out", str(tmp_path))
    (row,) = json.loads(answer.out)["rows"]
    assert (row["device"], row["nwrong"]) == ("cuda", 0) and row["fraction_of_memory"] > 0


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_wrappers_are_timed_in_phases_and_their_memory_is_counted(command, tmp_path, backend, ranks):
    asked = (
        "--model",
        "cnn,gpt2-mini",
        "--backend",
        backend,
        "--device",
        "cuda",
        "--ranks",
        str(ranks),
        "--iters",
        "3",
    )
    answer = command("bench", "wrappers", *asked, "--dtype", "bfloat16", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    for row in json.loads(answer.out)["rows"]:
        assert (row["device"], row["nwrong"] or 0) == ("cuda", 0)
        phases = row["forward_median_s"] + row["backward_median_s"] + row["optimizer_median_s"]
        assert 0 < phases < 1.5 * row["step_p90_s"]
        assert row["held_bytes"] >= row["num_bytes"] and row["peak_step_bytes"] > 0, row
        assert row["host_us_per_parameter"] is None
