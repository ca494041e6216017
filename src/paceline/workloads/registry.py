"""Models by name: their inputs, constructors, and benchmark sizes.

Only building a model imports torch, so commands can reject a request before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import ConfigError, suggest
from paceline.workloads import external
from paceline.workloads.data import Batch, DataForm, is_own

if TYPE_CHECKING:
    import torch
    from torch import nn

HF_PREFIX = "hf:"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of models: a convolution for each of `channels`, the width of hidden layers. None means the default."""

    channels: tuple[int, ...] | None = None
    hidden: int | None = None
    dropout: float | None = None


class Model(NamedTuple):
    """A model by name: its supported kinds of data, its options, and its default data."""

    kinds: tuple[str, ...]
    options: tuple[str, ...]
    form: DataForm


# Layers, width, heads, and the default vocabulary and context: the published sizes and two small ones. `gpt2-tiny` has
# the vocabulary of the byte tokenizer.
_GPT2_SIZES = {
    "gpt2-tiny": (4, 128, 4, 259, 128),
    "gpt2-mini": (4, 256, 4, 4096, 64),
    "gpt2": (12, 768, 12, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 50257, 1024),
}


_HF_KINDS = ("tokens", "pairs")
MODELS = {
    "linear": Model(("numbers", "images"), (), DataForm("numbers", (64,))),
    "mlp": Model(("numbers", "images"), ("hidden", "dropout"), DataForm("numbers", (64,))),
    "cnn": Model(("images",), ("channels", "hidden", "dropout"), DataForm("images", (1, 28, 28), 10)),
    "resnet18": Model(("images",), (), DataForm("images", (3, 32, 32), 10)),
    "resnet18-imagenet": Model(("images",), (), DataForm("images", (3, 224, 224), 1000)),
    **{
        name: Model(_HF_KINDS, ("dropout",), DataForm("tokens", (context,), vocabulary, vocabulary))
        for name, (*_, vocabulary, context) in _GPT2_SIZES.items()
    },
    "tiny": Model((), (), DataForm("numbers", (8,), 8)),  # for benchmarks only
}
NAMES = tuple(name for name, model in MODELS.items() if model.kinds)
_OTHERS = ("hf:NAME_OR_FOLDER", "FILE.py:FUNCTION")


def check_model(name: str, options: ModelOptions) -> None:
    """Reject an unknown name, and options that the model does not take. Imports no torch."""
    taken: tuple[str, ...] = ()
    if is_own(name):
        external.check_own(name)
    elif name.startswith(HF_PREFIX):
        external.check_source(name.removeprefix(HF_PREFIX))
    elif name in NAMES:
        taken = MODELS[name].options
    else:
        known = f"use one of {', '.join((*NAMES, *_OTHERS))}"
        raise ConfigError(f"model {name!r} is unknown: {suggest(name, NAMES)}{known}")
    shown = " ".join(map(str, options.channels or ()))
    for option, value in asdict(options).items():
        if value is not None and option not in taken:
            takes, given = ", ".join(taken) or "no options", shown if option == "channels" else value
            raise ConfigError(f"model {name} has no {option} (given: {given}): it takes {takes}")


def default_form(name: str) -> DataForm:
    """The form of a model's default synthetic data; call `check_model` first. Does not import torch."""
    if is_own(name):
        advice = "name it, such as synthetic:images, or return it: (model, data, step)"
        raise ConfigError(f"model {name} does not declare its data: {advice}", code="no-data")
    if name.startswith(HF_PREFIX):
        vocabulary, context = external.read_limits(name.removeprefix(HF_PREFIX))
        return DataForm("tokens", (min(128, context),), vocabulary, vocabulary)
    return MODELS[name].form


def describe_model(name: str) -> str:
    """A note for the user about this model, such as random weights; usually empty."""
    return external.describe_weights(name.removeprefix(HF_PREFIX)) if name.startswith(HF_PREFIX) else ""


def build_model(name: str, form: DataForm, options: ModelOptions) -> nn.Module:
    """Build the module for data of this form, with float32 parameters. Its output is (batch, num_classes) for images
    and pairs, (batch, context, vocabulary) for tokens, (batch, 1) for numbers."""
    check_model(name, options)
    if is_own(name):
        return external.build_own(name, form)
    is_hf = name.startswith(HF_PREFIX)
    kinds = _HF_KINDS if is_hf else MODELS[name].kinds
    if form.kind not in kinds:
        fit = [known for known, model in MODELS.items() if form.kind in model.kinds]
        fit += [_OTHERS[0]] * (form.kind in _HF_KINDS) + [_OTHERS[1]] * (form.kind == "own")
        what = f"model {name} takes {' or '.join(kinds)}, but the data is {form.kind}"
        raise ConfigError(f"{what}: models for {form.kind} are {', '.join(fit)}")
    if form.num_classes < 0:
        advice = "add num_classes or classes to the data set, or use your own model"
        raise ConfigError(f"model {name} needs the number of classes, which the data does not provide: {advice}")
    if is_hf:
        return external.build_hf(name.removeprefix(HF_PREFIX), form)
    return _build(name, form, options)


def _build(name: str, form: DataForm, options: ModelOptions) -> nn.Module:
    from paceline.workloads import models

    shape, num_outputs = form.shape, form.num_classes or 1
    hidden, dropout = options.hidden, options.dropout or 0.0
    if name in ("linear", "mlp"):
        return models.build_mlp(shape, 0 if name == "linear" else hidden or 256, num_outputs, dropout)
    if name == "cnn":
        return models.build_cnn(shape, options.channels or (32, 64), hidden or 128, num_outputs, dropout)
    if name.startswith("resnet18"):
        return models.ResNet18(shape[0], num_outputs, for_imagenet=name == "resnet18-imagenet")
    if name == "tiny":
        return models.build_tiny(depth=500, width=shape[0])
    layers, width, heads, *_ = _GPT2_SIZES[name]
    num_classes = form.num_classes if form.kind == "pairs" else 0
    return models.GPT2(layers, width, heads, form.vocabulary, shape[0], num_classes, dropout)


@dataclass(frozen=True)
class Workload:
    """A model at its benchmark size, with synthetic batches. `num_parameters` counts tensors, `num_elements` their
    elements. `form` None means the model's default."""

    model: str
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
        """Generate a synthetic batch from the seed and the rank; it differs between ranks."""
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
        """Run the forward pass and compute the cross-entropy, averaged over the batch."""
        import torch.nn.functional as F

        logits = model(batch.inputs)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


WORKLOADS = {
    workload.model: workload
    for workload in (
        # wide layers and a small batch: on a CPU, communication takes longer than compute
        Workload("mlp", 8, 16_785_408, 2, DataForm("numbers", (2048,), 2048), ModelOptions(hidden=2048)),
        # a small network for images of digits
        Workload("cnn", 8, 1_199_882, 16),
        # BatchNorm, and 32 x 32 images: compute takes longer than communication
        Workload("resnet18", 62, 11_173_962, 2),
        # a small GPT-2 whose tied embedding is ready last
        Workload("gpt2-mini", 52, 4_224_512, 4),
        # 1,000 tiny parameters: host overhead dominates
        Workload("tiny", 1000, 36_000, 8),
        # for a GPU: the stem and the classes of ImageNet, and a context of 1024
        Workload("resnet18-imagenet", 62, 11_689_512, 8),
        Workload("gpt2", 148, 124_439_808, 4),
        Workload("gpt2-large", 436, 774_030_080, 4),
    )
}
