"""Embedding rows in plans, jobs and control words, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.control import ControlWords, RankReport
from paceline.parallel.rows import Lookups
from paceline.plan import Bucket, Gradient, Piece, Plan, Rows, compare_rows, plan_by_cuts, plan_like_torch
from paceline.predict.curves import MeasuredCurve
from paceline.predict.job import Job, Lookup
from paceline.predict.simulate import MachineCosts, simulate

GRADIENTS = (Gradient("words", 4000, shape=(10, 100)), Gradient("inner", 400), Gradient("head", 800))


def test_a_plan_has_rows_with_or_without_a_dense_part():
    alone = plan_like_torch(GRADIENTS, [2, 1, 0], [1000], [Rows(0, 3, True)])
    assert alone.partition == ((2, 1),) and alone.alone == {0} and not alone.is_split
    assert Plan.from_json(alone.to_json()) == alone
    with pytest.raises(ConfigError, match="embedding rows"):
        alone.as_torch_kwargs()
    shared = plan_like_torch(GRADIENTS, [0, 2, 1], [1000], [Rows(0, 3)])
    assert shared.partition == ((0,), (2, 1)) and not shared.alone
    whole = alone.without_rows({0})
    assert whole.partition == ((2, 1, 0),) and not whole.rows
    assert shared.without_rows({0}).partition == shared.partition
    with pytest.raises(ConfigError, match="contains 4000"):
        Plan(GRADIENTS, (Bucket(tuple(Piece(i, 0, g.num_bytes) for i, g in enumerate(GRADIENTS))),), "", alone.rows)


def test_rows_are_not_sent_if_the_dense_part_is_late():
    order, rows = [0, 2, 1], [Rows(0, 3)]
    late = plan_like_torch(GRADIENTS, order, [10_000], rows)
    assert late.partition == ((0, 2, 1),) and not late.rows
    assert plan_like_torch(GRADIENTS, order, [10_000], rows, keeps_rows=True).rows == tuple(rows)
    assert plan_like_torch(GRADIENTS, [2, 0, 1], [1000], rows).partition == ((2, 0), (1,))
    assert plan_like_torch(GRADIENTS, [2, 0, 1], [1000], rows).rows
    # the dense part of the table is itself ready last
    assert not plan_like_torch(GRADIENTS, [2, 1, 0], [1000], rows).rows
    # A table that is only used for lookups saves bytes in any case.
    assert plan_like_torch(GRADIENTS, order, [10_000], [Rows(0, 3), Rows(1, 1, True)]).rows == (Rows(1, 1, True),)
    # Buckets are sent in order: a bucket of another dtype is late if it follows the one that completes last.
    mixed = (GRADIENTS[0], *(replace(g, dtype="bfloat16") for g in GRADIENTS[1:]))
    assert plan_like_torch(mixed, [0, 2, 1], [10_000], rows).partition == ((0,), (2, 1))
    assert plan_like_torch(mixed, [0, 2, 1], [10_000], rows).rows
    assert plan_like_torch(mixed, [2, 0, 1], [10_000], rows).partition == ((2, 1), (0,))
    assert not plan_like_torch(mixed, [2, 0, 1], [10_000], rows).rows


def test_rows_are_compared_with_a_dense_all_reduce():
    # Each of n ranks receives the rows of n - 1 others, and 2 (n - 1) / n of all bytes in a ring all-reduce.
    assert compare_rows(10, 396, 4000, 2) == pytest.approx(1.0)
    assert compare_rows(10, 396, 4000, 4) == pytest.approx(2.0)


def build_job(**lookup: float | None) -> Job:
    gradients = tuple(replace(g, num_bytes=1000 * g.num_bytes) for g in reversed(GRADIENTS))
    found = Lookup("words", 100, 400, **lookup)
    return Job(gradients, (0.1, 0.5, 1.0), 1.0, lookups=(found,))


def test_a_job_is_split_where_rows_pay_off():
    alone, tied = build_job().split(2), build_job(rest_s=0.2).split(2)
    assert [g.name for g in alone.gradients] == ["head", "inner"] and alone.whole == build_job()
    assert [g.name for g in tied.gradients] == ["head", "words", "inner"] and tied.ready_s == (0.1, 0.2, 0.5)
    # An all-gather between 2 ranks moves the same bytes as an all-reduce of this size.
    assert [num_bytes for _, num_bytes in tied.tail] == [100 * 404]
    assert [r.is_all for r in (*alone.list_rows(GRADIENTS), *tied.list_rows(GRADIENTS))] == [True, False]
    assert alone.order(GRADIENTS) == [2, 1] and tied.order(GRADIENTS) == [2, 0, 1]
    assert not build_job().split(1).tail and not build_job(rest_s=0.2).split(100).tail
    assert tied.stretch(2.0).lookups[0].rest_s == 0.4


def test_the_head_is_hidden_and_the_rows_follow_the_last_bucket():
    costs = MachineCosts(MeasuredCurve((1, 10_000_000), (1e-9, 1.0)))  # 0.1 us per byte
    job = build_job(rest_s=0.2)
    whole = simulate(job, (1, 3), costs)
    split = simulate(job.split(2), (2, 3), costs)
    assert whole.exposed_s > 0.3  # `inner` and all of `words`
    assert 0 < split.exposed_s < 0.01
    assert [span.num_bytes for span in split.tail] == [100 * 404] and len(split.buckets) == 2


def test_the_simulator_sends_the_rows_that_the_plan_sends():
    costs = MachineCosts(MeasuredCurve((1, 10_000_000), (1e-9, 1.0)), launch_s=0.001)
    job = build_job(rest_s=0.2)
    split = job.split(2)  # head, words, inner
    for cuts, has_rows in (((3,), False), ((1, 3), False), ((2, 3), True), ((1, 2, 3), True)):
        plan = plan_by_cuts(GRADIENTS, split.order(GRADIENTS), cuts, "", split.list_rows(GRADIENTS))
        step = simulate(split, cuts, costs)
        assert bool(plan.rows) == bool(step.tail) == has_rows, cuts
        assert bool(simulate(split, plan_by_cuts(split.gradients, range(3), cuts, ""), costs).tail) == has_rows
        if not has_rows:  # without rows, the table is complete once its lookups are
            assert step.step_s == simulate(job, cuts, costs).step_s


def test_row_counts_travel_in_the_control_words():
    words = [ControlWords(rank, 2, num_used=1, num_tables=2) for rank in range(2)]
    parts = []
    for rank, control in enumerate(words):
        part = torch.zeros(control.num_words, dtype=torch.bfloat16)
        control.write_report(part, RankReport(samples=rank))
        control.write_counts(part, [300 + rank, 2**32 - 1])
        control.write_used(part, [])
        parts.append(part)
    total = (parts[0] + parts[1]).tolist()
    assert words[0].read_counts(total) == [[300, 2**32 - 1], [301, 2**32 - 1]]
    assert [report.samples for report in words[0].read_reports(total)] == [0, 1]
    assert total[words[0].num_read_words] == 2


def test_lookups_are_detected_on_a_bare_module():
    """The gradient is dense, as in a profile, and the rows touched by lookups are known."""
    module = nn.ModuleDict({"words": nn.Embedding(4096, 16, padding_idx=1), "small": nn.Embedding(4, 16)})
    weight, ids, seen = module["words"].weight, torch.tensor([[5, 1, 5, 7]]), list[tuple[int, list[int]]]()
    lookups = Lookups(module, list(module.parameters()))
    (module["words"](ids).sum() + (weight * 2).sum()).backward()
    wanted, weight.grad = weight.grad, None
    lookups.attach(lambda index, rows: seen.append((index, rows.tolist())))
    x = module["words"](ids)
    assert "weight" not in module["words"].__dict__ and not module["words"].sparse
    (x.sum() + (weight * 2).sum()).backward()
    torch.testing.assert_close(weight.grad, wanted)
    assert seen == [(0, [5, 5, 7])]
    lookups.stop()
    assert not module["words"]._forward_pre_hooks and not module["words"]._forward_hooks
