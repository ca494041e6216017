"""Finished studies of `paceline scale`, shared by several modules because they take long to run."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="session")
def studies(tmp_path_factory) -> dict[str, dict]:
    """The JSON of each verb, which must be its only output. One-rank jobs need no further process."""
    from tests.cli.test_scale import BATCH, LARGE, RANKS
    from tests.cli.test_train import type_alone, type_command

    asked = ("--json", "--out", str(tmp_path_factory.mktemp("studies")))
    found = {}
    for name, run, arguments in (
        ("batch", type_alone, BATCH),
        ("ranks", type_command, RANKS),
        ("large-batch", type_alone, LARGE),
    ):
        answer = run(*arguments, *asked)
        assert answer.code == 0, answer.err
        found[name] = json.loads(answer.out)
    return found
