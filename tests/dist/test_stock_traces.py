"""`predict --trace` on torch.profiler traces of torch's own DDP, on two gloo ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

import paceline
from paceline.verbs.predict import load_traced_steps
from tests.conftest import run_as_if_fresh

WIDTHS = (64, 256, 128, 64)
SIZES = [4 * n for a, b in itertools.pairwise(WIDTHS) for n in (a * b, b)]


def train_traced(folder: str) -> tuple[list[int], list[int]]:
    """This rank's traces in every style, and the buckets that the wrapper reports, with either cap."""
    with paceline.init("gloo", announce=None) as world:
        torch.manual_seed(0)
        models = []
        for cap in (0.125, 25):
            layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
            models.append(DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=cap))
        inputs = torch.randn(8, WIDTHS[0])

        def step(model, optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        small, large = [(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
        # From the first iteration, which sends one bucket.
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(5):
                step(*small)
        profiler.export_chrome_trace(f"{folder}/plain-{world.rank}.json")
        # Marked, on a schedule, compressed, and with a micro-batch that sends no gradients.
        handler = tensorboard_trace_handler(f"{folder}/board", f"rank-{world.rank}.trace", use_gzip=True)
        with profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=handler, record_shapes=True,
        ) as profiler:  # fmt: skip
            for _ in range(5):
                with large[0].no_sync():
                    large[0](inputs).square().mean().backward()
                step(*large)
                profiler.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(*small)
        profiler.export_chrome_trace(f"{folder}/shapeless-{world.rank}.json")
        said = [model._get_ddp_logging_data()["rebuilt_bucket_sizes"] for model in models]
        return tuple([int(size) for size in sizes.split(",")] for sizes in said)


@pytest.fixture(scope="module")
def traced(warm_pool, tmp_path_factory) -> tuple[Path, list[int], list[int]]:
    folder = tmp_path_factory.mktemp("traces")
    (small, large), _ = warm_pool.run(run_as_if_fresh, (train_traced, str(folder)), num_ranks=2, timeout_s=60)
    return folder, small, large


def test_the_trace_of_one_rank_suffices(command, traced, tmp_path):
    folder, buckets, _ = traced
    answer = command("predict", "--trace", str(folder / "plain-0.json"), "--json", "--out", str(tmp_path / "runs"))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert (document["rank"], document["world_size"], document["backend"]) == (0, 2, "gloo")
    assert [row["num_bytes"] for row in document["messages"]] == buckets and len(buckets) > 1
    assert document["num_steps"] == 4  # the first step sends other buckets
    own = document["caps"][0]
    assert own["label"] == "traced" and own["num_buckets"] == len(buckets)
    assert own["low_s"] < own["step_s"] < own["high_s"] and own["gain"] == 0
    assert document["verdict"] in ("use", "keep", "flat", "undecided") and document["caps"][-1]["num_buckets"] == 1
    loaded = paceline.load_result(document["run"])
    if loaded.traced.is_off:  # on a busy machine, steps are marked as doubtful
        assert "does not reproduce the traced step" in " ".join(loaded.findings) and loaded.verdict != "use"
    else:  # the prediction reproduces the traced buckets
        assert own["step_s"] == pytest.approx(document["traced_step_s"], rel=1e-3)
    assert loaded.to_json()["caps"] == document["caps"] and loaded.answer == document["answer"]
    assert (Path(document["run"]) / "caps.png").stat().st_size > 0


def test_two_ranks_other_networks_and_other_numbers_of_ranks(command, traced, tmp_path):
    files = [str(traced[0] / f"plain-{rank}.json") for rank in (0, 1)]
    more = ("--network", "10gbe", "--ranks", "4,64", "--json", "--out", str(tmp_path))
    answer = command("predict", "--trace", *files, *more)
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert [(row["network"], row["world_size"]) for row in document["elsewhere"]] == [("10gbe", 4), ("10gbe", 64)]
    result = paceline.predict_trace(files, ranks=4)  # the traced messages, scaled
    assert [row.world_size for row in result.elsewhere] == [4] and result.traced.compared == [0, 1]


def test_steps_that_are_marked_have_their_micro_batch_and_its_backward(traced):
    folder, _, buckets = traced
    steps = load_traced_steps([path for path in sorted((folder / "board").iterdir()) if "rank-1" in path.name])
    assert len(steps) == 3 and all(len(step.alone_s) == 1 and step.alone_s[0] > 0 for step in steps)
    assert all(list(step.layout) == buckets for step in steps)
    assert all(sorted(step.gradient_bytes) == sorted(SIZES) for step in steps)
    assert all(step.before_s > step.alone_s[0] and step.after_s > 0 for step in steps)
    result = paceline.predict_trace(folder / "board")  # both ranks
    assert result.traced.ranks == (0, 1) and len(result.traced.alone_s) == 3
    assert "bucket_cap_mb" in str(result.next_steps) or result.verdict != "use"


def test_gloo_without_shapes_is_refused_in_one_line(command, traced, tmp_path):
    answer = command("predict", "--trace", str(traced[0] / "shapeless-0.json"), "--out", str(tmp_path / "runs"))
    assert answer.code == 2 and answer.err.count("\n") == 1 and "record_shapes=True" in answer.err
    assert not (tmp_path / "runs").exists()
