"""The kinds of records: derived rates and JSON round trips."""

import dataclasses
import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records.kinds import (
    COLLECTIVES,
    COSTS,
    ITEM_BYTES,
    KINDS,
    MEMORIES,
    SOURCES,
    ChunksRecord,
    CostRecord,
    bus_factor,
    record_from_json,
    record_to_json,
)
from paceline.records.layers import BlockTimes, LayerProfileRecord, ParameterTimes
from paceline.records.samples import REDUCERS, Samples, Summary
from paceline.records.steps import EXTRA_SAMPLES, ROLES, StepRecord, TracedMessage, TracedStepRecord
from paceline.records.training import BUDGETS, BatchRecord, NoiseProbe, NoiseRecord


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 1, 0.0), ("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75),
        ("all_gather", 1, 0.0), ("all_gather", 4, 0.75),
        ("reduce_scatter", 1, 0.0), ("reduce_scatter", 8, 0.875),
        ("broadcast", 1, 1.0), ("broadcast", 8, 1.0),
    ],
)  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert bus_factor(collective, ranks) == pytest.approx(factor)


def test_rates_follow_from_size_and_median(build_collective, build_samples):
    record = build_collective(num_bytes=4 * 10**9, world_size=4, timing=build_samples(1.0, 2.0, 9.0, ranks=4))
    assert record.time_s == 2.0
    assert record.algbw_bytes_per_s == pytest.approx(2e9)
    assert record.busbw_bytes_per_s == pytest.approx(3e9)
    assert record.num_elements == 10**9


@pytest.mark.parametrize(("dtype", "elements"), [("float64", 128), ("bfloat16", 512), ("int8", 1024), ("unknown", 256)])
def test_elements_follow_from_the_type(build_collective, build_chunks, dtype, elements):
    assert build_collective(num_bytes=1024, dtype=dtype).num_elements == elements
    assert build_chunks(chunk_bytes=1024, total_bytes=4096, dtype=dtype).chunk_elements == elements


@pytest.mark.parametrize(("total", "chunk", "messages"), [(4000, 1000, 4), (4000, 1500, 3), (4000, 4000, 1), (9, 4, 3)])
def test_chunks_count_their_messages_and_the_ragged_last(build_chunks, total, chunk, messages):
    assert build_chunks(total_bytes=total, chunk_bytes=chunk).num_messages == messages


def test_rates_of_chunks_are_of_the_total(build_chunks, build_samples):
    record = build_chunks(total_bytes=4000, world_size=4, timing=build_samples(2.0, ranks=4))
    assert record.algbw_bytes_per_s == pytest.approx(2000)
    assert record.busbw_bytes_per_s == pytest.approx(3000)


@pytest.mark.parametrize(
    ("field", "value"),
    [("collective", "broadcast"), ("backend", "mpi"), ("device", "cuda"), ("world_size", 3), ("dtype", "int8"),
     ("op", "max"), ("memory", "shared")],
)  # fmt: skip
def test_records_of_another_curve_have_another_key(build_collective, field, value):
    assert build_collective(**{field: value}).key != build_collective().key
    assert build_collective(num_bytes=8).key == build_collective().key


@pytest.mark.parametrize(
    "changes",
    [{"num_bytes": 0}, {"world_size": 0}, {"collective": "unheard"}, {"source": "guessed"}, {"memory": "virtual"}],
)
def test_an_impossible_collective_is_refused(build_collective, changes):
    with pytest.raises(RecordError):
        build_collective(**changes)


@pytest.mark.parametrize(
    "changes", [{"num_bytes": 0}, {"world_size": 0}, {"operation": "triad"}, {"time_s": 0.0}, {"source": "guessed"}]
)
def test_an_impossible_pass_over_memory_is_refused(build_pass, changes):
    with pytest.raises(RecordError):
        build_pass(**changes)


def test_a_record_of_an_older_file_lies_in_ordinary_memory(build_collective):
    document = record_to_json(build_collective())
    del document["memory"]
    assert record_from_json(document) == build_collective()


@pytest.mark.parametrize("changes", [{"chunk_bytes": 0}, {"total_bytes": 0}, {"world_size": 0}, {"source": "guessed"}])
def test_impossible_chunks_are_refused(build_chunks, changes):
    with pytest.raises(RecordError):
        build_chunks(**changes)


TIME = st.floats(0, 1e6)
POSITIVE = st.floats(1e-9, 1e6)
COUNT = st.integers(1, 2**50)
TEXT = st.text(max_size=12)
# The values of fields with restricted choices.
KNOWN = {
    "source": SOURCES, "collective": list(COLLECTIVES), "memory": MEMORIES, "operation": ("add", "copy"),
    "status": ("ok", "warn", "fail"), "of": ("step", "backward"), "budget": BUDGETS, "role": ROLES,
    "mode": ("", "weak", "strong"), "dtype": [*ITEM_BYTES, "unknown"],
}  # fmt: skip


@st.composite
def samples(draw, time=POSITIVE, shape=None):
    ranks, count = shape or (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    rows = st.lists(st.tuples(*[time] * ranks), min_size=count, max_size=count).map(tuple)
    return Samples(
        seconds=draw(rows),
        warmup_seconds=draw(st.just(()) | rows),
        arrivals_s=draw(st.just(()) | rows),
        reducer=draw(st.sampled_from(list(REDUCERS))),
    )


def values_of(hint):
    """Values for a field of this type."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(arguments[0]), min_size=2, max_size=3).map(tuple)
    if arguments:
        return st.one_of(*map(values_of, arguments))
    summaries = st.builds(Summary, mean_s=POSITIVE, median_s=st.none() | POSITIVE, min_s=st.none() | TIME)
    simple = {int: COUNT, float: POSITIVE, str: TEXT, bool: st.booleans(), type(None): st.none()}
    found = {Samples: samples(), Summary: summaries} | simple
    return found[hint] if hint in found else build(hint)


def build(kind, **given):
    """Objects of a class, with these strategies for some fields."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    found = {name: st.sampled_from(KNOWN[name]) if name in KNOWN else values_of(hints[name]) for name in names}
    return st.builds(kind, **found, **given)


@st.composite
def layer_profiles(draw):
    """Ready times and blocks that fit into backward passes of at least a second."""
    count = draw(st.integers(1, 3))
    phase = samples(shape=(1, count), time=st.floats(1, 1e6))
    row = st.tuples(*[st.floats(0, 0.3)] * count)
    blocks = tuple(BlockTimes(name, draw(row), draw(row)) for name in ("a", "b"))
    ready = st.tuples(*[st.none() | st.floats(0, 1)] * count)
    parameter = build(
        ParameterTimes, num_elements=st.just(6), shape=st.sampled_from([(), (6,), (2, 3)]),
        block=st.sampled_from(["a", "b", ""]), ready_s=ready,
    )  # fmt: skip
    parameters = draw(st.lists(parameter, min_size=1, max_size=4))
    parameters.sort(key=lambda p: math.inf if p.median_s is None else p.median_s)
    phases = ("timing", "forward", "backward", "optimizer", "profiled_step", "profiled_forward", "profiled_backward")
    given = {"blocks": st.just(blocks), "parameters": st.just(tuple(parameters))}
    return draw(build(LayerProfileRecord, **given, **dict.fromkeys(phases, phase)))


@pytest.mark.parametrize(
    ("build_bad", "place"),
    [
        (lambda: CostRecord(name="save", seconds=(math.inf,)), "cost record save: seconds is inf"),
        (lambda: Samples(seconds=((-1.0,),)), "samples: seconds is -1.0"),
        (lambda: TracedMessage(-1, 0.0, 0.0, 0.0), "traced message: "),
    ],
)
def test_an_error_describes_its_record(build_bad, place):
    with pytest.raises(RecordError, match=f"^{place}"):
        build_bad()


@st.composite
def steps(draw):
    ranks = draw(st.integers(1, 3))
    some = samples(shape=(ranks, draw(st.integers(1, 3))))
    batch_size, mode, role = draw(COUNT), draw(st.sampled_from(KNOWN["mode"])), draw(st.sampled_from(ROLES))
    given = {"world_size": ranks, "batch_size": batch_size, "accumulate": 2, "mode": mode, "role": role}
    given["cell_size"] = 2 * batch_size * (ranks if mode == "strong" else 1)
    given = {name: st.just(value) for name, value in given.items()}
    given |= {"timing": some, **dict.fromkeys(EXTRA_SAMPLES, st.none() | some)}
    messages = dict.fromkeys(("under_way", "overlapped"), some) if role == "disturbed" else {
        "message_bytes": st.just(0), **dict.fromkeys(("under_way", "overlapped", "alone"), st.none())
    }  # fmt: skip
    return draw(build(StepRecord, **given | messages))


@st.composite
def noise_records(draw):
    size = draw(st.integers(2, 4))
    probes = []
    for _ in range(draw(st.integers(1, 3))):
        small = draw(st.tuples(*[TIME] * size))
        probes.append(NoiseProbe(small, draw(st.floats(0, 1)) * sum(small) / size))
    return draw(build(NoiseRecord, probes=st.just(tuple(probes)), epoch=TIME | st.integers(0, 100)))


@st.composite
def traced_steps(draw):
    """Gradients become ready, and messages move, in order."""
    times = sorted(draw(st.lists(POSITIVE, min_size=4, max_size=4)))
    sizes = draw(st.lists(COUNT, min_size=1, max_size=3))
    given = {
        "backward_s": times[3], "gradient_bytes": tuple(sizes), "ready_s": (times[0],) * len(sizes),
        "messages": (TracedMessage(draw(COUNT), *times[:3]),) * draw(st.integers(0, 2)),
    }  # fmt: skip
    return draw(build(TracedStepRecord, **{name: st.just(value) for name, value in given.items()}))


RECORDS = {name: build(kind) for name, kind in KINDS.items()} | {
    "batch": build(BatchRecord, failure=st.just(""), timing=samples())
    | build(BatchRecord, failure=st.just("out of memory"), timing=st.none()),
    "chunks": build(ChunksRecord, total_bytes=st.just(2**50)),
    "cost": build(CostRecord, name=st.sampled_from(COSTS)),
    "layer_profile": layer_profiles(),
    "noise_scale": noise_records(),
    "step": steps(),
    "traced_step": traced_steps(),
}


@given(st.one_of(*RECORDS.values()))
def test_a_record_survives_json(record):
    text = json.dumps(record_to_json(record), allow_nan=False)
    copy = record_from_json(json.loads(text))
    assert type(copy) is type(record)
    assert copy == record


def test_a_wrapper_keeps_the_samples_of_every_phase(build_wrapper):
    document = record_to_json(build_wrapper())
    for name in ("samples", "forward", "backward", "optimizer"):
        assert len(document[name]["seconds"]) == 10
    assert not {"ratio_to_torch", "noise", "step_median_s"} & set(document)


@pytest.mark.parametrize(
    ("value", "reason"),
    [([[1.0]], "backward.* not list"), ({"seconds": [1.0]}, "backward.seconds must be a list")],
)
def test_a_wrapper_with_a_broken_phase_is_refused(build_wrapper, value, reason):
    with pytest.raises(RecordError, match=reason):
        record_from_json({**record_to_json(build_wrapper()), "backward": value})


def test_derived_numbers_are_not_stored(build_collective, build_chunks, build_pass):
    fields = {"kind", "source", "note", "backend", "device", "world_size", "dtype", "samples", "num_wrong"}
    fields |= {"num_checked"}
    record = build_collective()
    assert record.busbw_bytes_per_s > 0  # values computed before saving are not saved either
    document = record_to_json(record)
    assert set(document) == fields | {"collective", "num_bytes", "op", "memory", "nodes"}
    assert set(document["samples"]) == {"seconds", "warmup_seconds", "arrivals_s", "reducer"}
    assert set(record_to_json(build_chunks())) == fields | {"total_bytes", "chunk_bytes"}
    assert set(record_to_json(build_pass())) == fields - {"backend"} | {"operation", "num_bytes"}


LAYER = {"kind": "layer_size", "layer": "a", "num_params": 1}
TIMED_LAYER = {"kind": "layer_time", "layer": "a"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({**LAYER, "kind": "poem"}, "unknown kind of record 'poem'"),
        ({**LAYER, "kind": ["layer_size"]}, "unknown kind"),
        ({"layer": "a"}, "unknown kind of record 'None'"),
        ([LAYER], "not list"),
        ({**LAYER, "colour": "red"}, "LayerSizeRecord has no field colour"),
        ({"kind": "layer_size", "layer": "a"}, "num_params"),
        ({**LAYER, "summary": {"mean_s": 1.0}}, "no field timing"),
        (TIMED_LAYER, "timing"),
        ({**TIMED_LAYER, "summary": {"mean_s": 1.0, "mode_s": 1.0}}, "Summary has no field mode_s"),
        ({**TIMED_LAYER, "summary": {"mean_s": "slow"}}, "summary.mean_s"),
        ({**TIMED_LAYER, "samples": {"seconds": [[1.0]], "hours": []}}, "Samples has no field hours"),
        ({**TIMED_LAYER, "samples": {"seconds": [1.0]}}, "samples.seconds must be a list"),
        ({**TIMED_LAYER, "samples": {"seconds": [["x"]]}}, "samples.seconds"),
        ({**TIMED_LAYER, "samples": {"reducer": "max"}}, "seconds"),
        ({**TIMED_LAYER, "samples": {"seconds": [[-1.0]]}}, "seconds is -1.0"),
        ({**TIMED_LAYER, "samples": {"seconds": [[10**400]]}}, "samples.seconds: int too large"),
        ({**TIMED_LAYER, "samples": [[1.0]]}, "samples must be a JSON object"),
    ],
)
def test_a_broken_record_is_refused(document, reason):
    with pytest.raises(RecordError, match=reason):
        record_from_json(document)
