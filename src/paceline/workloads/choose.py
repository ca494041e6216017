"""Models by name for training: what a name takes, the data that it would like, and the module for the data there is.

Loads without torch, so that a command can refuse a request before any rank starts; building needs torch. What the
benchmarks step through, with sizes and batches, is in `catalog`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.workloads import huggingface, own_model
from paceline.workloads.forms import DataForm

if TYPE_CHECKING:
    from torch import nn

__all__ = ["GPT2_SIZES", "NAMES", "ModelOptions", "build_model", "check_model", "default_form", "describe_model"]

HF_PREFIX = "hf:"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What can be set of a model; None, or False, where its own is meant.

    `channels`: one convolution of `cnn` for each. `hidden`: the width of hidden linear layers. `layers`: cuts an `hf:`
    model to its first so many, with random weights. `zero_init`: blocks of a ResNet begin as their shortcuts.
    """

    channels: tuple[int, ...] | None = None
    hidden: int | None = None
    dropout: float | None = None
    layers: int | None = None
    zero_init: bool = False

    @property
    def given(self) -> dict[str, object]:
        """The options that are set, by name."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if value is not None and value is not False}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A model: the kinds of data that it can learn, the options that it takes, and the data that it would like."""

    kinds: tuple[str, ...]
    options: tuple[str, ...]
    form: DataForm
    build: Callable[[DataForm, ModelOptions], nn.Module]


@dataclass(frozen=True)
class _GPT2Size:
    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


# The five published sizes and two small ones; `gpt2-tiny` reads bytes and three marks. On other data the vocabulary and
# the number of positions are the data's.
GPT2_SIZES = {
    "gpt2-tiny": _GPT2Size(4, 128, 4, vocabulary=259, context=128),
    "gpt2-mini": _GPT2Size(4, 256, 4, vocabulary=4096, context=64),
    "gpt2": _GPT2Size(12, 768, 12),
    "gpt2-medium": _GPT2Size(24, 1024, 16),
    "gpt2-large": _GPT2Size(36, 1280, 20),
    "gpt2-xl": _GPT2Size(48, 1600, 25),
}


def _count_outputs(form: DataForm) -> int:
    return 1 if form.kind == "numbers" else form.num_classes


def _build_linear(form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads.models import build_linear

    return build_linear(form.shape, _count_outputs(form))


def _build_mlp(form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads.models import build_mlp

    return build_mlp(form.shape, options.hidden or 256, _count_outputs(form), options.dropout or 0.0)


def _build_cnn(form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads.models import build_cnn

    channels, hidden = options.channels or (32, 64), options.hidden or 128
    return build_cnn(form.shape, channels, hidden, form.num_classes, options.dropout or 0.0)


def _build_resnet18(form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads.resnet import build_resnet18

    return build_resnet18(form.shape[0], form.num_classes, options.zero_init)


def _build_resnet18_imagenet(form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads.resnet import build_resnet18_imagenet

    return build_resnet18_imagenet(form.shape[0], form.num_classes, options.zero_init)


def _gpt2_entry(size: _GPT2Size) -> _Entry:
    def build(form: DataForm, options: ModelOptions) -> nn.Module:
        from paceline.workloads.gpt2 import GPT2

        return GPT2(
            layers=size.layers,
            width=size.width,
            heads=size.heads,
            vocabulary=form.vocabulary,
            context=form.shape[0],
            num_classes=form.num_classes if form.kind == "pairs" else 0,
            dropout=options.dropout or 0.0,
        )

    form = _tokens_form(size.vocabulary, size.context)
    return _Entry(kinds=("tokens", "pairs"), options=("dropout",), form=form, build=build)


def _tokens_form(vocabulary: int, context: int) -> DataForm:
    return DataForm(kind="tokens", shape=(context,), num_classes=vocabulary, vocabulary=vocabulary)


_NUMBERS = DataForm(kind="numbers", shape=(64,), num_classes=0)
_ENTRIES = {
    "linear": _Entry(kinds=("numbers", "images"), options=(), form=_NUMBERS, build=_build_linear),
    "mlp": _Entry(kinds=("numbers", "images"), options=("hidden", "dropout"), form=_NUMBERS, build=_build_mlp),
    "cnn": _Entry(
        kinds=("images",),
        options=("channels", "hidden", "dropout"),
        form=DataForm(kind="images", shape=(1, 28, 28), num_classes=10),
        build=_build_cnn,
    ),
    "resnet18": _Entry(
        kinds=("images",),
        options=("zero_init",),
        form=DataForm(kind="images", shape=(3, 32, 32), num_classes=10),
        build=_build_resnet18,
    ),
    "resnet18-imagenet": _Entry(
        kinds=("images",),
        options=("zero_init",),
        form=DataForm(kind="images", shape=(3, 224, 224), num_classes=1000),
        build=_build_resnet18_imagenet,
    ),
    **{name: _gpt2_entry(size) for name, size in GPT2_SIZES.items()},
}
NAMES = tuple(_ENTRIES)
_OTHERS = ("hf:NAME_OR_FOLDER", "FILE.py:FUNCTION")
_HF_KINDS, _HF_OPTIONS = ("tokens", "pairs"), ("layers",)


def check_model(name: str, options: ModelOptions) -> None:
    """Refuse an unknown name, options that the model does not take, and values that cannot be. Imports no torch."""
    if own_model.is_own(name):
        own_model.check_own(name)
        taken: tuple[str, ...] = ()
    elif name.startswith(HF_PREFIX):
        huggingface.check_source(name.removeprefix(HF_PREFIX))
        taken = _HF_OPTIONS
    elif name in _ENTRIES:
        taken = _ENTRIES[name].options
    else:
        near = difflib.get_close_matches(name, NAMES, 3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"model {name!r} is unknown: {hint}known are {', '.join((*NAMES, *_OTHERS))}")
    for option, value in options.given.items():
        if option not in taken:
            takes = f"it takes {', '.join(taken)}" if taken else "it takes no options"
            raise ConfigError(f"model {name} has no {option} (given: {_show(value)}): {takes}")
    _check_values(options)


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_values(options: ModelOptions) -> None:
    if options.channels is not None and (not options.channels or min(options.channels) < 1):
        raise ConfigError(f"channels ({_show(options.channels)}): give one number of at least 1 for each convolution")
    for option in ("hidden", "layers"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: at least 1")
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise ConfigError(f"dropout {options.dropout}: at least 0 and less than 1")


def default_form(name: str, options: ModelOptions) -> DataForm:
    """The form of the synthetic data that this model is trained on where nobody names data."""
    check_model(name, options)
    if own_model.is_own(name):
        raise ConfigError(
            f"model {name} does not say what data it takes: name a data set, or a kind such as synthetic:images"
        )
    if name.startswith(HF_PREFIX):
        vocabulary, context = huggingface.read_limits(name.removeprefix(HF_PREFIX))
        return _tokens_form(vocabulary, min(128, context))
    return _ENTRIES[name].form


def describe_model(name: str, options: ModelOptions) -> str:
    """What a person should know before training this model, such as that its weights are random; mostly empty."""
    if name.startswith(HF_PREFIX):
        return huggingface.describe_weights(name.removeprefix(HF_PREFIX), options.layers)
    return ""


def build_model(name: str, form: DataForm, options: ModelOptions) -> nn.Module:
    """The module that learns data of this form. Parameters are float32, drawn from torch's generator unless loaded.

    It gives (batch, num_classes) for images and pairs, (batch, context, vocabulary) for tokens, (batch, 1) for numbers;
    an `hf:` model returns an object that has this as `logits`.
    """
    check_model(name, options)
    if own_model.is_own(name):
        return own_model.build_own(name, form)
    is_hf = name.startswith(HF_PREFIX)
    kinds = _HF_KINDS if is_hf else _ENTRIES[name].kinds
    if form.kind not in kinds:
        fit = [known for known, entry in _ENTRIES.items() if form.kind in entry.kinds]
        fit += [_OTHERS[0]] if form.kind in _HF_KINDS else []
        raise ConfigError(
            f"model {name} takes {' or '.join(kinds)}, and the data is {form.kind}: models for {form.kind} are "
            f"{', '.join(fit)}"
        )
    if is_hf:
        return huggingface.build_hf(name.removeprefix(HF_PREFIX), form, options.layers)
    return _ENTRIES[name].build(form, options)
