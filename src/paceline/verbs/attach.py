"""`paceline.attach`: start a user's own program, observe some of its steps without an edit of it, and answer.

What is observed is in `measure.attach`, which runs inside of the program's ranks and writes files; they are read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import LaunchError, RecordError, refuse
from paceline.measure.settings import check_counts
from paceline.predict.traces import RankTrace
from paceline.records import Record, Samples, StepRecord, TracedStepRecord
from paceline.records.steps import RACED
from paceline.records.store import write_new
from paceline.runtime.environment import is_launched
from paceline.runtime.session import Session, open_session
from paceline.training.settings import takes_cap_lists
from paceline.units import MIB, format_bytes, format_ms, format_number_of
from paceline.verbs.jobs import Place, Sizes, finish, list_sizes

if TYPE_CHECKING:
    from paceline.report.attached import AttachedResult

# Steps of a program that are not timed: torch's wrapper makes its buckets in the second.
_WARMUP, _RACE_WARMUP = 4, 3
# A race inside of one run: its steps, and those of a turn, of which the first are not timed. And one of short runs: the
# least rounds that give an interval for two plans, and the timed steps of a turn.
_RACE_STEPS, _SWITCH_STEPS, _TURN_STEPS = 145, 2, 3
_RUNS, _RUN_STEPS = 7, 7
# The least steps with which there is something to record, and how many are recorded after how many others.
_LEAST_STEPS, _RECORDED, _BEFORE = 8, 8, 10
# How long a program may take to end once all of its ranks were asked to, and ranks once the first has.
_END_S, _LAST_S, _POLL_S = 60.0, 5.0, 0.3
# Of a program that is watched for long, the last ones.
_MOST_STEPS = 5000


def attach(
    command: Sequence[str] = (), *, folder: Place = None, steps: int = 48, stop: bool = False, every: int = 0,
    race: bool = False, caps: Sizes = (), budget: float | None = None, out: Place = None,
    progress: bool | None = None,
) -> AttachedResult:  # fmt: skip
    """Where does the time of your own program go, and which buckets would be better? Without an edit of it.

    `command` starts it: `["torchrun", "--nproc-per-node", "2", "train.py"]`. The first `steps` are observed (0: all);
    then the program goes on, or with `stop` ends on all ranks after the same step. `every` so many steps a line says
    how long they take. With `race` it is run again and again for a few steps, in turns with its own buckets and with
    the best ones or those of `caps`, for at most `budget` seconds. With `out` the run is saved in a folder there.
    `folder`, instead of a command: what a program wrote that ran with PACELINE_ATTACH set to it.
    """
    check_counts(steps=steps or None, every=every or None)
    words = list(command)
    refuse(
        (not words and folder is None,
         "no command is given: write it behind --, as in `paceline profile -- python train.py`"),
        (words and folder is not None, f"--folder {folder} and a command: give one of them"),
        (words and shutil.which(words[0]) is None, f"{words[0] if words else ''}: no such command on this machine"),
        (0 < steps < _LEAST_STEPS, f"--steps {steps}: at least {_LEAST_STEPS} are needed, of which some are warm-up"),
        (stop and not steps, "--stop with --steps 0: say after how many steps the program is to stop"),
    )  # fmt: skip
    refuse((is_launched(), "this process is one rank of a launched world: start the launcher itself, behind --"),
           code="launched")  # fmt: skip
    verb = "tune attach" if race else "watch" if every else "profile attach"
    config: dict[str, Any] = {"command": words, "steps": steps, "stop": stop or race, "every": every, "plans": {}}
    with open_session(verb, config, out=out, progress=progress) as session, _make_folder(session.folder) as place:
        program = _Program(words, session)
        warmup, record = _share_out(steps)
        variables = {"STEPS": steps, "WARMUP": warmup, "RECORD": record, "EVERY": every, "STOP": int(stop or race)}
        ranks = program.run(place / "observed", variables) if folder is None else _load_folder(Path(folder))
        traces, traced, why = _read_traces(ranks)
        session.warnings += why
        records = [_build_record(ranks, traced, ""), *traced]
        if session.folder is not None and traces:
            from paceline.predict.traces import merge_traces, render_trace

            write_new(session.folder / "trace.json.gz", render_trace(merge_traces(traces)))
        if race:
            records += _race(program, place, session, records, list_sizes(caps), budget)
        return cast("AttachedResult", finish(session, records))


def _load_folder(path: Path) -> list[_Rank]:
    ranks = _Folder(path).read() if path.is_dir() else []
    found = [rank for rank in ranks if len(rank.steps) > _RACE_WARMUP]
    refuse((not found, f"--folder {path}: no rank wrote steps there: run the program with PACELINE_ATTACH={path}"))
    return found


def _share_out(steps: int) -> tuple[int, int]:
    """How many steps pass before recording begins, and how many are recorded."""
    if not steps:
        return _BEFORE, _RECORDED
    return min(_BEFORE, steps // 2), min(_RECORDED, max(2, steps // 4))


@contextlib.contextmanager
def _make_folder(place: Path | None) -> Iterator[Path]:
    """For the files of the ranks: where the run is saved, which other hosts may see, too."""
    with tempfile.TemporaryDirectory(dir=place, prefix=".paceline-attach-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@dataclass
class _Rank:
    """What one rank wrote: its head and its tail in `about`, and of each step its number, seconds, and those in data
    loaders and in optimizers."""

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        found = json.loads(line)
        self.steps += [(int(number), *times) for number, *times in found.pop("steps", ())]
        del self.steps[:-_MOST_STEPS]
        self.about |= found

    @property
    def number(self) -> int:
        return int(self.about["rank"])

    @property
    def is_over(self) -> bool:
        return "num_steps" in self.about or "error" in self.about


class _Folder:
    """The files of a program that is being observed, read as they grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[Path, tuple[int, _Rank]] = {}

    def read(self) -> list[_Rank]:
        """What the ranks have written until now, by rank; of two processes that say to be one, that with more steps."""
        for path in self.path.glob("rank-*.jsonl"):
            place, rank = self._known.get(path, (0, _Rank(self.path)))
            with path.open("rb") as file:
                file.seek(place)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]  # the last line may be half written
            for line in whole.splitlines():
                rank.add(line)
            self._known[path] = place + len(whole), rank
        found = [rank for _, rank in self._known.values() if "rank" in rank.about]
        chosen = {rank.number: rank for rank in sorted(found, key=lambda rank: len(rank.steps))}
        return [chosen[number] for number in sorted(chosen)]

    def is_over(self) -> bool:
        """Whether all ranks have written all of it."""
        ranks = self.read()
        return bool(ranks) and all(r.is_over for r in ranks) and len(ranks) >= int(ranks[0].about["world_size"])


class _Program:
    """The user's command. Its output goes to stderr: stdout is for the answer."""

    def __init__(self, command: Sequence[str], session: Session) -> None:
        self._command, self._session = command, session

    def run(
        self, folder: Path, variables: Mapping[str, int], caps: Sequence[float] = (),
        race: Mapping[str, Any] | None = None,
    ) -> list[_Rank]:  # fmt: skip
        """Run it, attached; what its ranks wrote. LaunchError where it failed before there was anything."""
        folder.mkdir(parents=True)
        given = {f"PACELINE_ATTACH_{name}": str(value) for name, value in variables.items()}
        given |= {"PACELINE_ATTACH": str(folder.resolve()), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
        given |= {"PACELINE_BUCKET_CAP_MB": ",".join(map(repr, caps))} if caps else {}
        given |= {"PACELINE_ATTACH_RACE": json.dumps(race)} if race else {}
        quiet = {"KINETO_LOG_LEVEL": "6"} | dict(os.environ)  # torch 2.13 writes lines when a profile starts and stops
        process = subprocess.Popen(self._command, env=quiet | given, stdout=2)
        is_interrupted, files = False, _Folder(folder)
        lines = _Lines(files, variables["EVERY"] if self._session.progress is not False else 0)
        try:
            is_interrupted = self._wait(process, files, bool(variables["STOP"]), lines.show)
        finally:
            code = process.poll()
            _end(process)
        until_s = time.monotonic() + _LAST_S
        while files.read() and not files.is_over() and time.monotonic() < until_s:
            time.sleep(_POLL_S)  # a rank that is not a child of the command may end after it
        ranks = files.read()
        least, stops = min((len(rank.steps) for rank in ranks), default=0), bool(variables["STOP"])
        if is_interrupted and (stops or least <= _RACE_WARMUP):
            raise KeyboardInterrupt
        if least <= _RACE_WARMUP:
            raise LaunchError(self._explain(code, folder, least), code="not-attached")
        if is_interrupted:
            self._session.warnings.append("interrupted: fewer steps were observed than asked for")
        elif code and not (stops and files.is_over()):  # how ranks end that were stopped says nothing
            self._session.config["failure"] = f"{shlex.join(self._command)} ended with exit code {code}"
        return ranks

    def _wait(self, process: subprocess.Popen[bytes], files: _Folder, stops: bool, show: Callable[[], None]) -> bool:
        """Until it ends; whether it was interrupted. Ctrl-C reaches the program, too, which may save first."""
        asked_s = 0.0
        while process.poll() is None:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                show()
                if stops and not asked_s and files.is_over():
                    asked_s = time.monotonic()
                if asked_s and time.monotonic() - asked_s > _END_S:
                    self._session.warnings.append(f"its ranks stopped, and it did not end within {_END_S:.0f} s")
                    return False
            except KeyboardInterrupt:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                return True
        show()
        return False

    def _explain(self, code: int | None, folder: Path, steps: int) -> str:
        name = shlex.join(self._command)
        ended = f"{name} ended with exit code {code}" if code else f"{name} ended"
        if not (folder / "seen").exists():
            return (
                f"{ended} and was not attached to: it did not import torch, or its Python does not have this Paceline "
                "(pip install it there)"
            )
        if not steps:
            return f"{ended} before an optimizer of torch took a second step: is it a program that trains?"
        return f"{ended} after {steps + 1} steps: that is too few to observe; let it train longer"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program where it still runs: launchers end their ranks."""
    for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)


class _Lines:
    """A line on stderr for each part of a run that is watched."""

    def __init__(self, files: _Folder, every: int) -> None:
        self._files, self._every, self._shown = files, every, 0

    def show(self) -> None:
        ranks = self._files.read() if self._every else []
        count = min((max((step[0] for step in rank.steps), default=0) for rank in ranks), default=0)
        while ranks and self._shown + self._every <= count:
            first, self._shown = self._shown, self._shown + self._every
            parts = [[step for step in rank.steps if first < step[0] <= self._shown] for rank in ranks]
            if all(parts):
                print(f"paceline: step {self._shown}: {_describe_part(parts)}", file=sys.stderr, flush=True)


def _describe_part(parts: Sequence[Sequence[tuple[int, float, float, float]]]) -> str:
    medians = [[statistics.median(step[place] for step in steps) for place in (1, 2, 3)] for steps in parts]
    step_s, data_s, optimizer_s = (max(times) for times in zip(*medians, strict=True))
    text = f"{format_ms(step_s)} ms a step, {data_s / step_s:.0%} data, {optimizer_s / step_s:.0%} optimizer"
    rank = max(range(len(medians)), key=lambda number: medians[number][1])
    return text + (f", data on rank {rank}" if len(medians) > 1 and data_s > 0.1 * step_s else "")


def _read_traces(ranks: Sequence[_Rank]) -> tuple[list[RankTrace], list[TracedStepRecord], list[str]]:
    """The traces, the steps in them, and why there are none."""
    from paceline.predict.traced import mark_steps, read_steps
    from paceline.predict.traces import read_chrome

    traces, steps, why = [], list[TracedStepRecord](), dict[str, None]()
    for rank in ranks:
        if "trace" not in rank.about:
            if found := rank.about.get("not_recorded") or rank.about.get("error"):
                why[f"no step was recorded: {found}"] = None
            continue
        try:
            document = json.loads((rank.folder / rank.about["trace"]).read_text(errors="replace"))
            trace = mark_steps(read_chrome(document, rank.number, int(rank.about["world_size"])))
            traces.append(trace)
            if trace.world_size > 1:
                steps += read_steps(trace)
        except (OSError, ValueError, KeyError, RecordError) as error:
            why[f"the recorded steps say nothing of messages: {error}"] = None
    return traces, steps, list(why)


def _build_record(
    ranks: Sequence[_Rank], traced: Sequence[TracedStepRecord], label: str, only: Sequence[int] = (), **more: Any
) -> StepRecord:
    """The steps that all ranks have and none recorded, or `only` these, as one record."""
    about = ranks[0].about
    first, last = about.get("recorded", (0, -1))
    common = set.intersection(*(({step[0] for step in rank.steps}) for rank in ranks))
    settled = _RACE_WARMUP if label else _WARMUP
    used = sorted(number for number in common if number > settled and not first <= number <= last)
    used = list(only) or used or sorted(common)
    by_rank = [{step[0]: step for step in rank.steps} for rank in ranks]

    def build(place: int, numbers: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(steps[number][place]) for steps in by_rank) for number in numbers)

    wrapper: dict[str, Any] = next(iter(about.get("wrappers") or ()), {})
    buckets = _read_sizes(wrapper.get("rebuilt_bucket_sizes") or wrapper.get("bucket_sizes"))
    backend = next((step.backend for step in traced if step.backend), "") or wrapper.get("backend_name")
    name = "none" if not wrapper else "paceline" if wrapper["is_ours"] else "torch"
    return StepRecord(
        model=str(wrapper.get("module_name") or "the program"), wrapper=name,
        backend=str(backend or about["backend"]), device=about["device"], world_size=int(about["world_size"]),
        batch_size=1, timing=Samples(build(1, used), build(1, [n for n in sorted(common) if n <= settled])),
        data_wait=Samples(build(2, used)), optimizer=Samples(build(3, used)), threads=int(about["threads"]),
        cap_bytes=max(0, int(wrapper.get("bucket_cap_bytes", 0))), label=label, **{"bucket_bytes": buckets, **more},
    )  # fmt: skip


def _read_sizes(text: str | None) -> tuple[int, ...]:
    """Of torch's wrapper: bytes with commas between."""
    return tuple(int(size) for size in (text or "").split(",") if size.strip().isdigit())


def _race(
    program: _Program, folder: Path, session: Session, records: Sequence[Record], caps: Sequence[int],
    budget: float | None,
) -> list[StepRecord]:  # fmt: skip
    """The program as it is, and with other buckets, in turns."""
    from paceline.records.store import Run
    from paceline.report.attached import NOW, AttachedResult

    seen = AttachedResult(Run(session.verb, session.config, session.environment, tuple(records)))
    if seen.buckets is None:
        session.warnings.append("there is no race: nothing that it sends was recorded")
        return []
    plans: dict[str, dict[str, Any]] = {NOW: {}}
    for cap in caps:
        plans[format_bytes(cap)] = {"bucket_cap_mb": cap / MIB}
    best = seen.buckets.candidate
    if not caps and best.estimate.cuts != seen.buckets.now.estimate.cuts:
        plans[f"bucket_cap_mb={best.cap_mib:g}"] = {"bucket_cap_mb": best.cap_mib}
        if seen.cap_list and takes_cap_lists():
            plans["bucket_cap_mb_list"] = seen.cap_list
    if len(plans) < 2:
        session.warnings.append("there is no race: the buckets that it has are those that are predicted best")
        return []
    session.config["plans"] = plans
    found = _race_inside(program, folder, session, plans, seen.step_s, budget)
    return found or _race_runs(program, folder, session, plans, budget)


def _list_caps(plan: Mapping[str, Any]) -> list[float]:
    return [cap for value in plan.values() for cap in (value if isinstance(value, list) else [value])]


def _order(count: int, rounds: int) -> list[int]:
    """Turns of plans, by number: each is first in as many rounds as last."""
    return [turn for number in range(rounds) for turn in range(count)[:: 1 if number % 2 == 0 else -1]]


def _race_inside(
    program: _Program, folder: Path, session: Session, plans: Mapping[str, Mapping[str, Any]], step_s: float,
    budget: float | None,
) -> list[StepRecord]:  # fmt: skip
    """One run, in which torch's wrapper gets other buckets between steps; nothing where that cannot be done."""
    length = _SWITCH_STEPS + _TURN_STEPS
    rounds = _RACE_STEPS // (length * len(plans))
    if budget is not None:
        rounds = max(2, min(rounds, int(budget / (step_s * length * len(plans)))))
    turns = _order(len(plans), rounds)
    race = {"plans": [*map(_list_caps, plans.values())], "turns": turns, "first": _RACE_WARMUP, "length": length}
    variables = {"STEPS": _RACE_WARMUP + length * len(turns), "WARMUP": 0, "RECORD": 0, "EVERY": 0, "STOP": 1}
    try:
        ranks = program.run(folder / "race", variables, race=race)
    except LaunchError:
        ranks = []
    why = next((rank.about["error"] for rank in ranks if "error" in rank.about), "the program ended early")
    if not ranks or not all(rank.about.get("num_steps") == variables["STEPS"] for rank in ranks):
        session.config.pop("failure", None)
        session.warnings.append(f"each turn was a run: the wrapper could not change its buckets in one ({why})")
        return []
    records = []
    for number, label in enumerate(plans):
        begins = [_RACE_WARMUP + length * place for place, turn in enumerate(turns) if turn == number]
        used = [begin + step for begin in begins for step in range(_SWITCH_STEPS + 1, length + 1)]
        sizes = _read_sizes(ranks[0].about.get("layouts", {}).get(str(number)))
        more = {"note": RACED, "steps_per_turn": _TURN_STEPS, "bucket_bytes": sizes}
        records.append(_build_record(ranks, (), label, used, **more))
    return records


def _race_runs(
    program: _Program, folder: Path, session: Session, plans: Mapping[str, Mapping[str, Any]], budget: float | None
) -> list[StepRecord]:
    """Short runs in turns, each with the buckets that its wrapper is made with."""
    variables = {"STEPS": _RACE_WARMUP + _RUN_STEPS, "WARMUP": 0, "RECORD": 0, "EVERY": 0, "STOP": 1}
    runs: dict[str, list[StepRecord]] = {label: [] for label in plans}
    rounds, begin_s = _RUNS + len(plans) - 2, time.monotonic()
    for number in range(rounds):
        elapsed_s = time.monotonic() - begin_s
        if budget is not None and number and elapsed_s * (number + 1) / number > budget:
            session.warnings.append(f"the race ended after {format_number_of(number, 'round')}: raise --budget")
            break
        for turn in _order(len(plans), 2)[(number % 2) * len(plans) :][: len(plans)]:
            label = list(plans)[turn]
            ranks = program.run(folder / f"round-{number}-{turn}", variables, _list_caps(plans[label]))
            runs[label].append(_build_record(ranks, (), label, note=RACED))
        if session.progress:
            print(f"paceline: tune: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [_join(records) for records in runs.values()]


def _join(turns: Sequence[StepRecord]) -> StepRecord:
    """The turns of one plan as one record; each has as many steps as the shortest."""
    count = min(turn.timing.count for turn in turns)

    def join(name: str) -> Samples:
        return Samples(tuple(row for turn in turns for row in turn.phase(name).seconds[:count]))

    return replace(
        turns[-1], timing=join("timing"), data_wait=join("data_wait"), optimizer=join("optimizer"), steps_per_turn=count
    )
