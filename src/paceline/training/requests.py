"""What settings ask of `workloads`: the request for data and the options of a model. Imports no torch.

Building what is asked for is in `build`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.plan import Plan
from paceline.training.settings import TrainSettings
from paceline.workloads.choose import ModelOptions, check_model
from paceline.workloads.data.requests import DataRequest, check_request, parse_data

__all__ = ["build_data_request", "build_model_options", "check_requests", "load_plan", "takes_cap_lists"]


def build_data_request(settings: TrainSettings) -> DataRequest:
    name, path = parse_data(settings.data)
    return DataRequest(
        name=name,
        path=path,
        context=settings.context,
        tokenizer=settings.tokenizer,
        samples=settings.samples,
        seed=settings.seed,
        augment=settings.augment,
        cutout=settings.cutout,
    )


def build_model_options(settings: TrainSettings) -> ModelOptions:
    return ModelOptions(channels=settings.channels, hidden=settings.hidden, dropout=settings.dropout)


def check_requests(settings: TrainSettings) -> None:
    """Refuse an unknown model, unknown data, or files that are not there, before any rank starts."""
    check_model(settings.model, build_model_options(settings))
    check_request(build_data_request(settings))
    if settings.plan is not None:
        load_plan(Path(settings.plan))


def takes_cap_lists() -> bool:
    """Whether the installed torch can give its wrapper a cap for each bucket; asked without importing it."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def load_plan(path: Path) -> Plan:
    """The plan in a file; ConfigError says what is wrong with it."""
    try:
        return Plan.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; give the file of a plan") from None
    except (PacelineError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: {error}") from None
