"""Small models made of a few layers, in plain torch: linear layers and convolutions.

Their names are in `choose`, the sizes that benchmarks use in `catalog`; `resnet` and `gpt2` have files of their own.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.errors import ConfigError

__all__ = ["build_cnn", "build_linear", "build_mlp", "build_tiny"]


def build_linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer on all numbers of a sample."""
    return nn.Sequential(*_flatten(shape), nn.Linear(math.prod(shape), outputs))


def build_mlp(shape: tuple[int, ...], hidden: int, outputs: int, dropout: float = 0.0) -> nn.Module:
    """Four linear layers on all numbers of a sample: many bytes of gradients for little arithmetic."""
    layers: list[nn.Module] = []
    for width in (math.prod(shape), hidden, hidden):
        layers += [nn.Linear(width, hidden), nn.ReLU(), *_dropout(dropout)]
    return nn.Sequential(*_flatten(shape), *layers, nn.Linear(hidden, outputs))


def _flatten(shape: tuple[int, ...]) -> list[nn.Module]:
    return [nn.Flatten()] if len(shape) > 1 else []


def _dropout(dropout: float) -> list[nn.Module]:
    return [nn.Dropout(dropout)] if dropout else []


def build_cnn(
    shape: tuple[int, ...], channels: tuple[int, ...], hidden: int, num_classes: int, dropout: float = 0.0
) -> nn.Module:
    """A 3 x 3 convolution for each of `channels`, then two linear layers.

    The sides are halved after every convolution but the first. The convolutions before the first halving take one
    pixel off each side; those after it keep the size, so that a few of them fit small images. For 10 classes of 28 x
    28 grey images (16, 32) with 128 hidden have 0.6 M elements, (32, 64) with 128 have 1.2 M, (32, 64, 128) with 512
    have 2.5 M, and (64, 128, 256) with 2048 have 19.3 M.
    """
    channels_in, height, width = shape
    layers: list[nn.Module] = []
    for number, channels_out in enumerate(channels):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=0 if number < 2 else 1), nn.ReLU()]
        if number < 2:
            height, width = height - 2, width - 2
        if number > 0:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        if min(height, width) < 1:
            raise ConfigError(
                f"{len(channels)} convolutions on images of {shape[1]} x {shape[2]}: nothing is left of them after "
                f"{number + 1}, give at most {number} channels"
            )
        channels_in = channels_out
    layers += [nn.Flatten(), nn.Linear(channels_in * height * width, hidden), nn.ReLU(), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


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
