"""ResNet-18 for images of any size and number of channels, with the stem of CIFAR or of ImageNet.

Other models for images are in `models`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ResNet18", "build_resnet18", "build_resnet18_imagenet"]


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
    """ResNet-18 (He 2016) behind a stem that makes 64 channels of an image.

    With `zero_init` every block begins as its shortcut alone: the scale of its last BatchNorm starts at 0 (Goyal 2017).
    """

    def __init__(self, stem: nn.Module, num_classes: int, zero_init: bool = False) -> None:
        super().__init__()
        self.stem = stem
        blocks: list[nn.Module] = []
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_BasicBlock(channels_in, channels, stride), _BasicBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, num_classes)
        if zero_init:
            for name, parameter in self.blocks.named_parameters():
                if name.endswith("bn2.weight"):
                    nn.init.zeros_(parameter)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: torch.Tensor = self.head(features)
        return logits


def build_resnet18(channels: int = 3, num_classes: int = 10, zero_init: bool = False) -> nn.Module:
    """For 32 x 32 images: a 3 x 3 stem that keeps their size."""
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    return ResNet18(nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU()), num_classes, zero_init)


def build_resnet18_imagenet(channels: int = 3, num_classes: int = 1000, zero_init: bool = False) -> nn.Module:
    """For 224 x 224 images: a 7 x 7 stem and a pooling that divide their sides by 4."""
    conv = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return ResNet18(nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), pool), num_classes, zero_init)
