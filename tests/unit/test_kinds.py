"""The kinds of records: derived rates, and the way to JSON and back."""

import json
import math

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
    CheckRecord,
    ChunksRecord,
    CollectiveRecord,
    CostRecord,
    FaultRecord,
    LinkRecord,
    MemoryRecord,
    bus_factor,
    record_from_json,
    record_to_json,
)
from paceline.records.layers import (
    BlockTimes,
    CapTimeRecord,
    CodecRecord,
    LayerProfileRecord,
    LayerSizeRecord,
    LayerTimeRecord,
    ParameterTimes,
)
from paceline.records.samples import REDUCERS, Samples, Summary
from paceline.records.steps import ROLES, StepRecord
from paceline.records.traced import TracedMessage, TracedStepRecord
from paceline.records.training import BUDGETS, BatchRecord, CurvePoint, LargeBatchRecord, NoiseProbe, NoiseRecord


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


def test_an_unknown_collective_has_no_bus_factor():
    with pytest.raises(RecordError, match="'all_to_all'"):
        bus_factor("all_to_all", 2)


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
MAYBE_COUNT = st.none() | st.integers(0, 2**50)
TEXT = st.text(max_size=12)


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


SUMMARIES = st.builds(
    Summary, mean_s=POSITIVE, median_s=st.none() | POSITIVE, stdev_s=st.none() | TIME, min_s=st.none() | TIME,
    max_s=st.none() | TIME, count=MAYBE_COUNT,
)  # fmt: skip
SHARED = {"source": st.sampled_from(SOURCES), "note": TEXT}
TIMED = {
    **SHARED, "backend": TEXT, "device": TEXT, "world_size": COUNT, "dtype": st.sampled_from([*ITEM_BYTES, "unknown"]),
    "timing": samples() | SUMMARIES, "num_wrong": MAYBE_COUNT, "num_checked": MAYBE_COUNT,
}  # fmt: skip
PHASES = ("timing", "forward", "backward", "optimizer")
WRAPPER_FIELDS = {
    **{name: value for name, value in TIMED.items() if name != "dtype"}, "precision": TEXT,
    "model": TEXT, "wrapper": TEXT, "configuration": TEXT, "batch_size": COUNT, "num_parameters": COUNT,
    "num_bytes": COUNT, "held_bytes": COUNT, "peak_step_bytes": COUNT,
}  # fmt: skip
WRAPPERS = st.tuples(st.integers(1, 3), st.integers(1, 4)).flatmap(
    lambda shape: st.builds(StepRecord, **{**WRAPPER_FIELDS, **{name: samples(shape=shape) for name in PHASES}})
)


@st.composite
def layer_profiles(draw):
    """Ready times and blocks that fit into backwards of at least a second."""
    count = draw(st.integers(1, 3))
    phase = samples(shape=(1, count), time=st.floats(1, 1e6))
    row = st.tuples(*[st.floats(0, 0.3)] * count)
    blocks = tuple(BlockTimes(name, draw(row), draw(row)) for name in ("a", "b"))
    ready = st.tuples(*[st.none() | st.floats(0, 1)] * count)
    parameter = st.builds(
        ParameterTimes, name=TEXT, num_bytes=COUNT, num_elements=st.just(6), dtype=TEXT,
        shape=st.sampled_from([(), (6,), (2, 3)]),
        block=st.sampled_from(["a", "b", ""]), ready_s=ready, aliases=st.lists(TEXT, max_size=2).map(tuple),
    )  # fmt: skip
    parameters = draw(st.lists(parameter, min_size=1, max_size=4))
    phases = ("timing", "forward", "backward", "optimizer", "profiled_step", "profiled_forward", "profiled_backward")
    return LayerProfileRecord(
        model=draw(TEXT), device=draw(TEXT), dtype=draw(TEXT), batch_size=draw(COUNT), blocks=blocks,
        parameters=tuple(sorted(parameters, key=lambda p: math.inf if p.median_s is None else p.median_s)),
        source=draw(st.sampled_from(SOURCES)), note=draw(TEXT), **{name: draw(phase) for name in phases},
    )  # fmt: skip


@st.composite
def phase_records(draw):
    ranks, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some = samples(shape=(ranks, count))
    names = ("timing", "marked", "no_comm", "no_comm_backward", "data_wait", "forward", "backward", "optimizer")
    texts = ("model", "data", "wrapper", "backend", "device", "precision", "note")
    counts = ("batch_size", "accumulate", "num_parameters", "num_bytes", "num_messages")
    return StepRecord(
        world_size=ranks, busy=draw(st.none() | some), source=draw(st.sampled_from(SOURCES)),
        **{name: draw(some) for name in names}, **{name: draw(TEXT) for name in texts},
        **{name: draw(COUNT) for name in counts},
    )  # fmt: skip


@st.composite
def tune_steps(draw):
    ranks, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some = samples(shape=(ranks, count))
    messages = {}
    if (role := draw(st.sampled_from(ROLES))) == "disturbed":
        sizes = {"message_bytes": draw(COUNT), "num_messages": draw(COUNT)}
        messages = {**sizes, "under_way": draw(some), "overlapped": draw(some)}
    texts = ("model", "wrapper", "backend", "device", "label", "note")
    return StepRecord(
        role=role, world_size=ranks, batch_size=draw(COUNT), source=draw(st.sampled_from(SOURCES)),
        cap_bytes=draw(COUNT) if role == "job" else 0, bucket_bytes=tuple(draw(st.lists(COUNT, max_size=3))),
        **{name: draw(some) for name in PHASES}, **{name: draw(TEXT) for name in texts}, **messages,
    )  # fmt: skip


@st.composite
def noise_records(draw):
    size = draw(st.integers(2, 4))
    probes = []
    for _ in range(draw(st.integers(1, 3))):
        small = draw(st.tuples(*[TIME] * size))
        probes.append(NoiseProbe(small, draw(st.floats(0, 1)) * sum(small) / size))
    return NoiseRecord(
        probes=tuple(probes), step=draw(COUNT), seed=draw(COUNT), world_size=draw(COUNT), small_batch_size=draw(COUNT),
        epoch=draw(TIME | st.integers(0, 100)), **{name: draw(TEXT) for name in ("model", "data", "device")},
        precision=draw(TEXT), **{name: draw(value) for name, value in SHARED.items()},
    )  # fmt: skip


@st.composite
def batches(draw):
    shape, texts = (1, draw(st.integers(1, 3))), ("model", "data", "device", "precision", "note")
    timed = {"timing": draw(samples(shape=shape)), "data_wait": draw(st.none() | samples(shape=shape))}
    counts = ("threads", "batch_size", "num_samples", "num_steps", "peak_bytes")
    return BatchRecord(
        source=draw(st.sampled_from(SOURCES)), **draw(st.sampled_from([timed, {"failure": "out of memory"}])),
        **{name: draw(TEXT) for name in texts}, **{name: draw(COUNT) for name in counts},
    )  # fmt: skip


@st.composite
def scales(draw):
    ranks, batch_size, accumulate = draw(st.integers(1, 4)), draw(COUNT), draw(st.integers(1, 3))
    some, mode = samples(shape=(ranks, draw(st.integers(1, 3)))), draw(st.sampled_from(["weak", "strong"]))
    texts = ("model", "data", "wrapper", "backend", "device", "precision", "note")
    return StepRecord(
        mode=mode, cell_size=batch_size * accumulate * (1 if mode == "weak" else ranks), world_size=ranks,
        batch_size=batch_size, accumulate=accumulate, timing=draw(some), no_comm=draw(st.none() | some),
        busy=draw(st.none() | some), source=draw(st.sampled_from(SOURCES)), **{name: draw(TEXT) for name in texts},
        **{name: draw(COUNT) for name in ("threads", "num_bytes", "num_messages")},
    )  # fmt: skip


CURVES = st.lists(
    st.builds(
        CurvePoint, update=COUNT, num_samples=COUNT, train_loss=TIME, test_loss=TIME, test_accuracy=st.floats(0, 1)
    ),
    min_size=1,
    max_size=3,
).map(tuple)
LARGE_BATCH_FIELDS = {
    **SHARED, **dict.fromkeys(("model", "data", "device", "precision", "recipe", "configuration", "failure"), TEXT),
    **dict.fromkeys(
        ("world_size", "batch_size", "global_batch_size", "largest_batch_size", "epochs", "num_updates", "num_samples",
         "seed"), COUNT
    ),
}  # fmt: skip

CENTERS = st.builds(Summary, median_s=POSITIVE)


@st.composite
def traced_steps(draw):
    """Gradients are ready, and messages move, in order."""
    times = sorted(draw(st.lists(POSITIVE, min_size=4, max_size=4)))
    sizes = draw(st.lists(COUNT, min_size=1, max_size=3))
    message = TracedMessage(draw(COUNT), *times[:3])
    return TracedStepRecord(
        rank=0, world_size=2, device="cpu", backend="gloo", host=draw(TEXT), number=1, before_s=draw(TIME),
        backward_s=times[3], after_s=draw(TIME), gradient_bytes=tuple(sizes), ready_s=(times[0],) * len(sizes),
        messages=(message,) * draw(st.integers(0, 2)), alone_s=(times[3],), launch_s=draw(TIME),
        are_sizes_known=draw(st.booleans()),
    )  # fmt: skip


RECORDS = {
    "check": st.builds(CheckRecord, name=TEXT, status=st.sampled_from(("ok", "warn", "fail")), found=TEXT, advice=TEXT),
    "batch": batches(),
    "large_batch": st.builds(
        LargeBatchRecord, curve=CURVES, budget=st.sampled_from(BUDGETS), lr=POSITIVE, seconds=TIME, **LARGE_BATCH_FIELDS
    ),
    "collective": st.builds(
        CollectiveRecord, collective=st.sampled_from(list(COLLECTIVES)), num_bytes=COUNT, op=TEXT,
        memory=st.sampled_from(MEMORIES), **TIMED,
    ),
    "memory": st.builds(
        MemoryRecord, operation=st.sampled_from(["add", "copy"]), num_bytes=COUNT,
        **{name: value for name, value in TIMED.items() if name != "backend"} | {"timing": samples()},
    ),
    "link": st.builds(
        LinkRecord, sender=TEXT, receiver=TEXT, interface=TEXT, num_bytes=COUNT, timing=samples(), short=samples()
    ),
    "chunks": st.builds(ChunksRecord, total_bytes=st.just(2**50), chunk_bytes=COUNT, **TIMED),
    "layer_size": st.builds(LayerSizeRecord, layer=TEXT, num_params=COUNT, **SHARED),
    "layer_time": st.builds(LayerTimeRecord, layer=TEXT, timing=samples() | SUMMARIES, **SHARED),
    "layer_profile": layer_profiles(),
    "cap_time": st.builds(
        CapTimeRecord, cap_bytes=COUNT, of=st.sampled_from(("step", "backward")), timing=CENTERS, **SHARED
    ),
    "codec": st.builds(
        CodecRecord, strategy=TEXT, device=TEXT, world_size=COUNT, num_bytes=COUNT, num_buckets=COUNT,
        parts=st.lists(samples(), min_size=2, max_size=3).map(tuple), **SHARED,
    ),
    "fault": st.builds(
        FaultRecord, fault=TEXT, system=TEXT, backend=TEXT, ranks=COUNT, trial=COUNT, rank=COUNT, step=COUNT,
        detected_s=st.none() | st.floats(0, 1e3), is_right=st.booleans(), ended_s=st.none() | st.floats(0, 1e3),
        limit_s=st.floats(0, 1e3), steps_lost=st.none() | COUNT, restart_s=st.none() | st.floats(0, 1e3),
        left_over=st.lists(TEXT, max_size=3).map(tuple), said=TEXT, policy=TEXT,
        recovered_s=st.none() | st.floats(0, 1e3), on_fault=TEXT, names_step=st.none() | st.booleans(), **SHARED,
    ),
    "cost": st.builds(
        CostRecord, name=st.sampled_from(COSTS), seconds=st.lists(st.floats(0, 1e3), min_size=1, max_size=3).map(tuple),
        **SHARED,
    ),
    "noise_scale": noise_records(),
    "step": st.one_of(WRAPPERS, phase_records(), scales(), tune_steps()),
    "traced_step": traced_steps(),
}  # fmt: skip


def test_every_kind_is_round_tripped_here():
    assert set(RECORDS) == set(KINDS)


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
    ("changes", "reason"),
    [
        ({"num_parameters": -1}, "parameters"),
        ({"batch_size": 0}, "0 x 1 samples"),
        ({"times_s": (0.0,) * 3}, "in 0.0 s"),
        ({"backward": Samples(seconds=((1.0, 1.0),) * 9)}, "backward has other repetitions"),
        ({"forward": Samples(seconds=((1.0,),) * 10)}, "forward has other repetitions or ranks"),
    ],
)
def test_an_impossible_wrapper_is_refused(build_wrapper, changes, reason):
    with pytest.raises(RecordError, match=reason):
        build_wrapper(**changes)


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
    assert record.busbw_bytes_per_s > 0  # and what was computed before writing is not written either
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
        ({**TIMED_LAYER, "samples": {"seconds": [[-1.0]]}}, "negative"),
        ({**TIMED_LAYER, "samples": [[1.0]]}, "samples must be a JSON object"),
    ],
)
def test_a_broken_record_is_refused(document, reason):
    with pytest.raises(RecordError, match=reason):
        record_from_json(document)
