"""The check of every element: correct results pass, and each kind of error is counted."""

import itertools
from functools import reduce

import pytest
import torch

from paceline.measure.collectives import Pattern

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8)
CASES = [(dtype, op) for dtype in FLOATS + INTEGERS for op in ("sum", "avg", "min", "max", "prod")]
CASES = [(dtype, op) for dtype, op in CASES if op != "avg" or dtype in FLOATS]
BLOCK = 64 * 4093
REPETITION = 5


def _fill(pattern, ranks, dtype, count, repetition=REPETITION):
    vectors = [torch.empty(count, dtype=dtype) for _ in ranks]
    for rank, vector in zip(ranks, vectors, strict=True):
        pattern.fill(vector, rank, repetition)
    return vectors


def _reduce(vectors, op):
    """Compute the result of a correct collective, in the vectors' own type."""
    steps = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}
    total = reduce(steps[op], vectors)
    return total / len(vectors) if op == "avg" else total.clone()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}".removeprefix("torch."))
def case(request):
    dtype, op = request.param
    return Pattern(3, dtype, op, "cpu"), dtype, op


def test_the_right_answer_has_no_wrong_element(case):
    pattern, dtype, op = case
    for count, repetition in itertools.product((1, BLOCK + 77), (0, 1, 4092, 4093, 10**6)):
        vectors = _fill(pattern, range(3), dtype, count, repetition)
        assert pattern.count_wrong(_reduce(vectors, op), repetition) == 0
        assert [pattern.count_wrong(v, repetition, rank=rank) for rank, v in enumerate(vectors)] == [0, 0, 0]


def test_exactly_the_corrupted_elements_are_counted(case):
    pattern, dtype, op = case
    vectors = _fill(pattern, range(3), dtype, BLOCK + 100)
    for vector, rank in ((_reduce(vectors, op), None), (vectors[1], 1)):
        for index in (0, 4093, BLOCK - 1, BLOCK, BLOCK + 99):
            if op == "avg":  # rounded, so a small difference is allowed
                vector[index] = 2 * vector[index] + 1
            else:
                vector[index] += 1 if vector[index] == 0 else -1
        assert pattern.count_wrong(vector, REPETITION, rank=rank) == 5


def test_a_missing_rank_is_found(case):
    pattern, dtype, op = case
    vectors = _fill(pattern, range(3), dtype, 5000)
    whole = _reduce(vectors, op)
    for missing in range(3):
        partial = _reduce([v for rank, v in enumerate(vectors) if rank != missing], op)
        differing = int((partial != whole).sum())
        assert differing > 500
        wrong = pattern.count_wrong(partial, REPETITION)
        assert wrong == differing if op != "avg" else wrong > differing / 2


def test_a_rank_counted_twice_is_found(case):
    pattern, dtype, op = case
    vectors = _fill(pattern, range(3), dtype, 5000)
    assert pattern.count_wrong(_reduce([vectors[0], vectors[1], vectors[1]], op), REPETITION) > 500


def test_a_shifted_vector_is_found(case):
    pattern, dtype, op = case
    answer = _reduce(_fill(pattern, range(3), dtype, 2 * 65536), op)
    for shift in (1, -1, 4096):
        shifted = answer.roll(shift)
        assert pattern.count_wrong(shifted, REPETITION) > 0.2 * answer.numel()


def test_data_of_the_previous_repetition_is_found(case):
    pattern, dtype, op = case
    answer = _reduce(_fill(pattern, range(3), dtype, 5000, REPETITION - 1), op)
    assert pattern.count_wrong(answer, REPETITION - 1) == 0
    assert pattern.count_wrong(answer, REPETITION) > 1000


def test_input_that_was_never_reduced_is_found(case):
    pattern, dtype, _ = case
    for vector in _fill(pattern, range(3), dtype, 5000):
        assert pattern.count_wrong(vector, REPETITION) > 500


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_counts_as_wrong(dtype, op):
    pattern = Pattern(2, dtype, op, "cpu")
    answer = _reduce(_fill(pattern, range(2), dtype, 1000), op)
    for value in (float("nan"), float("inf"), float("-inf")):
        answer[[3, 500]] = value
        assert pattern.count_wrong(answer, REPETITION) == 2


def test_another_ranks_data_is_found():
    pattern = Pattern(3, torch.float32, "sum", "cpu")
    vectors = _fill(pattern, range(3), torch.float32, 5000)
    assert pattern.count_wrong(vectors[0], REPETITION, rank=2) > 4500


@pytest.mark.parametrize("offset", [1, 1000, 4093, 10_000])
def test_a_share_is_checked_where_it_starts(offset):
    pattern = Pattern(2, torch.float32, "sum", "cpu")
    whole = _reduce(_fill(pattern, range(2), torch.float32, 20_000), "sum")
    share = whole[offset : offset + 5000]
    assert pattern.count_wrong(share, REPETITION, offset=offset) == 0
    assert pattern.count_wrong(share, REPETITION, offset=offset + 1) > 4000


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_one_rank_reduces_to_its_own_data(dtype):
    pattern = Pattern(1, dtype, "sum", "cpu")
    (vector,) = _fill(pattern, range(1), dtype, 5000)
    assert pattern.count_wrong(vector, REPETITION) == 0
    assert len(vector.unique()) > 50


@pytest.mark.parametrize(("dtype", "ranks"), [(torch.bfloat16, 64), (torch.float16, 64), (torch.int8, 60)])
def test_sums_of_many_ranks_stay_exact_in_small_types(dtype, ranks):
    pattern = Pattern(ranks, dtype, "sum", "cpu")
    vectors = _fill(pattern, range(ranks), dtype, 4093)
    whole = _reduce(vectors, "sum")
    assert pattern.count_wrong(whole, REPETITION) == 0
    partial = _reduce(vectors[1:], "sum")
    assert pattern.count_wrong(partial, REPETITION) == int((partial != whole).sum()) > 1000


def test_integer_sums_that_wrap_around_are_still_checked():
    """From 128 ranks on, int8 cannot hold the sum; both sides wrap around in the same way."""
    pattern = Pattern(130, torch.int8, "sum", "cpu")
    answer = _reduce(_fill(pattern, range(130), torch.int8, 1000), "sum")
    assert pattern.count_wrong(answer, REPETITION) == 0
    answer[7] += 1
    assert pattern.count_wrong(answer, REPETITION) == 1


@pytest.mark.parametrize(("dtype", "ranks"), [(torch.float32, 64), (torch.bfloat16, 8), (torch.bfloat16, 64)])
def test_the_tolerance_of_an_average_does_not_accept_an_empty_answer(dtype, ranks):
    pattern = Pattern(ranks, dtype, "avg", "cpu")
    expected = _reduce(_fill(pattern, range(ranks), dtype, 4093), "avg")
    assert pattern.count_wrong(torch.zeros_like(expected), REPETITION) == int((expected != 0).sum())
