"""Where gradients lie: every element once, in plan order, in the parameter's own strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.flat import FlatGradients
from paceline.parallel.replicas import read_replica
from paceline.plan import Bucket, Piece, Plan
from tests.unit.made_plans import plan_by_cap, plan_in_pieces


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.zeros(0))
        self.low = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


REPLICA = read_replica(Model())
ORDER = list(reversed(range(len(REPLICA.params))))


@pytest.mark.parametrize("cap", [16, 64, 10_000])
def test_every_element_has_a_place_of_its_own_inside_its_bucket(cap):
    plan = plan_in_pieces(REPLICA.gradients, ORDER, cap, 8)
    flat = FlatGradients(REPLICA, plan, num_words=7)
    for index, view in flat.views.items():
        param = REPLICA.params[index]
        assert view.shape == param.shape and view.dtype == param.dtype
        assert param.numel() < 2 or view.stride() == param.stride()
        view.fill_(1)
    assert flat.words.numel() == 7 and flat.words.float().abs().sum() == 0
    # Ones as often as there are elements: no two views share one, and all lie in ranges. What is between is zero.
    assert sum(int((span == 1).sum()) for span in flat.ranges) == sum(param.numel() for param in REPLICA.params)
    assert all(((span == 1) | (span == 0)).all() for span in flat.ranges)
    assert flat.messages[-1].nbytes >= flat.ranges[-1].nbytes + 7 * flat.words.element_size()


def test_buckets_and_large_gradients_begin_at_a_vector_of_the_processor():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 10_000)
    flat = FlatGradients(REPLICA, plan, num_words=7, separate={0})
    assert all(span.storage_offset() * span.element_size() % 64 == 0 for span in flat.ranges)
    assert flat.views[0].storage_offset() * 4 % 64 == 0 and flat.views[0].storage_offset() > 0


@pytest.mark.parametrize(
    ("plan", "separate", "has_gaps"),
    [
        (plan_in_pieces(REPLICA.gradients, ORDER, 16, 8), (), False),
        (plan_in_pieces(REPLICA.gradients, ORDER, 64, 8), (0, 1, 4), False),
        (plan_by_cap(REPLICA.gradients, ORDER, 10_000), (), False),
        (plan_by_cap(REPLICA.gradients, ORDER, 10_000), (0, 1, 4), True),
    ],
)
def test_a_message_is_its_gradients_and_its_extra_bytes(plan, separate, has_gaps):
    flat = FlatGradients(REPLICA, plan, num_words=7, separate=separate)
    left = [message.nbytes - extra for message, extra in zip(flat.messages, flat.extra_bytes, strict=True)]
    assert left == list(plan.bucket_bytes)
    assert (sum(flat.extra_bytes) > flat.messages[-1].nbytes - flat.ranges[-1].nbytes) == has_gaps


def test_a_write_through_a_view_counts_in_its_bucket_alone():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 1)
    flat = FlatGradients(REPLICA, plan, num_words=0)
    before = [span._version for span in flat.ranges]
    flat.views[ORDER[0]].add_(1)
    assert [span._version - old for span, old in zip(flat.ranges, before, strict=True)] == [1, 0, 0, 0, 0, 0]


def test_loose_gradients_have_no_room():
    plan = plan_by_cap(REPLICA.gradients, ORDER, 1)
    flat = FlatGradients(REPLICA, plan, 0, uncopied={0})
    assert 0 not in flat.views and sum(span.numel() for span in flat.ranges) == sum(
        param.numel() for param in REPLICA.params[1:]
    )


def test_parts_in_another_order_than_their_elements_are_refused():
    replica = read_replica(nn.Linear(2, 1, bias=False))
    plan = Plan(replica.gradients, (Bucket((Piece(0, 4, 8),)), Bucket((Piece(0, 0, 4),))))
    with pytest.raises(ConfigError, match="weight") as caught:
        FlatGradients(replica, plan, num_words=0)
    assert caught.value.code == "plan"
