"""Users' programs that do not mention Paceline behave the same when attached, and the answer is correct."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline

TESTS = Path(__file__).parents[1]
SCRIPTS, ROOT = TESTS / "scripts", TESTS.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
# For each program: the launcher, further arguments, and the required package.
PROGRAMS = {
    "plain_loop": (TORCHRUN, [], ""),
    "mixed_precision": ([sys.executable], [], ""),
    "accumulate": (TORCHRUN, [], ""),
    "gan": (TORCHRUN, [], ""),
    "compiled": (TORCHRUN, ["--compiler", "aot_eager"], ""),
    "uneven": (TORCHRUN, [], ""),
    "char_gpt": (TORCHRUN, [], ""),
    "cnn": (TORCHRUN, [], ""),
    "accelerate_loop": (ACCELERATE, [], "accelerate"),
    "hf_trainer": (TORCHRUN, [], "transformers"),
    "lightning_module": ([sys.executable], [], "lightning"),
    "fabric_loop": ([sys.executable], [], "lightning"),
}


def build_command(name: str, *more: str) -> list[str]:
    launcher, arguments, needed = PROGRAMS[name]
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return [*launcher, str(SCRIPTS / f"{name}.py"), *arguments, *more]


def flatten(values: dict) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in values.items():
        found |= {f"{key}.{k}": v for k, v in flatten(value).items()} if isinstance(value, dict) else {key: value}
    return found


def test_none_of_the_twelve_programs_mentions_paceline():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(PROGRAMS) and len(PROGRAMS) == 12
    assert not [path.name for path in SCRIPTS.glob("*.py") if "paceline" in path.read_text().lower()]


def run_plainly(name: str, *more: str, **variables: str) -> str:
    command, given = build_command(name, *more), os.environ | {"KINETO_LOG_LEVEL": "6"} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=given)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_attached_program_has_bit_identical_weights_and_an_answer(name, tmp_path):
    files = [tmp_path / "plain.pt", tmp_path / "attached.pt"]
    run_plainly(name, "--steps", "40", "--save", str(files[0]))
    result = paceline.attach(build_command(name, "--steps", "40", "--save", str(files[1])), steps=32, progress=False)
    assert result.failure == "" and result.steps.world_size == 2 and result.steps.timing.num_ranks == 2
    assert result.steps.backend == "gloo" and result.buckets is not None, result.warnings
    assert result.verdict in ("use", "keep", "flat", "undecided") and result.bottleneck.evidence in result.answer
    assert sum(result.buckets.traced.layout) == result.buckets.job.num_bytes
    one, other = (flatten(torch.load(file)) for file in files)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_our_wrapper_gives_the_losses_and_weights_of_torchs(name, tmp_path, monkeypatch, capfd):
    found = []
    for number, wrapper in enumerate(("torch", "paceline")):
        monkeypatch.setenv("PACELINE_WRAPPER", str(number))
        file = tmp_path / f"{wrapper}.pt"
        command = build_command(name, "--steps", "40", "--double", "--save", str(file))
        result = paceline.attach(command, steps=32, progress=False)
        assert result.failure == "" and result.steps.wrapper == wrapper  # otherwise compared with itself
        text = "".join(capfd.readouterr())
        losses = [float(part) for part in re.findall(r"(?:loss |'loss': ')([-+.e\d]+)", text)]
        found.append((losses, flatten(torch.load(file))))
    (losses, weights), (others, other_weights) = found
    assert len(losses) >= 2 and losses == pytest.approx(others, rel=1e-6)
    assert weights.keys() == other_weights.keys()
    # torch's wrapper keeps rank 0's running statistics, ours averages those of all ranks.
    names = [name for name in weights if "running_" not in name]
    assert all(torch.allclose(weights[name], other_weights[name], rtol=1e-6, atol=1e-12) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("data", ["--decode-ms", "2", "--batch-size", "16"]),
        ("late rank", ["--slow-rank-ms", "40"]),
        ("buckets", ["--bucket-cap-mb", "0.001", "--depth", "24", "--width", "128", "--batch-size", "128"]),
        ("batch", ["--batch-size", "1", "--width", "1024", "--depth", "8"]),
    ],
)
def test_a_planted_bottleneck_is_named(kind, arguments):
    command = build_command("plain_loop", "--steps", "200", *arguments)
    result = paceline.attach(command, steps=48, stop=True, progress=False)
    # On one host, shared memory is an alternative fix for a batch that is too small for its messages.
    assert result.bottleneck.kind in ((kind, "backend") if kind == "batch" else (kind,)), result.text(None)
    if kind == "late rank":
        assert "rank 1" in result.bottleneck.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("data", "cnn"), ("late rank", "char_gpt"), ("late rank", "accumulate"), ("buckets", "accumulate")],
)
def test_a_bottleneck_planted_from_outside_is_named_only_when_present(kind, name):
    found = []
    for planted in (kind, "nothing"):
        plant = [str(Path(__file__).with_name("planted.py")), planted, str(SCRIPTS / f"{name}.py")]
        result = paceline.attach([*TORCHRUN, *plant, "--steps", "200"], steps=48, stop=True, progress=False)
        found.append(result.bottleneck)
    # A short wait is normal on two cores that also load data.
    assert found[0].kind == kind and (found[1].kind != kind or 3 * found[1].gain_s < found[0].gain_s)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["torch", "paceline"])
def test_plans_are_compared_within_one_run(wrapper, monkeypatch):
    monkeypatch.setenv("PACELINE_WRAPPER", str(int(wrapper == "paceline")))
    command = build_command("plain_loop", "--steps", "300", "--width", "512", "--bucket-cap-mb", "0.001")
    result = paceline.attach(command, race=True, steps=24, caps="1MiB", progress=False)
    assert result.steps.wrapper == wrapper and result.buckets is not None, result.warnings
    assert result.race is not None and result.race.num_rounds == 14, result.warnings
    now, other = result.table("race").rows_json()
    assert (now["plan"], other["plan"]) == ("as it is", "1 MiB") and other["num_buckets"] < now["num_buckets"]
    assert result.verdict in ("use", "default", "flat", "undecided") and result.cap_mib in (None, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["torch", "paceline"])
def test_a_program_is_stopped_on_all_ranks_after_the_same_step(wrapper, monkeypatch):
    monkeypatch.setenv("PACELINE_WRAPPER", str(int(wrapper == "paceline")))
    for name in ("mixed_precision", "cnn", "accelerate_loop", "hf_trainer", "lightning_module", "fabric_loop"):
        if PROGRAMS[name][2] and importlib.util.find_spec(PROGRAMS[name][2]) is None:
            continue
        result = paceline.attach(build_command(name, "--steps", "4000"), steps=16, stop=True, progress=False)
        assert result.failure == "" and result.steps.timing.num_ranks == 2 and result.steps.wrapper == wrapper
        assert not [text for text in result.warnings if "did not end" in text], name


@pytest.mark.slow
def test_a_program_that_is_watched_prints_lines_and_runs_to_its_end(capfd, tmp_path):
    file = tmp_path / "weights.pt"
    command = build_command("plain_loop", "--steps", "61", "--save", str(file))
    result = paceline.attach(command, steps=0, every=20, progress=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline: step ")]
    assert [line.split(":")[1].strip() for line in lines] == ["step 20", "step 40", "step 60"]
    assert file.exists() and result.run.verb == "watch" and result.steps.timing.count >= 40


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    """The documented commands run verbatim, in a folder that contains the programs they name."""
    text = (ROOT / "docs" / "your-own-script.md").read_text()
    lines = [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line.strip() for line in lines]
    assert len(commands) >= 6
    (tmp_path / "train.py").write_text((SCRIPTS / "plain_loop.py").read_text().replace("default=60", "default=300"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run"), ("paceline", "-m paceline")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    for command in commands:
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 230}
        done = subprocess.run(command, shell=True, check=False, **options)
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
        said = "A step of Sequential on 2 ranks (gloo, cpu) takes" if "paceline" in command else "loss"
        assert said in done.stdout, command


def train_rebucketed(kind: str, view: bool, static_graph: bool) -> tuple[list[int], list[torch.Tensor]]:
    """The number of buckets every five steps, and the final weights; the wrapper is kept or replaced."""
    from paceline.measure.observer import rebucket

    wrap = paceline.DDP if kind == "paceline" else torch.nn.parallel.DistributedDataParallel
    with paceline.init("gloo", announce=None) as world:
        counts, weights = [], []
        for plans in ([], [0.01, 0.05, None, 0.2]):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
            model = wrap(net, gradient_as_bucket_view=view, static_graph=static_graph, bucket_cap_mb=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for number in range(20):
                if plans and number % 5 == 0:
                    rebucket(model, plans[number // 5])
                optimizer.zero_grad()
                model(torch.full((4, 64), 0.1 * (world.rank + 1))).square().mean().backward()
                optimizer.step()
                if number % 5 == 4:
                    counts.append(len(str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")))
            weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        return counts, weights


@pytest.mark.parametrize("options", [("torch", False, False), ("torch", True, True), ("paceline", False, False)])
def test_a_wrapper_with_a_replaced_reducer_behaves_as_if_built_with_that_cap(on_ranks, options):
    (counts, weights), (others, _) = on_ranks(2, train_rebucketed, *options)
    assert counts == others == [1, 1, 1, 1, 6, 2, 1, 1]
    assert torch.equal(*weights)  # sums over two ranks do not depend on buckets
