"""What a run keeps: its folder is its own while it lives."""

from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.training import checkpoints
from paceline.training.settings import TrainSettings


def test_two_runs_do_not_write_to_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_LOCK_TIMEOUT_S", 0.0)
    world = SimpleNamespace(rank=0)
    first, second = (checkpoints.RunFiles(tmp_path, TrainSettings(), world) for _ in range(2))
    first.open(0)
    with pytest.raises(ConfigError) as caught:
        second.open(0)
    assert caught.value.code == "locked"
    first.write_rows([{"step": 1}])
    first.close()
    first.unlock()
    second.open(1)
    second.close()
    second.unlock()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
