"""Models by name: what each takes, how it is built, and the sizes that benchmarks use.

Loads without torch, so that a command can refuse a request before any rank starts; building needs torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.workloads import huggingface, own
from paceline.workloads.data import Batch, DataForm

if TYPE_CHECKING:
    import torch
    from torch import nn

HF_PREFIX = "hf:"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What can be set of a model; None means the model's default.

    `channels`: one convolution of `cnn` for each. `hidden`: the width of hidden linear layers.
    """

    channels: tuple[int, ...] | None = None
    hidden: int | None = None
    dropout: float | None = None

    @property
    def given(self) -> dict[str, object]:
        """The options that are set, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Model:
    """What a named model needs: the kinds of data that it can learn, the options that it takes, its default data."""

    kinds: tuple[str, ...]
    options: tuple[str, ...]
    form: DataForm


@dataclass(frozen=True)
class _GPT2Size:
    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


# The published sizes and two small ones; `gpt2-tiny` reads bytes and three marks. With other data, the vocabulary and
# the number of positions are those of the data.
GPT2_SIZES = {
    "gpt2-tiny": _GPT2Size(4, 128, 4, vocabulary=259, context=128),
    "gpt2-mini": _GPT2Size(4, 256, 4, vocabulary=4096, context=64),
    "gpt2": _GPT2Size(12, 768, 12),
    "gpt2-medium": _GPT2Size(24, 1024, 16),
    "gpt2-large": _GPT2Size(36, 1280, 20),
    "gpt2-xl": _GPT2Size(48, 1600, 25),
}


def _numbers_form(num_features: int, num_classes: int = 0) -> DataForm:
    return DataForm(kind="numbers", shape=(num_features,), num_classes=num_classes)


def _images_form(channels: int, side: int, num_classes: int) -> DataForm:
    return DataForm(kind="images", shape=(channels, side, side), num_classes=num_classes)


def _tokens_form(vocabulary: int, context: int) -> DataForm:
    return DataForm(kind="tokens", shape=(context,), num_classes=vocabulary, vocabulary=vocabulary)


MODELS = {
    "linear": Model(("numbers", "images"), (), _numbers_form(64)),
    "mlp": Model(("numbers", "images"), ("hidden", "dropout"), _numbers_form(64)),
    "cnn": Model(("images",), ("channels", "hidden", "dropout"), _images_form(1, 28, 10)),
    "resnet18": Model(("images",), (), _images_form(3, 32, 10)),
    "resnet18-imagenet": Model(("images",), (), _images_form(3, 224, 1000)),
    **{
        name: Model(("tokens", "pairs"), ("dropout",), _tokens_form(size.vocabulary, size.context))
        for name, size in GPT2_SIZES.items()
    },
    "tiny": Model((), (), _numbers_form(8, 8)),  # learns no data: for benchmarks alone
}
NAMES = tuple(name for name, model in MODELS.items() if model.kinds)
_OTHERS = ("hf:NAME_OR_FOLDER", "FILE.py:FUNCTION")
_HF_KINDS = ("tokens", "pairs")


def check_model(name: str, options: ModelOptions) -> None:
    """Refuse an unknown name, options that the model does not take, and invalid values. Imports no torch."""
    taken: tuple[str, ...] = ()
    if own.is_own(name):
        own.check_own(name)
    elif name.startswith(HF_PREFIX):
        huggingface.check_source(name.removeprefix(HF_PREFIX))
    elif name in NAMES:
        taken = MODELS[name].options
    else:
        near = difflib.get_close_matches(name, NAMES, 3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"model {name!r} is unknown: {hint}known are {', '.join((*NAMES, *_OTHERS))}")
    for option, value in options.given.items():
        if option not in taken:
            takes = f"it takes {', '.join(taken)}" if taken else "it takes no options"
            raise ConfigError(f"model {name} has no {option} (given: {_show(value)}): {takes}")
    if options.channels is not None and (not options.channels or min(options.channels) < 1):
        raise ConfigError(f"channels ({_show(options.channels)}): give one number of at least 1 for each convolution")
    if options.hidden is not None and options.hidden < 1:
        raise ConfigError(f"hidden {options.hidden}: at least 1")
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise ConfigError(f"dropout {options.dropout}: at least 0 and less than 1")


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def default_form(name: str, options: ModelOptions) -> DataForm:
    """The form of the synthetic data that this model is trained on where no data is named. Imports no torch."""
    check_model(name, options)
    if own.is_own(name):
        raise ConfigError(
            f"model {name} does not say what data it takes: name a data set, or a kind such as synthetic:images"
        )
    if name.startswith(HF_PREFIX):
        vocabulary, context = huggingface.read_limits(name.removeprefix(HF_PREFIX))
        return _tokens_form(vocabulary, min(128, context))
    return MODELS[name].form


def describe_model(name: str) -> str:
    """What a person should know before training this model, such as that its weights are random; mostly empty."""
    if name.startswith(HF_PREFIX):
        return huggingface.describe_weights(name.removeprefix(HF_PREFIX))
    return ""


def build_model(name: str, form: DataForm, options: ModelOptions) -> nn.Module:
    """The module that learns data of this form. Parameters are float32, drawn from torch's generator unless loaded.

    It gives (batch, num_classes) for images and pairs, (batch, context, vocabulary) for tokens, (batch, 1) for numbers;
    an `hf:` model returns an object that has this as `logits`.
    """
    check_model(name, options)
    if own.is_own(name):
        return own.build_own(name, form)
    is_hf = name.startswith(HF_PREFIX)
    kinds = _HF_KINDS if is_hf else MODELS[name].kinds
    if form.kind not in kinds:
        fit = [known for known, model in MODELS.items() if form.kind in model.kinds]
        fit += [_OTHERS[0]] if form.kind in _HF_KINDS else []
        raise ConfigError(
            f"model {name} takes {' or '.join(kinds)}, and the data is {form.kind}: models for {form.kind} are "
            f"{', '.join(fit)}"
        )
    if is_hf:
        return huggingface.build_hf(name.removeprefix(HF_PREFIX), form)
    return _build(name, form, options)


def _build(name: str, form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads import models

    num_outputs, dropout = form.num_classes or 1, options.dropout or 0.0
    if name == "linear":
        return models.build_linear(form.shape, num_outputs)
    if name == "mlp":
        return models.build_mlp(form.shape, options.hidden or 256, num_outputs, dropout)
    if name == "cnn":
        channels, hidden = options.channels or (32, 64), options.hidden or 128
        return models.build_cnn(form.shape, channels, hidden, num_outputs, dropout)
    if name == "resnet18":
        return models.build_resnet18(form.shape[0], num_outputs)
    if name == "resnet18-imagenet":
        return models.build_resnet18_imagenet(form.shape[0], num_outputs)
    if name == "tiny":
        return models.build_tiny(num_parameters=1000, width=form.shape[0])
    size = GPT2_SIZES[name]
    return models.GPT2(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        vocabulary=form.vocabulary,
        context=form.shape[0],
        num_classes=form.num_classes if form.kind == "pairs" else 0,
        dropout=dropout,
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model at the size at which benchmarks step through it, with its synthetic batches.

    `num_parameters` counts tensors, as a wrapper sees them; `num_elements` their elements. A tied tensor counts once.
    `form` None means the model's default.
    """

    model: str
    purpose: str
    num_parameters: int
    num_elements: int
    batch_size: int
    form: DataForm | None = None
    options: ModelOptions = field(default_factory=ModelOptions)

    @property
    def data_form(self) -> DataForm:
        return self.form or MODELS[self.model].form

    def build(self) -> nn.Module:
        return _build(self.model, self.data_form, self.options)

    def make_batch(self, batch_size: int, seed: int, rank: int, device: torch.device) -> Batch:
        """A synthetic batch, equal for equal seed and rank wherever it is made, and different on every rank."""
        import torch

        form, generator = self.data_form, torch.Generator().manual_seed(1000 * seed + rank)
        if form.kind == "tokens":
            ids = torch.randint(form.vocabulary, (batch_size, form.shape[0] + 1), generator=generator)
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        else:
            inputs = torch.randn((batch_size, *form.shape), generator=generator)
            targets = torch.randint(form.num_classes, (batch_size,), generator=generator)
        return Batch(inputs.to(device), targets.to(device))

    def compute_loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
        """The forward pass and its cross-entropy, averaged over the batch."""
        import torch.nn.functional as F

        logits = model(batch.inputs)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


WORKLOADS = {
    workload.model: workload
    for workload in (
        Workload(
            model="mlp", purpose="wide layers and a small batch: communication takes longer than arithmetic on CPU",
            num_parameters=8, num_elements=16_785_408, batch_size=2,
            form=_numbers_form(2048, 2048), options=ModelOptions(hidden=2048),
        ),
        Workload(
            model="cnn", purpose="a small network for images of digits",
            num_parameters=8, num_elements=1_199_882, batch_size=16,
        ),
        Workload(
            model="resnet18", purpose="BatchNorm, and 32 x 32 images: arithmetic takes longer than communication",
            num_parameters=62, num_elements=11_173_962, batch_size=2,
        ),
        Workload(
            model="gpt2-mini", purpose="a small GPT-2 whose tied embedding is ready last",
            num_parameters=52, num_elements=4_224_512, batch_size=4,
        ),
        Workload(
            model="tiny", purpose="1,000 tiny parameters: the time is the host's overhead",
            num_parameters=1000, num_elements=36_000, batch_size=8,
        ),
        Workload(
            model="resnet18-imagenet", purpose="ResNet-18 with the stem and the classes of ImageNet, for a GPU",
            num_parameters=62, num_elements=11_689_512, batch_size=8,
        ),
        Workload(
            model="gpt2", purpose="GPT-2 with a context of 1024, for a GPU",
            num_parameters=148, num_elements=124_439_808, batch_size=4,
        ),
        Workload(
            model="gpt2-large", purpose="GPT-2 large with a context of 1024, for a GPU",
            num_parameters=436, num_elements=774_030_080, batch_size=4,
        ),
    )
}  # fmt: skip
