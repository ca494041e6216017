"""The built-in models in plain torch, their loss and their blocks."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError
from paceline.workloads.data import Batch, DataForm


def build_mlp(shape: tuple[int, ...], hidden: int, outputs: int, dropout: float = 0.0) -> nn.Module:
    """Build four linear layers on the flattened sample: large gradients for little compute. With `hidden` 0, builds a
    single layer."""
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    width = math.prod(shape)
    for _ in range(3 if hidden else 0):
        layers += [nn.Linear(width, hidden), nn.ReLU()] + [nn.Dropout(dropout)] * bool(dropout)
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def build_cnn(
    shape: tuple[int, ...], channels: tuple[int, ...], hidden: int, num_classes: int, dropout: float = 0.0
) -> nn.Module:
    """Build a 3 x 3 convolution for each of `channels`, then two linear layers. Max pooling (2 x 2) follows every
    convolution but the first; the first two are not padded."""
    channels_in, height, width = shape
    layers: list[nn.Module] = []
    for number, channels_out in enumerate(channels):
        padding = 0 if number < 2 else 1
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=padding), nn.ReLU()]
        height, width = height - 2 + 2 * padding, width - 2 + 2 * padding
        if number > 0:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        if min(height, width) < 1:
            what = f"{len(channels)} convolutions on images of {shape[1]} x {shape[2]}"
            raise ConfigError(f"{what}: no pixels are left after {number + 1}; use at most {number} channels")
        channels_in = channels_out
    layers += [nn.Flatten(), nn.Linear(channels_in * height * width, hidden), nn.ReLU()]
    layers += [nn.Dropout(dropout)] * bool(dropout)
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


class _Residual(nn.Module):
    """A tiny linear layer with a residual connection, scaled to keep signals stable over hundreds of layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 1 / math.sqrt(depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.linear(x)  # type: ignore[no-any-return]


def build_tiny(depth: int, width: int) -> nn.Module:
    """Build a model with many tiny parameters, where host overhead dominates."""
    return nn.Sequential(*(_Residual(width, depth) for _ in range(depth)))


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and a shortcut."""

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
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He 2016) with a 3 x 3 stem for 32 x 32 images, or the original 7 x 7 stem with pooling for ImageNet
    (224 x 224)."""

    def __init__(self, channels: int = 3, num_classes: int = 10, for_imagenet: bool = False) -> None:
        super().__init__()
        size, stride = (7, 2) if for_imagenet else (3, 1)
        conv = nn.Conv2d(channels, 64, size, stride=stride, padding=size // 2, bias=False)
        pool = [nn.MaxPool2d(3, stride=2, padding=1)] if for_imagenet else []
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), *pool)
        blocks: list[nn.Module] = []
        channels_in = 64
        for channels_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_BasicBlock(channels_in, channels_out, stride), _BasicBlock(channels_out, channels_out, 1)]
            channels_in = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 (Radford 2019): learned positions, and a head tied to the embedding. With `num_classes`, a linear layer on
    each sequence's last token replaces the tied head."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, context: int, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, num_classes, bias=False) if num_classes else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Use smaller values for the 2 x `layers` outputs added to the residual stream.
                into_stream = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of every next token, or of the classes. The mask is 1 on tokens and 0 on padding; padding must be
        at the end, where causal attention never sees it."""
        length, context = ids.shape[1], self.positions.num_embeddings
        if length > context:
            # On a GPU, a failed lookup raises no useful error.
            raise ConfigError(f"a sequence of {length} tokens: this model has {context} positions; use fewer tokens")
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        if self.classes is None:
            return F.linear(self.norm(x), self.tokens.weight)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        last = (mask * torch.arange(length, device=ids.device)).argmax(dim=1)
        x = x[torch.arange(len(x), device=x.device), last]
        return self.classes(self.norm(x))  # type: ignore[no-any-return]


class Outcome(NamedTuple):
    """The loss summed over a batch's targets, the number of correct predictions (None in regression), and the predicted
    class of each target."""

    loss_sum: torch.Tensor
    num_correct: torch.Tensor | None
    predicted: torch.Tensor | None = None


def compute_outcome(
    model: Callable[..., Any], batch: Batch, form: DataForm, *, label_smoothing: float = 0.0
) -> Outcome:
    """Compute the summed float32 loss: cross-entropy for classes (ignoring targets of -100), squared error for
    numbers."""
    inputs, targets = batch.split()
    if batch.mask is not None:
        output = model(inputs, attention_mask=batch.mask)
    elif isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    predicted, shape, targets = getattr(output, "logits", output), targets.shape, targets.reshape(-1)
    if not isinstance(predicted, torch.Tensor):
        kind = type(predicted).__name__
        raise ConfigError(f"the model returned {kind}: it must return a tensor, or an object with `logits`")
    returned = f"the model returned a tensor of shape {tuple(predicted.shape)}"
    if form.num_classes == 0:
        if predicted.numel() != targets.numel():
            raise ConfigError(f"{returned} for {len(batch)} numbers: ({len(batch)}, 1) is required")
        errors = predicted.float().reshape(-1) - targets
        return Outcome((errors * errors).sum(), None)
    classes = predicted.shape[-1] if predicted.dim() else 0
    if classes == 0 or predicted.numel() != targets.numel() * classes or classes < form.num_classes:
        what = f"targets of shape {tuple(shape)} and {form.num_classes} classes"
        raise ConfigError(f"{returned} for {what}: {(*shape, form.num_classes)} is required")
    logits = predicted.reshape(-1, classes)
    loss = F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=label_smoothing)
    found = logits.detach().argmax(dim=-1)
    return Outcome(loss, (found == targets).sum(), found)


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the blocks by name, in definition order. Each is callable, has parameters, and is listed once.

    Splits modules that contain a stack (several layers with children, in a list or a Sequential); the layers of a stack
    are blocks."""
    prefix = ""
    # Descend through modules that only wrap another module.
    while len(inner := _trained_children(module)) == 1 and next(module.parameters(recurse=False), None) is None:
        name, module = inner[0]
        prefix += f"{name}."
    blocks: dict[nn.Module, str] = {}
    for name, block in list(_walk(module)) or [("", module)]:
        blocks.setdefault(block, (prefix + name).rstrip("."))
    return [(name, block) for block, name in blocks.items()]


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = _trained_children(module)
    classes = [type(child) for _, child in children]
    for name, child in children:
        # Entries of a list, or several modules of one class, are layers regardless of their content (such as experts).
        alike = classes.count(type(child)) if isinstance(module, nn.Sequential) else 1
        is_layer = not isinstance(child, _LISTS) and (isinstance(module, nn.ModuleList | nn.ModuleDict) or alike > 1)
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or (not is_layer and _holds_stack(child)):
            for inner, block in _walk(child):
                yield f"{name}.{inner}", block
        else:
            yield name, child


def _trained_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]


def _holds_stack(module: nn.Module) -> bool:
    """Whether the module is or contains a list of layers with children; a Sequential needs several of them."""
    for part in module.modules():
        if isinstance(part, _LISTS):
            num_layers = sum(bool(_trained_children(child)) for _, child in _trained_children(part))
            if num_layers > isinstance(part, nn.Sequential):
                return True
    return False
