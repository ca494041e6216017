"""An error on one NCCL rank is raised on all of them, with the same text, which names the rank.

If ranks send different messages, kernels wait on the GPU forever: these tests are in a separate file.
"""

from __future__ import annotations

import pytest

from tests.dist import test_outer_ranks, test_strategies, test_wrapper_errors
from tests.dist.test_wrapper_hooks import FAILURES, break_hook
from tests.gpu.conftest import BACKEND
from tests.gpu.test_wrapper_cuda import leave_out

RANKS = (2, 4, 8)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_missing_gradient_is_named_on_all_ranks(on_nccl, ranks):
    # Late in a run, the control words are read before the next step.
    for step_without, step_found in ((2, 2), (12, 13)):
        answers = on_nccl(ranks, leave_out, BACKEND, step_without)
        assert len(set(answers)) == 1
        text, step = answers[0]
        assert f"spare.weight on rank {ranks - 1}" in text
        if BACKEND == "nccl":
            assert step == step_found


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_fails_in_forward_is_one_error_everywhere(on_nccl, ranks):
    results = on_nccl(ranks, test_wrapper_errors.fail_in_forward, (1,), 2)
    texts = [[(kind, text) for kind, text, _ in result] for result in results]
    assert all(text == texts[0] for text in texts[1:])
    for kind, text in texts[0]:
        assert kind == "CollectiveError rank-failed"
        assert all(word in text for word in ("step 3", "rank 1", "forward", "KeyError: 'no such word'"))


def test_drift_is_detected_at_the_next_check(on_nccl):
    results = on_nccl(4, test_wrapper_errors.drift, 1)
    assert all(result == results[0] for result in results)
    for kind, text in results[0]:
        assert kind == "CollectiveError drift" and "left.bias on rank 1" in text


def test_different_models_or_options_are_the_same_error_everywhere(on_nccl):
    results = on_nccl(4, test_wrapper_errors.wrap_differently)
    assert all(result == results[0] for result in results)
    *refused, accepted = results[0]
    assert {kind for kind, _ in refused} == {"ConfigError mismatch"} and accepted == ("", "")
    assert all("rank 1" in text for _, text in refused)


def test_join_can_stop_all_ranks_when_the_first_runs_out(on_nccl):
    first, second = on_nccl(2, test_wrapper_errors.stop_at_the_first_end)
    assert first == second
    assert first[0] == "CollectiveError uneven-inputs" and "rank 1" in first[1]


# -- a rank has not sent an awaited message ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", FAILURES)
def test_a_hook_that_fails_on_one_rank_is_one_error_everywhere(on_nccl, how):
    results = on_nccl(4, break_hook, how, (1,), 1, timeout_s=45)
    texts = [[(kind, text) for kind, text, _ in result] for result in results]
    assert all(text == texts[0] for text in texts[1:])
    fine, (kind, text), (later, refusal) = texts[0]
    assert fine == ("", "")
    assert (kind, later) == ("CollectiveError hook-failed", "CollectiveError unusable")
    assert "rank 1" in text and "rank 0" not in text and FAILURES[how] in text and text in refusal


def test_if_the_hook_fails_on_all_ranks_each_raises_its_own_error_and_can_continue(on_nccl):
    for result in on_nccl(2, break_hook, "first call", (0, 1), 1, timeout_s=45):
        assert [(kind, text) for kind, text, _ in result] == [("", ""), ("OSError", "no more room"), ("", "")]


@pytest.mark.parametrize(("text", "stage"), [("int8", 0), ("int8", 1), ("powersgd:2", 2)])
def test_a_codec_that_fails_on_one_rank_is_one_error_everywhere(on_nccl, text, stage):
    first, *others = on_nccl(4, test_strategies.fail_inside, text, stage, timeout_s=45)
    assert first[0] == "CollectiveError hook-failed"
    assert "rank 1" in first[1] and "no more room" in first[1]
    assert all(other == first for other in others)


def test_a_failure_in_a_schedule_is_one_error_on_all_ranks(on_nccl):
    first, second = on_nccl(2, test_outer_ranks.fail_in_every_way, timeout_s=90)
    assert first == second
    assert [kind.removeprefix("CollectiveError ") for kind, _ in first] == [
        "rank-failed", "missing-gradient", "uneven-inputs", "not-finite", "drift", "hook-failed", "unusable",
        "hook-failed",
    ]  # fmt: skip
