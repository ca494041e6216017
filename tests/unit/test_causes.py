"""Causes of slow steps: each is found in the evidence of an affected program, and none in a healthy program's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.predict.accounting import RankRow, SlowPart
from paceline.predict.advice import blame_changing_rank, rank_findings
from paceline.predict.causes import _SEARCH, CAUSES, Evidence, find_causes
from paceline.predict.traces import Lateness
from paceline.records import RankRecord, TracedMessage, TracedStepRecord
from paceline.records.findings import Finding
from paceline.records.steps import RESENT, OperatorTime, Stall

STEPS = 40


def made_rank(rank: int, **more: object) -> RankRecord:
    nothing = (0.0,) * STEPS
    given = {"collected_s": nothing, "evaluated_s": nothing, "saved_s": nothing, "elements": (4096,) * STEPS}
    given |= {"device": "cpu", "host": "box", "threads": 1, "cores": 4, "cpu_share": 0.9}
    return RankRecord(rank=rank, **given | more)


def made_evidence(*ranks: dict, **more: object) -> Evidence:
    rows = [RankRow(rank, 0.1, 0.002, 0.03, 0.05, 0.001, 0.003, 0.01) for rank in (0, 1)]
    return Evidence(rows, [made_rank(rank, **given) for rank, given in enumerate(ranks or ({}, {}))], **more)


def find(evidence: Evidence) -> list[Finding]:
    return rank_findings(find_causes(evidence), evidence.step_s)


def pause(step_s: float, every: int) -> tuple[float, ...]:
    return tuple(step_s if n % every == 0 else 0.0 for n in range(STEPS))


def test_a_healthy_program_has_no_cause():
    (only,) = find(made_evidence())
    assert only.kind == "healthy" and len({cause.kind for cause in CAUSES}) == len(CAUSES)
    assert [*find_causes(replace(made_evidence(), ranks=()))] == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [("garbage collection", "collected_s"), ("evaluation", "evaluated_s"), ("checkpoint", "saved_s")],
)
def test_pauses_between_steps_count_on_average(kind, name):
    """0.4 s in every tenth step of 0.1 s."""
    (found,) = find(made_evidence({name: pause(0.4, 10)}, {name: pause(0.4, 10)}))
    assert (found.kind, found.rank, found.gain_s) == (kind, None, pytest.approx(0.04))
    assert found.share == pytest.approx(0.04 / 0.14) and found.line and found.cure
    low_s, high_s = found.gain_interval_s
    assert 0 < low_s < found.gain_s < high_s
    assert [one.kind for one in find(made_evidence({name: pause(0.01, 10)}, {}))] == ["healthy"]


def test_the_only_rank_that_pauses_is_named_and_others_wait_for_it():
    (found,) = find(made_evidence({}, {"saved_s": pause(0.4, 10)}))
    assert (found.kind, found.rank) == ("checkpoint", 1) and found.gain_s == pytest.approx(0.04)
    # Collections at different steps on two ranks cost twice as much.
    apart = tuple(reversed(pause(0.4, 10)))
    (found,) = find(made_evidence({"collected_s": pause(0.4, 10)}, {"collected_s": apart}))
    assert found.rank is None and found.gain_s == pytest.approx(0.08)


def test_a_gpu_works_while_its_host_collects_garbage():
    given = {"collected_s": pause(0.4, 10), "device": "cuda"}
    assert find(made_evidence(given, given))[0].kind == "healthy"
    (found,) = find(made_evidence(given, given, idle_s=0.03))
    assert found.kind == "garbage collection" and found.gain_s == pytest.approx(0.03)


# -- the wrapper, the optimizer, cores, batches ------------------------------------------------------------------------


def made_recorded(*stalls: Stall, search_s: float = 0.0) -> list[TracedStepRecord]:
    operators = (OperatorTime(f"torch.distributed.ddp.reducer::{_SEARCH}", search_s), OperatorTime("aten::mm", 0.01))
    return [
        TracedStepRecord(
            rank=rank, world_size=2, device="cpu", backend="gloo", host="box", number=number, before_s=0.03,
            backward_s=0.05, after_s=0.01, gradient_bytes=(4096,), ready_s=(0.05,), stalls=stalls, operators=operators,
            messages=(TracedMessage(4096, 0.05, 0.05, 0.06),),
        )
        for rank in (0, 1) for number in range(6)
    ]  # fmt: skip


def made_rows(**parts: float) -> list[RankRow]:
    return [replace(row, **parts) for row in made_evidence().rows]


def test_a_search_for_unused_parameters_costs_its_time_and_its_message():
    recorded = made_recorded(Stall(0.05, 0.01, 0.006), Stall(-0.02, 0.01, 0.001), search_s=0.008)
    options = {"find_unused": True}
    (found,) = find(made_evidence(options, options, recorded=recorded))
    assert found.kind == "unused parameters" and found.gain_s == pytest.approx(0.014)
    assert "static_graph" not in found.line
    (found,) = find(made_evidence(options, options | {"has_unused": True}, recorded=recorded))
    assert "static_graph=True" in found.line
    for cured in ({}, options | {"is_static": True}):
        assert find(made_evidence(cured, cured, recorded=recorded))[0].kind != "unused parameters"


def test_broadcasting_buffers_delays_forward():
    recorded = made_recorded(*(Stall(-0.02, 0.01, 0.006) for _ in range(3)), Stall(0.05, 0.01, 0.006))
    options = {"buffer_bytes": 4096}
    found, other = find(made_evidence(options, options, recorded=recorded))
    assert other.kind == "collectives"
    assert found.kind == "buffers" and found.gain_s == pytest.approx(0.012)  # a third is the program's own
    assert "broadcast_buffers=False" in found.line
    assert find(made_evidence(recorded=recorded))[0].kind == "collectives"


def test_gradients_of_every_micro_batch_cost_what_they_block():
    resent = [Stall(-0.02 * number, 0.01, 0.008, RESENT) for number in (3, 2, 1)]
    (found,) = find(made_evidence(recorded=made_recorded(*resent)))
    assert found.kind == "accumulate" and found.gain_s == pytest.approx(0.024)
    assert "all 4 micro-batches" in found.evidence and "no_sync" in found.line
    hidden = [replace(stall, blocked_s=0.0) for stall in resent]
    assert find(made_evidence(recorded=made_recorded(*hidden)))[0].kind == "healthy"


def test_collectives_of_the_program_are_counted_without_those_of_the_wrapper():
    own = [Stall(0.065, 0.004, 0.004, "all_reduce"), Stall(0.07, 0.004, 0.003, "barrier")]
    (found,) = find(made_evidence(recorded=made_recorded(*own, Stall(0.06, 0.001, 0.001, "barrier"))))
    assert found.kind == "collectives" and found.gain_s == pytest.approx(0.008)
    assert "(2 x barrier, 1 x all_reduce)" in found.evidence
    wrapper = [Stall(-0.03, 0.01, 0.004), Stall(-0.02, 0.01, 0.004), Stall(0.02, 0.01, 0.004)]
    options = {"buffer_bytes": 4096, "find_unused": True}
    found = find(made_evidence(options, options, recorded=made_recorded(*wrapper)))
    assert "collectives" not in {one.kind for one in found}


def test_an_optimizer_is_fused_first_and_then_sharded():
    slow = made_rows(backward_s=0.02, optimizer_s=0.04)
    options = {"optimizer": "AdamW", "can_fuse": True}
    (found,) = find(replace(made_evidence(options, options), rows=slow))
    assert found.kind == "optimizer" and found.line == "torch.optim.AdamW(..., fused=True)"
    low_s, high_s = found.gain_interval_s
    assert 0 < low_s < found.gain_s < high_s < 0.04
    options |= {"is_fused": True}
    (found,) = find(replace(made_evidence(options, options), rows=slow))
    assert found.kind == "replicated optimizer" and found.gain_s == pytest.approx(0.02) and "zero1" in found.line
    assert find(made_evidence(options, options))[0].kind == "healthy"


def test_ranks_with_more_threads_than_cores_are_advised_of_their_share():
    crowded = {"threads": 4, "cpu_share": 2.0}
    (found,) = find(made_evidence(crowded, crowded, cores=4))
    assert found.kind == "threads" and found.line == "torch.set_num_threads(2)" and 0 < found.gain_s < 0.09
    for healthy in ({"threads": 2, "cpu_share": 2.0}, crowded | {"cpu_share": 0.9}, crowded | {"device": "cuda"}):
        assert find(made_evidence(healthy, healthy, cores=4))[0].kind == "healthy"
    apart = made_evidence(crowded, crowded | {"host": "other"}, cores=4)
    assert find(apart)[0].kind == "healthy"


def test_a_rank_that_its_container_throttles_or_that_waits_for_a_core_is_named():
    for kind, name in (("throttling", "throttled_share"), ("shared cores", "queued_share")):
        (found,) = find(made_evidence({}, {name: 0.3}))
        assert (found.kind, found.rank, found.gain_s) == (kind, 1, pytest.approx(0.03))
        assert find(made_evidence({}, {name: 0.04}))[0].kind == "healthy"
    crowded = {"threads": 4, "cpu_share": 2.0, "queued_share": 0.3}
    assert [one.kind for one in find(made_evidence(crowded, crowded, cores=4))] == ["threads"]


def test_uneven_batches_cost_the_excess_of_the_largest():
    (found,) = find(made_evidence({"elements": (8000,) * STEPS}, {"elements": (4000,) * STEPS}))
    # The larger batch, a third above the mean, takes 80 ms of forward and backward.
    assert (found.kind, found.rank, found.gain_s) == ("uneven batches", 0, pytest.approx(0.02))
    turns = [tuple(8000 if n % 2 == rank else 4000 for n in range(STEPS)) for rank in (0, 1)]
    (found,) = find(made_evidence(*({"elements": elements} for elements in turns)))
    assert (found.kind, found.rank) == ("uneven batches", None) and found.gain_s == pytest.approx(0.08 / 3)
    last = {"elements": (4096,) * (STEPS - 1) + (512,)}  # the end of an epoch
    assert find(made_evidence({}, last))[0].kind == "healthy"


def test_padding_costs_its_share_of_forward_and_backward():
    (found,) = find(made_evidence({"padded_share": 0.5}, {"padded_share": 0.3}))
    assert found.kind == "padding" and found.gain_s == pytest.approx(0.4 * 0.08)


def test_alternately_late_ranks_delay_even_the_one_that_waits_least():
    late = Lateness(0, 0.5, 0.02)
    (found,) = blame_changing_rank([0.04, 0.0] * 4, late, 0.1)
    assert (found.kind, found.rank, found.gain_s) == ("changing late rank", None, pytest.approx(0.02))
    assert [*blame_changing_rank([0.014, 0.0] * 4, late, 0.1)] == []
    (found,) = blame_changing_rank([0.014, 0.0] * 4, late, 0.1, SlowPart("spin", 0.012, 1.0, 0.9, 0.0))
    assert "spin takes 12 ms longer" in found.evidence


@pytest.mark.parametrize("kind", ["backend", "collectives", "buffers"])
def test_a_cure_that_changes_the_training_comes_after_one_that_saves_half_as_much(kind):
    for saved_s, first in ((0.012, kind), (0.008, "batch")):
        found = [Finding("batch", "small", "larger", 0.02), Finding(kind, "some", "other", saved_s)]
        assert rank_findings(found, 0.1)[0].kind == first
