"""What a run keeps: its folder is its own while it lives."""

from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.training import keeping
from paceline.training.settings import TrainSettings


def test_two_runs_do_not_write_to_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_PATIENCE_S", 0.0)
    world = SimpleNamespace(rank=0)
    first, second = (keeping.Keeper(tmp_path, TrainSettings(), world) for _ in range(2))
    first.begin(0)
    with pytest.raises(ConfigError, match="another run"):
        second.begin(0)
    first.write_rows([{"step": 1}])
    first.close()
    first.release()
    second.begin(1)
    second.close()
    second.release()
    assert (tmp_path / keeping.METRICS).read_text() == '{"step": 1}\n'
