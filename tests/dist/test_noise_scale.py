"""Gradient noise scale probes in real jobs: correct norms for any number of ranks, without side effects."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from paceline.errors import MeasurementError
from paceline.training.train_settings import TrainSettings

MODELS = """
import random

import numpy
import torch
from torch import nn


def linear():
    return nn.Linear(16, 1)


class Restless(nn.Module):
    '''All that a forward can change: running statistics, a buffer that it replaces, three sources of numbers.'''

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        return self.layers(x) * (1 + 0.1 * random.random() + 0.1 * numpy.random.random())


def restless():
    return Restless()


class Spare(nn.Linear):
    def __init__(self):
        super().__init__(16, 1)
        self.spare = nn.Parameter(torch.ones(3))


def spare():
    return Spare()
"""
NUMBERS = TrainSettings(data="synthetic:numbers", device="cpu", threads=1, samples=48, batch_size=4)
PROBED = {"step": 3, "epoch": 1.5, "batch_size": 4, "num_probes": 2}


@pytest.fixture
def build(tmp_path):
    """`build(name)`: the settings of a job that trains this model from the file above."""
    (tmp_path / "models.py").write_text(MODELS)
    return lambda name, **changes: replace(NUMBERS, model=f"{tmp_path / 'models.py'}:{name}", **changes)


def open_job(settings: TrainSettings) -> Any:
    import contextlib

    from paceline.training.build import build_job, open_world

    @contextlib.contextmanager
    def opened() -> Any:
        with open_world(settings) as world:
            yield build_job(replace(settings, ranks=world.world_size), world)

    return opened()


def probe(settings: TrainSettings, **asked: Any) -> Any:
    """The record of a fresh job, the small batches passed to the model, and the final weights."""
    from paceline.studies import training_runs as measuring

    seen: list[Any] = []
    compute = measuring.compute_outcome

    def compute_and_note(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        seen.append((batch.inputs.clone(), batch.targets.clone()))
        return compute(model, batch, *args, **options)

    measuring.compute_outcome = compute_and_note
    try:
        with open_job(settings) as job:
            record = measuring.measure_noise_scale(job, **asked)
            weights = [param.detach().clone() for param in job.learner.module.parameters()]
    finally:
        measuring.compute_outcome = compute
    return record, seen, weights


def probe_here(settings: TrainSettings, asked: dict[str, Any]) -> Any:
    return probe(settings, **asked)


@pytest.mark.slow
def test_squared_norms_match_gradients_computed_by_hand(on_ranks, build):
    """The gradient of a squared error is 2 * error * (x, 1), for each sample."""
    ((record, seen, (weight, bias)),) = on_ranks(1, probe_here, build("linear"), {**PROBED, "num_small": 3})
    assert (record.data, record.precision, record.seed) == ("synthetic:numbers", "fp32", 1)
    assert (record.step, record.epoch, record.source) == (3, 1.5, "measured")
    assert (record.small_batch_size, record.big_batch_size, record.world_size) == (4, 12, 1)
    assert len(seen) == 6 and len(record.probes) == 2
    for number, found in enumerate(record.probes):
        grads = []
        for inputs, targets in seen[3 * number : 3 * number + 3]:
            x, y = inputs.double().numpy(), targets.double().numpy().reshape(-1)
            errors = x @ weight.double().numpy().T[:, 0] + bias.item() - y
            rows = 2 * errors[:, None] * numpy.hstack([x, numpy.ones((len(x), 1))])
            grads.append(rows.mean(0))
        assert found.small_squares == pytest.approx([(grad**2).sum() for grad in grads], rel=1e-5)
        assert found.big_square == pytest.approx((numpy.mean(grads, 0) ** 2).sum(), rel=1e-5)


def compare_with_textbook(settings: TrainSettings) -> list[tuple[float, float]]:
    """Each small batch's squared norm uses the mean cross-entropy over all targets of its batch."""
    import torch.nn.functional as F

    from paceline.studies import training_runs as measuring

    squares: list[float] = []
    compute = measuring.compute_outcome

    def compute_and_compare(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        logits = model(batch.inputs)
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1), label_smoothing=settings.label_smoothing
        )
        squares.append(sum(float(g.double().square().sum()) for g in torch.autograd.grad(loss, model.parameters())))
        return compute(model, batch, *args, **options)

    measuring.compute_outcome = compute_and_compare
    try:
        with open_job(settings) as job:
            record = measuring.measure_noise_scale(job, **PROBED, num_small=2)
    finally:
        measuring.compute_outcome = compute
    return list(zip((s for probe in record.probes for s in probe.small_squares), squares, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt2-tiny", "context": 16},
        {"model": "cnn", "channels": (4, 8), "hidden": 16, "label_smoothing": 0.2},
    ],
    ids=lambda changes: changes["model"],
)
def test_a_loss_is_the_mean_over_its_targets(on_ranks, changes):
    settings = replace(NUMBERS, data="synthetic", dropout=0.0, **changes)
    (pairs,) = on_ranks(1, compare_with_textbook, settings)
    assert [found for found, _ in pairs] == pytest.approx([wanted for _, wanted in pairs], rel=1e-4)


def test_a_parameter_without_a_gradient_adds_nothing(on_ranks, build):
    asked = {**PROBED, "num_small": 2}
    plain, spare = (on_ranks(1, probe_here, build(name), asked)[0][0] for name in ("linear", "spare"))
    assert spare.probes == plain.probes


def test_samples_differ_in_every_batch_probe_and_step(on_ranks, build):
    asked = {**PROBED, "num_small": 3}
    runs = [on_ranks(1, probe_here, build("linear"), changed)[0] for changed in (asked, asked, {**asked, "step": 4})]
    digests = [[hashlib.sha256(inputs.numpy().tobytes()).digest() for inputs, _ in seen] for _, seen, _ in runs]
    assert digests[0] == digests[1] and runs[0][0] == runs[1][0]
    assert len({*digests[0], *digests[2]}) == 12


@pytest.mark.parametrize("name", ["linear", "restless"])
@pytest.mark.parametrize("wrapper", ["paceline", "torch"])
def test_two_ranks_match_one_rank_with_twice_the_batches(on_ranks, build, name, wrapper):
    """Dropout and a model's own random numbers follow the batch, not the rank."""
    ((alone, *_),) = on_ranks(1, probe_here, build(name), {**PROBED, "num_small": 6})
    (first, *_), (second, *_) = on_ranks(2, probe_here, build(name, wrapper=wrapper), {**PROBED, "num_small": 3})
    assert first == second and first.world_size == 2 and first.big_batch_size == alone.big_batch_size == 24
    for found, wanted in zip(first.probes, alone.probes, strict=True):
        assert found.small_squares == pytest.approx(wanted.small_squares, rel=1e-5)
        assert found.big_square == pytest.approx(wanted.big_square, rel=1e-5)
    assert len({square for found in first.probes for square in found.small_squares}) == 12


def probe_twice(settings: TrainSettings) -> Any:
    from paceline.studies.training_runs import measure_noise_scale

    with open_job(settings) as job:
        records = []
        for mode in (True, False):
            job.learner.module.train(mode)
            records.append(measure_noise_scale(job, **PROBED, num_small=2))
        return records


def test_a_probe_is_in_training_mode_whatever_the_model_is_in(on_ranks, build):
    ((training, evaluating),) = on_ranks(1, probe_twice, build("restless"))
    assert training == evaluating


# -- side effects -----------------------------------------------------------------------------------------------------


def train_between_probes(settings: TrainSettings, num_small: int) -> list[Any]:
    """Three steps, with a probe around each where `num_small` is not 0, and the state that a probe could have
    changed."""
    from paceline.measure.step_bench import cycle_windows
    from paceline.studies.training_runs import measure_noise_scale
    from paceline.training.step import NoPhases, take_step

    with open_job(settings) as job:
        job.learner.model.train()
        list(job.learner.module.modules())[-1].eval()  # has its own mode, which is restored
        windows = cycle_windows(job)
        state: list[Any] = []

        def note() -> None:
            learner = job.learner
            numbers = numpy.random.get_state()
            state.append(
                {
                    "modes": [part.training for part in learner.module.modules()],
                    "gradients": [None if p.grad is None else p.grad.numpy().tobytes() for p in learner.parameters],
                    "model": {k: v.numpy().tobytes() for k, v in learner.module.state_dict().items()},
                    "optimizer": [v.numpy().tobytes() for s in learner.optimizer.state.values() for v in s.values()],
                    "scaler": learner.scaler.state_dict(),
                    "torch's numbers": torch.get_rng_state().numpy().tobytes(),
                    "Python's numbers": random.getstate(),
                    "numpy's numbers": (numbers[1].tobytes(), *numbers[2:]),
                }
            )

        def probe_if_asked(step: int) -> None:
            if num_small:
                asked = {"epoch": 1.0, "batch_size": 3, "num_small": num_small, "num_probes": 2}
                measure_noise_scale(job, step=step, **asked)
                measure_noise_scale(job, step=step, **asked)
            note()

        probe_if_asked(0)
        for step in range(3):
            window = next(windows)
            take_step(job.learner, window.batches, window.num_samples, 0.1, NoPhases())
            for param in job.learner.parameters[:2]:  # gradients kept by the program
                param.grad = torch.full_like(param, step)
            probe_if_asked(step + 1)
            job.learner.optimizer.zero_grad()
        windows.close()
        return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "wrapper", "precision"),
    [(1, "none", "fp32"), (2, "paceline", "fp32"), (2, "torch", "fp32"), (2, "paceline", "fp16"), (1, "torch", "bf16")],
)
def test_probes_do_not_affect_training(on_ranks, build, ranks, wrapper, precision):
    settings = build("restless", wrapper=wrapper, precision=precision, optimizer="adamw")
    plain = on_ranks(ranks, train_between_probes, settings, 0)
    probed = on_ranks(ranks, train_between_probes, settings, 2)
    for wanted, found in zip(plain, probed, strict=True):
        for step, (then, now) in enumerate(zip(wanted, found, strict=True)):
            assert not [name for name in then if then[name] != now[name]], f"behind step {step}"
    assert plain[0][0] != plain[0][1], "nothing changes in a step"


# -- unsupported cases ------------------------------------------------------------------------------------------------


def probe_half(settings: TrainSettings, scale: float) -> Any:
    """The record at this loss scale, and the scale afterward."""
    from paceline.studies.training_runs import measure_noise_scale

    with open_job(settings) as job:
        job.learner.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return measure_noise_scale(job, **PROBED, num_small=2), job.learner.scaler.get_scale()


def test_a_loss_scale_that_overflows_is_lowered_only_for_the_probe(on_ranks, build):
    settings = build("linear", precision="fp16")
    (wanted, _), (found, scale) = (on_ranks(1, probe_half, settings, scale)[0] for scale in (1.0, 2.0**40))
    assert scale == 2.0**40
    for one, other in zip(found.probes, wanted.probes, strict=True):
        assert one.small_squares == pytest.approx(other.small_squares, rel=0.02)


def probe_broken(settings: TrainSettings) -> str:
    from paceline.studies.training_runs import measure_noise_scale

    with open_job(settings) as job:
        if job.world.rank == 1:
            job.train.inputs.fill_(float("nan"))
        try:
            measure_noise_scale(job, **PROBED, num_small=2)
        except MeasurementError as error:
            return str(error)
    return ""


def test_a_nan_gradient_is_reported_on_all_ranks(on_ranks, build):
    first, second = on_ranks(2, probe_broken, build("linear"))
    assert first == second and first.startswith("step 3: a gradient of probe 0 is not finite")
