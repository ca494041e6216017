"""Causes of slow steps: each is found in the evidence of a program with it, and none in that of a healthy one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.predict.accounting import RankRow
from paceline.predict.advice import rank_findings
from paceline.predict.causes import CAUSES, Evidence, find_causes
from paceline.records import RankRecord
from paceline.records.findings import Finding

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


def test_the_rank_that_alone_pauses_is_named_and_others_wait_for_it():
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
