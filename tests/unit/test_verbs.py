"""Arguments of verbs that are checked before any rank starts."""

import contextlib
import signal
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.runtime.ranks.session import Session
from paceline.studies import scale
from paceline.training.train_settings import Batches, TrainSettings, check_job
from paceline.verbs import profile
from paceline.verbs.train import _build_jobs, train


@pytest.mark.parametrize("ranks", [None, 1, (1,), [1]])
def test_layers_are_of_one_rank_however_it_is_written(ranks):
    assert profile._build_bare("cnn", {"ranks": ranks, "batch_size": None}).batches.batch_size == 32


@pytest.mark.parametrize("ranks", [0, 2, [1, 2]])
def test_layers_are_of_no_other_number_of_ranks(ranks):
    with pytest.raises(ConfigError, match="ranks"):
        profile._build_bare("cnn", {"ranks": ranks})


@pytest.mark.parametrize("given", [{"wrapper": "torch"}, {"plan": "plan.json"}, {"accumulate": 2}])
def test_layers_are_those_of_the_bare_model(given):
    with pytest.raises(ConfigError, match=f"--{next(iter(given))} .*: layers are timed"):
        profile._build_bare("cnn", given)


def test_no_batch_size_is_the_default_one(monkeypatch):
    def open_session(verb, config, **_):
        raise ConfigError(str(config["batch_sizes"]))

    monkeypatch.setattr(profile, "open_session", open_session)
    with pytest.raises(ConfigError, match="32"):
        profile.profile("cnn", kind="phases", ranks=1, batch_size=None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size 0: must be"),
        ({"seeds": -1}, "--seeds -1: must be at least 1"),
        ({"base_batch_size": 0}, "--base-batch-size 0: must be at least 1"),
    ],
)
def test_what_a_study_of_large_batches_refuses(arguments, words):
    with pytest.raises(ConfigError, match=words):
        scale.large_batch(**arguments)


@pytest.mark.parametrize(
    ("given", "batches"),
    [
        ({}, [Batches(1, 32, 1), Batches(2, 16, 1)]),
        ({"accumulate": 2}, [Batches(1, 32, 2), Batches(2, 16, 2)]),
        ({"global_batch_size": 24}, [Batches(1, 24, 1), Batches(2, 12, 1)]),
        ({"global_batch_size": 24, "batch_size": 6}, [Batches(1, 6, 4), Batches(2, 6, 2)]),
    ],
)
def test_several_numbers_of_ranks_have_the_same_global_batch(given, batches):
    assert [job.batches for job in _build_jobs((1, 2), given)] == batches


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": (1, 2), "batch_size": 8}, "--batch-size 8 with --ranks 1,2: .* pass --global-batch-size"),
        ({"ranks": (1, 3)}, "a global batch of 32, the default for one rank.* a multiple of 3"),
        ({"ranks": (1, 3), "accumulate": 2}, "a global batch of 64, .* a multiple of 6"),
        ({"ranks": (1, 2), "resume": "run"}, "--ranks 1,2 with --resume"),
        ({"ranks": ()}, "one or more numbers"),
    ],
)
def test_what_several_numbers_of_ranks_cannot_be_trained_with(given, words):
    with pytest.raises(ConfigError, match=words):
        train(**given)


def test_an_unknown_setting_is_refused_with_the_nearest_one():
    for call in (lambda: train(optimiser="sgd"), lambda: profile.profile("cnn", optimiser="sgd")):
        with pytest.raises(ConfigError, match=r"'optimiser' .* did you mean optimizer\?"):
            call()


def test_a_launched_world_has_one_number_of_ranks(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="launcher") as caught:
        train(ranks=(1, 2))
    assert caught.value.code == "launched"


@pytest.mark.parametrize(("gpus", "device", "is_refused"), [(0, "auto", True), (2, "cpu", True), (1, "auto", False)])
def test_torchs_dataparallel_needs_gpus(monkeypatch, gpus, device, is_refused):
    monkeypatch.setattr("paceline.machine.count_gpus", lambda: gpus)
    settings = TrainSettings(wrapper="dp", device=device)
    with pytest.raises(ConfigError, match="new") if is_refused else contextlib.nullcontext():
        check_job(settings)


@pytest.mark.parametrize(
    ("number", "code", "is_saved"), [(signal.SIGUSR1, 0, True), (signal.SIGTERM, 0, True), (signal.SIGUSR1, 138, False)]
)
def test_a_run_that_saved_tells_the_script_of_slurm(monkeypatch, tmp_path, number, code, is_saved):
    mark = tmp_path / "mark"
    monkeypatch.setenv("PACELINE_SAVED", str(mark))
    monkeypatch.setattr(
        Session, "ask", lambda *_, **__: SimpleNamespace(signal=number, step=4, facts={}, notes=(), rows=(), asked=(0,))
    )
    with pytest.raises(SystemExit) as caught:
        train(out=tmp_path if is_saved else None)
    assert caught.value.code == code and mark.exists() == is_saved


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_moments_of_a_run_starts_no_other(monkeypatch, tmp_path, capsys, number, code):
    asked = []

    def ask(session, function, arguments, saves, hang_timeout_s, recovery):
        asked.append(session.ranks)
        session.signal = number  # the ranks had already taken their last step and never got the signal
        return SimpleNamespace(signal=0, step=4, facts={}, notes=(), rows=())

    monkeypatch.setattr(Session, "ask", ask)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        train(ranks=(1, 2), out=tmp_path)
    assert getattr(caught.value, "code", 130) == code and asked == [1]
    assert "interrupted: 1-rank (finished) saved in " in capsys.readouterr().err
