"""The rows of a run: valid JSON whatever the numbers, whole lines after a kill, one history after a resume."""

import builtins
import importlib.util
import json
import math

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.records.training import MetricsLog, load_metrics
from paceline.training.journal import EventsLog


def write(path, *steps):
    with MetricsLog(path) as log:
        log.append(*({"step": step, "loss": 1 / (step + 1)} for step in steps))


def steps(path):
    return [row["step"] for row in load_metrics(path)]


def test_rows_come_back_and_are_there_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [{"step": 1, "epoch": 0, "loss": 0.1, "note": "ß", "accuracy": None}, {"step": 2, "loss": -math.inf}]
    with MetricsLog(path) as log:
        log.append(*rows)
        assert load_metrics(path) == rows
        log.append({"step": 3, "loss": math.nan})
        assert math.isnan(load_metrics(path)[2]["loss"])


def test_every_line_is_valid_json_that_says_what_is_not_finite(tmp_path):
    with MetricsLog(tmp_path / "m") as log:
        log.append({"step": 1, "loss": math.nan, "norm": math.inf, "rate": 0.1})

    def refuse(word):
        raise AssertionError(word)

    assert json.loads((tmp_path / "m").read_text(), parse_constant=refuse) == {
        "step": 1, "loss": None, "norm": None, "rate": 0.1, "not_finite": {"loss": "nan", "norm": "inf"},
    }  # fmt: skip


@pytest.mark.parametrize("cut_bytes", [1, 2, 10, 20])
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path, cut_bytes):
    write(tmp_path / "m", 0, 1, 2)
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-cut_bytes])
    assert steps(tmp_path / "m") == [0, 1]
    write(tmp_path / "m", 7)
    assert steps(tmp_path / "m") == [0, 1, 7]


@pytest.mark.parametrize(("step", "kept"), [(-1, []), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resume_drops_what_comes_after_the_step(tmp_path, step, kept):
    write(tmp_path / "m", 0, 1, 2, 3)
    with MetricsLog.resume(tmp_path / "m", step) as log:
        log.append({"step": 10})
    assert steps(tmp_path / "m") == [*kept, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_resume_begins_a_file_where_there_is_none(tmp_path):
    MetricsLog.resume(tmp_path / "m", 5).close()
    assert load_metrics(tmp_path / "m") == []


def test_a_resume_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "m", 0, 1, 2)

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(RecordError, match="No space left"):
        MetricsLog.resume(tmp_path / "m", 0)
    assert steps(tmp_path / "m") == [0, 1, 2] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "1"}', '{"step": 1, "not_finite": 3}', "\0\0"])
def test_a_damaged_line_is_named_by_its_number(tmp_path, line):
    (tmp_path / "m").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(RecordError, match="m, line 2 is no row with a step"):
        load_metrics(tmp_path / "m")


@pytest.mark.parametrize("row", [{"loss": 1}, {"step": 1.0}, {"step": 1, "not_finite": {}}, {"step": 1, "x": object()},
                                 {"step": 1, "x": [math.nan]}])  # fmt: skip
def test_a_bad_row_is_refused_and_nothing_of_its_batch_is_written(tmp_path, row):
    with MetricsLog(tmp_path / "m") as log:
        with pytest.raises(ConfigError, match="row of metrics"):
            log.append({"step": 0}, row)
        assert (tmp_path / "m").read_bytes() == b""


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"install paceline\[tensorboard\]"):
        EventsLog(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_events_are_read_by_tensorboard_as_one_history(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with EventsLog(tmp_path) as log:
        log.append(*({"step": step, "loss": float(step), "note": "x", "gone": None, "on": True} for step in range(4)))
    with EventsLog(tmp_path, after_step=1) as log:
        log.append({"step": 2, "loss": 20.0})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]
