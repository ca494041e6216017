"""A user's own model: how it is called and errors for unusable files."""

import pickle
import subprocess
import sys

import pytest
import torch

from paceline.errors import ConfigError
from paceline.workloads.data import DataForm
from paceline.workloads.external import call_own
from paceline.workloads.registry import ModelOptions, build_model, check_model, default_form

PLAIN = ModelOptions()
FORM = DataForm(kind="images", shape=(1, 4, 4), num_classes=3)

NEIGHBOUR = """
from torch import nn

CLASSES = 3


def build_theirs():
    return nn.Linear(8, CLASSES)
"""
SOURCE = """
from dataclasses import dataclass

import functools

import neighbour
from neighbour import build_theirs
from torch import nn


def decorate(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@dataclass
class Size:
    width: "int" = 16


def build():
    return nn.Linear(Size().width, neighbour.CLASSES)


def build_for(form):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, form.num_classes))


@decorate
def build_decorated(form):
    return nn.Linear(6, form.num_classes)


def build_wide(width=7, form=None):
    return nn.Linear(width, form.num_classes)


def build_default(width=5):
    import late

    return nn.Linear(width, late.CLASSES)


def build_keyword(*, data):
    return nn.Linear(2, data.num_classes)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(9, 9)


def build_both(width, depth):
    return nn.Linear(width, depth)


def build_nothing():
    pass


def build_broken():
    raise KeyError("weights")


SIZE = 3
"""


def file_of(name: str) -> str | None:
    return getattr(sys.modules[name], "__file__", None)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "late.py").write_text("CLASSES = 4\n")
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if name in ("neighbour", "late") or str(file_of(name)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("function", "features", "outputs"),
    [
        ("build", 16, 3),
        ("build_for", 16, 3),
        ("build_wide", 7, 3),
        ("build_default", 5, 4),
        ("build_keyword", 2, 3),
        ("build_decorated", 6, 3),
        ("build_theirs", 8, 3),
        ("Net", 9, 9),
    ],
)
def test_the_function_gets_the_form_if_it_takes_one(file, function, features, outputs):
    path = list(sys.path)
    check_model(f"{file}:{function}", PLAIN)
    module = build_model(f"{file}:{function}", FORM, PLAIN)
    assert module(torch.zeros(2, features)).shape == (2, outputs)
    assert sys.path == path


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("biuld", "nets.py defines no biuld: did you mean build"),
        ("build_their", "did you mean build_theirs"),
        ("forward", "defines no forward: pass the name of a function"),
        ("", "names no function: write FILE.py:FUNCTION"),
    ],
)
def test_a_missing_name_is_refused_before_anything_runs(file, function, words):
    file.write_text(SOURCE + "\nraise SystemExit('this ran')\n")
    with pytest.raises(ConfigError, match=words):
        check_model(f"{file}:{function}", PLAIN)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("build_both", "build_both needs width, depth: Paceline passes only the data form and the named arguments"),
        ("build_nothing", "build_nothing returned a NoneType: it must return a torch.nn.Module"),
        ("build_broken", "build_broken raised KeyError: 'weights'"),
        ("SIZE", "defines SIZE of type int"),
    ],
)
def test_an_unusable_function_is_named(file, function, words):
    with pytest.raises(ConfigError, match=words):
        build_model(f"{file}:{function}", FORM, PLAIN)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def build(:\n", "is not Python: invalid syntax"),
        ("import no_such_module\ndef build(): pass\n", "raised ModuleNotFoundError: .*no_such_module.*line 1: import"),
        ("def build(): pass\nraise SystemExit('usage')\n", "raised SystemExit: usage .nets.py, line 2"),
        ("from os import *\n", "defines no build"),
    ],
)
def test_an_unusable_file_is_named(file, source, words):
    file.write_text(source)
    with pytest.raises(ConfigError, match=words):
        build_model(f"{file}:build", FORM, PLAIN)


def test_names_known_only_at_run_time_are_checked_when_building(file):
    file.write_text("from neighbour import *\n")
    check_model(f"{file}:CLASSES", PLAIN)
    with pytest.raises(ConfigError, match=r"CLASSES .*int"):
        build_model(f"{file}:CLASSES", FORM, PLAIN)


def test_a_missing_file_options_and_data_of_its_own_are_refused(file, tmp_path):
    with pytest.raises(ConfigError, match=r"other.py"):
        check_model(f"{tmp_path / 'other.py'}:build", PLAIN)
    with pytest.raises(ConfigError, match="hidden"):
        check_model(f"{file}:build", ModelOptions(hidden=3))
    with pytest.raises(ConfigError, match="data"):
        default_form(f"{file}:build")


def test_what_is_pickled_is_loaded_in_another_process_also_of_files_of_one_name(tmp_path):
    loaded = []
    for number in (1, 2):
        folder = tmp_path / f"v{number}.0 %2E"
        folder.mkdir()
        (folder / "job.py").write_text(f"class Set:\n    def __len__(self):\n        return {number}\n")
        loaded.append(call_own(f"{folder / 'job.py'}:Set", "data")[0])
    program = "import pickle, sys; print(*map(len, pickle.load(sys.stdin.buffer)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(loaded), capture_output=True, check=False)
    assert done.stdout.split() == [b"1", b"2", b"False"], done.stderr


def test_a_file_that_changed_is_loaded_again(tmp_path):
    file = tmp_path / "job.py"
    for number in (1, 22, 333):
        file.write_text(f"def build():\n    return {number}\n")
        assert call_own(f"{file}:build", "data")[0] == number
