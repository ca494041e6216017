"""Runs on disk: complete, versioned, never overwritten, each in its own folder."""

import datetime
import errno
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.records import LayerSizeRecord, store
from paceline.records.store import Run, create_folder, load_run, save_run, write_new
from paceline.report.result import build_result


@pytest.fixture
def run(build_collective, build_chunks, build_environment):
    records = (build_collective(), build_chunks(), LayerSizeRecord(layer="naïve µ", num_params=3))
    return Run("bench allreduce", {"sizes": [4, 8], "op": "sum"}, build_environment(), records, ("a warning",), False)


@pytest.fixture
def saved(run, tmp_path):
    save_run(run, tmp_path / "run.json")
    return tmp_path / "run.json"


def test_a_run_is_loaded_as_it_was_saved_from_its_file_and_its_folder(run, saved):
    assert load_run(saved) == run
    assert load_run(str(saved.parent)) == run


def test_a_compressed_run_is_read_like_any_other(run, saved):
    packed = saved.with_name("run.json.gz")
    packed.write_bytes(gzip.compress(saved.read_bytes(), mtime=0))
    saved.unlink()
    for path in (packed, saved, saved.parent):
        assert load_run(path) == run
    result = build_result(run)
    result.save(saved.parent)  # next to its own run, not inside another run's folder
    assert not saved.exists()
    with pytest.raises(RecordError) as caught:
        build_result(replace(run, created="another")).save(saved.parent)
    assert caught.value.code == "exists"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(RecordError) as caught:
        load_run(packed)
    assert caught.value.code == "damaged"


def test_a_run_without_records_is_loaded_as_it_was_saved(run, tmp_path, build_environment):
    empty = Run("bench", {}, build_environment(), ())
    save_run(empty, tmp_path / "empty.json")
    assert load_run(tmp_path / "empty.json") == empty


def test_the_file_says_its_format_and_keeps_one_record_per_line(run, saved):
    document = json.loads(saved.read_text())
    assert (document["format"], document["version"]) == ("paceline-run", 3)
    assert sum(line.lstrip().startswith('{"kind"') for line in saved.read_text().splitlines()) == len(run.records)


def test_a_file_is_never_overwritten(run, saved):
    before = saved.read_bytes()
    with pytest.raises(RecordError, match="exists"):
        save_run(run, saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, step):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, step, fail)
    with pytest.raises(RecordError, match=r"table.csv: No space left on device"):
        write_new(tmp_path / "table.csv", "a,b\n")
    assert os.listdir(tmp_path) == []


def test_files_are_written_even_without_hard_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(store.os, "link", refuse)
    write_new(tmp_path / "table.csv", "a,b\n")
    assert (tmp_path / "table.csv").read_text() == "a,b\n"
    with pytest.raises(RecordError, match="never overwritten"):
        write_new(tmp_path / "table.csv", "c\n")
    assert os.listdir(tmp_path) == ["table.csv"] and (tmp_path / "table.csv").read_text() == "a,b\n"


def test_an_error_of_a_replacement_is_not_taken_for_a_missing_hard_link(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(store.os, "replace", refuse)
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(RecordError, match="Operation not permitted"):
        write_new(tmp_path / "table.csv", "c\n", replace=True)
    assert os.listdir(tmp_path) == ["table.csv"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(RecordError, match="cannot write"):
        write_new(tmp_path / "nowhere" / "table.csv", "a,b\n")


def test_a_run_that_is_not_json_is_not_half_written(tmp_path, build_environment):
    with pytest.raises(ValueError):
        save_run(Run("bench", {"x": float("nan")}, build_environment(), ()), tmp_path / "run.json")
    assert os.listdir(tmp_path) == []


def _without(key):
    return lambda document: document.pop(key)


def _with(**changes):
    return lambda document: document.update(changes)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_with(version=4), "version"),
        (_with(version=2), "version"),
        (_without("version"), "version"),
        (_with(format="other"), "damaged"),
        (_without("format"), "damaged"),
        *((_without(key), f"lacks the key '{key}'") for key in ("records", "environment", "verb", "config", "created")),
        (_with(records=[{"kind": "poem"}]), "unknown kind of record 'poem'"),
        (_with(records=None), "NoneType"),
        (_with(records=[{"kind": "layer_size"}]), "LayerSizeRecord"),
        (_with(environment={"host": "box"}), "missing"),
        (_with(warnings=None), "NoneType"),
    ],
)
def test_a_damaged_run_is_refused_with_its_name(saved, damage, reason):
    document = json.loads(saved.read_text())
    damage(document)
    saved.write_text(json.dumps(document))
    with pytest.raises(RecordError) as caught:
        load_run(saved)
    assert str(saved) in str(caught.value) and (reason == caught.value.code or reason in str(caught.value))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"format": "paceline-run", ', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[1, 2]", 'it lacks "format": "paceline-run"'),
        (b"null", 'it lacks "format": "paceline-run"'),
    ],
)
def test_a_file_without_a_run_is_refused(tmp_path, content, reason):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=reason) as caught:
        load_run(path)
    assert str(path) in str(caught.value)


def test_a_missing_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"nothing\.json"):
        load_run(tmp_path / "nothing.json")
    with pytest.raises(RecordError, match=r"run\.json"):
        load_run(tmp_path)


@pytest.fixture
def noon(monkeypatch):
    """The store's clock stands still."""
    now = datetime.datetime(2024, 5, 6, 12, 0, 7, tzinfo=datetime.UTC)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda zone: now), UTC=datetime.UTC)
    monkeypatch.setattr(store, "datetime", clock)


def test_a_run_folder_is_named_by_time_and_verb_and_keeps_what_is_put_in(noon, run, tmp_path):
    with create_folder(tmp_path / "deep" / "runs", "bench allreduce") as folder:
        assert folder == tmp_path / "deep" / "runs" / "20240506-120007-bench-allreduce"
        assert folder.is_dir()
        save_run(run, folder / "run.json")
        write_new(folder / "a.txt", "text")
        write_new(folder / "a.bin", b"\x00\x01")
    assert (folder / "a.txt").read_text() == "text" and (folder / "a.bin").read_bytes() == b"\x00\x01"
    assert load_run(folder) == run
    assert sorted(os.listdir(folder)) == ["a.bin", "a.txt", "run.json"]


def test_runs_in_the_same_second_get_separate_folders(noon, tmp_path):
    names = []
    for content in "abc":
        with create_folder(tmp_path, "bench") as folder:
            (folder / "x").write_text(content)
        names.append(folder.name)
    assert names == ["20240506-120007-bench", "20240506-120007-bench-2", "20240506-120007-bench-3"]
    assert [(tmp_path / name / "x").read_text() for name in names] == ["a", "b", "c"]


@pytest.mark.parametrize("is_failing", [False, True])
def test_an_empty_run_folder_is_removed(tmp_path, is_failing):
    try:
        with create_folder(tmp_path, "bench"):
            assert len(os.listdir(tmp_path)) == 1
            if is_failing:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert is_failing
    assert os.listdir(tmp_path) == []


def test_files_saved_by_a_failed_run_are_kept(tmp_path):
    with pytest.raises(RuntimeError), create_folder(tmp_path, "bench") as folder:
        (folder / "partial").write_text("x")
        raise RuntimeError
    assert os.listdir(folder) == ["partial"]


@pytest.mark.parametrize("below", ["", "runs"])
def test_an_unusable_output_location_is_refused_before_the_work(tmp_path, below):
    (tmp_path / "file").write_text("I am not a folder")
    with (
        pytest.raises(ConfigError, match=r"file.*--out"),
        create_folder(tmp_path / "file" / below, "bench"),
    ):
        pytest.fail("the work has begun")


RESULTS = Path(__file__).parents[2] / "results"


def list_published():
    """All published runs; all but one per verb are slow, because predicting the curves of many ranks takes seconds."""
    known = set()
    for path in sorted(RESULTS.rglob("run.json.gz")):
        verb = json.loads(gzip.decompress(path.read_bytes()))["verb"]
        is_slow = verb in known or path.parent.name.startswith("scale-ranks")
        known.add(verb)
        yield pytest.param(path, id=str(path.parent.relative_to(RESULTS)), marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize("path", [*list_published()])
def test_the_published_runs_can_be_read(path):
    run = load_run(path.parent)
    # Traces and compared runs are in separate files, not in records.
    elsewhere = {
        "profile trace": ["overview.json.gz"],
        "train --compare": [f"{n}/config.json" for n in ("1-rank", "2-ranks")],
    }
    assert run.records or all((path.parent / name).exists() for name in elsewhere[run.verb])
    assert "paceline" not in {getattr(record, "backend", "") for record in run.records}
    assert isinstance(build_result(run, path.parent).text(80), str)
