"""The models that benchmarks step through: what each is for, its size, how to build it, and its batches and loss.

Loads without torch, so that a command can refuse a request before any rank starts; building needs torch. Other models,
sizes and data are in `choose`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.workloads.choose import ModelOptions, build_model, default_form
from paceline.workloads.forms import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MODELS", "Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with the batches that it trains on. `input_shape` is one sample's; `num_tokens` > 0 means token ids.

    `num_parameters` counts tensors, as a wrapper sees them; `num_elements` what is in them. A tied one counts once.
    """

    purpose: str
    build: Callable[[], nn.Module]
    num_parameters: int
    num_elements: int
    batch_size: int
    input_shape: tuple[int, ...]
    num_classes: int
    num_tokens: int = 0

    def make_batch(self, batch_size: int, seed: int, rank: int, device: torch.device) -> Batch:
        """A synthetic batch, equal for equal seed and rank wherever it is made, and different on every rank."""
        import torch

        generator = torch.Generator().manual_seed(1000 * seed + rank)
        shape = (batch_size, *self.input_shape)
        if self.num_tokens:
            ids = torch.randint(self.num_tokens, (batch_size, self.input_shape[0] + 1), generator=generator)
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        else:
            inputs = torch.randn(shape, generator=generator)
            targets = torch.randint(self.num_classes, (batch_size,), generator=generator)
        return Batch(inputs.to(device), targets.to(device))

    def compute_loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
        """The forward pass and its cross-entropy, averaged over the batch."""
        import torch.nn.functional as F

        logits = model(batch.inputs)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


def _build_mlp() -> nn.Module:
    from paceline.workloads.models import build_mlp

    return build_mlp((2048,), 2048, 2048)


def _build_tiny() -> nn.Module:
    from paceline.workloads.models import build_tiny

    return build_tiny(num_parameters=1000)


def _build_default(name: str) -> Callable[[], nn.Module]:
    """The model of this name as `choose` builds it by default."""
    return lambda: build_model(name, default_form(name, ModelOptions()), ModelOptions())


MODELS = {
    "mlp": Workload(
        purpose="wide layers and a small batch: communication takes longer than arithmetic on CPU",
        build=_build_mlp, num_parameters=8, num_elements=16_785_408,
        batch_size=2, input_shape=(2048,), num_classes=2048,
    ),
    "cnn": Workload(
        purpose="a small network for images of digits",
        build=_build_default("cnn"), num_parameters=8, num_elements=1_199_882,
        batch_size=16, input_shape=(1, 28, 28), num_classes=10,
    ),
    "resnet18": Workload(
        purpose="BatchNorm, and 32 x 32 images: arithmetic takes longer than communication",
        build=_build_default("resnet18"), num_parameters=62, num_elements=11_173_962,
        batch_size=2, input_shape=(3, 32, 32), num_classes=10,
    ),
    "gpt2-mini": Workload(
        purpose="a small GPT-2 whose tied embedding is ready last",
        build=_build_default("gpt2-mini"), num_parameters=52, num_elements=4_224_512,
        batch_size=4, input_shape=(64,), num_classes=4096, num_tokens=4096,
    ),
    "tiny": Workload(
        purpose="1,000 tiny parameters: what is left is the host's time",
        build=_build_tiny, num_parameters=1000, num_elements=36_000,
        batch_size=8, input_shape=(8,), num_classes=8,
    ),
    "resnet18-imagenet": Workload(
        purpose="ResNet-18 with the stem and the classes of ImageNet, for a GPU",
        build=_build_default("resnet18-imagenet"), num_parameters=62, num_elements=11_689_512,
        batch_size=8, input_shape=(3, 224, 224), num_classes=1000,
    ),
    "gpt2": Workload(
        purpose="GPT-2 with a context of 1024, for a GPU",
        build=_build_default("gpt2"), num_parameters=148, num_elements=124_439_808,
        batch_size=4, input_shape=(1024,), num_classes=50257, num_tokens=50257,
    ),
    "gpt2-large": Workload(
        purpose="GPT-2 large with a context of 1024, for a GPU",
        build=_build_default("gpt2-large"), num_parameters=436, num_elements=774_030_080,
        batch_size=4, input_shape=(1024,), num_classes=50257, num_tokens=50257,
    ),
}  # fmt: skip
