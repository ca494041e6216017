"""The models by name: what each is for, how large it is, how to build it, and its batches and loss.

Loads without torch, so that a command can refuse a request before any rank starts; building needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    return build_mlp(width=2048, depth=4)


def _build_cnn() -> nn.Module:
    from paceline.workloads.models import build_cnn

    return build_cnn()


def _build_resnet18() -> nn.Module:
    from paceline.workloads.models import build_resnet18_cifar

    return build_resnet18_cifar()


def _build_resnet18_imagenet() -> nn.Module:
    from paceline.workloads.models import build_resnet18_imagenet

    return build_resnet18_imagenet()


def _build_gpt2() -> nn.Module:
    from paceline.workloads.models import GPT2

    return GPT2(layers=4, width=256, heads=4, vocabulary=4096, context=64)


def _build_gpt2_large() -> nn.Module:
    from paceline.workloads.models import GPT2

    return GPT2(layers=36, width=1280, heads=20)


def _build_tiny() -> nn.Module:
    from paceline.workloads.models import build_tiny

    return build_tiny(num_parameters=1000)


MODELS = {
    "mlp": Workload(
        purpose="wide layers and a small batch: communication takes longer than arithmetic on CPU",
        build=_build_mlp, num_parameters=8, num_elements=16_785_408,
        batch_size=2, input_shape=(2048,), num_classes=2048,
    ),
    "cnn": Workload(
        purpose="a small network for images of digits",
        build=_build_cnn, num_parameters=8, num_elements=1_199_882,
        batch_size=16, input_shape=(1, 28, 28), num_classes=10,
    ),
    "resnet18": Workload(
        purpose="BatchNorm, and 32 x 32 images: arithmetic takes longer than communication",
        build=_build_resnet18, num_parameters=62, num_elements=11_173_962,
        batch_size=2, input_shape=(3, 32, 32), num_classes=10,
    ),
    "gpt2": Workload(
        purpose="a small GPT-2 whose tied embedding is ready last",
        build=_build_gpt2, num_parameters=52, num_elements=4_224_512,
        batch_size=4, input_shape=(64,), num_classes=4096, num_tokens=4096,
    ),
    "tiny": Workload(
        purpose="1,000 tiny parameters: what is left is the host's time",
        build=_build_tiny, num_parameters=1000, num_elements=36_000,
        batch_size=8, input_shape=(8,), num_classes=8,
    ),
    "resnet18-imagenet": Workload(
        purpose="ResNet-18 with the stem and the classes of ImageNet, for a GPU",
        build=_build_resnet18_imagenet, num_parameters=62, num_elements=11_689_512,
        batch_size=8, input_shape=(3, 224, 224), num_classes=1000,
    ),
    "gpt2-large": Workload(
        purpose="GPT-2 large with a context of 1024, for a GPU",
        build=_build_gpt2_large, num_parameters=436, num_elements=774_030_080,
        batch_size=4, input_shape=(1024,), num_classes=50257, num_tokens=50257,
    ),
}  # fmt: skip
