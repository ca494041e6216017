"""Training on several ranks against one process at the same global batch: one loss curve, one model, one message."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import TrainingError
from paceline.records.training import load_metrics
from paceline.training.train_settings import TrainSettings

CNN = TrainSettings(model="cnn", channels=(4, 8), hidden=16, device="cpu", threads=1, epochs=2, save_every="epoch")
GPT2 = replace(CNN, model="gpt2-tiny", channels=None, hidden=None, context=16, optimizer="adamw", lr=1e-3)
RESNET = replace(CNN, model="resnet18", channels=None, hidden=None, epochs=1, lr=0.01, samples=7, global_batch_size=4)


@dataclass(frozen=True)
class Seen:
    """The results of one rank: its metrics rows, its model, and the messages of each step."""

    rows: list[dict[str, Any]]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    messages: list[int]
    syncs: int | None

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def digest(self) -> dict[str, str]:
        return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in self.weights.items()}


def build_precise(*args: Any) -> torch.nn.Module:
    """The model in double precision: in single precision, a rounding error that flips one ReLU moves gradients by 1
    %."""
    from paceline.workloads.registry import build_model

    module = build_model(*args).double()
    module.register_forward_pre_hook(lambda _, args: tuple(x.double() if x.is_floating_point() else x for x in args))
    return module


def train_and_look(settings: TrainSettings, folder: Path, num_test: int = 40) -> Seen:
    """Train with a small test set and keep state that `train` does not return."""
    import torch.distributed as dist

    from paceline.parallel import DataParallel
    from paceline.training import build as building
    from paceline.training import loop
    from paceline.workloads.data import sets

    jobs: list[Any] = []
    starts: list[dict[str, torch.Tensor]] = []
    messages: list[int] = []
    syncs: list[int] = []
    build, step, model, sizes = loop.build_job, loop.take_step, building.build_model, dict(sets._SIZES)

    def build_and_keep(*args: Any) -> Any:
        jobs.append(build(*args))
        starts.append(copy_state(jobs[-1].learner.module))
        return jobs[-1]

    def count(model: Any) -> int:
        # Our wrapper uses its own group while another wrapper is alive, for example one not yet garbage-collected.
        is_ours = isinstance(model, DataParallel)
        return model.count_sent().num_messages if is_ours else dist.group.WORLD._get_sequence_number_for_group()

    def step_and_count(learner: Any, *args: Any) -> Any:
        before = count(learner.model)
        outcome = step(learner, *args)
        messages.append(count(learner.model) - before)
        if isinstance(learner.model, DataParallel):
            syncs[:] = [learner.model.report().num_steps]
        return outcome

    loop.build_job, loop.take_step = build_and_keep, step_and_count
    if settings.precision == "fp32":
        building.build_model = build_precise
    sets._SIZES["test"] = num_test
    try:
        loop.train(settings, folder, False)
    finally:
        loop.build_job, loop.take_step, building.build_model = build, step, model
        sets._SIZES.update(sizes)
    path = folder / "metrics.jsonl"
    rows = load_metrics(path) if path.exists() else []
    return Seen(rows, starts[0], copy_state(jobs[0].learner.module), messages, syncs[0] if syncs else None)


def copy_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture
def train_on(on_ranks, tmp_path):
    """`train_on(ranks, settings)`: the results of each rank."""
    runs = iter(range(100))

    def run(ranks: int, settings: TrainSettings, **options: Any) -> list[Seen]:
        folder = tmp_path / str(next(runs))
        return on_ranks(ranks, functools.partial(train_and_look, **options), settings, folder)

    return run


@pytest.fixture(scope="module")
def known() -> dict[Any, Seen]:
    return {}


@pytest.fixture
def train_alone(train_on, known):
    """`train_alone(settings)`: one process without a wrapper. Results are cached."""

    def run(settings: TrainSettings, **options: Any) -> Seen:
        key = (settings, *options.items())
        if key not in known:
            (known[key],) = train_on(1, replace(settings, wrapper="none"), **options)
        return known[key]

    return run


def assert_parity(seen: list[Seen], wanted: Seen, buffers_too: bool = True) -> None:
    """The same curve and weight updates as one process, within rounding; one bit-identical model on all ranks."""
    first = seen[0]
    assert first.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert [row["samples"] for row in first.rows] == [row["samples"] for row in wanted.rows]
    assert [row["accuracy"] for row in first.rows] == pytest.approx([row["accuracy"] for row in wanted.rows])
    for name, tensor in wanted.weights.items():
        if buffers_too or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            way, wanted_way = first.weights[name] - first.start[name], tensor - wanted.start[name]
            off = (way - wanted_way).double().norm() / wanted_way.double().norm()
            assert off < 1e-5, f"{name} went elsewhere, by {off:.1e} of its way"
    for rank, other in enumerate(seen[1:], 1):
        assert other.digest == first.digest, f"rank {rank} has another model than rank 0"


@pytest.mark.parametrize(
    ("ranks", "accumulate", "wrapper", "tail"),
    [
        (2, 1, "paceline", "keep"), (2, 3, "torch", "drop"), (3, 2, "paceline", "pad"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (3, 1, "torch", "keep"), (3, 2, "paceline", "keep"), (2, 1, "torch", "pad"), (2, 3, "paceline", "drop"),
        )),
    ],
)  # fmt: skip
def test_a_cnn_trains_like_one_process(train_on, train_alone, tail, ranks, accumulate, wrapper):
    """25 samples in batches of 12: the last window has one sample, fewer than there are ranks."""
    settings = replace(CNN, samples=25, global_batch_size=12, tail=tail)
    alone = train_alone(settings)
    seen = train_on(ranks, replace(settings, wrapper=wrapper, accumulate=accumulate))
    assert len(alone.rows) == (4 if tail == "drop" else 6)
    assert alone.losses[-2] < alone.losses[0]
    assert_parity(seen, alone)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrapper", ["paceline", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_gpt2_trains_like_one_process(train_on, train_alone, wrapper, ranks):
    """11 blocks in batches of 6: a tail of 5, which neither 2 nor 3 ranks divide evenly."""
    settings = replace(GPT2, samples=11, global_batch_size=6)
    alone = train_alone(settings)
    assert_parity(train_on(ranks, replace(settings, wrapper=wrapper)), alone)


NORMED = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
"""


@pytest.fixture(scope="module")
def normed(tmp_path_factory) -> TrainSettings:
    """A small model with BatchNorm. 13 samples leave a tail of 5, which 2 ranks split into 2 and 3."""
    file = tmp_path_factory.mktemp("model") / "normed.py"
    file.write_text(NORMED)
    return TrainSettings(
        model=f"{file}:build", data="synthetic:numbers", device="cpu", threads=1, lr=0.01, samples=13,
        global_batch_size=8,
    )  # fmt: skip


@pytest.mark.parametrize("wrapper", ["paceline", "torch"])
def test_batchnorm_of_each_rank_is_that_of_a_micro_batch(train_on, train_alone, normed, wrapper):
    """Without SyncBatchNorm, one process has the same statistics if its micro-batches are the ranks' batches."""
    alone = train_alone(replace(normed, accumulate=2))
    assert_parity(train_on(2, replace(normed, wrapper=wrapper)), alone, buffers_too=False)
    other = train_alone(normed)
    assert other.losses[0] != pytest.approx(alone.losses[0], rel=1e-3), "whose statistics would not matter"


@pytest.mark.parametrize("wrapper", ["paceline", "torch"])
def test_sync_batchnorm_is_that_of_the_whole_batch(train_on, train_alone, normed, wrapper):
    assert_parity(train_on(2, replace(normed, sync_batchnorm=True, wrapper=wrapper)), train_alone(normed))


@pytest.mark.slow
def test_ghost_batchnorm_on_one_rank_is_batchnorm_on_two(train_on, train_alone):
    """Global batches of 4 without a tail: each ghost batch of 2 samples is one rank's batch, so averages are equal."""
    settings = replace(RESNET, samples=8)
    alone = train_alone(replace(settings, ghost_batchnorm=2), num_test=1)
    assert_parity(train_on(2, settings, num_test=1), alone)
    assert train_alone(settings, num_test=1).losses[0] != pytest.approx(alone.losses[0], rel=1e-3)


@pytest.mark.parametrize("samples", [6, 5])
def test_sync_batchnorm_sees_no_sample_twice(train_on, train_alone, normed, samples):
    """5 samples leave a tail of 2 for 3 ranks: the rank without samples still joins the step."""
    settings = replace(normed, samples=samples, global_batch_size=3)
    assert_parity(train_on(3, replace(settings, sync_batchnorm=True)), train_alone(settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": 0.05},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        {"schedule": "cosine", "lr_warmup": 2, "momentum": 0.0},
        {"trust_coefficient": 0.01, "optimizer": "lars", "lr": 2.0, "weight_decay": 0.1},
        {"lr": 0.01, "optimizer": "lamb", "weight_decay": 0.1},
        {"lr_drops": (0.3, 0.6), "schedule": "piecewise"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_update_is_that_of_one_process(train_on, train_alone, changes):
    settings = replace(CNN, samples=25, global_batch_size=12)
    alone = train_alone(replace(settings, **changes))
    assert_parity(train_on(2, replace(settings, **changes)), alone)
    assert alone.losses[1:] != pytest.approx(train_alone(settings).losses[1:], rel=1e-4), "it changes nothing"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_nearly_the_same(train_on, train_alone, precision):
    """Full windows, because with a single sample fp16 overflows and the step is skipped."""
    settings = replace(CNN, samples=24, global_batch_size=12)
    seen = train_on(2, replace(settings, precision=precision))
    wanted = train_alone(settings).losses
    assert seen[0].losses == pytest.approx(wanted, rel=0.02)
    assert seen[0].losses != pytest.approx(wanted, rel=1e-6), "nothing was rounded"
    assert seen[1].digest == seen[0].digest


@pytest.mark.parametrize("wrapper", ["paceline", pytest.param("torch", marks=pytest.mark.slow)])
def test_gradients_are_sent_once_per_step_for_any_number_of_micro_batches(train_on, wrapper):
    settings = replace(CNN, samples=26, global_batch_size=12, wrapper=wrapper)
    seen = [train_on(2, replace(settings, accumulate=number))[0] for number in (1, 2, 6)]
    assert seen[0].messages[1] >= 1
    assert [other.messages for other in seen[1:]] == [seen[0].messages] * 2
    assert [other.syncs for other in seen] == [6 if wrapper == "paceline" else None] * 3


def test_a_row_covers_all_ranks(train_on):
    (*_, last) = rows = train_on(3, replace(CNN, samples=25, global_batch_size=12, profile=True))[0].rows
    keys = {
        "step", "epoch", "loss", "accuracy", "samples", "lr", "step_s", "exposed_comm_s", "data_wait_s", "forward_s",
        "backward_s", "optimizer_s", "ranks",
    }  # fmt: skip
    tested = {"test_loss", "test_accuracy", "test_samples"}
    assert [set(row) - {"messages"} == keys | (tested if row["step"] % 3 == 0 else set()) for row in rows] == [True] * 6
    assert [(row["step"], row["epoch"], row["samples"]) for row in rows] == [
        (1, 0, 12), (2, 0, 12), (3, 0, 1), (4, 1, 12), (5, 1, 12), (6, 1, 1),
    ]  # fmt: skip
    assert last["accuracy"] in (0.0, 1.0) and last["test_samples"] == 40


def build_and_draw(settings: TrainSettings) -> tuple[str, torch.Tensor, torch.Tensor]:
    """This rank's model before the wrapper synchronized it, and its outputs for one batch with and without dropout."""
    import paceline
    from paceline.training import build

    models: list[str] = []
    build_model = build.build_model

    def build_and_note(*args: Any) -> torch.nn.Module:
        module = build_model(*args)
        models.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest())
        return module

    build.build_model = build_and_note
    try:
        with paceline.init(settings.backend, settings.device, announce=None) as world:
            module = build.build_job(replace(settings, ranks=world.world_size), world).learner.module
            batch = torch.ones(2, 1, 28, 28)
            with torch.no_grad():
                return models[0], module.train()(batch), module.eval()(batch)
    finally:
        build.build_model = build_model


def test_ranks_begin_with_one_model_and_drop_different_units(on_ranks):
    (model, noisy, plain), *others = on_ranks(3, build_and_draw, replace(CNN, dropout=0.5, samples=12, batch_size=2))
    for other_model, other_noisy, other_plain in others:
        assert other_model == model and torch.allclose(other_plain, plain, atol=1e-5)
        assert not torch.allclose(other_noisy, noisy, atol=1e-2)
    assert not torch.allclose(others[0][1], others[1][1], atol=1e-2)


# -- a non-finite loss -------------------------------------------------------------------------------------------------


def train_on_a_bad_sample(settings: TrainSettings, folder: Path, rank: int, number: int) -> str:
    """The error on this rank if window `number` of one rank has a NaN input."""
    import paceline.runtime.ranks.world as worlds
    from paceline.training import loop

    load = loop.load_windows

    def load_damaged(*args: Any) -> Any:
        world = worlds.current_world()
        for window in load(*args):
            if world is not None and (world.rank, window.number) == (rank, number):
                window.batches[0].batch.inputs[0] = float("nan")
            yield window

    loop.load_windows = load_damaged
    try:
        loop.train(settings, folder, False)
    except TrainingError as error:
        return str(error)
    finally:
        loop.load_windows = load
    return ""


@pytest.mark.parametrize("wrapper", ["paceline", "torch"])
def test_a_nan_loss_ends_all_ranks_with_the_same_error(on_ranks, tmp_path, wrapper):
    from paceline.training.checkpoint_files import CheckpointStore

    settings = replace(CNN, samples=60, global_batch_size=12, save_every="2steps", keep=1, wrapper=wrapper)
    first, second = on_ranks(2, train_on_a_bad_sample, settings, tmp_path, 1, 2)
    assert first == second
    assert first.startswith("step 3: the loss of rank 1 is not finite")
    assert "the gradient of 0.weight" in first and "the checkpoint of step 2 is kept" in first
    loaded = CheckpointStore(tmp_path / "checkpoints").load_latest()
    assert loaded is not None and loaded.step == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.model.values())
    losses = [row["loss"] for row in load_metrics(tmp_path / "metrics.jsonl")]
    assert losses[:2] == [pytest.approx(2.3, abs=1)] * 2 and losses[2] != losses[2]


ROOT = """
import torch
from torch import nn


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.linear(x) + torch.sqrt(self.zero)
"""


def test_a_model_with_nan_parameters_is_not_saved(on_ranks, tmp_path):
    """The loss is finite, but the updated model is not: the square root has an infinite slope at 0."""
    (tmp_path / "root.py").write_text(ROOT)
    settings = TrainSettings(
        model=f"{tmp_path / 'root.py'}:Root", data="synthetic:numbers", device="cpu", samples=8, batch_size=4
    )
    first, second = on_ranks(2, train_on_a_bad_sample, settings, tmp_path, 0, 99)
    assert first == second
    assert first.startswith("step 1: zero is not finite") and "there is no checkpoint yet" in first
    assert not list((tmp_path / "checkpoints").glob("step*")) and not (tmp_path / "weights.safetensors").exists()


def train_with_a_bad_replica(settings: TrainSettings, folder: Path) -> str:
    """The error on this rank if only rank 1 has a non-finite parameter."""
    import paceline.runtime.ranks.world as worlds
    from paceline.training import loop

    find = loop.find_bad_parameter

    def find_on_rank_1(module: torch.nn.Module) -> str:
        world = worlds.current_world()
        return "0.weight" if world is not None and world.rank == 1 else find(module)

    loop.find_bad_parameter = find_on_rank_1
    try:
        loop.train(settings, folder, False)
    except TrainingError as error:
        return str(error)
    finally:
        loop.find_bad_parameter = find
    return ""


def test_between_two_syncs_all_ranks_learn_that_one_model_is_not_finite(on_ranks, tmp_path):
    settings = replace(CNN, samples=60, global_batch_size=12, save_every="2steps", strategy="localsgd:100")
    first, second = on_ranks(2, train_with_a_bad_replica, settings, tmp_path)
    assert first == second
    assert first.startswith("step 2: 0.weight is not finite on rank 1 after the update")
