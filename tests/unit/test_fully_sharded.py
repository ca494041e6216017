"""Fully sharded data parallel computed by hand, the memory of strategies, and `predict scale`."""

from __future__ import annotations

import dataclasses
import math

import pytest

from paceline.errors import ConfigError
from paceline.plan import Gradient
from paceline.predict.curves import fit_curve
from paceline.predict.fully_sharded import Blocks, count_states, estimate_memory, simulate_fully_sharded
from paceline.predict.job import Job
from paceline.predict.simulate import Contention, MachineCosts
from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.report.outlook import OutlookResult
from paceline.report.result import build_result
from paceline.strategy import Strategy
from paceline.units import MIB
from paceline.verbs.predict import predict_scale
from tests.unit.test_predict_strategies import MADE

# Forward takes 2 s in the root unit and 4 s in each block; backward 3 s, 3 s and 2 s.
JOB = Job(
    (Gradient("blocks.1.w", 400), Gradient("blocks.0.w", 200), Gradient("tokens", 80)), (3.0, 6.0, 8.0), 8.0, 10.0, 4.0
)
BLOCKS = Blocks({"blocks.1.w": "blocks.1", "blocks.0.w": "blocks.0", "tokens": ""}, {"blocks.0": 0.4, "blocks.1": 0.4})


def build_costs(message_s: float, compute_rate: float = 1.0) -> MachineCosts:
    curve = fit_curve([(1, message_s), (1 << 30, message_s)])
    return MachineCosts(curve, contention=Contention((1,), (compute_rate,), (1.0,)))


def test_units_are_the_blocks_and_the_rest():
    root, units = BLOCKS.list_units(JOB)
    assert (root.num_bytes, root.backward_s) == (80, 2.0) and math.isclose(root.forward_share, 0.2)
    assert [(unit.num_bytes, unit.backward_s) for unit in units] == [(200, 3.0), (400, 3.0)]


@pytest.mark.parametrize(
    ("message_s", "before_s", "backward_s", "over_s"),
    [
        # Two waits in forward: for the root and the first block. In backward, one for the last block, and one at the
        # end for the root's gradients.
        (1.0, 12.0, 9.0, 10.0),
        # Everything waits for messages. Gathers: root until 7, blocks until 12 and 17; compute from 17 to 21. Backward:
        # until 26 and 31; the first block's backward ends at 34, the second's reduction at 39, the root's at 44.
        (5.0, 21.0, 15.0, 25.0),
    ],
)
def test_the_step_by_hand(message_s, before_s, backward_s, over_s):
    step = simulate_fully_sharded(JOB, BLOCKS, build_costs(message_s), 4)
    assert (step.before_s, step.backward_s, step.over_s, step.after_s) == pytest.approx(
        (before_s, backward_s, over_s, 1.0)
    )
    assert len(step.buckets) == 8  # one gather for the root, two for each block, and three reductions


def test_free_messages_leave_the_step_of_one_rank_and_contention_slows_it():
    free = simulate_fully_sharded(JOB, BLOCKS, build_costs(1e-9), 4)
    assert free.step_s == pytest.approx(10 + 8 + 4 / 4)
    slowed = simulate_fully_sharded(JOB, BLOCKS, build_costs(1.0, compute_rate=0.5), 4)
    # A 1 s message during forward and two during backward each cost half a second of compute.
    assert slowed.step_s == pytest.approx(simulate_fully_sharded(JOB, BLOCKS, build_costs(1.0), 4).step_s + 2.0)


def test_memory_by_hand():
    job = dataclasses.replace(JOB)
    of = lambda text: estimate_memory(job, Strategy.parse(text), BLOCKS, 2, 4)  # noqa: E731
    assert of("dense") == of("bf16") == 4 * 680
    assert of("zero1") == 2 * 680 + 2 * 680 // 4
    assert of("powersgd:2") == of("int8") == 6 * 680 and of("powersgd:2,feedback=0") == 4 * 680
    assert of("localsgd:4") == 5 * 680 and of("diloco:4") == 6 * 680
    assert estimate_memory(job, None, BLOCKS, 2, 4) == 680 + 80 + 2 * 400
    assert [count_states("sgd", 0.0), count_states("sgd", 0.9), count_states("adamw", 0.0)] == [0, 1, 2]


def build_outlook(**changes: object) -> OutlookResult:
    config = {
        "network": "100Gb/s,10us,1Gb/s,100ms", "ranks": [2, 64], "backend": None, "ranks_per_node": 1, "cores": 0,
        "inside": None, "algorithm": "auto", "accumulate": 1, "gradients": None, "spread": 0.0, "is_own": False,
        "busy": [], "strategies": ["zero1", "fsdp", "diloco:100"], "optimizer": "adamw", "momentum": 0.9,
        "total_samples": 1e6, "memory_bytes": None, "save_bytes_per_s": 10**9, "mtbf_per_rank_s": 1e7,
        "detect_s": 10.0, "restart_s": 300.0,
    }  # fmt: skip
    result = build_result(Run("predict scale", config | changes, capture_environment(), tuple(MADE.build_carried())))
    assert isinstance(result, OutlookResult)
    return result


def test_the_fastest_strategy_of_each_place_with_faults_and_memory():
    result = build_outlook()
    assert {one.name for one in result.outlooks} == {"dense", "bf16", "zero1", "fsdp", "diloco:100"}
    assert len(result.outlooks) == 2 * 2 * 5
    for one in result.outlooks:
        steps = 1e6 / (result.profile.batch_size * one.row.world_size)
        assert one.time_s == pytest.approx(steps * one.row.step_s / one.share) and 0 < one.share < 1
        assert one.row.low_s <= one.row.step_s <= one.row.high_s
        assert one.bounds_s[0] <= one.time_s <= one.bounds_s[1]
    by_place = {(o.row.network, o.row.world_size, o.name): o for o in result.outlooks}
    slow = {name: by_place["1Gb/s,100ms", 64, name] for name in ("dense", "fsdp", "diloco:100")}
    assert slow["diloco:100"].time_s < slow["dense"].time_s < slow["fsdp"].time_s
    assert slow["fsdp"].memory_bytes < slow["dense"].memory_bytes < slow["diloco:100"].memory_bytes
    # Faults are 32 times as frequent on 32 times as many ranks.
    assert slow["dense"].share < by_place["1Gb/s,100ms", 2, "dense"].share
    chosen = [one for one in result.chosen if (one.row.network, one.row.world_size) == ("1Gb/s,100ms", 64)]
    assert [one.update for one in chosen] == ["exact", "schedule"] and chosen[-1].name == "diloco:100"
    document = result.to_json()
    assert len(document["strategies"]) == len(result.outlooks) and len(document["rows"]) == len(result.chosen)
    assert document["rows"][0].keys() >= {"step_s", "time_low_s", "memory_bytes", "useful_share", "doubt"}
    assert result.files()["strategies.csv"].count("\n") == 1 + len(result.outlooks)


def test_strategies_that_do_not_fit_are_not_chosen():
    size = 16 * MIB
    sharded = build_outlook(memory_bytes=3 * size)  # dense gradients need four times the parameter memory
    assert {one.name for one in sharded.chosen} <= {"fsdp", "zero1"} and sharded.chosen
    assert not any(one.fits for one in sharded.outlooks if one.name == "dense")
    nothing = build_outlook(memory_bytes=size // 100)
    assert nothing.chosen == [] and "no strategy fits" in nothing.answer


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 1}, {"ranks": (0, 2)}, {"total_samples": "many"}, {"total_samples": "nan"}, {"strategy": "fsdb"},
        {"mtbf_per_rank": "0s"}, {"restart_seconds": -1.0}, {"save_rate": "0B"}, {"save_rate": "fast"},
        {"gpu_memory": "80"}, {"network": "nowhere"},
    ],
    ids=str,
)  # fmt: skip
def test_refusals(tmp_path, changes):
    from paceline.records.store import save_run

    records = tuple(MADE.build_carried())
    save_run(Run("profile layers", {"data": "synthetic"}, capture_environment(), records), tmp_path / "run.json")
    with pytest.raises(ConfigError):
        predict_scale(tmp_path, **changes)
