"""Train your own model with `paceline train`: detect paraphrases by matching parts of two sentences.

paceline train --model examples/paraphrase.py:build --data mrpc:FOLDER --ranks 1,2 --optimizer adamw --lr 0.002
"""

import torch
import torch.nn.functional as F
from torch import nn

SEPARATOR = 257  # the token between two sentences


class Matcher(nn.Module):
    """Encodes byte spans and matches each with the most similar span of the other sentence.

    The classifier's input is the quality of the matches, weighted by a learned importance of each span.
    """

    def __init__(self, vocabulary: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.first, self.second = (nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.weigh = nn.Linear(width, 4)
        self.classify = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, num_classes))

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Zero out padding, like the convolution's own: other pairs in the batch then do not affect the result.
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


def build(form):  # `form` describes the data: vocabulary, num_classes, shape
    return Matcher(form.vocabulary, form.num_classes)
