"""What settings ask of `workloads`: the request for data and the options of a model. Imports no torch.

Building what is asked for is in `build`.
"""

from __future__ import annotations

from paceline.training.settings import TrainSettings
from paceline.workloads.choose import ModelOptions, check_model
from paceline.workloads.data.requests import DataRequest, check_request, parse_data

__all__ = ["build_data_request", "build_model_options", "check_requests"]


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
    )


def build_model_options(settings: TrainSettings) -> ModelOptions:
    return ModelOptions(channels=settings.channels, hidden=settings.hidden, dropout=settings.dropout)


def check_requests(settings: TrainSettings) -> None:
    """Refuse an unknown model, unknown data, or files that are not there, before any rank starts."""
    check_model(settings.model, build_model_options(settings))
    check_request(build_data_request(settings))
