"""A study on disk: finished cells are kept and found again; a damaged or foreign file is refused with a reason."""

import json

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.records.store import STUDY_FILE, Study

from .made_scaling import make_batches, make_cell, make_rng, make_run

CONFIG = {"model": "cnn", "ranks": [1, 2]}
CELL = "weak 32, ranks 1,2"


@pytest.fixture
def study(tmp_path):
    return Study.begin(tmp_path, "scale ranks", CONFIG)


@pytest.mark.parametrize(
    "records", [make_batches(make_rng()), make_cell(make_rng(), "weak", 32), [make_run()], []],
    ids=["batches", "ranks", "runs", "none"],
)  # fmt: skip
def test_a_kept_cell_is_found_as_it_was(study, records):
    assert study.find(CELL) is None
    study.keep(CELL, records)
    assert study.find(CELL) == records
    assert study.find("weak 64, ranks 1,2") is None


def test_a_study_continues_where_it_stopped(study):
    study.keep(CELL, [make_run()])
    again = Study.load(study.path, "scale ranks")
    assert again == study
    assert again.find(CELL) == [make_run()]


def test_the_command_and_the_machines_are_kept(tmp_path):
    study = Study.begin(tmp_path, "scale ranks", CONFIG, "paceline scale ranks --iters 3")
    study.keep(CELL, [make_run()], "two cores")
    study.keep("another", [make_run()])
    again = Study.load(tmp_path, "scale ranks")
    assert again.command_line == "paceline scale ranks --iters 3"
    assert [again.find_machine(cell) for cell in (CELL, "another")] == ["two cores", "unknown"]


def test_only_a_study_without_a_finished_cell_is_discarded(study):
    study.keep(CELL, [make_run()])
    study.discard()
    assert Study.load(study.path, "scale ranks").find(CELL) == [make_run()]
    study._file(CELL).unlink()
    study.discard()
    assert list(study.path.iterdir()) == []


def test_a_cell_is_never_made_twice(study):
    study.keep(CELL, [make_run()])
    with pytest.raises(RecordError) as caught:
        study.keep(CELL, [make_run(seed=1)])
    assert caught.value.code == "exists"
    assert study.find(CELL) == [make_run()]


def test_a_study_is_not_started_inside_another(study):
    with pytest.raises(RecordError) as caught:
        Study.begin(study.path, "scale ranks", CONFIG)
    assert caught.value.code == "exists"


def _file(study):
    (file,) = (study.path / "cells").iterdir()
    return file


def _cell(**values):
    return json.dumps({"format": "paceline-cell", "version": 3} | values)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "paceline-cell"),
        ("{}", "paceline-cell"),
        (_cell(), "'cell'"),
        (_cell(cell=CELL), "'records'"),
        (_cell(cell="another", records=[]), "it contains 'another'"),
        (_cell(cell=CELL, records=[{"kind": "poem"}]), "unknown kind of record 'poem'"),
        (_cell(cell=CELL, records=[{"kind": "step"}]), "StepRecord"),
        (_cell(cell=CELL, records=None), "NoneType"),
    ],
)
def test_a_broken_cell_is_refused_with_its_name_and_what_to_do(study, text, reason):
    study.keep(CELL, [make_run()])
    _file(study).write_text(text)
    with pytest.raises(RecordError, match=reason) as caught:
        study.find(CELL)
    assert str(_file(study)) in str(caught.value) and caught.value.code == "damaged"
    assert "\n" not in str(caught.value)


def test_cells_whose_files_would_have_one_name_are_not_mistaken_for_each_other(study):
    study.keep("weak 32", [make_run()])
    assert study.find("weak/32") is None
    study.keep("weak/32", [make_run(), make_run(seed=2)])
    assert [len(study.find(name)) for name in ("weak 32", "weak/32")] == [1, 2]
    file = next((study.path / "cells").glob("weak-32.json"))
    file.write_text(file.read_text().replace("weak 32", "weak 33"))
    with pytest.raises(RecordError, match="'weak 33'"):
        study.find("weak 32")


def test_another_verb_is_refused(study):
    with pytest.raises(ConfigError, match=r"`scale ranks`.*`scale batch`") as caught:
        Study.load(study.path, "scale batch")
    assert caught.value.code == "other-verb"


def _document(**changes):
    return json.dumps({"format": "paceline-study", "version": 1, "verb": "scale ranks", "config": {}, **changes})


OTHER_VERSION = _document(version=2)
NO_STUDIES = ["{", "[]", "{}", '"x"', OTHER_VERSION, _document(format="paceline-run"), _document(version=1)]


@pytest.mark.parametrize("text", NO_STUDIES)
def test_a_file_without_a_study_is_refused(tmp_path, text):
    (tmp_path / STUDY_FILE).write_text(text)
    with pytest.raises(ConfigError, match=STUDY_FILE) as caught:
        Study.load(tmp_path, "scale ranks")
    assert caught.value.code == ("version" if text == OTHER_VERSION else "damaged")


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist") as caught:
        Study.load(tmp_path / "nowhere", "scale ranks")
    assert caught.value.code == "missing"


def test_a_cell_of_another_version_is_refused(study, build_collective):
    study.keep(CELL, [build_collective()])
    document = json.loads(_file(study).read_text()) | {"version": 2}
    _file(study).write_text(json.dumps(document))
    with pytest.raises(RecordError) as caught:
        study.find(CELL)
    assert caught.value.code == "version"
