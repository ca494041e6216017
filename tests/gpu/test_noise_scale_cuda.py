"""Probes of the gradient noise scale on a GPU: the same results as on the CPU, and no leftovers."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test

from paceline.studies.training_runs import measure_noise_scale
from paceline.training.build import build_job, open_world
from paceline.training.train_settings import TrainSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# The same samples on both devices: synthetic data is generated on the device.
SETTINGS = {"model": "resnet18", "data": "synthetic", "samples": 32, "batch_size": 8, "wrapper": "none"}


def probe(device, precision="fp32", inputs=None):
    """The record of a fresh job, its samples, and the remaining state before and after the probes."""
    settings = TrainSettings(**SETTINGS, device=device, precision=precision)
    with open_world(settings) as world:
        job = build_job(settings, world)
        if inputs is not None:
            job.train.inputs.copy_(inputs[0])
            job.train.targets.copy_(inputs[1])
        states = []
        for turn in range(2):
            if turn:
                record = measure_noise_scale(job, step=0, epoch=0, batch_size=4, num_small=3, num_probes=2)
            numbers = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
            model = {name: tensor.clone() for name, tensor in job.learner.module.state_dict().items()}
            states.append({"numbers": numbers.clone(), **model})
        samples = job.train.inputs.cpu(), job.train.targets.cpu()
        assert all(param.grad is None for param in job.learner.parameters)
    return record, samples, states


@pytest.fixture(scope="module")
def on_cpu():
    return probe("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_finds_the_same_as_the_cpu_without_side_effects(on_cpu, precision):
    wanted, samples, _ = on_cpu
    found, _, (before, behind) = probe("cuda", precision, samples)
    assert [name for name in before if not torch.equal(before[name], behind[name])] == []
    for one, other in zip(found.probes, wanted.probes, strict=True):
        near = {"fp32": 0.02, "bf16": 0.2, "fp16": 0.05}[precision]
        assert one.small_squares == pytest.approx(other.small_squares, rel=near)
        assert one.big_square == pytest.approx(other.big_square, rel=near)
