"""GPT-2: the mask and the number of positions. Its numbers are compared with others' in `test_models_hf`."""

import pytest
import torch

from paceline.errors import ConfigError
from paceline.workloads.models import GPT2

SIZE = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "context": 16}


def build(**changes):
    torch.manual_seed(3)
    module = GPT2(**{**SIZE, **changes})
    with torch.no_grad():  # biases begin as zeros and norms as ones, where an exchange would not be seen
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def test_classes_are_read_at_the_last_token_whatever_stands_behind_it():
    module = build(num_classes=3)
    ids = torch.randint(50, (2, 10))
    lengths = torch.tensor([6, 10])
    mask = (torch.arange(10) < lengths[:, None]).long()
    padded = torch.where(mask == 1, ids, 49)
    logits = module(padded, attention_mask=mask)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[:1], module(ids[:1, :6]))
    torch.testing.assert_close(logits[1:], module(ids[1:]))
    assert not torch.allclose(logits[:1], module(padded[:1]))
    torch.testing.assert_close(module(padded, attention_mask=mask.bool()), logits)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match="a sequence of 17 tokens: this model has 16 positions"):
        build()(torch.zeros(1, 17, dtype=torch.long))
