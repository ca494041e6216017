"""A user's own data and step on the command line: every verb, exact resumes, and errors that cite the user's line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.records.store import load_run
from paceline.report.result import load_result
from tests.cli.test_train import load_rows, type_alone, type_command

DOCUMENT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SECTION = DOCUMENT.split("## Your own data and step")[1].split("\n## ")[0]
FILES = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", SECTION, re.DOTALL))
COMMANDS = re.findall(r"^paceline (.+)$", SECTION, re.MULTILINE)

JOB = """
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import aside

CALLS = []


class Set:
    num_classes = 3

    def __len__(self):
        return 26

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=draw) + 0.1 * torch.randn(4), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        order = list(range(26))
        random.shuffle(order)
        return (Set()[index] for index in order)


class Changing(Stream):
    def __iter__(self):
        CALLS.append(1)
        return (Set()[(index + len(CALLS)) % 26] for index in range(26))


def load():
    return Set(), Set()


def load_workers():
    return DataLoader(Set(), batch_size=4, shuffle=True, num_workers=1), Set()


def load_spawned():
    return DataLoader(Set(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="spawn"), Set()


def load_texts():
    return [(f"text {index}", index % 3) for index in range(26)]


def load_dropping():
    return DataLoader(Set(), batch_size=4, drop_last=True)


def load_stream():
    return Stream()


def load_changing():
    return Changing()


def load_strangely(width):
    return Set()


def load_broken():
    return aside.explode()


class Faulty(Set):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("row 5")
        return super().__getitem__(index)


def load_faulty():
    return DataLoader(Faulty(), batch_size=4, num_workers=1)


def build_net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def make(model, optimizer):
    def step(model, batch):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def build(data=Set):
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "data": data(), "step": make(model, optimizer), "state": {"optimizer": optimizer}}


def build_stream():
    return build(Stream)


def build_stateless():
    parts = build()
    return parts["model"], parts["data"], parts["step"]


def build_step():
    return {name: part for name, part in build().items() if name != "data"}


def build_twice():
    net = build_net()
    return nn.ModuleDict({"first": net, "second": net}), Set(), make(net, None)


def build_silent():
    return build_net(), Set(), lambda model, batch: None


def build_odd():
    return build_net(), Set(), lambda model: None


def build_misspelt():
    return {"model": build_net(), "data": Set(), "step": make, "optimiser": None}


def build_listed():
    return {"model": build_net(), "data": Set(), "step": make, "state": [1]}


def build_judged():
    return {"model": build_net(), "data": Set(), "step": make, "evaluate": 0.5}


def build_number():
    return 7


def build_failing():
    def step(model, batch):
        return model(batch[0]).nowhere

    return build_net(), Set(), step
"""
ASIDE = """
def explode():
    raise FileNotFoundError("no table here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "job.py").write_text(JOB)
    (folder / "aside.py").write_text(ASIDE)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def here(folder, monkeypatch, tmp_path):
    """The folder of the files, for relative paths; runs are created elsewhere."""
    monkeypatch.chdir(folder)
    return tmp_path


def find_run(answer) -> Path:
    assert answer.code == 0, answer.err
    return Path(answer.out.rsplit("run: ", 1)[1].split()[0])


def list_numbers(run: Path) -> list[tuple]:
    return [(row["step"], row["epoch"], row["loss"], row["samples"], row.get("test_loss")) for row in load_rows(run)]


def load_weights(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "weights.safetensors")


def same_weights(first: Path, second: Path) -> bool:
    one, two = load_weights(first), load_weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


JOBS = {
    "set": ("--model", "job.py:build_net", "--data", "job.py:load"),
    "stream": ("--model", "job.py:build_net", "--data", "job.py:load_stream", "--steps", "9"),
    "step": ("--model", "job.py:build"),
    "stream and step": ("--model", "job.py:build_stream", "--steps", "9"),
    "step on named data": ("--model", "job.py:build_step", "--data", "job.py:load"),
}


RARE = ("set", "stream", "step on named data")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in JOBS])
def test_a_run_that_is_resumed_inside_an_epoch_is_bit_equal_to_one_that_was_not_stopped(here, name):
    """26 samples in batches of 6: five steps per epoch, four if the short batch is dropped."""
    job = (*JOBS[name], "--batch-size", "6", "--save-every", "1steps", "--keep", "20", "--out", str(here))
    longer = ("--steps", "9") if "--steps" in job else ("--epochs", "2")
    whole = find_run(type_alone("train", *job, *longer))
    rows = list_numbers(whole)
    assert len(rows) == (10 if "--epochs" in longer else 9)
    assert sum(row[3] for row in rows if row[1] == 0) == 26  # every sample once
    for path in (whole / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 7:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    before, weights = list_numbers(whole), load_weights(whole)
    answer = type_alone("train", "--resume", str(whole))
    assert answer.code == 0, answer.err
    assert "resumes at step 7" in answer.err and list_numbers(whole) == before
    assert all(torch.equal(value, weights[key]) for key, value in load_weights(whole).items())


def test_a_stream_that_does_not_repeat_itself_is_refused_inside_an_epoch(here):
    job = ("--model", "job.py:build_net", "--data", "job.py:load_changing", "--batch-size", "6", "--out", str(here))
    run = find_run(type_alone("train", *job, "--steps", "3"))
    answer = type_alone("train", "--resume", str(run), "--steps", "8")
    assert answer.code == 2 and "was trained on different samples" in answer.err


def test_a_resume_with_another_number_of_steps_in_an_epoch_is_refused(here):
    file = here / "changed.py"
    shutil.copy("aside.py", here)
    shutil.copy("job.py", file)
    job = ("--model", f"{file}:build_net", "--data", f"{file}:load", "--batch-size", "4", "--out", str(here))
    run = find_run(type_alone("train", *job, "--steps", "3"))
    file.write_text(file.read_text().replace("return Set(), Set()", "return DataLoader(Set(), 4, drop_last=True)"))
    answer = type_alone("train", "--resume", str(run), "--steps", "8")
    assert answer.code == 2 and "was trained with --tail keep, but now it is drop" in answer.err


def test_nothing_is_evaluated_without_a_test_set(here):
    tested = list_numbers(find_run(type_alone("train", *JOBS["set"], "--out", str(here))))
    assert [row[4] is None for row in tested] == [False]
    answer = type_alone("train", *JOBS["step"], "--out", str(here))
    assert "evaluate" not in answer.err  # there is no test set
    alone = list_numbers(find_run(answer))
    assert [row[4] is None for row in alone] == [True]
    answer = type_alone("train", *JOBS["step on named data"], "--out", str(here))
    assert answer.code == 0 and "returned no evaluate, so it is not tested" in answer.err


def test_an_optimizer_that_is_not_saved_is_reported_and_its_run_cannot_be_resumed(here):
    answer = type_alone("train", "--model", "job.py:build_stateless", "--epochs", "2", "--out", str(here))
    assert "returned no state, so the run cannot be resumed" in answer.err
    run = find_run(answer)
    answer = type_alone("train", "--resume", str(run), "--epochs", "3")
    assert answer.code == 2 and "did not return the state of its optimizers" in answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "job.py:build_number"), r"returned a int: it must return a torch.nn.Module, \(model, step\)"),
        (("--model", "job.py:build_misspelt"), "returned a dict with model, data, step, optimiser: it must return"),
        (
            ("--model", "job.py:build_odd"),
            "job.py:build_odd raised TypeError: .*takes 1 positional argument but 2 were given",
        ),
        (("--model", "job.py:build_silent"), "returned a NoneType: it must return its mean loss"),
        (("--model", "job.py:build_net"), "returned no data: name it"),
        (("--model", "job.py:build_step"), "returned no data: name it"),
        (("--model", "job.py:build_listed"), "returned a list as state: must be a dict of optimizers"),
        (("--model", "job.py:build_judged"), r"returned a float as evaluate: must be a function \(model, batch\)"),
        (("--model", "job.py:build_net", "--data", "job.py:load_dropping", "--tail", "pad"), "drop_last=True"),
        (("--model", "job.py:build_twice"), "two models of job.py:build_twice share a parameter"),
        (("--model", "job.py:build", "--data", "job.py:load"), "returned its own data; leave it out"),
        (("--model", "job.py:build", "--lr", "0.2"), "--lr 0.2: set by the step of job.py:build"),
        (("--model", "job.py:build", "--accumulate", "2"), "--accumulate 2: set by the step of job.py:build"),
        (("--data", "job.py:load_strangely"), "load_strangely needs width: Paceline passes only the named arguments"),
        (("--data", "job.py:lod"), "data file job.py defines no lod: did you mean load"),
        (("--data", "nowhere.py:load"), "data file nowhere.py does not exist"),
        (("--data", "job.py:load", "--augment"), "cannot be augmented"),
        (
            ("--model", "mlp", "--data", "job.py:load_texts"),
            r"a batch is a list of Tensor and str: return \(inputs, targets\)",
        ),
        (("--model", "job.py:build_net", "--data", "job.py:load_texts"), "a batch is a list of Tensor and str"),
        (("--model", "mlp", "--data", "job.py:load_stream"), "classes, which the data does not provide"),
        (
            ("--model", "job.py:build_net", "--data", "job.py:load_stream"),
            "unknown; give the data a __len__, or train with --steps",
        ),
        (
            ("--model", "job.py:build_net", "--data", "job.py:load_stream", "--steps", "2", "--tail", "pad"),
            "--tail pad",
        ),
    ],
)
def test_incompatible_options_are_refused_by_name(here, arguments, words):
    answer = type_alone("train", *arguments, "--out", str(here))
    assert answer.code == 2 and re.search(words, answer.err), answer.err
    assert len(answer.err.strip().splitlines()[-1].split("paceline: error: ")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "job.py:load_broken"), r"FileNotFoundError: no table here \(aside.py, line 3: raise FileNotFound"),
        (
            ("--model", "job.py:build_failing"),
            r"AttributeError: .*nowhere.* \(job.py, line \d+: return model\(batch\[0\]\)",
        ),
        (
            ("--model", "job.py:build_net", "--data", "job.py:load_faulty"),
            r"""KeyError: 'row 5' \(job.py, line \d+: raise KeyError\("row 5"\)\)""",
        ),
    ],
)
def test_an_error_in_user_code_is_one_line_that_cites_the_users_line(here, arguments, words):
    answer = type_alone("train", *arguments, "--out", str(here))
    assert answer.code == 2 and re.search(words, answer.err), answer.err


@pytest.mark.slow
@pytest.mark.parametrize("data", ["load_workers", "load_spawned"])
def test_worker_processes_load_the_same_samples(here, data):
    in_workers = ("--model", "job.py:build_net", "--data", f"job.py:{data}")
    first = find_run(type_alone("train", *in_workers, "--out", str(here)))
    assert [row["samples"] for row in load_rows(first)] == [4, 4, 4, 4, 4, 4, 2]  # the loader's batches
    second = find_run(type_alone("train", *JOBS["set"], "--batch-size", "4", "--out", str(here)))
    assert list_numbers(first) == list_numbers(second) and same_weights(first, second)


FEW = ("--iters", "2", "--warmup", "1", "--json")


@pytest.mark.parametrize(
    ("model", "asked", "size"),
    [
        pytest.param("job.py:build", ("--batch-size", "6"), 6, marks=pytest.mark.slow),
        pytest.param("job.py:build_stream", ("--batch-size", "6"), 6, marks=pytest.mark.slow),
        ("my_gan.py:build", ("--batch-size", "16"), 16),
        pytest.param("my_job.py:build", (), 32, marks=pytest.mark.slow),
    ],
)
def test_a_users_own_step_is_profiled(here, model, asked, size):
    answer = type_alone("profile", "phases", "--model", model, *asked, *FEW, "--out", str(here))
    assert answer.code == 0, answer.err
    (record,) = json.loads(answer.out)["records"]
    assert record["model"] == model and record["batch_size"] == size
    layers = type_alone("profile", "layers", "--model", model, *asked, *FEW, "--out", str(here))
    assert layers.code == 0, layers.err


@pytest.mark.parametrize("job", [pytest.param(JOBS["set"], marks=pytest.mark.slow), JOBS["step"]])
def test_batch_sizes_of_own_data_are_compared(here, job):
    few = ("--batch-size", "4,13,40", "--epochs", "2", "--json")
    answer = type_alone("scale", "batch", *job, *few, "--out", str(here))
    assert answer.code == 0, answer.err
    records = load_run(Path(json.loads(answer.out)["run"])).records
    assert [(r.batch_size, r.num_steps) for r in records[:2]] == [(4, 7), (13, 2)]
    assert "more than the 26 samples" in records[2].failure
    names = " ".join(job[:4])
    (line,) = load_result(json.loads(answer.out)["run"]).next_steps  # the size is chosen by step times
    assert line.rpartition(" ")[0] == f"paceline scale ranks {names} --batch-size" and line.endswith((" 4", " 13"))


def test_several_models_have_no_plan(here):
    answer = type_alone("tune", "--model", "my_gan.py:build", "--quick", "--network", "1gbe", "--out", str(here))
    assert answer.code == 2 and "the job has 2 models" in answer.err


@pytest.mark.slow
def test_the_files_of_the_document_train_on_one_rank(here):
    assert sorted(FILES) == ["my_data.py", "my_gan.py", "my_job.py"] and len(COMMANDS) == 7
    for command in (command for command in COMMANDS if command.startswith("train")):
        arguments = command.replace("--ranks 2 ", "").split()
        rows = load_rows(find_run(type_alone(*arguments, "--out", str(here))))
        tests = [row["test_loss"] for row in rows if row.get("test_loss") is not None]
        assert rows[-1]["epoch"] == 1 and (tests[-1] < tests[0] if tests else "gan" in command)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_document_run(here, command):
    answer = type_command(*command.split(), "--out", str(here))
    assert answer.code == 0, answer.err
