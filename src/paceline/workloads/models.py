"""Small definitions of the models that Paceline measures, in plain torch. Their names and sizes are in `catalog`.

Every model maps its inputs to logits in the last dimension, so that one loss serves them all.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "GPT2",
    "ResNet18",
    "build_cnn",
    "build_mlp",
    "build_resnet18_cifar",
    "build_resnet18_imagenet",
    "build_tiny",
]


def build_mlp(width: int, depth: int) -> nn.Module:
    """Square layers of one width: many bytes of gradients for little arithmetic."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width))


def build_cnn(num_classes: int = 10) -> nn.Module:
    """Two convolutions and two linear layers for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128), nn.ReLU(),
        nn.Linear(128, num_classes),
    )  # fmt: skip


class _Residual(nn.Module):
    """A tiny linear layer beside the identity, scaled so that hundreds of them in a row neither vanish nor explode."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 1 / math.sqrt(depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.linear(x)
        return x + self.scale * added


def build_tiny(num_parameters: int, width: int = 8) -> nn.Module:
    """So many parameters (a weight and a bias for each layer) of next to no size: what is left is the host's time."""
    depth = num_parameters // 2
    return nn.Sequential(*(_Residual(width, depth) for _ in range(depth)))


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, and the way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He 2016) behind a stem that makes 64 channels of an image."""

    def __init__(self, stem: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.stem = stem
        blocks: list[nn.Module] = []
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_BasicBlock(channels_in, channels, stride), _BasicBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: torch.Tensor = self.head(features)
        return logits


def build_resnet18_cifar(num_classes: int = 10) -> nn.Module:
    """For 32 x 32 images: a 3 x 3 stem that keeps their size."""
    conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return ResNet18(nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU()), num_classes)


def build_resnet18_imagenet(num_classes: int = 1000) -> nn.Module:
    """For 224 x 224 images: a 7 x 7 stem and a pooling that divide their sides by 4."""
    conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return ResNet18(nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), pool), num_classes)


class _Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: torch.Tensor = self.project(y.transpose(1, 2).flatten(2))
        return mixed


class _Block(nn.Module):
    """LayerNorm before attention, LayerNorm before the MLP, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        added: torch.Tensor = self.mlp(self.norm2(x))
        return x + added


class GPT2(nn.Module):
    """GPT-2 (Radford 2019): learned positions, and a head tied to the embedding. No dropout, so that steps repeat."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What writes into the residual stream starts smaller, for there are 2 x layers of it.
                into_stream = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
