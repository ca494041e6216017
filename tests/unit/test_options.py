"""Options: values outside their limits are refused, and every limit declared by settings is checked."""

import dataclasses
import math

import pytest

from paceline.cli.commands import Command
from paceline.errors import ConfigError
from paceline.measure.bench_settings import ChunkSettings, CollectiveSettings, WrapperSettings
from paceline.options import Option, check_counts, find_flag
from paceline.predict.tuning import TuneSettings
from paceline.studies.batch_sizes import BatchSettings
from paceline.studies.large_batches import LargeBatchSettings
from paceline.studies.rank_scaling import ScaleSettings, Setup
from paceline.training.train_settings import TrainSettings

NAMES = Option(choices=("gloo", "nccl"))
DEVICE = Option("cpu or cuda", pattern=r"cpu|cuda(:\d+)?")
COUNT, SHARE, NORM = Option(least=1, each_s=1e-3), Option(least=0, below=1), Option(above=0)
SETTINGS = (
    TrainSettings(),
    CollectiveSettings(sizes=(1024,)),
    ChunkSettings(total_bytes=1024, chunks=(1024,)),
    WrapperSettings(),
    TuneSettings(),
    BatchSettings(job=TrainSettings(), batch_sizes=(8,)),
    ScaleSettings(job=TrainSettings(), ranks=(1, 2), setups=(Setup("torch", "gloo"),), batch_sizes=(8,)),
    LargeBatchSettings(job=TrainSettings(), base_batch_size=8, global_batch_sizes=(32,), recipes=("none",)),
)
DECLARED = [
    pytest.param(settings, field, id=f"{type(settings).__name__}.{field.name}")
    for settings in SETTINGS
    for field in dataclasses.fields(settings)
    if "option" in field.metadata
]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        (NAMES, ("gloo", ("nccl", "gloo"), ["nccl", "gloo"], None)),
        (DEVICE, ("cpu", "cuda:1")),
        (COUNT, (1, 10**9, (1, 2), [1, 2], None)),
        (SHARE, (0, 0.0, 0.999)),
        (NORM, (1e-9, 5)),
        (Option(), ("anything", -1, math.nan, ())),
    ],
)
def test_a_value_within_the_limits_is_accepted(option, values):
    for value in values:
        option.check("what", value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        (NAMES, "glo", "--what 'glo' is unknown: did you mean gloo? use one of gloo, nccl"),
        (NAMES, ("gloo", "mpi"), "--what 'mpi' is unknown: use one of"),
        (NAMES, (), "--what: no name"),
        (DEVICE, "cuda:x", "--what 'cuda:x' cannot be parsed: use cpu or cuda"),
        (COUNT, 0, "--what 0: must be at least 1"),
        (COUNT, (3, -1), "--what -1: must be at least 1"),
        (COUNT, (), "--what: no number"),
        (COUNT, [], "--what: no number"),
        (COUNT, [3, -1], "--what -1: must be at least 1"),
        (COUNT, "4", "--what '4': must be a number"),
        (NAMES, ["mpi"], "--what 'mpi' is unknown: use one of"),
        (NAMES, {}, "--what '{}' is unknown: use one of"),
        (DEVICE, 0, "--what '0' cannot be parsed: use cpu or cuda"),
        (SHARE, 1, "--what 1: must be at least 0 and below 1"),
        (SHARE, -0.5, "--what -0.5: must be at least 0 and below 1"),
        (SHARE, math.nan, "--what nan: must be finite"),
        (NORM, 0.0, "--what 0.0: must be above 0"),
        (NORM, math.inf, "--what inf: must be finite"),
    ],
)
def test_a_value_outside_the_limits_is_refused_with_what_is_needed(option, value, words):
    with pytest.raises(ConfigError) as caught:
        option.check("what", value)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_requests_that_would_take_years_are_refused():
    with pytest.raises(ConfigError, match=r"--iters 10\^24 takes more than a year") as caught:
        check_counts(warmup=0, iters=10**24)
    assert caught.value.code == "endless"


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", None), ("wrapper", None), ("device", None), ("backend", None), ("batch_size", [8, 16]), ("lr", "1")],
)
def test_a_value_of_the_wrong_type_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{find_flag(name)}.* must "):
        TrainSettings(**{name: value}).check()


def test_lists_and_devices_are_accepted_as_in_python():
    torch = pytest.importorskip("torch")
    settings = TrainSettings(channels=[8, 16, 16], device=torch.device("cuda", 1))
    settings.check()
    assert settings.device == "cuda:1"


@pytest.mark.parametrize(("settings", "field"), DECLARED)
def test_every_declared_limit_is_checked(settings, field):
    option = field.metadata["option"]
    low = [limit for limit in (option.least, option.above) if limit is not None]
    bad = ["strange!"] if option.choices or option.pattern else [limit - 1 for limit in low]
    bad += [option.below] if option.below is not None else []
    several = isinstance(getattr(settings, field.name), tuple) or str(field.type).startswith("tuple")
    for value in bad:
        with pytest.raises(ConfigError, match=find_flag(field.name)):
            changed = dataclasses.replace(settings, **{field.name: (value,) if several else value})
            changed.check(2) if isinstance(changed, TuneSettings) else changed.check()


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ([], {}),
        (["--quick"], {"steps": 1, "warmup": 1}),
        (["--quick", "--steps", "7"], {"steps": 7, "warmup": 1}),
    ],
)
def test_quick_sets_the_options_that_are_not_given(monkeypatch, typed, passed):
    seen = {}

    def record(**given):
        seen.update(given)
        raise ConfigError("stop")

    command = Command("verbs.profile:trace", record, quick={"steps": 1, "warmup": 1}, without="model step")
    with pytest.raises(ConfigError, match="stop"):
        command.build().main(args=typed, standalone_mode=False)
    assert {name: seen[name] for name in ("steps", "warmup") if name in seen} == passed
    assert "quick" not in seen
