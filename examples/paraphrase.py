"""A model of your own for `paceline train`: do two sentences say the same? It learns which parts of them to match.

paceline train --model examples/paraphrase.py:build --data mrpc:FOLDER --ranks 1,2 --optimizer adamw --lr 0.002
"""

import torch
import torch.nn.functional as F
from torch import nn

SEPARATOR = 257  # the token between two sentences of bytes


class Matcher(nn.Module):
    """Runs of bytes are encoded, and each is matched with the run of the other sentence that is most like it. What
    decides is how good the matches are, weighted by how much each run matters."""

    def __init__(self, vocabulary: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.first, self.second = (nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.weigh = nn.Linear(width, 4)
        self.classify = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, num_classes))

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Padding is zero, as beyond the end: what is next to a pair in its batch changes nothing.
        mask = attention_mask[:, None]
        inputs = self.tokens(ids).transpose(1, 2) * mask
        runs = self.second(F.gelu(self.first(inputs)) * mask).transpose(1, 2)
        weights, runs = self.weigh(runs), F.normalize(runs, dim=-1)
        likeness = runs @ runs.transpose(1, 2)
        is_second = (ids == SEPARATOR).cumsum(1).bool()
        sides = [attention_mask.bool() & side for side in (~is_second, is_second)]
        found = []
        for here, there in (sides, reversed(sides)):
            best = likeness.masked_fill(~there[:, None], -1.0).amax(dim=2, keepdim=True)
            shares = weights.masked_fill(~here[..., None], -1e4).softmax(dim=1)
            found += [(shares * best).sum(dim=1), (shares * (1 - best).square()).sum(dim=1)]
        return self.classify(torch.cat(found, dim=1))


def build(form):  # form.vocabulary, form.num_classes, form.shape: what the data has
    return Matcher(form.vocabulary, form.num_classes)
