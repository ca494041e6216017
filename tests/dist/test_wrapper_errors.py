"""An error on one rank is raised on all of them within seconds, with the same text and code."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline import ConfigError
from paceline.parallel import DDP, backward, streams
from paceline.parallel.channel import Channel
from tests.dist.wrapped import REDUCERS, STEPS, Net, average_alone, check, check_equal, describe, error_of, here, loss

SOON_S = 60  # the timeouts of a collective and of the job are longer


# -- wrapping ---------------------------------------------------------------------------------------------------------


class Swapped(nn.Module):
    def __init__(self, is_swapped: bool) -> None:
        super().__init__()
        for name in ("b", "a") if is_swapped else ("a", "b"):
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))


def wrap_differently() -> list[tuple[str, str]]:
    with paceline.init(announce=None) as world:
        odd = world.rank == 1
        half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half() if odd else nn.Linear(2, 2))
        frozen = nn.Linear(2, 2)
        frozen.bias.requires_grad_(not odd)
        buffered = nn.Linear(2, 2)
        buffered.register_buffer("extra", torch.zeros(3 if odd else 2))
        strided = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last if odd else torch.contiguous_format)
        return [
            error_of(lambda: DDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3 if odd else 2))))),
            error_of(lambda: DDP(nn.Linear(2, 4 if odd else 3))),
            error_of(lambda: DDP(half)),
            error_of(lambda: DDP(Swapped(odd))),
            error_of(lambda: DDP(frozen)),
            error_of(lambda: DDP(buffered)),
            error_of(lambda: DDP(strided)),
            error_of(lambda: DDP(Net(), reducer="simple" if odd else "bucketed")),
            error_of(lambda: DDP(Net(), find_unused_parameters=odd)),
            error_of(lambda: DDP(Net(), bucket_cap_mb=2 if odd else 1)),
            error_of(lambda: DDP(Net(), average="samples" if odd else "ranks")),
            error_of(lambda: DDP(Net())),
        ]


def test_different_models_or_options_are_the_same_error_everywhere(job):
    results = job(3, wrap_differently)
    assert results[0] == results[1] == results[2]
    words = [
        ["2.weight", "rank 0", "rank 1"],
        ["weight", "(3, 2)", "(4, 2)", "rank 1"],
        ["1.weight", "float32", "float16", "rank 1"],
        ["a on rank 0", "b on rank 1"],
        ["bias", "trained", "frozen", "rank 1"],
        ["extra", "(2,)", "(3,)", "rank 1"],
        ["weight", "strides", "rank 1"],
        ["reducer", "'bucketed' on rank 0", "'simple' on rank 1"],
        ["True on rank 1", "False on rank 0"],
        ["bucket_cap_mb", "1 on rank 0", "2 on rank 1"],
        ["average", "'ranks' on rank 0", "'samples' on rank 1"],
    ]
    for wanted, (kind, text) in zip(words, results[0][:-1], strict=True):
        assert kind == "ConfigError mismatch", text
        assert all(word in text for word in wanted), text
    assert results[0][-1] == ("", "")


def verify() -> list[Any]:
    with paceline.init(announce=None) as world:
        torch.manual_seed(5)
        same, other = Net(), Net()
        if world.rank == 1:
            with torch.no_grad():
                other.right.bias[2] += 1e-6
        found = [error_of(lambda: DDP(same, init="verify"))]
        try:
            DDP(other, init="verify")
        except ValueError as error:
            found += [isinstance(error, ConfigError) and error.code, str(error)]
        # By default, every rank gets the values of rank 0.
        check_equal(world, DDP(other).parameters())
        return found


def test_verify_raises_value_error_on_every_rank_with_parameter_and_rank(job):
    results = job(3, verify)
    assert results[0] == results[1] == results[2]
    assert results[0][:2] == [("", ""), "mismatch"]
    assert "right.bias on rank 1" in results[0][2]
    assert "right.weight" not in results[0][2]


def wrap_nothing() -> list[Any]:
    found = []
    with paceline.init(announce=None):
        for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            try:
                DDP(module)
            except RuntimeError as error:
                found.append(describe(error)[0])
        return found


def test_nothing_to_train_is_a_runtime_error_as_in_torch(job):
    results = job(2, wrap_nothing)
    assert results[0] == results[1]
    assert results[0] == ["NothingToTrainError nothing-to-train"] * 2


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"reducer": "fast"}, "reducer='fast'"),
    ({"reducer": "simple", "strategy": "bf16"}, "strategy='bf16'"),
    ({"reducer": "simple", "embeddings": "rows"}, "embeddings='rows'"),
    ({"init": "copy"}, "init='copy'"),
    ({"average": "tokens"}, "average='tokens'"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
    ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan"),
    ({"bucket_cap_mb_list": [1, -1]}, "bucket_cap_mb_list=-1"),
    ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list"),
    ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, "bucket_cap_mb and bucket_cap_mb_list"),
    ({"bucket_cap_mb": 1, "reducer": "simple"}, "reducer='simple'"),
    ({"check_replicas_every": -1}, "check_replicas_every=-1"),
    ({"statistics_every": -1}, "statistics_every=-1"),
    ({"statistics_every": 2, "broadcast_buffers": False}, "statistics_every=2"),
    ({"init_sync": False, "init": "verify"}, "init='verify'"),
    ({"device_ids": [0, 1]}, "device_ids"),
    ({"mixed_precision": object()}, "mixed_precision"),
    ({"ignore": ["no.such"]}, "no.such"),
]


def ask_badly() -> list[tuple[str, str]]:
    with paceline.init(announce=None):
        return [error_of(lambda options=options: DDP(Net(), **options)) for options, _ in BAD_OPTIONS]


def test_bad_options_are_refused_with_their_value(job):
    results = job(2, ask_badly)
    assert results[0] == results[1]
    for (options, word), (kind, text) in zip(BAD_OPTIONS, results[0], strict=True):
        assert kind.startswith("ConfigError"), (options, kind, text)
        assert word in text, (options, text)


# -- one rank fails ---------------------------------------------------------------------------------------------------


class Fragile(Net):
    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        hidden = super().forward(x)
        if fails:
            raise KeyError("no such word")
        return hidden


def fail_in_forward(ranks: tuple[int, ...], at_step: int) -> list[tuple[str, str, float]]:
    found = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Fragile(), **reducer)
            for step in range(at_step):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            model.zero_grad()
            began = time.monotonic()
            fails = world.rank in ranks
            kind, text = error_of(lambda model=model, fails=fails: loss(model, world.rank, fails=fails).backward())
            found.append((kind, text, time.monotonic() - began))
            # All ranks raised the same error, so all can continue.
            model.zero_grad()
            wanted = average_alone(model.module, loss, world.world_size)
            loss(model, world.rank).backward()
            check(world, model, wanted, reducer)
    return found


def fail_while_words_are_read_late(asks: bool) -> list[tuple[str, str]]:
    """Read control words one step late, when the next step's buckets are in flight, as on a GPU after the first steps.
    With `asks`, healthy ranks first check the last step."""
    copy, streams.copy_to_host = streams.copy_to_host, lambda slots: (slots.clone(), NoEvent())
    found = []
    try:
        with paceline.init(announce=None) as world:
            model = DDP(Fragile(), bucket_cap_mb=7e-5)
            model._ready._can_defer = True
            for step in range(backward._EAGER_STEPS + 2):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            assert len(model.plan.buckets) > 2
            for fails in (True, False):  # after the failure, the ranks continue
                model.zero_grad()
                if world.rank == 1 and fails:
                    found.append(error_of(lambda: loss(model, world.rank, fails=True).backward()))
                elif fails:
                    loss(model, world.rank).backward()
                    then = model.check_last_step if asks else lambda: loss(model, world.rank).backward()
                    found.append(error_of(then))
                else:
                    wanted = average_alone(model.module, loss, world.world_size)
                    loss(model, world.rank).backward()
                    check(world, model, wanted, {})
                    model.check_last_step()
    finally:
        streams.copy_to_host = copy
    return found


class NoEvent:
    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("asks", [False, True])
def test_a_failure_with_deferred_control_words_is_one_error_everywhere(job, asks):
    results = job(3, fail_while_words_are_read_late, asks)
    assert results[0] == results[1] == results[2]
    ((kind, text),) = results[0]
    assert kind == "CollectiveError rank-failed" and "rank 1" in text and "step 13" in text


class Normed(nn.Module):
    """A model with a first layer that exchanges messages in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = paceline.SyncBatchNorm(4), Fragile()

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        return self.last(self.norm(x), fails)


def fail_before_other_messages(kind: str) -> tuple[str, str]:
    """Rank 1 fails after the first steps. Before the next control words, the others send messages in forward, in the
    optimizer, in `rebuild`, in a hook, or for a schedule that stops averaging gradients."""
    copy, streams.copy_to_host = streams.copy_to_host, lambda slots: (slots.clone(), NoEvent())
    try:
        with paceline.init(announce=None) as world:
            num_steps = backward._EAGER_STEPS + 2
            strategy = {"optimizer": "zero1", "schedule": f"localsgd:2,after={num_steps + 1}"}.get(kind, "dense")
            model = DDP(Normed() if kind == "forward" else Fragile(), bucket_cap_mb=7e-5, strategy=strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "optimizer":
                optimizer = model.shard_optimizer(optimizer)
            failures = [OSError("no more room")] if kind == "hook" and world.rank == 1 else []

            def hook(state: object, bucket: Any) -> Any:
                if failures and model._ready.num_steps == num_steps:
                    raise failures.pop()  # only once
                return default_hooks.allreduce_hook(None, bucket)

            if kind == "hook":
                model.register_comm_hook(None, hook)
            model._ready._can_defer = True

            def step(number: int, fails: bool = False) -> None:
                optimizer.zero_grad()
                loss(model, world.rank, number, fails=fails).backward()
                optimizer.step()

            for number in range(num_steps):
                step(number)

            def fail() -> None:
                for number in range(3):
                    step(num_steps + number, fails=world.rank == 1 and kind != "hook")
                    if kind == "rebuild":
                        model.rebuild()

            return error_of(fail)
    finally:
        streams.copy_to_host = copy


@pytest.mark.parametrize("kind", ["forward", "optimizer", "schedule", "rebuild", "hook"])
def test_deferred_control_words_are_read_before_other_messages(job, kind):
    results = job(2, fail_before_other_messages, kind)
    assert results[0] == results[1]
    code, text = results[0]
    assert code == f"CollectiveError {'hook' if kind == 'hook' else 'rank'}-failed"
    assert "rank 1" in text and "step 13" in text


@pytest.mark.parametrize("at_step", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_fails_in_forward_is_one_error_everywhere(job, at_step):
    results = job(3, fail_in_forward, (1,), at_step)
    texts = [[(kind, text) for kind, text, _ in result] for result in results]
    assert texts[0] == texts[1] == texts[2]
    for kind, text in texts[0]:
        assert kind == "CollectiveError rank-failed"
        assert all(word in text for word in (f"step {at_step + 1}", "rank 1", "forward", "KeyError: 'no such word'"))
    assert all(seconds < SOON_S for result in results for *_, seconds in result)


def test_if_all_ranks_fail_each_raises_its_own_error(job):
    for result in job(3, fail_in_forward, (0, 1, 2), 1):
        assert [(kind, text) for kind, text, _ in result] == [("KeyError", "'no such word'")] * len(REDUCERS)


def leave_early(reducer: dict[str, Any]) -> tuple[str, str, float]:
    began, kind, text = time.monotonic(), "", ""
    try:
        with paceline.init(announce=None) as world:
            model = DDP(Net(), **reducer)
            for step in range(STEPS - (world.rank == 1)):
                model.zero_grad()
                loss(model, world.rank, step).backward()
    except paceline.CollectiveError as error:
        kind, text = describe(error)
    return kind, text, time.monotonic() - began


@pytest.mark.parametrize(
    "reducer", [REDUCERS[1], *(pytest.param(one, marks=pytest.mark.slow) for one in REDUCERS[::2])], ids=str
)
def test_a_rank_with_one_batch_less_is_named_by_the_others(job, reducer):
    results = job(3, leave_early, reducer)
    assert results[1][:2] == ("", "")
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind == "CollectiveError peer-lost"
        assert "rank 1" in text
        assert "join()" in text
        assert ("the gradient of " in text) == (reducer == {"reducer": "simple"}), text
        assert seconds < SOON_S


# -- uneven numbers of batches ----------------------------------------------------------------------------------------


def train_unevenly(batches: tuple[int, ...], average: str, divide_by_all: bool) -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), average=average, check_replicas_every=1, **reducer)
            alone = Net().to(here())
            alone.load_state_dict(model.module.state_dict())
            optimizer, reference = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
            with model.join(divide_by_initial_world_size=divide_by_all):
                for step in range(batches[world.rank]):
                    optimizer.zero_grad()
                    loss(model, world.rank, step).backward()
                    optimizer.step()
            for step in range(max(batches)):
                active = [rank for rank, count in enumerate(batches) if step < count]
                by_all = average == "ranks" and divide_by_all
                divisor = len(batches) if by_all else len(active)
                alone.zero_grad()
                (sum(loss(alone, rank, step) for rank in active) / divisor).backward()
                reference.step()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, msg=lambda text, reducer=reducer: f"{reducer}: {text}")
            check_equal(world, model.parameters(), reducer)
            # Afterward, steps work as before.
            model.zero_grad()
            wanted = average_alone(model.module, loss, len(batches))
            loss(model, world.rank).backward()
            check(world, model, wanted, reducer)


@pytest.mark.parametrize("batches", [(4, 3), (2, 4), (0, 0), (0, 2), (3, 1, 2)], ids=str)
def test_join_trains_on_every_batch_and_ends_with_equal_parameters(job, batches):
    job(len(batches), train_unevenly, batches, "ranks", True)


def test_join_can_divide_by_the_number_of_active_ranks(job):
    job(3, train_unevenly, (1, 3, 2), "ranks", False)
    job(3, train_unevenly, (1, 3, 2), "samples", True)


def stop_at_the_first_end() -> tuple[str, str]:
    with paceline.init(announce=None) as world:
        model = DDP(Net())

        def train() -> None:
            with model.join(throw_on_early_termination=True):
                for step in range(STEPS - world.rank):
                    model.zero_grad()
                    loss(model, world.rank, step).backward()

        return error_of(train)


def test_join_can_stop_all_ranks_when_the_first_runs_out(job):
    first, second = job(2, stop_at_the_first_end)
    assert first == second
    assert first[0] == "CollectiveError uneven-inputs"
    assert "rank 1" in first[1]


# -- replicas that diverge --------------------------------------------------------------------------------------------


def drift(every: int) -> list[tuple[str, str]]:
    found = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), check_replicas_every=every, **reducer)
            for step in range(3):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            if world.rank == 1:
                with torch.no_grad():
                    model.module.left.bias[0] += 1e-5
            model.zero_grad()
            found.append(error_of(lambda model=model: loss(model, world.rank).backward()))
    return found


def test_drift_is_detected_at_the_next_check(job):
    results = job(3, drift, 1)
    assert results[0] == results[1] == results[2]
    for kind, text in results[0]:
        assert kind == "CollectiveError drift"
        assert "left.bias on rank 1" in text
        assert "step 4" in text
        assert "right" not in text
    # Without the check, the mismatch goes unnoticed.
    assert job(3, drift, 0) == [[("", "")] * len(REDUCERS)] * 3


# -- gradients that cannot be sent ------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(torch.arange(x.size(0))) * x)


def send_sparse() -> tuple[list[tuple[str, str]], float]:
    began = time.monotonic()
    found = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:

            def train(reducer: dict[str, Any] = reducer) -> None:
                model = DDP(Sparse(), **reducer, embeddings="dense")
                loss(model, world.rank).backward()

            found.append(error_of(train))
    return found, time.monotonic() - began


def test_sparse_gradients_are_a_clear_error_on_all_ranks(job):
    (first, first_s), (second, _) = job(2, send_sparse)
    assert first == second
    assert first_s < SOON_S
    for kind, text in first:
        assert kind == "ConfigError sparse-gradient", (kind, text)
        assert "words.weight" in text, text


# -- a lost peer ------------------------------------------------------------------------------------------------------


def talk_to_the_gone(what: str) -> tuple[str, str]:
    with paceline.init(announce=None, timeout_s=SOON_S) as world:
        assert dist.group.WORLD is not None
        channel = Channel(dist.group.WORLD, torch.device("cpu"))
        assert channel.share(world.rank) == [0, 1, 2]
        channel.broadcast([torch.zeros(3)], source=1)
        if world.rank == 1:
            return "", ""
        if what == "share":
            return error_of(lambda: channel.share(7))
        return error_of(lambda: channel.broadcast([torch.zeros(3)], source=1))


@pytest.mark.parametrize("what", ["share", "broadcast"])
def test_a_lost_peer_is_named_in_every_kind_of_exchange(job, what):
    results = job(3, talk_to_the_gone, what)
    for kind, text in (results[0], results[2]):
        assert kind == "CollectiveError peer-lost", (kind, text)
        assert "rank 1" in text


class Meeting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), paceline.SyncBatchNorm(4)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise KeyError("no such word")
        return self.norm(self.first(x))


def fail_before_others_meet(at_step: int) -> tuple[str, str, float]:
    began = time.monotonic()
    kind = text = ""
    try:
        with paceline.init(announce=None) as world:
            model = DDP(Meeting())
            for step in range(at_step + 1):
                fails = step == at_step and world.rank == 1
                loss(model, world.rank, step, fails=fails).backward()
    except Exception as error:
        kind, text = describe(error)
    return kind, text, time.monotonic() - began


@pytest.mark.parametrize("at_step", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_fails_while_others_wait_in_forward_is_named_when_it_exits(job, at_step):
    results = job(3, fail_before_others_meet, at_step)
    assert results[1][:2] == ("KeyError", "'no such word'")
    for kind, text, _ in (results[0], results[2]):
        assert kind == "CollectiveError peer-lost"
        assert "rank 1" in text and "KeyError: 'no such word'" in text
    assert all(seconds < SOON_S for *_, seconds in results)
