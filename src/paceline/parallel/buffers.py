"""Buffers that change in training: running statistics are averaged; other buffers are broadcast when they change.

The statistics travel with the control words. Buffers never change between a forward and its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import nn

from paceline.parallel.batchnorm import SYNC_LAYERS
from paceline.parallel.channel import Channel
from paceline.torch_internals import BatchNorm

_MANY_RANKS = 1 << 20  # more than any world has


class SharedBuffers:
    """The running statistics of BatchNorm layers, which are averaged, and all other buffers, which follow rank 0. The
    statistics take `num_words` control words, or a separate message (`need_message`)."""

    def __init__(
        self, module: nn.Module, ignored: Collection[str], device: torch.device, every: int, words_are_precise: bool
    ) -> None:
        self.every = every
        self._layers: list[BatchNorm] = []
        self._statistics: list[torch.Tensor] = []
        self._places: list[tuple[nn.Module, str]] = []  # not tensors, because a buffer may be assigned again
        for prefix, layer in module.named_modules():
            own = [name for name, buffer in layer._buffers.items() if buffer is not None]
            own = [name for name in own if f"{prefix}.{name}".lstrip(".") not in ignored]
            if not isinstance(layer, BatchNorm):
                self._places += [(layer, name) for name in own]
            # Layers that synchronize in forward already have equal statistics.
            elif not isinstance(layer, SYNC_LAYERS) and {"running_mean", "running_var"} <= set(own):
                self._layers.append(layer)
                self._statistics += [layer.get_buffer("running_mean"), layer.get_buffer("running_var")]
        self._versions = self._read_versions()
        # Statistics fit only into control words of the same precision on the same device.
        fits = words_are_precise and all(s.dtype == torch.float32 and s.device == device for s in self._statistics)
        is_averaged = bool(every and self._statistics)
        self.need_message = is_averaged and not fits
        # The last word counts the ranks that contributed.
        self._num_values = sum(s.numel() for s in self._statistics)
        self.num_words = self._num_values + 1 if is_averaged and fits else 0

    def is_turn(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def are_due(self, step: int, in_training: bool = True) -> bool:
        """Whether statistics change on this rank and are averaged in this step."""
        return self.is_turn(step) and any(layer.training or not in_training for layer in self._layers)

    def _split(self, words: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(words, [statistic.numel() for statistic in self._statistics])
        return [part.view_as(statistic) for part, statistic in zip(parts, self._statistics, strict=True)]

    def write(self, words: torch.Tensor, take_part: bool, hold: bool) -> None:
        """Write this rank's statistics followed by a count of 1. Without `take_part`, write zeros; with `hold`, their
        count is so far below 0 that no rank applies the average."""
        if take_part:
            torch._foreach_copy_(self._split(words[:-1]), self._statistics)
        else:
            words.zero_()
        if take_part or hold:
            words[-1:].fill_(1 if take_part else -_MANY_RANKS)

    def read(self, words: torch.Tensor, is_valid: bool) -> None:
        """Store the average over the ranks that contributed. With `is_valid=False`, the count in the words decides
        whether the average is used, so that the host does not wait for a GPU. The buffers are written in either
        case."""
        average, count = words[:-1] / words[-1], words[-1]
        if not is_valid:
            average = torch.where(count > 0, average, torch.cat([own.reshape(-1) for own in self._statistics]))
        torch._foreach_copy_(self._statistics, self._split(average))

    def average(self, channel: Channel, take_part: bool) -> None:
        """Average in a separate message, if the statistics do not fit into the control words. Collective."""
        precise = functools.reduce(torch.promote_types, (s.dtype for s in self._statistics), torch.float32)
        message = torch.empty(self._num_values + 1, dtype=precise, device=channel.device)
        self.write(message, take_part, hold=False)
        channel.wait(channel.start_sum(message), "the running statistics")
        self.read(message, is_valid=True)

    @property
    def _others(self) -> list[torch.Tensor]:
        found = (layer._buffers.get(name) for layer, name in self._places)
        return [buffer for buffer in found if buffer is not None]

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._others]

    def have_changed(self) -> bool:
        """Whether any buffer except the statistics was written on this rank since the last broadcast."""
        return bool(self._places) and self._read_versions() != self._versions

    def broadcast(self, channel: Channel, source: int) -> None:
        """Broadcast the buffers of rank `source`. Collective: every rank must call this."""
        channel.broadcast(self._others, source)
        self._versions = self._read_versions()
