"""The functions that a walk through the code names exist where it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`([a-z]+(?:\.[A-Za-z_]+)+)`", (ROOT / "docs" / "ddp.md").read_text())))
MODULES = ("backward", "control", "ddp", "reducers", "replicas")
WALK = [name for name in NAMES if name.split(".")[0] in MODULES and not name.endswith(".py")]


def test_the_walk_names_the_step_logic_and_the_reducer():
    assert {name.split(".")[1] for name in WALK} >= {"GradientSync", "BucketedReducer"}


@pytest.mark.parametrize("name", WALK)
def test_every_function_of_the_walk_exists(name):
    module, *path = name.split(".")
    found = importlib.import_module(f"paceline.parallel.{module}")
    for part in path:
        found = getattr(found, part)
