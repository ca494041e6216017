"""The error types: their base classes and pickling between processes."""

import pickle

import pytest

from paceline import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.RecordError, ValueError),
        (errors.LaunchError, RuntimeError),
        (errors.CollectiveError, RuntimeError),
        (errors.MeasurementError, RuntimeError),
    ],
)
def test_every_error_is_ours_and_a_builtin(error, builtin):
    assert issubclass(error, errors.PacelineError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(("rank", "trace"), [(3, "Traceback ...\nKeyError: 'x'"), (0, ""), (None, "")])
def test_a_launch_error_survives_pickling_with_its_rank_and_traceback(rank, trace):
    copy = pickle.loads(pickle.dumps(errors.LaunchError("rank failed", rank, trace)))
    assert type(copy) is errors.LaunchError
    assert (str(copy), copy.rank, copy.rank_traceback) == ("rank failed", rank, trace)


@pytest.mark.parametrize(
    "error", [errors.ConfigError, errors.RecordError, errors.CollectiveError, errors.MeasurementError]
)
def test_the_other_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error("what was found")))
    assert type(copy) is error
    assert str(copy) == "what was found"
