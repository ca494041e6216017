"""The scoreboard: well-formed programs, fixes that remove the planted problem, and correct scores."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from paceline.predict.advice import WORTH, rank_findings
from paceline.records.findings import HEALTHY, Finding

FOLDER = Path(__file__).parents[2] / "benchmarks" / "scoreboard"
PROGRAMS = sorted(path.stem for path in (FOLDER / "programs").glob("*.py") if path.stem != "loop")


@pytest.fixture(scope="module")
def board():
    """The modules of the scoreboard, which are scripts in a separate folder."""
    before, known = sys.path[:], set(sys.modules)
    sys.path[:0] = [str(FOLDER), str(FOLDER / "programs")]
    yield {name: importlib.import_module(name) for name in ("score", "peers", "run", "render", "loop")}
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_there_are_enough_programs(board):
    facts = [board["run"].describe(name) for name in PROGRAMS]
    healthy = [one for one in facts if board["score"].is_healthy(one)]
    on_cpu = [one for one in facts if not one["needs_cuda"]]
    assert len(facts) - len(healthy) >= 24 and len([one for one in healthy if one in on_cpu]) >= 6
    assert len(on_cpu) >= 30
    assert len({one["title"] for one in facts}) == len(facts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_well_formed(board, name):
    facts, path = board["run"].describe(name), FOLDER / "programs" / f"{name}.py"
    assert facts["title"] and facts["about"] and facts["culprit"] in (None, 0, 1)
    assert len(path.read_text().splitlines()) <= 45
    assert facts["needs_cuda"] == name.startswith(("cuda_", "healthy_cuda"))
    assert board["score"].is_healthy(facts) == name.startswith("healthy_")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_trains_with_and_without_the_planted_problem(board, name, monkeypatch):
    """One step of each variant, without ranks: gradients reach every parameter that is optimized."""
    kind = board["run"].load_program(name)
    if kind.needs_cuda and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # without ranks, nothing is bound to cores
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    for cured in (False, True):
        program = kind(cured, rank=1)
        assert program.is_ailing_here == (not cured and program.culprit in (None, 1))
        torch.manual_seed(0)
        net = program.build_model().to(program.device)
        model, optimizer = Alone(net), program.build_optimizer(net)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        inputs, targets = program.build_batch(torch.Generator().manual_seed(0))
        program.train_step(model, optimizer, program.move(inputs), program.move(targets))
        program.after_step(4, model)
        assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


class Alone(torch.nn.Module):
    """A stand-in for DistributedDataParallel in one process."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)

    def no_sync(self):
        return contextlib.nullcontext()


def count_sleeps(board, monkeypatch, name, cured, rank):
    """Seconds that a program waits or spins in one step."""
    kind, slept = board["run"].load_program(name), []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(sys.modules[kind.__module__], "spin", slept.append, raising=False)
    program = kind(cured, rank)
    inputs, targets = program.build_batch(torch.Generator().manual_seed(0))
    program.load(0)
    program.find_loss(program.build_model(), inputs, targets).backward()
    return sum(slept)


@pytest.mark.parametrize("name", ["slow_loader_rank", "slow_backward_rank", "slow_forward_rank"])
def test_a_slow_rank_waits_only_where_its_problem_is_planted(board, monkeypatch, name):
    culprit = board["run"].describe(name)["culprit"]
    assert count_sleeps(board, monkeypatch, name, False, culprit) > 0
    assert count_sleeps(board, monkeypatch, name, False, 1 - culprit) == 0
    assert count_sleeps(board, monkeypatch, name, True, culprit) == 0


def test_cures_change_the_option_that_causes_the_problem(board):
    def options(name, cured):
        program = board["run"].load_program(name)(cured, 0)
        return program.wrapper_options | program.loader_options | {"backend": program.backend, "n": program.threads}

    assert options("tiny_buckets", False)["bucket_cap_mb"] < 0.01 and "bucket_cap_mb" not in options(
        "tiny_buckets", True
    )
    assert options("unused_parameters", False)["find_unused_parameters"]
    assert not options("unused_parameters", True)["find_unused_parameters"]
    assert options("broadcast_buffers", False)["broadcast_buffers"]
    assert not options("broadcast_buffers", True)["broadcast_buffers"]
    assert "num_workers" not in options("slow_loader", False) and options("slow_loader", True)["num_workers"]
    assert [options("gloo_on_one_host", cured)["backend"] for cured in (False, True)] == ["gloo", "shm"]
    assert [options("too_many_threads", cured)["n"] for cured in (False, True)] == [8, 1]


def test_uneven_batches_have_as_many_samples_when_cured(board):
    kind = board["run"].load_program("uneven_batches")
    assert [kind(False, rank).batch for rank in (0, 1)] == [512, 1024]
    assert [kind(True, rank).batch for rank in (0, 1)] == [768, 768]
    assert kind(False, 0).samples == kind(True, 1).samples


# -- scores ------------------------------------------------------------------------------------------------------------


def build_document(cause="data", culprit=1, rank=1, gain=0.42, answer=("data",), tool="Paceline"):
    runs = {
        "plain": [{"samples": 8, "steps_s": [0.010, 0.010]}],
        "cured": [{"samples": 16, "steps_s": [0.012, 0.012]}],  # 40 % less per sample
        tool: [{"samples": 8, "steps_s": [0.0101, 0.0103]}],
    }
    answers = {tool: {"causes": answer, "rank": rank, "gain": gain, "text": ""}}
    facts = {"name": "made", "title": "made", "causes": [cause], "culprit": culprit, "needs_cuda": False}
    where = {"cores": 2, "machine": "x86_64", "gpu": "", "torch": "2.13.0", "python": "3.11"}
    return {**facts, "runs": runs, "answers": answers, "errors": {}, "steps": 220, "environment": where}


def test_a_right_answer_scores_in_each_column(board):
    score = board["score"].score_answer(build_document(), "Paceline")
    assert score.is_cause and score.is_rank and score.is_gain
    assert score.gain_error == pytest.approx(0.02) and score.overhead == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"answer": ("buckets",)}, (False, False, False)),
        ({"rank": 0}, (True, False, True)),
        ({"rank": None}, (True, False, True)),
        ({"gain": 0.34}, (True, True, False)),
        ({"gain": None}, (True, True, False)),
        ({"answer": ("late rank", "data")}, (True, True, True)),
        ({"answer": ()}, (False, False, False)),
        ({"culprit": None, "rank": 0}, (True, None, True)),
    ],
)
def test_a_wrong_answer_loses_only_its_columns(board, changed, expected):
    score = board["score"].score_answer(build_document(**changed), "Paceline")
    assert (score.is_cause, score.is_rank, score.is_gain) == expected


@pytest.mark.parametrize("kind", HEALTHY)
def test_every_verdict_without_a_cure_is_right_for_a_healthy_program(board, kind):
    assert kind in board["score"].HEALTHY
    healthy = {"cause": "healthy", "culprit": None}
    assert board["score"].score_answer(build_document(**healthy, answer=(kind,)), "Paceline").is_cause
    wrong = board["score"].score_answer(build_document(**healthy, answer=("network",)), "Paceline")
    assert wrong.is_cause is False and wrong.is_gain is None


def test_a_tool_that_did_not_run_is_not_scored(board):
    assert board["score"].score_answer(build_document(), "TraceML") is None
    document = build_document()
    document["runs"] = {"Paceline": document["runs"]["Paceline"]}  # the only tool next to a busy core
    score = board["score"].score_answer(document, "Paceline", gain=0.40)
    assert score.is_gain and score.overhead is None


def test_a_problem_that_costs_nothing_here_is_skipped_with_a_reason(board):
    document = build_document()
    assert board["score"].find_reason(document) == ""
    document["runs"]["cured"] = [{"samples": 8, "steps_s": [0.0099, 0.0099]}]
    assert "1.0%" in board["score"].find_reason(document)


def test_the_first_finding_is_the_answer(board):
    slow = Finding("data", "it waits", "load ahead", 0.02, rank=1)
    first, *others = rank_findings([Finding("buckets", "many", "fewer", 0.01), slow], 0.1)
    ranked = [one.to_json() for one in (first, *others)]
    document = {"bottlenecks": ranked, "card": first.card, "is_inconclusive": False}
    answer = board["score"].read_answer(document)
    assert (answer.causes, answer.rank, answer.gain) == (("data",), 1, pytest.approx(0.2))
    (healthy,) = rank_findings([Finding("data", "it waits", "load ahead", 0.9 * WORTH * 0.1)], 0.1)
    document = {"bottlenecks": [healthy.to_json()], "card": healthy.card, "is_inconclusive": True}
    answer = board["score"].read_answer(document)
    assert answer.causes == ("healthy",) and answer.gain is None and not answer.is_conclusive


def test_an_inconclusive_answer_is_not_a_false_finding_and_needs_the_right_cause(board):
    def score(**changed):
        document = build_document(**changed)
        document["answers"]["Paceline"]["is_conclusive"] = False
        return board["score"].score_answer(document, "Paceline")

    assert score(cause="healthy", culprit=None, answer=("late rank",)).is_cause
    assert score().is_cause and not score(answer=("network",)).is_cause


def test_a_disturbed_run_is_repeated_and_the_least_disturbed_one_counts(board, monkeypatch, tmp_path):
    module, clock = board["run"], {"now": 0.0, "stolen": 0.0}
    shares = iter([0.30, 0.10, 0.20, 0.01, 0.30])

    def call(run):
        clock["now"] += 10.0
        clock["stolen"] += 10.0 * module.os.cpu_count() * next(shares)
        return board["score"].Answer(text=run.folder.name)

    monkeypatch.setattr(module, "read_stolen_s", lambda: clock["stolen"])
    monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])
    stolen, run, answer = module.try_tool(call, "healthy_mlp", tmp_path / "first", 80)
    assert (stolen, run.folder.name, answer.text) == (pytest.approx(0.10), "1", "1")
    stolen, run, answer = module.try_tool(call, "healthy_mlp", tmp_path / "second", 80)
    assert (stolen, run.folder.name) == (pytest.approx(0.01), "0")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_is_recorded_and_tried_again(board, tmp_path):
    module = board["run"]

    def take_steps(run):
        run.times.write_text(json.dumps({"samples": 4, "steps_s": [0.01]}))

    def answer(run):
        take_steps(run)
        return board["score"].Answer(("data",), 1, 0.3)

    def fail(run):
        run.start([sys.executable, "-c", "raise SystemExit('no such backend')"])

    facts, path = module.describe("slow_loader_rank"), tmp_path / "slow_loader_rank.json"
    tools = {"plain": take_steps, "Paceline": answer, "cured": take_steps, "TraceML": fail}
    document = module.run_program(facts, tools, 80, 2)
    assert {name: len(runs) for name, runs in document["runs"].items()} == {"plain": 2, "Paceline": 2, "cured": 2}
    assert document["answers"]["Paceline"]["rank"] == 1
    assert list(document["errors"]) == ["TraceML"] and "no such backend" in document["errors"]["TraceML"]

    def is_done(rounds=2, steps=80):
        return module.is_done(module.load_earlier(path, steps), tools, rounds)

    assert not is_done()
    path.write_text(json.dumps(document))
    assert not is_done()
    path.write_text(json.dumps(document | {"errors": {}}))
    assert is_done() and not is_done(steps=220) and not is_done(rounds=3)
    again = module.run_program(facts, {"Paceline": answer}, 80, 3, document | {"errors": {}})
    assert {name: len(runs) for name, runs in again["runs"].items()} == {"plain": 2, "Paceline": 3, "cured": 2}
    again = module.run_program(facts, {"plain": take_steps}, 80, 1, document)  # other times are not comparable with it
    assert list(again["runs"]) == ["plain"] and list(again["answers"]) == ["Paceline"]


def test_healthy_programs_are_not_cured_and_only_paceline_runs_beside_a_busy_core(board, tmp_path):
    module, names = board["run"], []
    tools = {name: lambda run: names.append(run.folder.parent.name) for name in ("plain", "cured")}
    module.run_program(module.describe("healthy_mlp"), tools, 80, 1)
    assert names == ["plain"]
    nowhere = tmp_path / "bin" / "python"
    assert list(module.list_tools(nowhere, busy=True)[0]) == ["Paceline"]
    tools, left_out = module.list_tools(nowhere, busy=False)
    assert list(tools) == ["plain", "Paceline", "cured", "torch.profiler"] and set(left_out) == {"HTA", "TraceML"}


# -- peers -------------------------------------------------------------------------------------------------------------


def build_table(**self_us):
    rows = {"ProfilerStep*": 100.0} | self_us
    return [{"name": name, "count": 8, "self_us": 8 * took, "total_us": 8 * took} for name, took in rows.items()]


@pytest.mark.parametrize(
    ("first", "second", "cause", "rank"),
    [
        ({}, {}, "healthy", None),
        ({"SlowBackward": 1}, {"SlowBackward": 30}, "late rank", 1),
        ({"enumerate(DataLoader)#x": 40}, {"enumerate(DataLoader)#x": 38}, "data", None),
        ({"enumerate(DataLoader)#x": 40}, {"enumerate(DataLoader)#x": 2}, "data", 0),
        ({"Optimizer.step#Adam.step": 45}, {"Optimizer.step#Adam.step": 44}, "optimizer", None),
        ({"gloo:all_reduce": 45}, {"gloo:all_reduce": 44}, "network", None),
    ],
)
def test_reading_the_profiler_finds_the_bottleneck(board, first, second, cause, rank):
    answer = board["peers"].read_profiler([build_table(**first), build_table(**second)])
    assert cause in answer.causes and answer.rank == rank


def test_verdicts_of_peers_become_causes(board):
    read = board["peers"].read_traceml
    assert read({"primary_diagnosis": {"kind": "INPUT_BOUND"}}).causes == ("data",)
    late = {"kind": "COMPUTE_STRAGGLER", "summary": "r1 took 16.0 ms, compared with 0.2 ms on r0."}
    assert "late rank" in read({"primary_diagnosis": late}).causes and read({"primary_diagnosis": late}).rank == 1
    assert read({}).causes == ()
    assert board["peers"].read_hta({"error": "no GPU kernels"}).causes == ()
    assert "host" in board["peers"].read_hta({"idle": 0.5, "overlap": 1.0, "communication": 0.1}).causes


# -- the page ----------------------------------------------------------------------------------------------------------


def write_runs(folder, documents):
    (folder / "quiet").mkdir()
    for number, document in enumerate(documents):
        (folder / "quiet" / f"{number}.json").write_text(json.dumps(document))


def test_the_page_shows_misses(board, tmp_path):
    healthy = build_document("healthy", None, None, None, ("network",)) | {"name": "fine", "title": "fine"}
    failed = build_document() | {"name": "failed", "title": "failed", "answers": {}}
    write_runs(tmp_path, [build_document(), healthy, failed])
    page = board["render"].render(tmp_path)
    assert "| Paceline | 1 of 1 | 1 of 1 | 1 of 1 | 0 | 1 of 1 |" in page and "apart (median)" not in page
    assert "| fine | healthy | **network** |" in page and "| failed | **failed** |" in page


def test_no_answer_about_a_healthy_program_is_no_false_finding_and_the_noise_is_shown(board, tmp_path):
    document = build_document("healthy", None, None, None, ()) | {"name": "fine", "title": "fine"}
    document["runs"]["plain"] = [{"samples": 1, "steps_s": [step_s] * 4} for step_s in (0.1, 0.11)]
    write_runs(tmp_path, [document])
    page = board["render"].render(tmp_path)
    assert "| Paceline |  |  |  | 0 |  |" in page and "are 10.0% apart" in page


def test_the_published_page_is_that_of_the_published_runs(board):
    assert board["render"].PAGE.read_text() == board["render"].render(FOLDER.parents[1] / "results" / "scoreboard")
