"""What a run that goes on may change: how it is run, and not what is computed."""

import dataclasses

import pytest

from paceline.cli.train import _change
from paceline.training.settings import Batches, TrainSettings


@pytest.mark.parametrize(
    ("saved", "ranks", "batches"),
    [
        ((4, 8, 16), 1, Batches(1, 8, 64)),  # not one micro-batch of 512
        ((2, 8, 1), 1, Batches(1, 8, 2)),
        ((2, 8, 4), 4, Batches(4, 8, 2)),
        ((2, 8, 1), 4, Batches(4, 4, 1)),  # 8 no longer fit
    ],
)
def test_on_other_ranks_the_micro_batch_stays_where_it_can(saved, ranks, batches):
    run = TrainSettings(ranks=saved[0], batch_size=saved[1], accumulate=saved[2])
    assert _change(run, dataclasses.replace(run, ranks=ranks), ["ranks"]).batches == batches
