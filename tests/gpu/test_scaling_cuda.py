"""Scaling studies on a GPU: memory by batch size, a batch that does not fit, interleaved ranks, a probed large
batch."""

import dataclasses
import json

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test

from paceline.records import LargeBatchRecord, NoiseRecord
from paceline.studies.batch_sizes import measure_batch
from paceline.studies.large_batches import LargeBatchSettings
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.studies.training_runs import measure_training
from paceline.training.train_settings import TrainSettings
from tests.cli.test_train import type_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

JOB = TrainSettings(channels=(16, 32), hidden=32, samples=4096, batch_size=32, wrapper="none", device="cuda")

LITTLE_BYTES = 512 * 2**20


@pytest.fixture
def little_memory():
    """Limit this process to a small fraction of the GPU's memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LITTLE_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_larger_batch_takes_more_memory():
    found = [measure_batch(dataclasses.replace(JOB, batch_size=size), 2)[0] for size in (32, 512)]
    assert [(record.device, record.failure, record.timing.count) for record in found] == [("cuda", "", 1)] * 2
    small, large = (record.peak_bytes for record in found)
    # 480 additional samples, with at least the output of the first convolution in memory for each.
    assert small > 0 and large - small > 480 * 16 * 14 * 14 * 4


def test_a_batch_that_does_not_fit_is_a_row_and_the_next_one_fits(little_memory):
    wide = dataclasses.replace(JOB, channels=(256, 256))
    (failed,) = measure_batch(dataclasses.replace(wide, batch_size=4096), 2)
    assert (failed.failure, failed.timing) == ("out of memory in epoch 1", None)
    assert (failed.batch_size, failed.num_samples, failed.device) == (4096, 4096, "cuda")
    (fine,) = measure_batch(dataclasses.replace(wide, batch_size=8, samples=64), 2)
    assert fine.failure == "" and 0 < fine.peak_bytes < LITTLE_BYTES


def test_the_command_shows_batches_that_do_not_fit(little_memory, tmp_path):
    asked = ("--channels", "256,256", "--samples", "4096", "--batch-size", "16,4096", "--device", "cuda")
    answer = type_alone("scale", "batch", *asked, "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert [(row["batch_size"], row["failure"]) for row in document["batch"]] == [
        (16, ""), (4096, "out of memory in epoch 1")
    ]  # fmt: skip
    assert any("Batch size 4096 does not fit: out of memory" in line for line in document["findings"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_large_batch_run_is_evaluated_and_probed(precision):
    settings = LargeBatchSettings(
        job=dataclasses.replace(JOB, wrapper="paceline", samples=256, test_samples=64, epochs=2, precision=precision),
        base_batch_size=16, global_batch_sizes=(64,), recipes=("linear+warmup+smoothing", "lars", "grow"), seeds=(1,),
        updates=0, most_at_once=32, evaluations=2,
    )  # fmt: skip
    settings.check()
    cells = settings.list_cells(256)
    assert [cell.probes for cell in cells] == [True, False, False, False]
    for cell in cells:
        (run, *noise) = measure_training(cell, settings.evaluations, 1)
        assert isinstance(run, LargeBatchRecord) and (run.device, run.precision) == ("cuda", precision)
        assert run.failure == "" and len(run.curve) == 2 and run.num_samples == 512
        assert run.largest_batch_size == cell.global_batch_size
        assert len(noise) == (4 if cell.probes else 0)
        assert all(isinstance(record, NoiseRecord) and len(record.probes) == 8 for record in noise)


def measure_turns(settings, cell):
    from paceline.studies.rank_steps import measure_scaling

    return measure_scaling(settings, cell)


def test_two_ranks_that_share_the_gpu_take_turns_with_one(on_ranks):
    setups = (Setup("torch", "gloo"), Setup("paceline", "gloo"))
    settings = ScaleSettings(job=JOB, ranks=(1, 2), setups=setups, batch_sizes=(16,), iters=2)
    alone, *rest = on_ranks(2, measure_turns, settings, ScalingCell("weak", 16))[0]
    assert (alone.device, alone.wrapper, alone.world_size, alone.num_bytes) == ("cuda", "none", 1, 0)
    assert {record.device for record in rest} == {"cuda"}
    assert [(record.role, record.wrapper, record.world_size) for record in rest] == [
        ("local", "torch", 1), ("local", "paceline", 1), ("together", "none", 2), ("job", "torch", 2),
        ("job", "paceline", 2),
    ]  # fmt: skip
    others = rest[3:]
    for record in others:
        assert (record.timing.count, record.timing.num_ranks, record.no_comm.count) == (2, 2, 2)
        assert record.num_bytes == sum(record.bucket_bytes) > 0
    assert others[0].busy is None  # on a GPU, messages of torch's wrapper cannot be timed
