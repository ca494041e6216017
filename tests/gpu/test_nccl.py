"""The wrapper's features other than averaging, between NCCL ranks: functions of `tests/dist` on a GPU."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.records.training import load_metrics
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.training import loop
from paceline.training.train_settings import TrainSettings
from tests.dist import test_outer_ranks, test_sharded, test_strategies, test_wrapper_errors
from tests.dist.test_embeddings import compare_all, train_in_other_ways
from tests.dist.test_sync_batchnorm import check_together
from tests.dist.test_training_resume import SMALL, STEPS, copy_until
from tests.dist.test_wrapper_compile import compile_parts
from tests.dist.test_wrapper_in_use import overflow_on_one_rank
from tests.gpu.conftest import BACKEND, DEVICE

RANKS = (2, 4, 8)


# -- codecs and hooks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_every_codec_keeps_replicas_equal_and_loses_nothing(on_nccl, ranks):
    on_nccl(ranks, test_strategies.run_steps, timeout_s=120)


def test_residuals_follow_the_loss_scale(on_nccl):
    on_nccl(2, test_strategies.scale_losses, timeout_s=60)


def test_accumulation_overflow_weights_and_uneven_data(on_nccl):
    on_nccl(2, test_strategies.do_special_steps, timeout_s=60)


def test_torchs_wrapper_accepts_our_hook_and_ours_accepts_torchs(on_nccl):
    on_nccl(2, test_strategies.use_torchs_wrapper, timeout_s=120)


def test_an_overflow_on_one_rank_skips_the_step_on_all(on_nccl):
    first, *others = on_nccl(4, overflow_on_one_rank, timeout_s=60)
    assert all(other == first for other in others)
    assert first == [[1024.0, 512.0, 512.0, 256.0]] * len(first)


# -- ZeRO-1 -----------------------------------------------------------------------------------------------------------


def test_gathered_parameters_are_those_of_the_unsharded_optimizer(on_nccl):
    for found, _ in on_nccl(2, test_sharded.compare_on_gloo, timeout_s=120):
        # On a GPU, scaled gradients are not detected: reading the scaler's flag would wait for the GPU.
        assert [name for name, same in found.items() if not same] == (["torch's clip"] if DEVICE == "cuda" else [])


def test_a_state_goes_from_two_ranks_to_four(on_nccl):
    first = on_nccl(2, test_sharded.train_from, None, "adamw", "zero1", range(2))[0]
    found = on_nccl(4, test_sharded.train_from, first, "adamw", "zero1", range(2, 4))
    (wanted,) = on_nccl(1, test_sharded.train_from, first, "adamw", None, range(2, 4))
    for name, value in wanted[0].items():
        assert all(torch.equal(other[0][name], found[0][0][name]) for other in found[1:]), name
        torch.testing.assert_close(found[0][0][name], value, rtol=1e-4, atol=1e-5)


def test_overflow_and_refusals_of_a_sharded_optimizer(on_nccl):
    first, second = on_nccl(2, test_sharded.save_and_use)
    assert first == second and first["finite"]
    assert first["skipped"] == ([True, False], 2.0)


# -- embeddings as rows -----------------------------------------------------------------------------------------------

# Models with gradients that torch's wrapper can average on NCCL.
TABLES = ["untied", "tied", "functional head", "two heads", "two tables", "padding", "frozen", "bag", "two lookups"]


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_of_embeddings_are_the_gradients_of_torch(on_nccl, ranks):
    on_nccl(ranks, compare_all, TABLES if ranks == 2 else TABLES[:2], "rows", timeout_s=120)


def test_rows_of_embeddings_with_accumulation(on_nccl):
    on_nccl(2, train_in_other_ways, timeout_s=60)


# -- SyncBatchNorm, join, torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4), (5, 1), (0, 4), (3, 1, 0, 2), (1, 2, 0, 4, 3, 1, 2, 5)], ids=len)
def test_sync_batchnorm_gives_the_result_of_the_whole(on_nccl, sizes):
    check_together(on_nccl, [(sizes, image, {}) for image in ((), (3, 2))])


@pytest.mark.parametrize("batches", [(4, 3), (2, 4), (0, 2), (3, 1, 2, 0), (1, 4, 2, 0, 3, 3, 4, 1)], ids=str)
def test_join_trains_on_every_batch_and_ends_with_equal_parameters(on_nccl, batches):
    on_nccl(len(batches), test_wrapper_errors.train_unevenly, batches, "ranks", True, timeout_s=90)


@pytest.mark.parametrize(("average", "divide_by_all"), [("ranks", False), ("samples", True)])
def test_join_can_divide_by_the_number_of_active_ranks(on_nccl, average, divide_by_all):
    on_nccl(4, test_wrapper_errors.train_unevenly, (1, 3, 2, 0), average, divide_by_all, timeout_s=90)


@pytest.mark.parametrize("kind", ["block", "model", "wrapper"])
def test_compiled_gradients_are_averaged(on_nccl, kind):
    on_nccl(2, compile_parts, kind, timeout_s=120)


def compile_with_inductor() -> None:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no processes besides the ranks
    compile_parts("model", "inductor")


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="Triton needs a C compiler and Python.h",
)
def test_gradients_of_the_default_compiler_are_averaged(on_nccl):
    on_nccl(2, compile_with_inductor, timeout_s=180)


# -- save and resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_codecs_resume_exactly(on_nccl, ranks):
    on_nccl(ranks, test_strategies.resume, timeout_s=120)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_schedule_resumes_exactly_in_mid_round(on_nccl, ranks):
    on_nccl(ranks, test_outer_ranks.resume_in_mid_round, timeout_s=120)


def train_run(strategy: str, folder: Path, resume: bool) -> int:
    # Settings are built in the ranks, which may use the GPU.
    changes = {"ranks": 4, "backend": BACKEND, "device": DEVICE, "strategy": strategy, "batch_size": 3}
    return loop.train(TrainSettings(**(SMALL | changes)), folder, resume).step


@pytest.mark.parametrize("strategy", ["topk:0.05,dgc,warmup=4", "diloco:4,fragments=2,delay=3+int8", "zero1+bf16"])
def test_a_training_run_resumes_in_mid_round(on_nccl, tmp_path, strategy):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert on_nccl(4, train_run, strategy, whole, False) == [STEPS] * 4
    folder = copy_until(6, whole, tmp_path / "broken")
    assert on_nccl(4, train_run, strategy, folder, True) == [STEPS] * 4
    rows, others = ([row["loss"] for row in load_metrics(path / "metrics.jsonl")] for path in (whole, folder))
    assert len(rows) == STEPS and rows == pytest.approx(others, rel=1e-3)  # GPU sums have no fixed order


# -- several numbers of ranks in one world ----------------------------------------------------------------------------


def measure_turns(batch_size: int) -> list[tuple[Any, ...]]:
    from paceline.studies.rank_steps import measure_scaling

    job = TrainSettings(channels=(16, 32), hidden=32, samples=512, batch_size=batch_size, wrapper="none", device=DEVICE)
    setups = (Setup("torch", BACKEND), Setup("paceline", BACKEND))
    settings = ScaleSettings(job=job, ranks=(1, 2, 4), setups=setups, batch_sizes=(batch_size,), iters=2)
    records = measure_scaling(settings, ScalingCell("weak", batch_size))
    return [(record.role, record.wrapper, record.world_size, record.timing.count) for record in records]


def test_one_two_and_four_ranks_take_turns(on_nccl):
    found, *_ = on_nccl(4, measure_turns, 4, timeout_s=120)
    jobs = [("job", "torch", ranks, 2) for ranks in (2, 4)] + [("job", "paceline", ranks, 2) for ranks in (2, 4)]
    assert set(jobs) < set(found)
