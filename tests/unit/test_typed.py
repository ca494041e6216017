"""Mistyped commands: each error names the missing part."""

from __future__ import annotations

import sys

import pytest
import typer

import paceline
from paceline.cli.main import _join_lists, _tune, _watch, app
from paceline.errors import ConfigError, RecordError
from paceline.measure.bench_settings import CollectiveSettings, WrapperSettings
from paceline.runtime.faults.recovery import _explain_start
from paceline.verbs import bench


@pytest.mark.parametrize("words", [["train.py"], ["train.py", "--lr", "1"], [sys.executable, "train.py"]])
def test_a_program_without_the_dashes_is_told_to_use_them(words):
    with pytest.raises(ConfigError, match=r"paceline profile -- .*train\.py"):
        _join_lists(["profile", *words])


def test_a_script_is_not_a_command_to_tune():
    with pytest.raises(ConfigError, match=r"paceline tune -- python train\.py"):
        _tune(command=["train.py"])


def test_profiles_and_their_options_are_left_alone():
    assert _join_lists(["profile", "phases", "--ranks", "2"]) == ["profile", "phases", "--ranks", "2"]
    assert _join_lists(["profile", "--compare", "a", "b"]) == ["profile", "--compare", "a", "b"]
    assert _join_lists(["profile", "--", "python", "a.py"]) == ["profile", "attach", "--", "python", "a.py"]


@pytest.mark.parametrize(("words", "named"), [([], "nothing"), (["nosuch"], "nosuch")])
def test_watch_requires_a_folder_or_a_command(words, named, tmp_path):
    with pytest.raises(ConfigError, match=f"^{named}.*folder.*--") as caught:
        _watch(command=words, out=tmp_path)
    assert "profile" not in str(caught.value)


def test_a_folder_of_runs_is_not_a_run_and_the_newest_is_named(tmp_path):
    with pytest.raises(RecordError) as caught:
        paceline.load_result(tmp_path)
    assert caught.value.code == "not-a-run"
    for name in ("20260101-a", "20260102-b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    with pytest.raises(RecordError, match="20260102-b"):
        paceline.save_report([tmp_path])


def test_a_mistyped_keyword_is_not_blamed_on_a_file(tmp_path):
    with pytest.raises(TypeError, match=r"predict\(\).*did you mean network\?"):
        paceline.predict(tmp_path, networks="10gbe")


@pytest.mark.parametrize(
    ("text", "word"),
    [(None, "standard input"), ("run()", "must start ranks"), ("if __name__ == '__main__': run()", "above")],
)
def test_a_rank_that_cannot_start_says_why(monkeypatch, tmp_path, text, word):
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script) if text else "<stdin>", raising=False)
    assert word in _explain_start()


def test_help_shows_no_python_types():
    command = typer.main.get_command(app)
    pages = [(["tune"], "--quick"), (["bench", "allreduce"], "--limit"), ([], "--debug")]
    for words, known in pages:
        one = command
        for word in words:
            one = one.commands[word]
        context = one.make_context("paceline", ["x"] if not words else [], resilient_parsing=True)
        for option in one.get_params(context):
            assert "<" not in str(getattr(option, "metavar", None) or ""), option.name
        assert known in [name for option in one.params for name in option.opts]
        assert one.get_help_option(context).metavar == ""


@pytest.mark.parametrize(
    ("given", "iters", "models"),
    [({"quick": True}, 10, ("mlp", "cnn")), ({"quick": True, "iters": 3, "models": "tiny"}, 3, ("tiny",))],
)
def test_quick_measures_less_unless_told_otherwise(monkeypatch, given, iters, models):
    monkeypatch.setattr(bench, "open_session", stop_with_config)
    with pytest.raises(InterruptedError) as caught:
        bench.wrappers(**given)
    config = caught.value.args[0]
    assert (config["iters"], config["warmup"], config["models"]) == (iters, 1, models)


def stop_with_config(verb: str, config: dict, **more: object) -> None:
    raise InterruptedError(config)


def test_the_time_of_a_benchmark_is_known_unless_the_repetitions_are():
    many = CollectiveSettings(
        sizes=(1024, 4096), ranks=(2, 4), backends=("gloo", "shm"), memories=("ordinary", "shared")
    )
    assert many.num_cells == 2 * 2 * 3 and many.limit_s == 12 * 4.0
    assert WrapperSettings().limit_s == 5 * 60.0 and WrapperSettings(iters=5).limit_s is None
