"""A user's own data and step on real ranks: sharding of samples, resumes, several models, tune and scale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from paceline.errors import ConfigError
from paceline.measure.job_profile import measure_profile
from paceline.measure.plan_bench import tune_job
from paceline.predict.tuning import TuneSettings
from paceline.records.training import load_metrics
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.studies.rank_steps import measure_scaling
from paceline.training import loop
from paceline.training.train_settings import TrainSettings

FILE = """
import itertools
import os

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

COUNT = 26


class Set:
    def __init__(self, offset=0):
        self.offset = offset

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return {"index": index + self.offset, "x": torch.randn(4, generator=draw), "y": torch.randn(2, generator=draw)}


class Stream(IterableDataset):
    def __init__(self, part=0, parts=1, count=COUNT):
        self.part, self.parts, self.count = part, parts, count

    def __iter__(self):
        return (Set()[index] for index in torch.randperm(COUNT).tolist()[self.part :: self.parts][: self.count])


class Unlike(Stream):
    def __iter__(self):
        return itertools.islice(super().__iter__(), int(os.environ["RANK"]), None)


def load():
    return Set()


def load_stream():
    return Stream()


def load_batches():
    return DataLoader(Set(), batch_sampler=BatchSampler(RandomSampler(Set()), 3, drop_last=True))


def load_parts(rank, world_size):
    return Stream(rank, world_size)


def load_uneven(rank, world_size):
    return Stream(rank, world_size, count=13 - 3 * rank)


class Sized(Stream):
    def __len__(self):
        return self.count


def load_sized(rank, world_size):
    return Sized(rank, world_size, count=13 - 3 * rank)


def load_same(rank, world_size):
    return Stream()


def load_unlike():
    return Unlike()


def load_unlike_sets(rank):
    return Set(offset=rank)


def load_unlike_tests(rank):
    return Set(), Set(offset=rank)


def load_same_tests(rank, world_size):
    return Stream(rank, world_size), Stream()


def load_some_tests(rank):
    return (Set(), Set()) if rank else Set()


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, batch):
        folder = os.environ.get("SEEN_IN")
        if folder:
            with open(os.path.join(folder, os.environ["RANK"]), "a") as file:
                print(*batch["index"].tolist(), file=file)
        loss = (model(batch["x"]) - batch["y"]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    evaluate = lambda model, batch: (model(batch["x"]) - batch["y"]).abs().mean()
    return {"model": model, "step": step, "evaluate": evaluate, "state": {"optimizer": optimizer}}


def build_all(batch_size=3):
    return build() | {"data": Set()}


def build_gan():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    models = nn.ModuleDict({"g": nn.Linear(4, 4), "frozen": frozen, "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(models[name].parameters(), lr=0.1, momentum=0.9) for name in ("g", "d")}

    def step(models, batch):
        fake = models["frozen"](models["g"](batch["x"]))
        critic_loss = (models["d"](fake.detach()) - models["d"](batch["x"])).mean()
        critic_loss.backward()
        optimizers["d"].step()
        optimizers["d"].zero_grad()
        loss = -models["d"](fake).mean()
        loss.backward()
        optimizers["g"].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        return loss + critic_loss

    return {"model": models, "data": Set(), "step": step, "state": optimizers}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def train(settings: TrainSettings, folder: Path, resume: bool = False, seen: str = "") -> Any:
    """Train in a rank; errors are returned, because a failed rank would be restarted."""
    with pytest.MonkeyPatch.context() as patch:
        if seen:
            patch.setenv("SEEN_IN", seen)
        try:
            return loop.train(settings, folder, resume)
        except ConfigError as error:
            return error


def ask(file: Path, model: str, data: str | None = None, **more: Any) -> TrainSettings:
    given: dict[str, Any] = {"model": f"{file}:{model}", "ranks": 2, "batch_size": 3, "device": "cpu"} | more
    return TrainSettings(**given | ({} if data is None else {"data": f"{file}:{data}"}))


def read_seen(folder: Path) -> list[list[list[int]]]:
    """The samples of each step of each rank."""
    return [
        [[int(word) for word in line.split()] for line in (folder / str(r)).read_text().splitlines()] for r in (0, 1)
    ]


@pytest.mark.parametrize(
    ("data", "steps", "used"),
    [
        ("load", 5, 26),
        pytest.param("load_stream", 4, 24, marks=pytest.mark.slow),
        pytest.param("load_batches", 4, 24, marks=pytest.mark.slow),
        pytest.param("load_parts", 5, 26, marks=pytest.mark.slow),
        ("load_uneven", 4, 22),
    ],
)
def test_ranks_do_not_see_the_same_samples(on_ranks, file, tmp_path, data, steps, used):
    """26 samples make global batches of 6; the last two of a stream form one batch, not enough for two ranks."""
    runs, seen = tmp_path / "run", tmp_path / "seen"
    runs.mkdir(), seen.mkdir()
    settings = ask(file, "build", data, steps=2 * steps, save_every="3steps", keep=9)
    on_ranks(2, train, settings, runs, False, str(seen))
    ranks = read_seen(seen)
    for epoch in (0, 1):
        samples = [index for rank in ranks for step in rank[epoch * steps : (epoch + 1) * steps] for index in step]
        assert len(samples) == used == len(set(samples))
    rows = load_metrics(runs / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0] * steps + [1] * steps
    assert sum(row["samples"] for row in rows) == 2 * used
    # After a resume in the middle of the first epoch, the run is identical.
    before = safetensors.torch.load_file(runs / "weights.safetensors")
    for path in (runs / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 3:
            shutil.rmtree(path)
    shutil.rmtree(seen)
    seen.mkdir()
    outcomes = on_ranks(2, train, settings, runs, True, str(seen))
    assert [outcome.step for outcome in outcomes] == [2 * steps] * 2
    assert read_seen(seen) == [rank[3:] for rank in ranks]
    assert load_metrics(runs / "metrics.jsonl")[-1]["loss"] == rows[-1]["loss"]
    after = safetensors.torch.load_file(runs / "weights.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_parts_with_unequal_lengths_end_together(on_ranks, file, tmp_path):
    """With 13 and 10 samples in batches of 3, both ranks have 4 batches; the last has one sample."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = ask(file, "build", "load_sized", epochs=2)
    outcomes = on_ranks(2, train, settings, folder)
    assert [outcome.step for outcome in outcomes] == [8, 8]
    assert [row["epoch"] for row in load_metrics(folder / "metrics.jsonl")] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("load_same", "ranks 0 and 1.*same"),
        ("load_unlike", "rank 1.*different"),
        pytest.param("load_unlike_sets", "train: rank 1.*different", marks=pytest.mark.slow),
        pytest.param("load_unlike_tests", "test: rank 1.*different", marks=pytest.mark.slow),
        pytest.param("load_same_tests", "test: ranks 0 and 1.*same", marks=pytest.mark.slow),
        ("load_some_tests", "test set"),
    ],
)
def test_ranks_that_would_see_wrong_samples_are_refused(on_ranks, file, tmp_path, data, words):
    errors = on_ranks(2, train, ask(file, "build", data, steps=2), None)
    assert [error.code for error in errors] == ["shares"] * 2 and str(errors[0]) == str(errors[1])
    with pytest.raises(ConfigError, match=words):
        raise errors[0]


def test_each_of_several_models_has_its_own_wrapper(on_ranks, file, tmp_path):
    weights = []
    for wrapper in ("paceline", "torch"):
        folder = tmp_path / wrapper
        folder.mkdir()
        settings = ask(file, "build_gan", steps=5, wrapper=wrapper, threads=1)
        (first, _) = on_ranks(2, train, settings, folder)
        assert first.step == 5
        weights.append(safetensors.torch.load_file(folder / "weights.safetensors"))
    assert sorted(weights[0]) == ["d.bias", "d.weight", "frozen.bias", "frozen.weight", "g.bias", "g.weight"]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name])


@pytest.mark.slow
def test_a_users_own_job_is_scaled_and_tuned(on_ranks, file):
    job = ask(file, "build_all", ranks=1, wrapper="none", threads=1)
    study = ScaleSettings(job=job, ranks=(1, 2), setups=(Setup("paceline", "gloo"),), batch_sizes=(3,), iters=2)
    for cell in (ScalingCell("weak", 3), ScalingCell("strong", 6)):
        records, other = on_ranks(2, measure_scaling, study, cell)
        assert records == other
        sizes = {(r.role, r.world_size, r.batch_size) for r in records}
        alone = 3 if cell.mode == "weak" else 6
        assert sizes == {("job", 1, alone), ("local", 1, alone), ("together", 2, 3), ("job", 2, 3)}
        assert {record.data for record in records} == {f"{file}:build_all"}
    # Replicas that train without communication diverge, as expected here.
    (record,) = on_ranks(2, measure_profile, ask(file, "build_all", threads=1), "phases", 40, 1)[0]
    assert record.model == f"{file}:build_all" and len(record.timing.seconds) == 40
    settings = TuneSettings(effort="quick", confirms=False, iters=2)
    records, gradients, plan, _ = on_ranks(2, tune_job, settings, ask(file, "build_all"))[0]
    assert [gradient.name for gradient in gradients] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sum(plan.bucket_bytes) == sum(gradient.num_bytes for gradient in gradients)
