"""Plans: exactly torch's rule, cuts in ready order, and every byte in exactly one bucket."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, RecordError
from paceline.plan import (
    TORCH_CAP_BYTES,
    Bucket,
    Gradient,
    Piece,
    Plan,
    cut_by_cap,
    plan_by_cuts,
    plan_like_torch,
    plan_torch_start,
)
from paceline.units import MIB
from tests.unit.made_plans import plan_in_pieces

DTYPES = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}


@st.composite
def models(draw, dtypes=tuple(DTYPES), min_elements=0):
    """Gradients of a synthetic model, and their ready order."""
    count = draw(st.integers(1, 30))
    gradients = []
    for index in range(count):
        dtype = draw(st.sampled_from(dtypes))
        item = DTYPES[dtype].itemsize
        gradients.append(Gradient(f"p{index}", item * draw(st.integers(min_elements, 300)), item, dtype))
    return gradients, draw(st.permutations(range(count)))


def as_sets(partition):
    """torch orders buckets that never closed by a hash map, so order is compared separately."""
    return sorted(tuple(indices) for indices in partition)


CAPS = st.lists(st.integers(1, 3000), min_size=1, max_size=4)


@given(models(min_elements=1), CAPS)
def test_the_rebuilt_buckets_are_torchs_own(model, caps):
    gradients, order = model
    tensors = [
        torch.empty(gradients[i].num_bytes // gradients[i].item_bytes, dtype=DTYPES[gradients[i].dtype]) for i in order
    ]
    torchs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [], list(order))
    ours = plan_like_torch(gradients, order, caps).partition
    assert as_sets(ours) == as_sets(torchs)
    one_family = len({gradient.family for gradient in gradients}) == 1
    if one_family:
        assert list(ours) == [tuple(indices) for indices in torchs]


def resnet18() -> list[Gradient]:
    """ResNet-18 for ImageNet, in definition order."""
    shapes: list[tuple[str, int]] = []

    def conv(name: str, inputs: int, outputs: int, kernel: int) -> None:
        shapes.append((f"{name}.conv", outputs * inputs * kernel * kernel))
        shapes.extend([(f"{name}.bn.weight", outputs), (f"{name}.bn.bias", outputs)])

    conv("stem", 3, 64, 7)
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            conv(f"layer{stage}.{block}.a", inputs, outputs, 3)
            conv(f"layer{stage}.{block}.b", outputs, outputs, 3)
            if inputs != outputs:
                conv(f"layer{stage}.{block}.down", inputs, outputs, 1)
            inputs = outputs
    shapes += [("fc.weight", 512 * 1000), ("fc.bias", 1000)]
    return [Gradient(name, 4 * count) for name, count in shapes]


@pytest.mark.parametrize(
    ("caps", "sizes"),
    [
        ((MIB, 25 * MIB), (2052000, 28852224, 15853824)),
        ((MIB, 35 * MIB), (2052000, 38297600, 6408448)),
        ((25 * MIB,), (30904224, 15853824)),
        ((35 * MIB,), (37988256, 8769792)),
    ],
)
def test_golden_vectors_of_resnet18(caps, sizes):
    gradients = resnet18()
    assert sum(gradient.num_bytes for gradient in gradients) == 46_758_048
    assert plan_like_torch(gradients, reversed(range(len(gradients))), caps).bucket_bytes == sizes


def test_torchs_first_iteration_has_one_bucket_per_dtype():
    gradients = [Gradient("a", 8), Gradient("b", 4, 2, "float16"), Gradient("c", 4)]
    assert as_sets(plan_torch_start(gradients).partition) == [(0, 2), (1,)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 15_000))
def test_a_cap_cuts_as_torch_does(sizes, cap):
    gradients = [Gradient(str(index), 4 * size) for index, size in enumerate(sizes)]
    plan = plan_like_torch(gradients, range(len(sizes)), [cap])
    cuts = cut_by_cap([0, *itertools.accumulate(g.num_bytes for g in gradients)], cap)
    assert plan_by_cuts(gradients, range(len(sizes)), cuts, "").partition == plan.partition


def test_dtypes_do_not_share_a_bucket():
    gradients = [Gradient("a", 8), Gradient("b", 8, 2, "bfloat16"), Gradient("c", 8)]
    plan = plan_by_cuts(gradients, [0, 1, 2], [3], "all at once")
    assert plan.partition == ((0, 2), (1,))


@given(models(), st.integers(8, 3000), st.integers(0, 1000))
def test_a_plan_survives_json(model, cap, tail):
    plan = plan_in_pieces(*model, cap, tail)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "paceline-plan", "version": 9}', '{"format": "else", "version": 1}']
)
def test_invalid_plan_text_is_refused(text):
    with pytest.raises(RecordError, match="not a plan"):
        Plan.from_json(text)


def test_a_plan_with_an_unknown_field_is_refused():
    document = json.loads(plan_like_torch([Gradient("a", 8)], [0], [8]).to_json())
    document["gradients"][0]["colour"] = "red"
    with pytest.raises(RecordError, match="colour"):
        Plan.from_json(json.dumps(document))


A, B = Gradient("a", 8), Gradient("b", 8, 2, "float16")


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([[Piece(0, 0, 8)]], "0 of the 8 bytes of b"),
        ([[Piece(0, 0, 8), Piece(1, 0, 8)]], "mixes dtypes"),
        ([[Piece(0, 0, 8)], [Piece(1, 0, 8)], []], "bucket 2 is empty"),
        ([[Piece(0, 0, 8)], [Piece(1, 0, 8)], [Piece(0, 0, 8)]], "omits or duplicates bytes of a"),
        ([[Piece(0, 0, 4)], [Piece(1, 0, 8)]], "4 of the 8 bytes of a"),
        ([[Piece(0, 4, 8)], [Piece(1, 0, 8)]], "omits or duplicates bytes of a at byte 0"),
        ([[Piece(0, 0, 3), Piece(0, 3, 8)], [Piece(1, 0, 8)]], "splits an element"),
        ([[Piece(7, 0, 8)]], "refers to gradient 7 of 2"),
    ],
)
def test_a_plan_that_loses_a_byte_is_refused(buckets, words):
    with pytest.raises(ConfigError, match=words):
        Plan((A, B), tuple(Bucket(tuple(pieces)) for pieces in buckets))


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 1, 2], [0, 5]])
def test_a_ready_order_must_name_every_gradient_once(order):
    with pytest.raises(ConfigError, match="2 gradients"):
        plan_like_torch([A, A], order, [100])


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan_like_torch([A], [0], []),
        lambda: plan_like_torch([A], [0], [0]),
        lambda: plan_like_torch([dataclasses.replace(A, num_bytes=7)], [0], [8]),
    ],
)
def test_an_impossible_cap_or_size_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@given(models(dtypes=("float32",), min_elements=1), CAPS)
def test_torchs_arguments_reproduce_every_whole_plan_of_one_dtype(model, caps):
    gradients, order = model
    plan = plan_like_torch(gradients, order, caps)
    ((name, value),) = plan.as_torch_kwargs().items()
    given_caps = [int(mb * MIB) for mb in (value if name == "bucket_cap_mb_list" else [value])]
    assert plan_like_torch(gradients, order, given_caps).partition == plan.partition


def test_one_cap_is_preferred_and_torchs_default_needs_a_list():
    gradients = resnet18()
    order = list(reversed(range(len(gradients))))
    assert list(plan_like_torch(gradients, order, [TORCH_CAP_BYTES]).as_torch_kwargs()) == ["bucket_cap_mb"]
    assert list(plan_like_torch(gradients, order).as_torch_kwargs()) == ["bucket_cap_mb_list"]


def test_plans_that_torch_cannot_express_are_refused():
    with pytest.raises(ConfigError, match="cannot split"):
        plan_in_pieces([Gradient("a", 100)], [0], 40).as_torch_kwargs()
