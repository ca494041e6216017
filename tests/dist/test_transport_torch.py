"""Programs written for gloo give the same results on paceline: in warm ranks, under torchrun, and in debug mode."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.torch_internals import get_default_store
from paceline.transport import register, why_not
from tests.dist import gloo_programs

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "ddp", "ddp_with_hooks", "ddp_with_built_in_hooks", "compiled_ddp", "compiled_step", "ddp_with_uneven_inputs",
    "zero_redundancy", "fully_shard", "checkpoint", "objects",
    "reductions", "rooted", "all_to_all", "point_to_point", "gathering", "asynchronous", "coalesced", "functional",
    "kinds", "empty", "scattered_in_memory", "groups", "meshes", "reopened",
]  # fmt: skip


def run_program(backend: str, name: str, debug: str = "OFF") -> Any:
    register()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    dist.set_debug_level_from_env()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
        return getattr(gloo_programs, name)()
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)


def compare(found: Any, wanted: Any, where: str) -> None:
    """Compare results. A dictionary may contain extra entries: operations that gloo does not support."""
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            compare(one, other, f"{where}[{number}]")
    elif isinstance(wanted, dict):
        for key in wanted:
            compare(found[key], wanted[key], f"{where}[{key!r}]")
    else:
        assert found == wanted, where


def run_on_both(name: str, debug: str) -> tuple[Any, Any]:
    return run_program("paceline", name, debug), run_program("gloo", name)


LONG = (
    "meshes", "ddp_with_uneven_inputs", "ddp_with_hooks", "scattered_in_memory", "zero_redundancy", "fully_shard",
    "compiled_ddp", "compiled_step",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "debug"),
    [
        *(pytest.param(name, "OFF", marks=[pytest.mark.slow] * (name in LONG)) for name in PROGRAMS),
        *((name, "DETAIL") for name in ("ddp", "objects", "asynchronous", "groups")),
    ],
)
def test_programs_get_the_same_results_as_on_gloo(on_ranks, name, debug):
    for found, wanted in on_ranks(4 if name in ("groups", "meshes") else 2, run_on_both, name, debug):
        compare(found, wanted, name)


# -- bugs of gloo, and features that only shm has ---------------------------------------------------------------------


def reduce_with_gaps() -> list[Any]:
    """Tensors with gaps on one rank only: gloo sums the contents of the gaps."""
    register()
    dist.init_process_group("cpu:paceline", timeout=timedelta(seconds=30))
    rank, memory = dist.get_rank(), torch.arange(8.0)
    value, received = (memory[::2] if rank else memory[::2].clone()), (memory[1::2] if rank else torch.zeros(4))
    version = value._version
    dist.all_reduce(value)
    work = dist.broadcast(received, 1, async_op=True)
    work.wait()
    assert value._version == version  # autograd does not see a change, as on every backend
    mirrored = torch.tensor([1 + 2j, 3 - 1j]).conj().imag  # torch negates it lazily, on access
    dist.all_reduce(mirrored)
    assert mirrored.tolist() == [-4.0, 2.0]
    names = [dist.get_backend(), dist.group.WORLD.name(), str(dist.get_backend_config())]
    dist.destroy_process_group()
    return [value.tolist(), received.tolist(), names]


def test_non_contiguous_tensors_are_reduced_correctly(on_ranks):
    wanted = [[0.0, 4.0, 8.0, 12.0], [1.0, 3.0, 5.0, 7.0], ["cpu:paceline", "shm", "cpu:paceline"]]
    assert on_ranks(2, reduce_with_gaps) == [wanted] * 2


def wait_in_callbacks() -> list[float]:
    register()
    dist.init_process_group("shm", timeout=timedelta(seconds=30))

    def go_on(future: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    value = torch.ones(3)
    for _ in range(3):
        future = dist.all_reduce(value, async_op=True).get_future().then(go_on)
        value = future.wait()
    sent = dist.group.WORLD._get_sequence_number_for_group()
    late = dist.all_reduce(torch.ones(3), async_op=True)
    late.wait()
    assert dist.group.WORLD._get_sequence_number_for_group() == sent + 1
    dist.destroy_process_group()
    assert late.is_completed() and late.get_future().wait()[0].tolist() == [2.0] * 3
    return value.tolist()


def test_a_callback_of_a_future_may_wait_for_another_future(on_ranks):
    assert on_ranks(2, wait_in_callbacks) == [[64.0] * 3] * 2


# -- without importing Paceline ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Environment of a process in which this Paceline appears installed with its entry points, wherever it is."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["torch.backends"]
    info = tmp_path / "paceline_entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-entry\nVersion: 0\n")
    lines = [f"{name}_entry = {function}" for name, function in declared.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}


LOOK = """
import sys, torch
print(sorted(name for name in sys.modules if name.startswith("paceline")))
print(*map(torch.distributed.is_backend_available, ("shm", "paceline")))
"""


def record_collectives() -> list[tuple[str, float]]:
    """The recorded ranges of a barrier, of an all-reduce that rank 1 joins 20 ms after rank 0, and of a small one."""
    register()
    dist.init_process_group("shm", timeout=timedelta(seconds=30))
    values, store = torch.ones(1 << 20), get_default_store()
    with torch.profiler.profile() as profiler:
        dist.barrier()
        if dist.get_rank() == 1:
            store.wait(["joined"])
        work = dist.all_reduce(values, async_op=True)
        if dist.get_rank() == 0:
            time.sleep(0.02)
            store.set("joined", "")
        work.wait()
        dist.all_reduce(values[:1])
        dist.barrier()  # a range may end shortly after its message: torch 2.11 does not record it at the very end
    dist.destroy_process_group()
    assert values[:2].tolist() == [4.0, 2.0]
    return [(e.name, e.time_range.elapsed_us()) for e in profiler.events() if e.name.startswith("shm:")]


def test_a_profiler_records_collectives_until_they_end(on_ranks):
    first, second = on_ranks(2, record_collectives)
    for found in (first, second):
        assert [name for name, _ in found[:3]] == ["shm:barrier", "shm:all_reduce", "shm:all_reduce"]
    assert first[1][1] >= 20e3


def test_torch_finds_the_backend_silently(start, installed):
    """Registration is silent even if the core cannot be loaded, because loading happens on first use."""
    job = start("-W", "error", "-c", LOOK, env=installed | {"PACELINE_NATIVE_LIBRARY": "/nowhere"})
    out, err = job.communicate(timeout=90)
    wanted = ["paceline", "paceline.autoload", "paceline.transport"]
    assert (out, err) == (f"{wanted}\nTrue True\n", ""), err


@pytest.mark.slow
def test_a_program_without_paceline_runs_on_it_under_torchrun(start, installed):
    program = str(Path(__file__).with_name("program_for_gloo.py"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = start(*launcher, program, "paceline", env=installed, stdin=subprocess.DEVNULL)
    out, err = job.communicate(timeout=100)
    # Both ranks write to one pipe, and line endings may arrive late.
    assert (job.returncode, out.replace("\n", "")) == (0, "all is well" * 2), err


def allocate_unevenly() -> str:
    with paceline.init(backend="paceline", announce=None) as world:
        try:
            dist.group.WORLD.allocate(100 + world.rank)  # type: ignore[union-attr]
        except RuntimeError as error:
            return str(error)
    return "nothing was found"


def test_different_amounts_of_shared_memory_are_an_error_on_all_ranks(on_ranks):
    first, second = on_ranks(2, allocate_unevenly)
    assert first == second
    assert "rank 0 an allocation of 100 bytes, rank 1 an allocation of 101 bytes" in first


def average_a_long_vector(lanes: int) -> list[torch.Tensor]:
    register()
    os.environ["PACELINE_LANES"] = str(lanes)
    dist.init_process_group("shm", timeout=timedelta(seconds=30))
    try:
        rank, group = dist.get_rank(), dist.group.WORLD
        results = []
        for numel in (262_144, 700_001, 3_000_001):  # up to, around, and far above the size for one lane
            torch.manual_seed(rank)
            ordinary = torch.randn(numel)
            shared = group.allocate(4 * numel).view(torch.float32).copy_(ordinary)  # type: ignore[union-attr]
            dist.all_reduce(ordinary, dist.ReduceOp.AVG)
            works = [dist.all_reduce(shared, async_op=True), dist.all_reduce(torch.ones(3), async_op=True)]
            for work in works:
                work.wait()
            results += [ordinary, shared / dist.get_world_size()]
        assert len(group._native._handles) == lanes  # type: ignore[union-attr]
        return [result.clone() for result in results]
    finally:
        dist.destroy_process_group()
        del os.environ["PACELINE_LANES"]


def test_results_do_not_depend_on_the_number_of_lanes(on_ranks):
    one = on_ranks(2, average_a_long_vector, 1)
    three = on_ranks(2, average_a_long_vector, 3)
    for here, there in zip(one[0], three[1], strict=True):
        assert torch.equal(here, there)
