"""Running statistics in the control words: decoding the sum gives the average over the ranks that contributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.parallel.buffers import SharedBuffers


@pytest.mark.parametrize(
    ("writers", "holders", "wanted"),
    [((0, 1, 2), (), 2.0), ((0, 2), (), 2.0), ((1,), (), 2.0), ((), (), None), ((0, 1), (2,), None)],
)
def test_statistics_are_averaged_over_the_ranks_that_wrote(writers, holders, wanted):
    ranks, total = [], None
    for rank in range(3):
        layer = nn.BatchNorm1d(4)
        layer.running_mean.fill_(rank + 1)
        buffers = SharedBuffers(layer, (), torch.device("cpu"), 1, words_are_precise=True)
        words = torch.full((buffers.num_words,), 7.0)
        assert words.numel() == 4 + 4 + 1
        buffers.write(words, rank in writers, rank in holders)
        total = words if total is None else total + words
        ranks.append((layer, buffers))
    for rank, (layer, buffers) in enumerate(ranks):
        if not holders and writers:
            buffers.read(total.clone(), is_valid=True)
            assert torch.equal(layer.running_mean, torch.full((4,), wanted))
        buffers.read(total.clone(), is_valid=False)
        assert torch.equal(layer.running_mean, torch.full((4,), rank + 1.0 if wanted is None else wanted))
        assert torch.equal(layer.running_var, torch.ones(4))
