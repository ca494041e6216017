"""The environment of a run, differences that prevent a comparison, and each reason to doubt a measurement."""

import random
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.records import LayerTimeRecord, ParameterTimes, Samples, StepRecord, Summary
from paceline.records import environment as module
from paceline.records.environment import capture_environment
from paceline.records.findings import NOISY, add_busy, find_doubts, is_busy

from .made_scaling import make_batch
from .test_records_layers import build_profile, build_times


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Capturing the environment asks git for the commit, but unit tests start no process."""
    answer = SimpleNamespace(stdout="0123456789ab-dirty\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.delenv("PACELINE_COMMIT", raising=False)


@pytest.mark.parametrize(("override", "host"), [("published-name", "published-name"), ("", "node7"), (None, "node7")])
def test_the_host_can_be_renamed_and_its_name_does_not_leak(monkeypatch, override, host):
    monkeypatch.setattr(module.platform, "node", lambda: "node7")
    if override is None:
        monkeypatch.delenv("PACELINE_HOST", raising=False)
    else:
        monkeypatch.setenv("PACELINE_HOST", override)
    environment = capture_environment()
    assert environment.host == host
    assert "PACELINE_HOST" not in environment.variables


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/opt/venv/bin/paceline", "bench", "--ranks", "2"], "paceline bench --ranks 2"),
        (["paceline", "doctor"], "paceline doctor"),
        (["/opt/lib/paceline/__main__.py", "doctor"], "paceline doctor"),
        ([""], "paceline"),
    ],
)
def test_the_command_line_does_not_reveal_the_location_of_the_program(monkeypatch, argv, line):
    monkeypatch.setattr(module.sys, "argv", argv)
    assert capture_environment().command_line == line


def test_only_variables_that_steer_the_measurement_are_kept(monkeypatch):
    for name in ("NCCL_ALGO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MY_SECRET_TOKEN"):
        monkeypatch.setenv(name, "value")
    variables = capture_environment().variables
    assert {"NCCL_ALGO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= set(variables)
    assert "MY_SECRET_TOKEN" not in variables


def test_the_commit_and_the_versions_are_recorded():
    environment = capture_environment()
    assert environment.git_commit == "0123456789ab-dirty"
    assert {"paceline", "torch", "numpy"} <= set(environment.versions)
    assert environment.cores >= 1
    assert environment.memory_bytes > 0


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_no_commit(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module.subprocess, "run", fail)
    assert capture_environment().git_commit is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", "other"), ("cpu", "Other CPU"), ("cores", 4), ("versions", {"torch": "2.11"}), ("details", {"hosts": 2})],
)
def test_a_difference_that_matters_is_named_with_both_values(build_environment, field, value):
    here, there = build_environment(), build_environment(**{field: value})
    (difference,) = here.differences(there)
    mine = getattr(here, field)
    for part in (mine, value):
        (text,) = part.values() if isinstance(part, dict) else (part,)
        assert str(text) in difference
    assert (next(iter(value)) if isinstance(value, dict) else field) in difference and "{" not in difference


def test_a_machine_is_named_by_what_makes_times_comparable(build_environment):
    here = build_environment(details={"gpu": "H200"})
    assert here.machine == "Some CPU, 8 cores, 16.0 GiB, H200"
    assert here.machine_and_torch == "Some CPU, 8 cores, 16.0 GiB, H200, torch 2.13.0"


def test_command_line_commit_and_load_do_not_make_runs_incomparable(build_environment):
    there = build_environment(command_line="paceline bench chunks", git_commit=None, load_average=7.0)
    assert build_environment().differences(there) == []


# -- reasons to doubt a measurement ------------------------------------------------------------------------------------


def _swinging(low, high):
    return (low, high) * 6


def _rising(low, high):
    return (low,) * 6 + (high,) * 6


def _late(wait_s):
    return Samples(seconds=((1.0, 1.0),) * 10, arrivals_s=((0.0, wait_s),) * 10)


@pytest.fixture
def kinds_of(build_collective, build_environment, build_samples):
    """The warnings about one steady record on a quiet machine with 8 cores, after these changes."""

    def kinds_of(times_s=None, environment=(), **changes):
        if times_s is not None:
            changes["timing"] = build_samples(*times_s)
        return [d.kind for d in find_doubts([build_collective(**changes)], build_environment(**dict(environment)))]

    return kinds_of


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"num_wrong": None, "num_checked": None}, []),
        ({"num_wrong": 1}, ["wrong"]),
        ({"times_s": (1.0,) * 4}, ["few"]),
        ({"times_s": (1.0, 9.0, 1.0, 9.0)}, ["few"]),  # too few repetitions to tell whether they are unstable
        ({"times_s": (1.0,) * 5}, []),
        ({"times_s": _swinging(0.7, 1.3)}, ["unstable"]),
        ({"times_s": _swinging(0.8, 1.2)}, []),
        ({"times_s": _rising(1.0, 1.3)}, ["drifting"]),
        ({"times_s": _rising(1.3, 0.9)}, ["drifting"]),
        ({"times_s": _rising(1.0, 1.2)}, []),
        ({"timing": _late(0.6)}, ["skewed"]),
        ({"timing": _late(0.4)}, []),
        ({"world_size": 1}, []),
        ({"world_size": 8}, []),
        ({"world_size": 9}, ["crowded"]),
        ({"world_size": 9, "device": "cuda"}, []),
        ({"world_size": 9, "environment": {"details": {"hosts": 2}}}, []),
        ({"world_size": 9, "environment": {"details": {}}}, ["crowded"]),
        ({"environment": {"load_average": 4.1}}, ["busy"]),
        ({"environment": {"load_average": 4.0}}, []),
        ({"environment": {"load_average": None}}, []),
        ({"timing": Summary(mean_s=1.0, stdev_s=9.0, count=1), "world_size": 9, "source": "imported"}, []),
    ],
)
def test_a_doubt_appears_when_and_only_when_it_should(kinds_of, changes, kinds):
    assert kinds_of(**changes) == kinds


def test_steps_without_messages_wait_for_nobody_and_are_named_so(build_environment):
    step = {"model": "mlp", "wrapper": "none", "backend": "shm", "device": "cpu", "world_size": 2, "batch_size": 4}
    late = StepRecord(**step, timing=_late(0.6))
    assert [d.kind for d in find_doubts([late], build_environment())] == ["skewed"]
    assert find_doubts([replace(late, role="together")], build_environment()) == []
    swinging = Samples(seconds=tuple((time_s,) * 2 for time_s in _swinging(0.7, 1.3)))
    doubts = find_doubts([replace(late, role="together", timing=swinging)], build_environment())
    assert all("in none" not in doubt.text for doubt in doubts)
    assert any("unstable at mlp, 2 ranks without messages" in doubt.text for doubt in doubts)


def test_chunks_are_doubted_by_their_chunk_size(build_chunks, build_environment, build_samples):
    record = build_chunks(total_bytes=2**30, chunk_bytes=2**20, timing=build_samples(1.0), num_wrong=3)
    wrong, few = find_doubts([record], build_environment())
    assert (wrong.kind, few.kind) == ("wrong", "few")
    assert "1 MiB (3 of 1000 elements)" in wrong.text
    assert "1 MiB" in few.text


def test_wrappers_are_doubted_by_model_and_name(build_wrapper, build_environment):
    records = [build_wrapper("torch", num_wrong=3), build_wrapper("bare", (1.0,) * 3, num_wrong=None)]
    wrong, few = find_doubts(records, build_environment())
    assert (wrong.kind, few.kind) == ("wrong", "few")
    assert "WRONG PARAMETERS of cnn in torch (3 of 200 parameters)" in wrong.text
    assert "cnn in bare" in few.text


def test_a_wrapper_on_one_rank_is_no_reason_to_doubt(build_wrapper, build_environment):
    assert find_doubts([build_wrapper(world_size=1)], build_environment()) == []


def test_records_without_a_message_are_not_doubted(build_environment, build_samples):
    record = LayerTimeRecord(layer="a", timing=build_samples(*_swinging(1.0, 9.0)))
    assert find_doubts([record], build_environment()) == []


def test_doubts_are_gathered_per_backend_and_ranks_with_the_gravest_first(
    build_collective, build_environment, build_samples
):
    few = build_samples(1.0)
    records = [
        build_collective(timing=few, num_bytes=2**20),
        build_collective(timing=few, num_bytes=2**21),
        build_collective(timing=few, num_bytes=2**20, backend="nccl"),
        build_collective(timing=build_samples(*_swinging(1.0, 9.0))),
        build_collective(num_wrong=5, num_bytes=2**22, world_size=4),
    ]
    doubts = find_doubts(records, build_environment(load_average=8.0))
    assert [d.kind for d in doubts] == ["wrong", "unstable", "few", "few", "busy"]
    assert doubts[0].text.startswith("gloo, 4 ranks: WRONG DATA at 4 MiB")
    assert doubts[2].text.startswith("gloo, 2 ranks: fewer than 5 repetitions at 1 MiB, 2 MiB:")
    assert doubts[3].text.startswith("nccl, 2 ranks: fewer than 5 repetitions at 1 MiB:")


def test_many_doubtful_measurements_are_summarized_by_count_and_worst(
    build_collective, build_environment, build_samples
):
    highs = {2**20: 2.0, 2**21: 9.0, 2**22: 2.0, 2**23: 2.0}
    records = [build_collective(num_bytes=n, timing=build_samples(*_swinging(1.0, high))) for n, high in highs.items()]
    (doubt,) = find_doubts([*records, build_collective(num_bytes=4)], build_environment())
    named = "gloo, 2 ranks: unstable at 4 of 5 measurements, the worst 2 MiB (1 s to 9 s) (p10 to p90): "
    assert doubt.kind == "unstable" and doubt.text.startswith(named)
    (few,) = find_doubts(records[:3], build_environment())
    assert all(f"{size} MiB" in few.text for size in (1, 2, 4)) and "the worst" not in few.text


@pytest.mark.parametrize(
    ("num_unstable", "environment", "kinds", "words"),
    [
        (2, {}, ["unstable"], ""),  # half of them
        (3, {}, ["inconclusive", "unstable"], "(3 of 4 variants of the step are unstable)"),
        (3, {"load_average": 8.0}, ["inconclusive", "unstable"], "are unstable, load 8.0 on 8 cores)"),
        (0, {"load_average": 8.0}, ["busy"], ""),
        (0, {"stolen": 0.1}, [], ""),
        (0, {"stolen": 0.12}, ["inconclusive"], "(the hypervisor stole 12% of CPU time)"),
    ],
)
def test_a_machine_that_is_too_busy_to_measure_says_that_nothing_can_be_concluded(
    build_wrapper, build_environment, num_unstable, environment, kinds, words
):
    times = [_swinging(1.0, 9.0)] * num_unstable + [(1.0,) * 12] * (4 - num_unstable)
    records = [build_wrapper("paceline", times_s, label=f"cap {n}") for n, times_s in enumerate(times)]
    doubts = find_doubts(records, build_environment(**environment))
    assert [doubt.kind for doubt in doubts] == kinds and words in doubts[0].text if doubts else kinds == []
    if "inconclusive" in kinds:
        assert "nothing can be concluded from the times" in doubts[0].text
        assert doubts[0].cure.startswith("repeat on a quiet machine")
    wrong = find_doubts([*records, build_wrapper("torch", num_wrong=1)], build_environment(stolen=1.0))
    assert [doubt.kind for doubt in wrong][:2] == ["wrong", "inconclusive"]


@pytest.mark.parametrize(
    ("ranks", "kinds"), [((2,), ["unstable", "crowded"]), ((1, 2), ["inconclusive", "unstable", "unstable", "crowded"])]
)
def test_unstable_steps_of_more_ranks_than_cores_are_no_sign_of_a_busy_machine(
    build_wrapper, build_environment, ranks, kinds
):
    records = [build_wrapper("paceline", _swinging(1.0, 9.0), world_size=n) for n in ranks]
    doubts = find_doubts(records, build_environment(cores=1))
    assert [doubt.kind for doubt in doubts] == kinds and doubts[-1].text.startswith("2 ranks share 1 core: ")


def test_only_what_can_be_done_is_a_cure(build_wrapper, build_environment):
    (few,) = find_doubts([build_wrapper("torch", (1.0, 1.0))], build_environment())
    assert few.kind == "few" and few.cure == ""
    assert few.sentences.endswith(": the median is not reliable.")


def test_one_unstable_step_is_not_called_a_variant(build_wrapper, build_environment):
    doubts = find_doubts([build_wrapper("paceline", _swinging(1.0, 9.0))], build_environment())
    assert "too busy to measure (the step is unstable)" in doubts[0].text


def test_every_place_of_wrong_data_is_named(build_collective, build_environment):
    records = [build_collective(num_bytes=2**n, num_wrong=5) for n in range(20, 24)]
    (doubt,) = find_doubts(records, build_environment())
    assert all(f"{size} MiB (5 of" in doubt.text for size in (1, 2, 4, 8))


def test_a_run_without_records_of_its_times_has_the_doubts_of_its_machine(build_environment):
    assert find_doubts([], build_environment(load_average=None)) == []  # a record without timings
    (taken,) = find_doubts([], build_environment(stolen=0.9))
    (loaded,) = find_doubts([], build_environment(load_average=16.0, cores=2))
    assert (taken.kind, loaded.kind) == ("inconclusive", "busy") and "(load 16.0 on 2 cores)" in loaded.text


def test_the_noise_of_a_profile_of_layers_is_doubted_as_that_of_steps(build_environment):
    def find(*times_s, **environment):
        count = len(times_s)
        whole = {
            name: build_times(*(time_s,) * count)
            for name, time_s in (("profiled_forward", 0.5), ("profiled_backward", 1.0))
        }
        same = {name: build_times(*(0.1,) * count) for name in ("forward", "backward", "optimizer", "profiled_step")}
        parameter = ParameterTimes("a", 8, 2, "float32", "", (0.1,) * count)
        record = build_profile(timing=build_times(*times_s), parameters=(parameter,), blocks=(), **same, **whole)
        return find_doubts([record], build_environment(**environment))

    assert find(*(1.0,) * 12) == []
    busy, unstable = find(*_swinging(1.0, 3.0), load_average=9.0)
    assert (busy.kind, unstable.kind) == ("inconclusive", "unstable")
    assert "(the step is unstable, load 9.0 on 8 cores)" in busy.text
    assert unstable.text.startswith("1 rank: unstable at toy, batch 2 (1 s to 3 s) (p10 to p90): ")
    assert [doubt.kind for doubt in find(1.0, 3.0)] == ["few"]


def test_epochs_of_a_batch_size_are_few_but_must_agree(build_environment):
    rng = random.Random(0)
    steady = [make_batch(rng, size, timing=build_times(1.0, 1.1), data_wait=None) for size in (8, 16)]
    assert find_doubts([*steady, make_batch(rng, 32, failure="does not fit")], build_environment()) == []
    uneven = make_batch(rng, 32, timing=build_times(1.0, 3.0))
    (doubt,) = find_doubts([*steady, uneven], build_environment())
    assert doubt.kind == "unstable" and doubt.text.endswith("with more --epochs")
    assert [doubt.kind for doubt in find_doubts([uneven], build_environment())] == ["inconclusive", "unstable"]


def test_only_a_busy_machine_makes_predictions_doubtful(build_collective, build_environment, build_samples):
    noisy = [build_collective(timing=build_samples(*_swinging(1.0, 9.0))), build_collective(world_size=9)]
    assert not is_busy(find_doubts(noisy, build_environment()))
    for environment in ({"load_average": 5.0}, {"stolen": 0.2}):
        assert is_busy(find_doubts(noisy, build_environment(**environment)))
    assert (add_busy("", ()), add_busy("far", ())) == ("", "far")
    assert add_busy("far", ["profile", "all-reduce"]) == "far; measured on a busy machine: profile, all-reduce"


def test_strict_fails_on_noise_alone():
    assert set(NOISY) == {"inconclusive", "unstable", "drifting", "few"}


def test_a_row_faster_than_memory_is_doubted(build_collective, build_pass, build_environment, build_samples):
    ours = build_collective(backend="paceline", memory="shared", timing=build_samples(*(1e-4,) * 10))
    (doubt,) = find_doubts([build_collective(), ours, build_pass(time_s=2e-4)], build_environment())
    assert doubt.kind == "above" and doubt.kind not in NOISY
    assert doubt.text.startswith(
        "paceline, 2 ranks: above the memory bandwidth of one core per rank at 1 MiB in shared memory (2.00x)"
    )
    assert find_doubts([build_collective(), ours, build_pass(time_s=1e-4)], build_environment()) == []


def test_a_noisy_bound_is_doubted_by_its_pass_but_waits_for_nobody(build_pass, build_environment, build_samples):
    (unstable,) = find_doubts([build_pass(timing=build_samples(*_swinging(0.7, 1.3)))], build_environment())
    assert unstable.kind == "unstable" and unstable.text.startswith("memory, 2 ranks: unstable at 1 MiB (add) (")
    assert find_doubts([build_pass(timing=_late(0.9))], build_environment()) == []
    (wrong,) = find_doubts([build_pass("copy", num_wrong=4)], build_environment())
    assert "memory, 2 ranks: WRONG DATA at 1 MiB (copy) (4 of" in wrong.text
