"""Predicted strategies: the codecs' bytes, steps against manual sums, crossings, and a tuning."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure import engine
from paceline.measure.codec_bench import measure_codecs
from paceline.parallel.codecs import GATHER, SUM, build_codec
from paceline.plan import Gradient
from paceline.predict.curves import Resample
from paceline.predict.job import Job
from paceline.predict.search import estimate_caps
from paceline.predict.sending import LARGE_BYTES, Sending
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.strategy_costs import (
    ALL,
    BANDWIDTHS,
    MEASURED,
    choose_fastest,
    describe_strategies,
    describe_update,
    find_codec,
    fit_factor,
    fit_sending,
    is_worth_it,
    list_strategies,
    prefer,
    sweep_bandwidths,
)
from paceline.predict.tuning import TuneSettings, derive_tuning, load_tuning
from paceline.records import CodecRecord, Samples
from paceline.records.environment import capture_environment
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.store import Run
from paceline.report.predictions import TuneResult, describe_offers
from paceline.report.result import build_result
from paceline.report.strategy_steps import StrategyStepsResult, plot_bandwidths
from paceline.strategy import DENSE, Message, Strategy
from paceline.units import MIB
from tests.unit.made_jobs import line
from tests.unit.made_plans import plan_by_cap
from tests.unit.made_tuning import MadeJob

# Shapes with all corner cases: a vector, a matrix that low rank does not shrink, filters, and sizes that blocks do
# not divide.
SHAPES = ((7,), (3, 3), (64, 50), (8, 4, 3, 3), (1,), (700, 30))
ALPHA, RATE = 1e-3, 1e6
# After a codec, the wrapper's control words are sent in a separate message.
WORDS_S = ALPHA + 64 / RATE


def make_job(sizes, ready_s, backward_s: float, before_s: float = 0.0, after_s: float = 0.0) -> Job:
    gradients = tuple(Gradient(f"layer{place}", size) for place, size in enumerate(sizes))
    return Job(gradients, tuple(ready_s), backward_s, before_s, after_s)


def parse(text: str) -> Strategy:
    return Strategy.parse(text)


def list_sent(text: str, world_size: int, grads: list[torch.Tensor]) -> list[Message]:
    """The messages of a codec for one bucket."""
    codec, sent = build_codec(parse(text), 0, world_size), []
    exchange, value = codec.average([str(number) for number in range(len(grads))], grads, 0), None
    while True:
        try:
            kind, tensor = exchange.send(value)
        except StopIteration:
            return sent
        sent.append(Message(kind, tensor.nbytes))
        value = torch.stack([tensor] * world_size) if kind == GATHER else tensor.clone() if kind == SUM else tensor


@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "topk:0.01", "topk:0.5", "powersgd:1", "powersgd:4"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_simulated_bytes_are_those_of_the_codec(text, world_size):
    torch.manual_seed(1)
    grads = [torch.randn(shape) for shape in SHAPES]
    gradients = [Gradient(str(n), grad.nbytes, shape=tuple(grad.shape)) for n, grad in enumerate(grads)]
    assert list(parse(text).traffic(gradients, world_size)) == list_sent(text, world_size, grads)
    job = Job(tuple(gradients), (0.0,) * len(grads), 0.0)
    sent = sum(message.sent_bytes(world_size) for message in list_sent(text, world_size, grads))
    assert Sending(parse(text), world_size).count_sent(job, [len(grads)]) == sent


def test_bytes_of_a_period_and_of_shards():
    job = make_job([4096, 4096], [0.0, 0.0], 0.0)
    assert Sending(parse("diloco:100"), 2).count_sent(job, [1, 2]) == 8192 / 100
    assert Sending(parse("zero1"), 4).count_sent(job, [2]) == 2 * 3 / 4 * 8192 == Sending(DENSE, 4).count_sent(job, [2])
    # Ranks that share memory send uncompressed buckets.
    assert Sending(parse("bf16"), 4, is_in_place=True).count_sent(job, [2]) == 2 * 3 / 4 * 8192
    for text in ("zero1", "zero1+bf16"):
        assert Sending(parse(text), 4, is_in_place=True).count_sent(job, [2]) == 3 * 3 / 4 * 8192
    assert Sending(parse("int8"), 4, is_in_place=True).count_sent(job, [2]) < 8192 / 2
    assert Sending(parse("zero1+bf16"), 4).count_sent(job, [2]) == 3 / 4 * (4096 + 8192)
    # Pieces start at cache lines: 100 bytes on 2 ranks are split into 64 and 36, and both ranks send 64.
    assert Sending(parse("zero1"), 2).count_sent(make_job([100], [0.0], 0.0), [1]) == 64 + 64


def costs(text: str, parts=(), world_size: int = 2, **more) -> MachineCosts:
    return MachineCosts(line(ALPHA, RATE), sending=Sending(parse(text), world_size, parts, **more))


def test_two_messages_follow_each_other_and_codecs_compute_around_them():
    gradient = Gradient("matrix", 40_000, shape=(100, 100))
    job = Job((gradient,), (0.010,), 0.010, 0.005, 0.002)
    step = simulate(job, [1], costs("powersgd:4", ((0.003, 0.0), (0.002, 0.0), (0.0005, 1e-8))))
    message_s = ALPHA + 1600 / RATE  # 100 x 4 floats each way
    # Encoding is part of backward; its last part, too, is divided by the bytes of the gradients.
    assert step.backward_s == pytest.approx(0.013)
    assert step.over_s == pytest.approx(0.013 + message_s + 0.002 + message_s + 0.0009 + WORDS_S)
    (bucket,) = step.buckets
    assert (bucket.launch_s, bucket.start_s) == (pytest.approx(0.013), pytest.approx(0.013))
    # Without matrices there is one message, with a first and a last part only.
    vector = Job((Gradient("vector", 400, shape=(100,)),), (0.010,), 0.010)
    step = simulate(vector, [1], costs("powersgd:4", ((0.003, 0.0), (0.002, 0.0), (0.0005, 0.0))))
    assert step.over_s == pytest.approx(0.013 + ALPHA + 400 / RATE + 0.0005 + WORDS_S)


def test_codec_work_during_backward_shares_the_core():
    job = make_job([1000], [0.0], 0.010)
    step = simulate(job, [1], costs("bf16", ((0.0, 0.0), (0.002, 0.0))))
    # 500 bytes take 1.5 ms; 2 ms of decoding then take 4, during which backward does 2 of its remaining 8.5.
    assert step.buckets[0].done_s == pytest.approx(0.0055)
    assert step.backward_s == pytest.approx(0.012) and step.over_s == pytest.approx(0.012 + WORDS_S)


def test_messages_slow_codec_work():
    """Two consecutive buckets of one message each: the first is decoded while the second is in flight."""
    job, slow = make_job([1000, 1000], [0.0, 0.0], 0.0), Contention((1,), (0.5,), (1.0,))
    message_s, codec_s = ALPHA + 500 / RATE, 0.0004
    for given, took_s in ((Contention(), codec_s), (slow, 2 * codec_s)):
        step = simulate(job, [1, 2], replace(costs("bf16", ((0.0, 0.0), (codec_s, 0.0))), contention=given))
        assert step.buckets[0].done_s == pytest.approx(message_s + took_s)
        assert step.over_s == pytest.approx(2 * message_s + codec_s + WORDS_S)


def test_a_step_calibrates_the_cost_of_a_codec():
    job, given = make_job([1000, 1000], [0.002, 0.004], 0.004), costs("bf16", ((0.003, 0.0), (0.001, 1e-7)))
    for factor in (0.7, 1.0, 2.5):
        step_s = simulate(job, [1, 2], replace(given, sending=given.sending.scale(factor))).step_s
        assert fit_factor(job, [1, 2], given, step_s) == pytest.approx(factor, abs=2e-3)
    assert fit_factor(job, [1, 2], given, 100.0) == pytest.approx(5, abs=2e-3)  # the maximum
    assert fit_factor(job, [1, 2], costs("bf16"), 100.0) == 1  # decoding is free here


def test_with_two_levels_a_codec_works_on_a_part_between_messages_inside():
    job = Job((Gradient("matrix", 40_000, shape=(100, 100)),), (0.010,), 0.010)
    parts = ((0.003, 0.0), (0.002, 1e-7), (0.001, 0.0))
    sending = Sending(parse("int8+hosts"), 4, parts, ranks_per_host=2)
    step = simulate(job, [1], MachineCosts(line(ALPHA, RATE), sending=sending, inside=line(1e-4, 1e7)))
    inside_s = 1e-4 + 20_000 / 1e7  # half of an all-reduce
    # 5000 numbers in 10 blocks for each of two hosts. Two ranks of a host send concurrently.
    between_s = ALPHA + 2 * 2600 / RATE
    codec_s = 0.003 + 0.002 + 20_000 * 1e-7 + 0.001
    assert step.over_s == pytest.approx(0.010 + 2 * inside_s + 2 * between_s + codec_s + WORDS_S)
    assert sending.count_sent(job, [1]) == 2 * 20_000 + 2 * 2600
    # On one level, everything that a host's ranks send in an all-to-all crosses the link; an all-gather circulates
    # once.
    flat = [replace(sending, strategy=parse("int8"), ranks_per_host=num) for num in (1, 2, 4)]
    alone, shared, on_host = ([load.num_bytes for load in one.list_messages(job.gradients)] for one in flat)
    assert shared == [2 * alone[0], alone[1]] and on_host == alone


def test_second_messages_queue_behind_earlier_first_ones():
    job = make_job([1024 * 4, 1024 * 4], [0.0, 0.0], 0.0)
    step = simulate(job, [1, 2], costs("int8"))
    part = 2 * 260  # bytes of two blocks of 256 with their scales: half of a bucket
    first, second = (ALPHA + part / RATE,) * 2  # an all-to-all of two parts moves the bytes of an all-reduce of one
    assert step.buckets[0].done_s == pytest.approx(2 * first + second)
    assert step.over_s == pytest.approx(2 * first + 2 * second + WORDS_S)


def test_a_period_has_one_exchange():
    job = make_job([4000, 4000], [0.004, 0.008], 0.010, before_s=0.006, after_s=0.004)
    message_s = ALPHA + 8000 / RATE
    step = simulate(job, [1, 2], costs("localsgd:4"))
    exposed_s = (message_s + 2 * WORDS_S) / 4  # ranks agree before it starts, and before they use it
    assert step.step_s == pytest.approx(0.020 + exposed_s) and step.exposed_s == pytest.approx(exposed_s)
    assert [bucket.num_bytes for bucket in step.buckets] == [8000]
    # A delay of one step hides everything except the codec's initial computation.
    parts = ((0.003, 0.0), (0.0, 0.0))
    delayed = simulate(job, [2], costs("diloco:10,delay=1", parts))
    assert delayed.step_s == pytest.approx(0.020 + (0.003 + 2 * WORDS_S) / 10)
    short = replace(job, backward_s=0.0, ready_s=(0.0, 0.0), before_s=0.002, after_s=0.0)
    assert simulate(short, [2], costs("diloco:10,delay=1", parts)).step_s == pytest.approx(
        0.002 + (0.003 + message_s - 0.002 + 2 * WORDS_S) / 10
    )
    fragments = simulate(job, [2], costs("diloco:10,fragments=2"))
    assert fragments.step_s == pytest.approx(0.020 + 2 * (ALPHA + 4000 / RATE + 2 * WORDS_S) / 10)
    every_other = Sending(parse("diloco:10,fragments=2"), 2).list_fragments(make_job([4, 8, 16], [0] * 3, 0.0))
    assert [[gradient.num_bytes for gradient in group] for group in every_other] == [[4, 16], [8]]
    assert len(estimate_caps(job, costs("localsgd:4")).points) == 1  # nothing to search


def test_shards_halve_the_message_and_divide_the_optimizer():
    job = make_job([4096, 4096], [0.0, 0.010], 0.010, before_s=0.006, after_s=0.004)
    half_s, full_s = ALPHA + 2048 / RATE, ALPHA + 4096 / RATE
    # Forward waits for the bucket that it needs first and computes half while the other bucket arrives.
    gathering_s = 2 * half_s - 0.003
    step = simulate(job, [1, 2], costs("zero1"))
    assert step.over_s == pytest.approx(0.010 + half_s + WORDS_S + gathering_s) and step.after_s == pytest.approx(0.002)
    in_place = simulate(job, [1, 2], costs("zero1", is_in_place=True))
    assert in_place.over_s == pytest.approx(0.010 + full_s + gathering_s)


def times(*seconds: float) -> tuple[Samples, ...]:
    return tuple(Samples(((value,),) * 3) for value in seconds)


def codec(text: str, world_size: int, num_buckets: int, *parts: float) -> CodecRecord:
    return CodecRecord(strategy=text, device="cpu", world_size=world_size, num_bytes=1000, num_buckets=num_buckets,
                       parts=times(*parts))  # fmt: skip


CODECS = [
    codec("topk:0.01", 2, 1, 0.010, 0.004), codec("topk:0.01", 2, 5, 0.014, 0.004),
    codec("topk:0.01", 8, 1, 0.010, 0.010),
    codec("bf16", 2, 1, 0.002, 0.001), codec("bf16", 2, 5, 0.002, 0.001), codec("bf16", 8, 1, 0.003, 0.004, 0.005),
]  # fmt: skip


def test_codec_costs_by_bucket_by_byte_and_by_ranks():
    found = fit_sending(parse("topk:0.01"), 2, CODECS)
    assert found is not None and found.parts == (
        (pytest.approx(0.001), pytest.approx(9e-6)), (pytest.approx(0.0), pytest.approx(4e-6)),
    )  # fmt: skip
    between = fit_sending(parse("topk:0.001"), 5, CODECS, factor=2.0)  # at the nearest amount, half-way to 8 ranks
    assert between is not None and between.parts[1] == (0.0, pytest.approx(2 * 7e-6))
    assert between.parts[0] == (pytest.approx(0.002), pytest.approx(2 * 9e-6))  # constant parts stay constant
    wide = fit_sending(parse("zero1+bf16"), 4, CODECS)
    assert wide is not None and [round(rate, 9) for _, rate in wide.parts] == [3e-6, 4e-6, 5e-6]
    unknown = fit_sending(parse("int8"), 2, CODECS)
    assert unknown is not None and unknown.parts == () and unknown.list_works(100, 2) == [0.0, 0.0, 0.0]
    # Shared memory rounds in the sum, and no codec runs.
    assert fit_sending(parse("bf16"), 2, CODECS, is_in_place=True) is None
    shared = fit_sending(parse("zero1+bf16"), 2, CODECS, is_in_place=True)
    assert shared is not None and shared.parts == () and fit_sending(parse("bf16"), 2, CODECS) is not None
    assert fit_sending(DENSE, 8, CODECS) is None and fit_sending(parse("int8"), 1, CODECS) is None
    assert find_codec(CODECS, parse("diloco:10+bf16")) == "bf16" and find_codec(CODECS, parse("zero1")) == ""
    # Above 32 MiB, each byte of a bucket costs twice as much.
    large = replace(codec("topk:0.01", 2, 1, 0.020, 0.008), num_bytes=LARGE_BYTES + 8)
    large = replace(large, parts=times(*(2 * value * large.num_bytes / 1000 for value in (0.010, 0.004))))
    twice = fit_sending(parse("topk:0.01"), 2, [*CODECS, large])
    assert twice is not None and twice.parts == found.parts and twice.large_factor == pytest.approx(2)
    assert twice.list_works(LARGE_BYTES + 8, 1)[0] == pytest.approx(2 * (0.001 + 9e-6 * (LARGE_BYTES + 8)))
    assert twice.list_works(1000, 1) == found.list_works(1000, 1)
    alone = fit_sending(parse("topk:0.01"), 2, [large])
    assert alone is not None and alone.large_factor == 1 and alone.parts[0] == (0.0, pytest.approx(2e-5))
    drawn = fit_sending(parse("topk:0.01"), 2, CODECS, Resample())
    assert drawn == found


@pytest.mark.parametrize("text", ["zero1", "zero1+bf16"])
def test_a_sharded_update_costs_its_copies_of_gradients_and_of_parameters(text):
    known = [*CODECS, codec("zero1", 2, 1, 0.002, 0.003, 0.004), codec("dense", 2, 1, 0.005, 0.006)]
    found = fit_sending(parse(text), 2, known)
    assert found is not None and found.parts == ((0.0, pytest.approx(2e-6)), (0.0, pytest.approx(3e-6)))
    assert found.round_s_per_byte == pytest.approx(4e-6) and find_codec(known, parse("bf16")) == "bf16"
    assert find_codec([*CODECS, known[-1]], parse("zero1")) == ""  # a profile recorded before this codec was measured
    # Nothing hides the copies after the last message or those in a forward that waits for parameters.
    job = make_job([1000], [0.010], 0.010)
    free = replace(found, parts=(), round_s_per_byte=0.0)
    steps = [simulate(job, [1], replace(costs(text), sending=sending)).step_s for sending in (found, free)]
    assert steps[0] - steps[1] == pytest.approx(0.002 + 0.003 + 0.004)
    assert "its copies are assumed to be free" in describe_strategies(job, [parse(text)], CODECS)[-1]
    assert "its copies are assumed to be free" not in describe_strategies(job, [parse(text)], known)[-1]


def test_a_round_costs_what_its_schedule_computes_besides_the_codec():
    known = [*CODECS, codec("dense", 2, 1, 0.001, 0.002), codec("dense", 2, 5, 0.001, 0.003)]
    known += [codec("localsgd:1", 2, 1, 0.004, 0.003), codec("diloco:1", 2, 1, 0.004, 0.009)]
    job = make_job([1000, 3000], [0.0, 0.0], 0.0)
    for text, round_s in {"localsgd:8": 0.004, "diloco:8": 0.010, "slowmo:8": 0.010, "diloco:8+bf16": 0.010}.items():
        strategy = parse(text)
        found, free = (fit_sending(strategy, 2, records) for records in (known, known[:-2]))
        assert found is not None and free is not None and found.parts == free.parts
        assert found.round_s_per_byte == pytest.approx(round_s / 1000) and free.round_s_per_byte == 0
        costs = MachineCosts(line(0.010, 1e12), sending=found)
        longer_s = simulate(job, [2], costs).step_s - simulate(job, [2], replace(costs, sending=free)).step_s
        assert longer_s == pytest.approx(4 * round_s / 8)  # four times the bytes, once in eight steps
    assert fit_sending(DENSE, 2, known) is None and find_codec(known, parse("localsgd:4")) == "dense"
    (said,) = describe_strategies(job, [parse("localsgd:8")], known)
    assert (
        "as long as it did alone" in said
        and "is free" in describe_strategies(job, [parse("localsgd:8")], known[:-2])[0]
    )


def test_two_levels_use_the_codec_of_one_rank_per_host():
    found, flat = (fit_sending(parse(f"topk:0.01{more}"), 8, CODECS, ranks_per_host=4) for more in ("+hosts", ""))
    assert found is not None and flat is not None and found.has_levels and not flat.has_levels
    two = fit_sending(parse("topk:0.01"), 2, CODECS)
    assert two is not None and found.parts == two.parts != flat.parts and found.world_size == 8
    assert fit_sending(parse("topk:0.01+hosts"), 8, CODECS, ranks_per_host=8) is None
    alone = fit_sending(parse("topk:0.01+hosts"), 8, CODECS)
    assert alone is not None and alone.parts == flat.parts and not alone.has_levels
    dense = fit_sending(parse("hosts"), 8, CODECS, ranks_per_host=4)
    assert dense is not None and dense.has_levels and not dense.parts
    (line_of_hosts,) = (one for one in describe_strategies(make_job([4], [0.0], 0.0), [parse("hosts")], CODECS))
    assert line_of_hosts.startswith("+hosts: ")


def test_a_list_of_strategies_includes_the_baselines():
    assert [one.text for one in list_strategies("all")] == ["dense", *ALL]
    assert [one.text for one in list_strategies("topk:0.001,dgc; int8,bf16")] == [
        "dense", "bf16", "topk:0.001,dgc", "int8",
    ]  # fmt: skip
    for text in ("", "int9", "all;zip", ";", []):
        with pytest.raises(ConfigError) as error:
            list_strategies(text)
        assert error.value.code == "strategy"
    losses = [describe_update(parse(text)) for text in ("dense", "zero1", "bf16", "zero1+bf16", "int8", "localsgd:2")]
    assert losses == ["exact", "exact", "rounded", "rounded", "lossy", "schedule"]
    assert describe_update(parse("localsgd:2+bf16")) == "schedule"
    assert [one.text for one in prefer(list_strategies("int8;zero1"))] == ["dense", "zero1", "bf16", "int8"]


def test_where_another_one_is_fastest():
    # Sums by hand: dense is chosen up to 1 % above the codec, 0.010 + 80e6 / r = 1.01 (0.020 + 8e6 / r).
    crossing = (80e6 - 1.01 * 8e6) / (1.01 * 0.020 - 0.010)

    def estimate(rate: float) -> dict[str, float]:
        return {"dense": 0.010 + 80e6 / rate, "int8": 0.020 + 8e6 / rate}

    sweep = sweep_bandwidths(estimate)
    ((found, below, above),) = sweep.crossings
    assert found == pytest.approx(crossing, rel=0.01) and (below, above) == ("int8", "dense")
    assert [name for _, name, _ in sweep.rows] == ["int8" if rate < crossing else "dense" for rate in BANDWIDTHS]
    assert sweep_bandwidths(lambda rate: {"dense": 1.0, "int8": 0.995}).crossings == ()
    assert choose_fastest({"dense": 1.011, "bf16": 1.005, "int8": 1.0}) == "bf16"


def test_all_leaves_out_strategies_that_a_job_cannot_use():
    for given in ("all", ("all",), ["all"]):
        assert [one.text for one in list_strategies(given)] == ["dense", *ALL]
        assert [one.text for one in list_strategies(given, can_shard=False)] == ["dense", *ALL[:-2]]
    # Explicitly requested candidates are rejected, not dropped.
    assert list_strategies("zero1", can_shard=False)[-1].is_sharded


def test_assumptions_are_listed():
    job = make_job([4000], [0.0], 0.0)
    unknown = describe_strategies(job, list_strategies("powersgd:4"), [])
    assert any("bf16, powersgd:4" in line and "lower bound" in line for line in unknown)
    assert any("1 gradients have unknown shapes" in line for line in unknown)
    shaped = replace(job, gradients=(Gradient("w", 4000, shape=(100, 10)),))
    known = describe_strategies(shaped, list_strategies("topk:0.1"), CODECS)
    assert known == ["the codec of topk:0.1 is assumed to cost as much as that of topk:0.01"]


def test_codecs_are_timed_between_their_messages(monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(engine, "agree_on_max", lambda value, control: value)
    alone = SimpleNamespace(control=None, world=SimpleNamespace(share=lambda value: [value]))
    measure = functools.partial(measure_codecs, device=torch.device("cpu"), bench=alone)
    grads = [(str(number), torch.randn(shape)) for number, shape in enumerate(SHAPES)]
    records = measure(grads)
    gradients = [Gradient(name, grad.nbytes, shape=tuple(grad.shape)) for name, grad in grads]
    codecs, rounds = ([text for text in MEASURED if bool(parse(text).outer) == which] for which in (False, True))
    assert [record.strategy for record in records] == [*(text for text in codecs for _ in range(3)), *rounds]
    for record in records:
        assert record.num_bytes == sum(grad.nbytes for _, grad in grads) and record.device == "cpu"
        assert len(record.parts) == len(parse(record.strategy).traffic(gradients, record.world_size)) + 1
        assert record_from_json(json.loads(json.dumps(record_to_json(record)))) == record
    assert [(r.world_size, r.num_buckets) for r in records[:3]] == [(2, 1), (2, len(grads)), (8, 1)]
    assert len(measure(grads[:1])) == 2 * len(codecs) + len(rounds)
    assert measure([]) == []
    # Less than the bytes of all gradients together, and of the largest one.
    monkeypatch.setattr("paceline.measure.codec_bench.LARGE_BYTES", 60_000)
    monkeypatch.setattr("paceline.measure.codec_bench.MEASURED", ["bf16"])
    several = measure(grads)
    assert [(r.world_size, r.num_buckets) for r in several] == [(2, 2), (2, len(grads)), (8, 2), (2, 1)]


MADE = MadeJob(sizes=(4 * MIB,) * 4, launch_s=0.0, gather_s=0.0, disturbed=((MIB, 1.0, 1.0),))


def predict(network: str, ranks: list[int], strategies: tuple[str, ...] = ALL) -> StrategyStepsResult:
    config = {
        "network": network, "ranks": ranks, "backend": None, "ranks_per_node": None, "cores": 0, "inside": None,
        "algorithm": "auto", "accumulate": 1, "gradients": None, "spread": 0.0, "is_own": False, "busy": [],
        "strategies": list(strategies),
    }  # fmt: skip
    run = Run("predict strategies", config, capture_environment(), tuple(MADE.build_carried()))
    result = build_result(run)
    assert isinstance(result, StrategyStepsResult)
    return result


def test_strategies_on_a_slow_and_on_a_fast_network():
    result = predict("1Gb/s,50us;".rstrip(";") + ",400Gb/s,2us", [1, 2])
    slow, fast = result.cells
    assert [row.strategy.text for row in slow.rows] == ["dense", *ALL] and slow.world_size == 2
    by_name = {row.strategy.text: row for row in slow.rows}
    # At 1 Gb/s, 16 MiB take longer than backward; bf16 halves the bytes, and int8 halves them again.
    assert by_name["dense"].step_s > by_name["bf16"].step_s > by_name["int8"].step_s
    assert by_name["dense"].sent_bytes == 16 * MIB and by_name["bf16"].sent_bytes == 8 * MIB
    # A schedule sends so little that it gets its own answer.
    assert slow.lossy is not None and is_worth_it(slow.lossy) and slow.winner is slow.lossy
    assert not slow.lossy.strategy.outer and slow.schedule is not None and slow.schedule.strategy.outer
    assert slow.schedule.step_s < slow.lossy.step_s and slow.schedule.strategy.text in slow.describe()
    assert by_name["dense"].ratios["dense"].value == 1
    assert by_name["bf16"].ratios["bf16"].low == by_name["bf16"].ratios["bf16"].high == 1
    assert "scale strategies" in result.answer or "not worth it here" in result.answer
    assert fast.lossy is not None and not is_worth_it(fast.lossy) and "not worth it here" in fast.describe()
    assert describe_update(fast.winner.strategy) == "exact"
    document = result.to_json()
    assert [cell["winner"] for cell in document["cells"]] == [slow.winner.strategy.text, fast.winner.strategy.text]
    assert len(document["rows"]) == 22 and {"to_bf16_high", "sent_bytes", "update"} <= document["rows"][0].keys()
    (sweep,) = result.sweeps.values()
    assert [row["gbit_per_s"] for row in document["bandwidths"]] == [rate / 1e9 for rate in BANDWIDTHS]
    assert not any(parse(name).outer for row in sweep.crossings for name in row[1:])
    assert all(row["fastest_s"] == row[f"{row['fastest']}_s"] for row in document["bandwidths"])
    assert document["cells"][0]["schedule"] == slow.schedule.strategy.text
    assert sweep.crossings and sweep.crossings[-1][2] in ("dense", "zero1")
    assert document["crossings"][-1]["bits_per_s"] == sweep.crossings[-1][0] > 1e8
    assert any("lower bound" in line for line in result.findings)
    lines = plot_bandwidths(result).axes[0].get_lines()
    assert {"dense", *ALL} <= {one.get_label() for one in lines}


SETTINGS = TuneSettings(strategies=("dense", "bf16", "int8", "diloco:100", "zero1"))


def judge(confirmed_s: dict[str, float], settings: TuneSettings = SETTINGS):
    """A tuning in which the compared plans took these times; the default is one bucket per gradient."""
    job = MadeJob(alpha_s=0.003, bytes_per_s=1e8, backend="gloo", disturbed=((MIB, 1.0, 1.0),))
    records = [*job.build_calibration(), *CODECS]
    plan = plan_by_cap(job.gradients, range(7, -1, -1), MIB)
    before = derive_tuning(settings, records, job.gradients, plan)
    sizes = {candidate.label: candidate.plan.bucket_bytes for candidate in before.candidates}
    assert set(confirmed_s) <= set(sizes)
    for label, seconds in confirmed_s.items():
        turns = [seconds * (1 + 0.001 * (number % 3)) for number in range(64)]
        records.append(job.build_plan_step(label, turns, note="raced", bucket_bytes=sizes[label]))
    config = settings.to_json(job.gradients, plan, before.predictions)
    after = load_tuning(json.loads(json.dumps(config)), records)
    return before, after, Run("tune", config, capture_environment(), tuple(records))


def test_a_tuning_compares_bf16_and_the_best_lossy_strategy_without_choosing_them():
    before, after, run = judge({"default": 0.30, "recommended": 0.20, "bf16": 0.15, "int8": 0.10})
    assert [candidate.label for candidate in before.candidates] == ["default", "recommended", "bf16", "int8"]
    assert [candidate.strategy.text for candidate in before.candidates] == ["dense", "dense", "bf16", "int8"]
    assert list(before.predicted) == list(SETTINGS.strategies) and before.race is None
    said = describe_offers(before)  # as without --confirm
    assert "diloco:100 is predicted to take" in said and "scale strategies" in said
    assert before.predicted["diloco:100"].step_s < before.predicted["dense"].step_s
    # The fastest candidate is lossy; the answer is the exact one.
    assert after.verdict == "use" and after.answer.label == "recommended" and after.answer.strategy == DENSE
    assert after.whole is not None and after.whole.winner == "int8"
    assert [(c.label, round(to_bf16.value, 3)) for c, _, to_bf16 in after.offers] == [("bf16", 1.0), ("int8", 0.667)]
    text = describe_offers(after)
    assert "scale strategies" in text and "compare their accuracy" in text and "not worth it" not in text
    assert any("diloco:100, zero1" in line and "not run" in line for line in after.notes)
    result = build_result(run)
    assert isinstance(result, TuneResult)
    assert [row.status for row in result.rows] == ["beaten", "use", "faster", "faster"]
    tables = {table.name: table for table in result.tables()}
    measured = {row.strategy.text: row.measured_s for row in tables["strategies"].rows}
    assert measured["int8"] == pytest.approx(0.1001, rel=1e-3) and measured["diloco:100"] is None
    assert result.to_json()["race"][3]["strategy"] == "int8"
    sent = {row.strategy.text: row.sent_bytes for row in tables["strategies"].rows}
    assert sent["dense"] == 8 * MIB and sent["diloco:100"] == 8 * MIB / 100 and math.isclose(sent["bf16"], 4 * MIB)


def test_named_strategies_are_all_compared_and_only_the_best_of_all():
    named, *_ = judge({}, TuneSettings(strategies=("dense", "bf16", "topk:0.01", "int8", "diloco:100")))
    assert [candidate.label for candidate in named.candidates][2:] == ["bf16", "int8", "topk:0.01"]  # fastest first
    best, *_ = judge({}, TuneSettings(strategies=("all",)))
    assert list(best.predicted) == ["dense", *ALL] and len(best.candidates) == 4


def test_a_lossy_strategy_that_is_no_faster_than_bf16_is_not_worth_it():
    _, after, _ = judge({"default": 0.30, "recommended": 0.20, "bf16": 0.15, "int8": 0.1495})
    assert "not worth it here: bf16 with tuned buckets is as fast as int8" in describe_offers(after)
    with pytest.raises(ConfigError) as error:
        replace(SETTINGS, wrapper="torch").check(2)
    assert error.value.code == "strategy"
    with pytest.raises(ConfigError) as error:
        replace(SETTINGS, network="10gbe").check(1)
    assert error.value.code == "strategy"
