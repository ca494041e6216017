"""The memory bound: the faster pass sets it, and it applies only to an all-reduce of the same bytes and ranks."""

import pytest

from paceline.records.kinds import MemoryBounds


@pytest.mark.parametrize(("add_s", "copy_s"), [(2e-4, 3e-4), (3e-4, 2e-4), (2e-4, 2e-4)])
def test_the_faster_pass_is_the_bound(build_collective, build_pass, add_s, copy_s):
    record = build_collective()  # takes 1 ms
    for passes in ([build_pass("add", add_s), build_pass("copy", copy_s)],) * 2:
        bounds = MemoryBounds([record, *passes])
        assert bounds.bound_s(record) == pytest.approx(2e-4)
        assert bounds.fraction_of(record) == pytest.approx(0.2)
        passes.reverse()


def test_a_single_pass_is_also_a_bound(build_collective, build_pass):
    assert MemoryBounds([build_pass("copy", 5e-4)]).fraction_of(build_collective()) == pytest.approx(0.5)


def test_a_record_faster_than_memory_is_not_cut_to_1(build_collective, build_pass):
    assert MemoryBounds([build_pass(time_s=2e-3)]).fraction_of(build_collective()) == pytest.approx(2.0)


def test_all_backends_and_memories_have_the_same_bound(build_collective, build_pass, build_samples):
    bounds = MemoryBounds([build_pass(time_s=1e-4)])
    shared = build_collective(backend="paceline", memory="shared", timing=build_samples(2e-4))
    assert bounds.fraction_of(shared) == pytest.approx(0.5)
    assert bounds.bound_s(shared) == bounds.bound_s(build_collective(backend="nccl"))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 2**21}, {"world_size": 3}, {"dtype": "bfloat16"}, {"device": "cuda"},
        {"collective": "broadcast"}, {"collective": "reduce_scatter"},
    ],
)  # fmt: skip
def test_unmeasured_cells_have_no_bound(build_collective, build_pass, changes):
    bounds = MemoryBounds([build_pass()])
    assert bounds.fraction_of(build_collective()) is not None
    assert bounds.bound_s(build_collective(**changes)) is None
    assert bounds.fraction_of(build_collective(**changes)) is None


def test_one_rank_need_not_touch_its_vector(build_collective, build_pass):
    bounds = MemoryBounds([build_pass(world_size=1)])
    assert bounds.fraction_of(build_collective(world_size=1)) is None


def test_a_run_without_passes_has_no_bounds(build_collective):
    bounds = MemoryBounds([build_collective()])
    assert bounds.records == () and bounds.fraction_of(build_collective()) is None
