#!/usr/bin/env python
"""Run the scoreboard programs under Paceline and its peers, and compare their answers with the planted problems.

    python benchmarks/scoreboard/run.py [--only NAME,...] [--quick] [--busy] [--rounds N] --out runs/scoreboard
    python benchmarks/scoreboard/run.py --tools plain,Paceline,cured --rounds 3 --out runs/scoreboard

Each program runs on its own, with its problem fixed, under `paceline profile -- torchrun ...`, under TraceML, and with
torch.profiler, whose traces HTA reads. Raw results are written to FOLDER/quiet or FOLDER/busy, one file per program;
programs with results and without failures are skipped. `--tools` measures only these again, and keeps the results of
the others. Rounds alternate between the tools, so that their ratios do not contain the drift of the machine. Where the
hypervisor gave more than 5 % of a run's CPU time to other guests, the run is repeated up to twice, and the least
disturbed one counts. With `--busy`, another process keeps one core busy, and only Paceline runs. `render.py FOLDER`
writes the table. Peers need their own environment:

    python -m venv build/peers && build/peers/bin/pip install torch traceml-ai==0.5.* HolisticTraceAnalysis==0.5.*
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
sys.path[:0] = [str(HERE), str(PROGRAMS)]

from peers import read_hta, read_profiler, read_traceml  # noqa: E402
from score import MOST_STOLEN, PACELINE, Answer, find_gain, find_mean, read_answer, score_answer  # noqa: E402

from paceline.machine import read_stolen_s  # noqa: E402

RANKS = 2
STEPS, QUICK_STEPS = 220, 80  # the first 20 are warm-up
MOST_S = 300.0  # time limit of one run
MOST_TRIALS = 3
PEERS = ROOT / "build" / "peers" / "bin" / "python"
SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def list_programs() -> list[str]:
    return sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "loop")


def load_program(name: str) -> Any:
    """Load the class that a program defines."""
    spec = importlib.util.spec_from_file_location(f"scoreboard_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return next(kind for kind in kinds if issubclass(kind, module.Program))


def describe(name: str) -> dict[str, Any]:
    """Describe the problem planted in a program."""
    kind = load_program(name)
    declared = {key: getattr(kind, key) for key in ("title", "causes", "culprit", "needs_cuda")}
    return {"name": name, "about": sys.modules[kind.__module__].__doc__, **declared}


class Run:
    """One run of a program, in its own folder."""

    def __init__(self, program: str, folder: Path, steps: int) -> None:
        self.folder = folder
        self.times = folder / "times.json"
        self.program = [str(PROGRAMS / f"{program}.py"), "--steps", str(steps), "--times", str(self.times)]

    def launch(self, *options: str) -> list[str]:
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [*module, *self.program, *options]

    def start(self, command: Sequence[str]) -> str:
        """Run a command to completion, and return its output. No process outlives it."""
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "KINETO_LOG_LEVEL": "6"}
        log = self.folder / "stderr.txt"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            try:
                printed, _ = process.communicate(timeout=MOST_S)
            except subprocess.TimeoutExpired as error:
                raise RunError(f"did not end within {MOST_S:.0f} s") from error
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
            raise RunError(f"exit code {process.returncode}: {last[0][:200]}")
        return printed

    def read_times(self) -> dict[str, Any]:
        found = json.loads(self.times.read_text())
        return found | {"steps_s": [round(seconds, 7) for seconds in found["steps_s"]]}


class RunError(Exception):
    pass


def run_plain(run: Run) -> None:
    run.start(run.launch())


def run_cured(run: Run) -> None:
    run.start(run.launch("--cured"))


def run_paceline(run: Run) -> Answer:
    command = [sys.executable, "-m", "paceline", "profile", "--json", "--out", str(run.folder), "--", *run.launch()]
    return read_answer(json.loads(run.start(command)))


def run_profiler(run: Run) -> Answer:
    run.start(run.launch("--peer", "profiler", "--folder", str(run.folder)))
    return read_profiler([json.loads((run.folder / f"operators-{rank}.json").read_text()) for rank in range(RANKS)])


def run_hta(run: Run, peers: Path) -> Answer:
    """Run HTA on the traces that torch.profiler left in the folder."""
    printed = run.start([str(peers), str(HERE / "peers.py"), "hta", str(run.folder)])
    return read_hta(json.loads(printed.strip().splitlines()[-1]))


def run_traceml(run: Run, peers: Path) -> Answer:
    script, *options = run.program
    asked = ["--nproc-per-node", str(RANKS), "--logs-dir", str(run.folder), "--run-name", "traced"]
    run.start([str(peers.with_name("traceml")), "run", script, *asked, "--args", *options, "--peer", "traceml"])
    return read_traceml(json.loads(next(run.folder.glob("**/final_summary.json")).read_text()))


def has_peer(peers: Path, module: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return peers.exists() and subprocess.run([str(peers), "-c", find], check=False).returncode == 0


def list_tools(peers: Path, busy: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """List the runs of a round in order, and why others are skipped."""
    tools: dict[str, Any] = {PACELINE: run_paceline}
    if busy:
        return tools, {}
    tools = {"plain": run_plain, **tools, "cured": run_cured, "torch.profiler": run_profiler}
    left_out = {}
    for name, module, call in (("HTA", "hta", run_hta), ("TraceML", "traceml_ai", run_traceml)):
        if has_peer(peers, module):
            tools[name] = functools.partial(call, peers=peers)
        else:
            left_out[name] = f"{name} is not installed in {os.path.relpath(peers.parents[1], ROOT)}"
    return tools, left_out


def try_tool(call: Any, program: str, folder: Path, steps: int) -> tuple[float, Run, Answer | None]:
    """Run a program under a tool until a run is undisturbed, and return the least disturbed one: its stolen share of
    the CPU time, the run and the answer. The choice does not look at the answer."""
    trials: list[tuple[float, Run, Answer | None]] = []
    while len(trials) < MOST_TRIALS and (not trials or trials[-1][0] > MOST_STOLEN):
        run = Run(program, folder / str(len(trials)), steps)
        run.folder.mkdir(parents=True)
        stolen_s, begin_s = read_stolen_s(), time.monotonic()
        answer = call(run)
        stolen = (read_stolen_s() - stolen_s) / (os.cpu_count() or 1) / (time.monotonic() - begin_s)
        trials.append((stolen, run, answer))
    return min(trials, key=lambda trial: trial[0])


def run_program(
    facts: dict[str, Any], tools: dict[str, Any], steps: int, rounds: int, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run one program under every tool, and return the raw results, with `earlier` results of other tools. Their times
    are dropped if the plain program runs again: they would be compared with a run of another time."""
    document = {**facts, "runs": {}, "answers": {}, "errors": {}, "steps": steps}
    for part in ("answers", "errors") if "plain" in tools else ("runs", "answers", "errors"):
        document[part] |= {name: found for name, found in (earlier or {}).get(part, {}).items() if name not in tools}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            profiled = None
            for name, call in tools.items():
                if name == "cured" and facts["causes"] == ("healthy",):
                    continue
                try:
                    if name == "HTA":  # reads the traces of torch.profiler
                        answer = None if profiled is None else call(profiled)
                    else:
                        stolen, run, answer = try_tool(call, facts["name"], Path(place) / name, steps)
                        document["runs"].setdefault(name, []).append({"stolen": round(stolen, 4), **run.read_times()})
                        profiled = run if name == "torch.profiler" else profiled
                    if answer is not None:
                        document["answers"].setdefault(name, answer.to_json())
                except (RunError, OSError, ValueError, KeyError, StopIteration) as error:
                    document["errors"][name] = f"{type(error).__name__}: {error}"
    return document


def describe_machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    where = {"cores": os.cpu_count(), "machine": platform.machine(), "gpu": gpu}
    return where | {"torch": torch.__version__, "python": platform.python_version()}


@contextlib.contextmanager
def keep_core_busy(busy: bool) -> Iterator[None]:
    if not busy:
        yield
        return
    spinning = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def summarise(document: dict[str, Any]) -> str:
    """Summarise the outcome for the terminal."""
    parts = []
    if (plain := document["runs"].get("plain")) and plain[0]["steps_s"]:
        parts.append(f"{1e3 * find_mean(plain[0]) * plain[0]['samples']:.1f} ms per step")
    if (gain := find_gain(document)) is not None:
        parts.append(f"the cure saves {gain:.1%}")
    if (score := score_answer(document, PACELINE)) is not None:
        answer = document["answers"][PACELINE]
        parts.append(f"{'right' if score.is_cause else 'WRONG'}: {', '.join(answer['causes'])}, rank {answer['rank']}")
    return "; ".join([*parts, *(f"{name} failed ({why})" for name, why in document["errors"].items())])


def load_earlier(path: Path, steps: int) -> dict[str, Any]:
    """The results of an earlier run of a program with as many steps; empty if there are none."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("steps") == steps else {}


def is_done(earlier: dict[str, Any], tools: dict[str, Any], rounds: int) -> bool:
    """Whether an earlier run left enough results of these tools; failed programs are run again."""
    if not earlier or earlier["errors"]:
        return False
    counts = [len(earlier["runs"].get(name, ())) for name in tools if name in ("plain", PACELINE)]
    return min(counts, default=rounds) >= rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, to try it")
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--rounds", type=int, default=1, help="of all runs of a program; medians count")
    parser.add_argument("--tools", default="", help="measure only these again, separated by commas")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the interpreter that has TraceML and HTA")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "scoreboard")
    asked = parser.parse_args()
    known = list_programs()
    names = [name for name in asked.only.split(",") if name] or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(known)}")
    steps = QUICK_STEPS if asked.quick else STEPS
    tools, left_out = list_tools(asked.peers, asked.busy)
    chosen = [name for name in asked.tools.split(",") if name] or list(tools)
    if unknown := sorted(set(chosen) - set(tools)):
        parser.error(f"no such tool: {', '.join(unknown)}; there are {', '.join(tools)}")
    tools = {name: call for name, call in tools.items() if name in chosen}
    for why in left_out.values():
        print(f"skipped: {why}", file=sys.stderr)
    machine, begin_s = describe_machine(), time.monotonic()
    folder = asked.out / ("busy" if asked.busy else "quiet")
    folder.mkdir(parents=True, exist_ok=True)
    with keep_core_busy(asked.busy):
        for number, name in enumerate(names, 1):
            path, facts = folder / f"{name}.json", describe(name)
            earlier = load_earlier(path, steps)
            if not asked.tools and is_done(earlier, tools, asked.rounds):
                print(f"[{number}/{len(names)}] {name}: kept from an earlier run", file=sys.stderr)
                continue
            if facts["needs_cuda"] and not machine["gpu"]:
                print(f"[{number}/{len(names)}] {name}: skipped: it needs a GPU", file=sys.stderr)
                continue
            document = run_program(facts, tools, steps, asked.rounds, earlier) | {"environment": machine}
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(document) + "\n")
            partial.replace(path)
            spent = f"{(time.monotonic() - begin_s) / 60:.1f} min"
            print(f"[{number}/{len(names)}, {spent}] {name}: {summarise(document)}", file=sys.stderr, flush=True)
    print(f"raw results: {folder}; table: python benchmarks/scoreboard/render.py {asked.out}")


if __name__ == "__main__":
    main()
