"""`paceline.attach`: starts a user's unmodified program and observes some of its steps.

`measure.attach` runs inside the program's ranks and writes files, which are read here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paceline.errors import ConfigError, LaunchError, refuse
from paceline.options import check_counts
from paceline.records import RankRecord, Record, Samples, StepRecord, TracedStepRecord
from paceline.records.samples import group_by
from paceline.records.steps import RACED
from paceline.records.store import Run, pause_collection, write_new
from paceline.records.training import METRICS_FILE, MetricsLog, load_metrics
from paceline.report.observed import build_row
from paceline.report.page import save_page
from paceline.report.result import Result, build_result
from paceline.runtime.ranks.place import read_place
from paceline.runtime.ranks.session import Session, open_session
from paceline.units import MIB, format_bytes, format_ms, format_number_of
from paceline.verbs.jobs import Place, Sizes, finish, list_sizes
from paceline.verbs.watch import Follower, serve, show_address

if TYPE_CHECKING:
    from paceline.predict.traces import RankTrace
    from paceline.report.observed import AttachedResult

_WARMUP = 4  # untimed steps at the start of a program: torch's wrapper builds its buckets in the second
_LEAST_STEPS = 8  # minimum number of steps to observe
_STEPS, _LEAST_S = 48, 10.0  # minimum number of steps to observe by default, and minimum time
_COMPARISON_STEPS = 145  # total steps of a plan comparison
_SWITCH_STEPS = 2  # untimed steps at the start of each turn
_TURN_STEPS = 3  # timed steps of each turn
_LEAST_ROUNDS = 2  # rounds that a comparison needs if the program ends before it
_RECORDED = 8  # traced steps
_BEFORE = 10  # steps before tracing starts
_ALIKE = 1.25  # two recordings show the same state if step times differ by less
_END_S = 60.0  # how long a program may take to exit after its ranks were told to stop
_LAST_S = 5.0  # how long ranks may take to exit after the first one
_POLL_S = 0.3
_SHARES = ("cpu", "queued", "throttled")  # fractions of wall time that ranks report
_MOST_STEPS = 5000  # number of recent steps to keep for a watched program


def attach(
    command: Sequence[str], *, steps: int | None = None, stop: bool = False, every: int | None = None,
    race: bool = False, caps: Sizes = (), budget: float | None = None, port: int | None = None,
    browser: bool | None = None, out: Place = None, progress: bool | None = None,
) -> AttachedResult:  # fmt: skip
    """Where does your own program spend its time, and which buckets would be faster? Needs no changes to the program.

    Args:
        command: The command that starts the program: `["torchrun", "--nproc-per-node", "2", "train.py"]`.
        steps: Number of steps to observe, from the start (0: all). Default: 48, and more within the first 10 s.
        stop: Stop the program on all ranks after these steps. Otherwise it continues.
        every: Watch the program: print the time of a step every N steps, and serve a live page.
        port: Port of the live page. Default: a free one.
        browser: Open the page. Default: if there is a display.
        race: Stop this run, and compare its buckets with the best ones in a second run that alternates between them.
        caps: Bucket sizes to compare instead of the best ones.
        budget: Time limit for the comparison, in seconds.
        out: Save the run in a new subfolder of this folder.
    """
    least_s = _LEAST_S if steps is None and not (stop or race) else 0.0
    steps = _STEPS if steps is None else steps
    check_counts(steps=steps or None, every=every)
    words = list(command)
    refuse(
        (not words, "no command: write it after --, as in `paceline profile -- python train.py`"),
        (words and shutil.which(words[0]) is None, f"{words[0] if words else ''}: no such command on this machine"),
        (bool(missing := _find_missing(words)), missing),
        (0 < steps < _LEAST_STEPS, f"--steps {steps}: must be at least {_LEAST_STEPS}, including warm-up"),
        (stop and not steps, "--stop with --steps 0: pass the number of steps after which to stop the program"),
    )
    if read_place().world_size > 1:
        advice = "put the launcher itself after -- (in a Slurm batch script, unset SLURM_PROCID first)"
        raise ConfigError(f"this process is one rank of a launched world: {advice}", code="launched")
    verb = "tune attach" if race else "watch" if every else "profile attach"
    asked = {"steps": steps, "least_s": least_s, "stop": stop or race, "every": every or 0}
    recorded = {"warmup": min(_BEFORE, steps // 2 or _BEFORE), "record": min(_RECORDED, steps // 4 or _RECORDED)}
    with (
        open_session(verb, {"command": words, **asked}, out=out, progress=progress) as session,
        # Use the run's folder, which other hosts may share.
        tempfile.TemporaryDirectory(dir=session.folder, prefix=".attach-", ignore_cleanup_errors=True) as folder,
    ):
        if session.progress and steps and not (asked["stop"] or every):
            text = f"observing the first {steps} steps; the program then runs to its end (--stop ends it sooner)"
            print(f"paceline: {verb}: {text}", file=sys.stderr, flush=True)
        seen = Path(folder) / "observed"
        with _watch(session, seen, port, browser) if every else contextlib.nullcontext() as viewer:
            ranks = _run(session, seen, asked | recorded, viewer)
        found = _read_traces(ranks)
        traces, traced = found.traces, found.steps
        session.warnings += found.why
        records: list[Record] = [_build_record(ranks, traced), *_build_ranks(ranks), *traced]
        if session.folder is not None and traces:
            from paceline.predict.traces import merge_traces, render_trace

            write_new(session.folder / "trace.json.gz", render_trace(merge_traces(traces)))
        if race:
            try:
                records += _compare_plans(session, Path(folder) / "race", records, list_sizes(caps), budget)
            except KeyboardInterrupt:
                session.warnings.append("interrupted: plans were not compared")
        result = cast("AttachedResult", finish(session, records))
        if every and result.folder is not None:
            result.page = save_page([result], result.folder)
        return result


def _find_missing(words: Sequence[str]) -> str:
    """Why a command of Python or torchrun cannot run: its script does not exist. Otherwise nothing."""
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    is_module = "-m" in words and "torch.distributed.run" not in words
    if not script or is_module or not re.match(r"(python|torchrun)", Path(words[0]).name) or Path(script).exists():
        return ""
    near = sorted(map(str, itertools.islice(Path().glob(f"*/{Path(script).name}"), 3)))
    return f"{script}: no such file here{f'; did you mean {near[0]}?' if near else ''}"


@dataclass
class _Rank:
    """The output of one rank: its steps as (number, seconds, seconds in data loaders, host seconds, seconds in
    evaluation, in checkpoints and in garbage collection, elements of its batches), all other facts in `about`, and
    `place`, the number of bytes read from the rank's file."""

    about: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[float, ...]] = field(default_factory=list)
    place: int = 0


class _Files:
    """Reads the files of an observed program as they grow, and prints a line to stderr every `every` steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._shown = 0
        self._known: dict[Path, _Rank] = {}

    def read(self) -> list[_Rank]:
        """The output of all ranks so far, in rank order. If two processes claim the same rank, the one with more steps
        counts."""
        for path in self._folder.glob("rank-*.jsonl"):
            rank = self._known.setdefault(path, _Rank())
            with path.open("rb") as file:
                file.seek(rank.place)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]  # the last line may be incomplete
            for line in map(json.loads, whole.splitlines()):
                rank.steps += [tuple(step) for step in line.pop("steps")]
                rank.about |= line | {"folder": self._folder}
            del rank.steps[:-_MOST_STEPS]
            rank.place += len(whole)
        found = sorted((rank for rank in self._known.values() if rank.about), key=lambda rank: len(rank.steps))
        chosen = {rank.about["rank"]: rank for rank in found}
        return [chosen[number] for number in sorted(chosen)]

    def is_over(self) -> bool:
        """Whether all ranks are done writing."""
        ranks = self.read()
        is_over = [bool(rank.about.keys() & {"num_steps", "error"}) for rank in ranks]
        return all(is_over) and len(ranks) >= (ranks[0].about["world_size"] if ranks else 1)

    def show(self) -> None:
        ranks = self.read() if self._every else []
        while ranks and self._shown + self._every <= min((r.steps[-1][0] if r.steps else 0) for r in ranks):
            first = self._shown
            self._shown += self._every
            parts = [[step for step in rank.steps if first < step[0] <= self._shown] for rank in ranks]
            if not all(parts):
                continue
            step_s, data_s = (max(statistics.median(s[k] for s in steps) for steps in parts) for k in (1, 2))
            text = f"{format_ms(step_s)} ms per step, {data_s / step_s:.0%} of it waiting for data"
            print(f"paceline: step {self._shown}: {text}", file=sys.stderr, flush=True)


def _run(session: Session, folder: Path, asked: dict[str, Any], viewer: _Viewer | None = None) -> list[_Rank]:
    """Run the command with the observer attached, and return the output of its ranks. LaunchError if there is none."""
    folder.mkdir(exist_ok=True)
    command = session.config["command"]
    stop = asked["stop"]
    variables = {"KINETO_LOG_LEVEL": "6"} | dict(os.environ)  # silences torch 2.13, which logs each profile
    variables |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    variables |= {"PACELINE_ATTACH": json.dumps({"folder": str(folder.resolve()), **asked})}
    process = subprocess.Popen(command, env=variables, stdout=2)  # to stderr, because stdout is for our answer
    files = _Files(folder, asked.get("every", 0) if session.progress is not False else 0)
    is_interrupted = False
    try:
        is_interrupted = _wait(session, process, files, stop, viewer)
    finally:
        code = process.poll()
        _end(process)
    until_s = time.monotonic() + _LAST_S
    while files.read() and not files.is_over() and time.monotonic() < until_s:
        time.sleep(_POLL_S)  # a rank that is not a child of the command may outlive it
    ranks = files.read()
    if viewer is not None:
        viewer.close(files, "interrupted" if is_interrupted else f"exit code {code}" if code else "")
    least = min((len(rank.steps) for rank in ranks), default=0)
    if is_interrupted and (session.verb == "tune attach" or least < _WARMUP):
        raise KeyboardInterrupt
    if least < _WARMUP:
        raise LaunchError(_describe_failure(shlex.join(command), code, folder, least), code="not-attached")
    if is_interrupted:
        session.warnings.append("interrupted: fewer steps were observed than requested")
    elif code and not (stop and files.is_over()):  # the exit code of stopped ranks is meaningless
        session.config["failure"] = f"{shlex.join(command)} ended with exit code {code}"
    return ranks


def _wait(
    session: Session, process: subprocess.Popen[bytes], files: _Files, stop: bool, viewer: _Viewer | None
) -> bool:
    """Wait until the program exits; return whether it was interrupted. Ctrl-C also reaches the program, which may save
    first; SIGTERM reaches only us, so we pass it on."""
    asked_s = 0.0
    while process.poll() is None:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            files.show()
            if viewer is not None:
                viewer.follow(files)
            if stop and not asked_s and files.is_over():
                asked_s = time.monotonic()
            if asked_s and time.monotonic() - asked_s > _END_S:
                session.warnings.append(f"the program did not exit within {_END_S:.0f} s after its ranks stopped")
                return False
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            return True
    files.show()
    return False


class _Waiting(Result):
    answer = "The program has not taken a step yet."


class _Viewer(Follower):
    """Follows a running program for its live page: writes its steps as rows of metrics, except those that tracing makes
    slower."""

    def __init__(self, session: Session, folder: Path) -> None:
        folder.mkdir()
        self._session = session
        self._ranks: list[_Rank] = []
        self._end = ("running", "Running")
        self._traced: list[TracedStepRecord] = []
        self._window = _Window()
        self._log = MetricsLog(folder / METRICS_FILE)
        self._step = 0
        super().__init__(folder)

    def find_end(self, step: int) -> tuple[str, str]:
        return self._end

    def load(self) -> Result:
        with self.lock:
            records: list[Record] = []
            if self._step:
                window = _choose_window(self._ranks)
                if window != self._window and all("windows" in rank.about for rank in self._ranks):
                    self._traced = _read_traces(self._ranks).steps
                    self._window = window
                traced = self._traced
                records = [_build_record(self._ranks, traced), *_build_ranks(self._ranks), *traced]
            run = Run(self._session.verb, self._session.config, self._session.environment, tuple(records))
        if not records:
            return _Waiting(run, self._session.folder)
        result = cast("AttachedResult", build_result(run, self._session.folder))
        result.step_rows = load_metrics(self.folder / METRICS_FILE)
        return result

    def follow(self, files: _Files) -> None:
        """Write a row for each step that all ranks have taken."""
        with self.lock:
            self._ranks = files.read()
            if self._ranks and len(self._ranks) == self._ranks[0].about["world_size"]:
                by_rank = [{int(number): times for number, *times in rank.steps} for rank in self._ranks]
                new = sorted(number for number in set.intersection(*map(set, by_rank)) if number > self._step)
                shown = sorted(set(new) - _list_traced(self._ranks))
                found = [(number, zip(*(steps[number][:2] for steps in by_rank), strict=True)) for number in shown]
                self._log.append(*(build_row(number, *times) for number, times in found))
                self._step = max((self._step, *new))
        self.update()

    def close(self, files: _Files, why: str) -> None:
        self._end = ("stopped", f"Ended early: {why}") if why else ("finished", "Finished")
        if why.startswith("exit code -"):
            self._end = "killed", f"Killed by signal {why.removeprefix('exit code -')}"
        self.follow(files)
        self._log.close()
        self._seen_s = -math.inf
        self.update()


@contextlib.contextmanager
def _watch(session: Session, folder: Path, port: int | None, browser: bool | None) -> Iterator[_Viewer]:
    """Serve the live page of a program until viewers have seen how it ended."""
    with serve(viewer := _Viewer(session, folder), port) as server:
        if session.progress is not False:
            show_address(server, browser)
        yield viewer
        is_seen, until_s = bool(server.num_viewers), time.monotonic() + _LAST_S
        while server.num_viewers and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        time.sleep(1.0 if is_seen else 0.0)  # pages reload once after the program has ended


def _describe_failure(name: str, code: int | None, folder: Path, steps: int) -> str:
    ended = f"{name} ended with exit code {code}" if code else f"{name} ended"
    if not (folder / "seen").exists():
        why = "it did not import torch, or its Python does not have this Paceline (pip install it there)"
        return f"{ended}, and Paceline could not attach to it: {why}"
    if not steps:
        return f"{ended} before a torch optimizer took a second step: is it a training program?"
    return f"{ended} after {steps + 1} steps, which is too few to observe: let it train longer"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the program if it is still running; launchers terminate their ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)


@dataclass
class _Reading:
    """The traces of one window of each rank, the steps in them, and the reasons why traces are missing."""

    traces: list[RankTrace] = field(default_factory=list)
    steps: list[TracedStepRecord] = field(default_factory=list)
    why: dict[str, None] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """The mean time that all ranks together spend on their own work in a step."""
        by_rank = group_by(self.steps, lambda step: step.rank).values()
        return sum(statistics.fmean(step.step_s - step.exposed_s for step in steps) for steps in by_rank)


def _read_traces(ranks: Sequence[_Rank]) -> _Reading:
    """Read the traces of the last recording or, of several recordings of the same state, of the one in which other
    processes delayed the ranks least."""
    missing = _Reading()
    for rank in ranks:
        if "windows" not in rank.about and (found := rank.about.get("not_recorded") or rank.about.get("error")):
            missing.why[f"no step was recorded: {found}"] = None
    windows = _list_alike(ranks)
    read = [_read_window(ranks, window) for window in windows]
    whole = [one for one in read if not one.why and one.steps]
    chosen = min(whole, key=lambda one: one.own_s) if whole else read[-1] if read else missing
    chosen.why |= missing.why
    return chosen


@pause_collection()
def _read_window(ranks: Sequence[_Rank], window: _Window) -> _Reading:
    from paceline.predict.trace_steps import read_steps
    from paceline.predict.traces import read_chrome

    reading = _Reading()
    for rank in ranks:
        about = rank.about
        if "windows" not in about:
            continue
        try:
            name = next(found.trace for found in _list_windows(rank) if found.first == window.first)
            document = json.loads((about["folder"] / name).read_text(errors="replace"))
            reading.traces.append(read_chrome(document, about["rank"], about["world_size"]))
            if about["world_size"] > 1:
                reading.steps += _drop_paused(read_steps(reading.traces[-1]), rank, window)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, StopIteration) as error:
            reading.why[f"messages could not be read from the recorded steps: {error}"] = None
    return reading


class _Window(NamedTuple):
    """A trace of the steps from `first` to `last`, which were recorded because the step time has changed since step
    `since`; 0 if it has not."""

    trace: str = ""
    first: int = 0
    last: int = -1
    since: int = 0


def _list_windows(rank: _Rank) -> list[_Window]:
    return [_Window(*found) for found in rank.about.get("windows", ())]


def _list_traced(ranks: Sequence[_Rank]) -> set[float]:
    """The steps that tracing made slower. The last one of each recording also writes its file."""
    found: set[float] = {n for rank in ranks for one in _list_windows(rank) for n in range(one.first, one.last + 1)}
    for rank in ranks:
        if first := rank.about.get("recording"):
            found.update(number for number, *_ in rank.steps if number > first)
    return found


def _list_common(ranks: Sequence[_Rank]) -> list[_Window]:
    """The windows that all ranks with traces recorded, in order."""
    by_rank = [found for found in map(_list_windows, ranks) if found]
    common = set.intersection(*({one.first for one in found} for found in by_rank)) if by_rank else set()
    return sorted((one for one in by_rank[0] if one.first in common), key=lambda one: one.first) if common else []


def _choose_window(ranks: Sequence[_Rank]) -> _Window:
    """The last steps that all ranks with traces recorded."""
    return (_list_common(ranks) or [_Window()])[-1]


def _list_alike(ranks: Sequence[_Rank]) -> list[_Window]:
    """The last window, and those before it whose steps take as long as the untraced ones, in order."""
    windows = _list_common(ranks)
    by_rank, _, numbers = _pick_steps(ranks) if windows else ([], [], [])

    def find_usual(chosen: Iterable[float]) -> float:
        times = [max(steps[number][0] for steps in by_rank) for number in chosen if all(number in s for s in by_rank)]
        return statistics.median(times) if times else 0.0

    usual_s = find_usual(numbers)
    return [
        one
        for one in windows
        if one is windows[-1]
        or (one.since == windows[-1].since and find_usual(range(one.first, one.last)) * _ALIKE > usual_s)
    ]


def _drop_paused(recorded: Sequence[TracedStepRecord], rank: _Rank, window: _Window) -> list[TracedStepRecord]:
    """The recorded steps without evaluation, checkpoint or garbage collection. If there are none, or if the trace lacks
    some steps, all recorded steps."""
    paused = {number for number, *times in rank.steps if _is_paused(times)}
    found = [step for step in recorded if window.first + step.number not in paused]
    return found if found and len(recorded) == window.last - window.first else list(recorded)


_Times = list[dict[float, list[float]]]  # for each rank, the times of its steps by step number


def _pick_steps(ranks: Sequence[_Rank]) -> tuple[_Times, list[float], list[float]]:
    """The steps of each rank, the numbers of the steps that all ranks took, and the numbers of those to use: untraced
    steps after warm-up and since the last change of the step time."""
    by_rank = [{number: times for number, *times in rank.steps} for rank in ranks]
    common = sorted(set.intersection(*map(set, by_rank)))
    plain = sorted(number for number in set(common) - _list_traced(ranks) if number > _WARMUP)
    since = _choose_window(ranks).since
    return by_rank, common, [n for n in plain if n >= since] or plain or common


def _drop_pauses(by_rank: _Times, numbers: Sequence[float]) -> list[float]:
    """The steps without a pause on any rank, if they are the majority."""
    calm = [number for number in numbers if not any(_is_paused(steps[number]) for steps in by_rank)]
    return calm if 2 * len(calm) > len(numbers) else list(numbers)


def _is_paused(times: Sequence[float]) -> bool:
    return sum(_read_pauses(times)) > 0.02 * times[0]


def _read_pauses(times: Sequence[float]) -> tuple[float, float, float]:
    """Seconds in evaluation, in checkpoints and in garbage collection."""
    evaluated_s, saved_s, collected_s = (*times, *[0.0] * 6)[3:6]
    return evaluated_s, saved_s, collected_s


def _extend_pauses(times: Sequence[float], usual_s: float) -> list[float]:
    """Extend the longest pause of a step by its aftereffects, such as flushing a file or refilling caches."""
    pauses = list(_read_pauses(times))
    if (paused_s := sum(pauses)) > 0:
        pauses[pauses.index(max(pauses))] += max(0.0, times[0] - usual_s - paused_s)
    return pauses


def _build_record(
    ranks: Sequence[_Rank], traced: Sequence[TracedStepRecord] = (), only: Sequence[int] = (), **more: Any
) -> StepRecord:
    """One record of the untraced steps that all ranks took, or of `only` these steps. Steps with a pause are excluded
    or, if they are the majority, shortened by the longest pause of any rank, because all ranks wait for it."""
    about = ranks[0].about
    by_rank, common, used = _pick_steps(ranks)
    used = list(only) or _drop_pauses(by_rank, used)
    wrapper = next(iter(about.get("wrappers") or ()), {"model": "the program", "wrapper": "none"}) | more
    backend = next((step.backend for step in traced if step.backend), about["backend"])
    is_gpu = about["device"] == "cuda"  # on a GPU, the host collects garbage while kernels run

    def build(place: int, numbers: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(steps[number][place]) for steps in by_rank) for number in numbers)

    def build_timing(numbers: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        found = []
        for number in numbers:
            paused_s = max(sum(_read_pauses(steps[number])[: 2 if is_gpu else 3]) for steps in by_rank)
            found.append(tuple(max(steps[number][1], steps[number][0] - paused_s) for steps in by_rank))
        return tuple(found)

    return StepRecord(
        backend=backend, device=about["device"], world_size=about["world_size"], batch_size=1,
        timing=Samples(build_timing(used), build_timing([n for n in common if n <= _WARMUP])), threads=about["threads"],
        data_wait=Samples(build(1, used)), host=Samples(build(2, used)) if is_gpu else None,
        **wrapper | {"bucket_bytes": tuple(wrapper.get("bucket_bytes", ()))},
    )  # fmt: skip


def _build_ranks(ranks: Sequence[_Rank]) -> list[RankRecord]:
    """The work of each rank outside its timed steps; empty if some rank did not report it."""
    by_rank, common, numbers = _pick_steps(ranks)
    calm, found = _drop_pauses(by_rank, numbers), []
    window = _choose_window(ranks)
    before = [number for number in common if _WARMUP < number < window.since]
    for rank, steps in zip(ranks, by_rank, strict=True):
        about, used = rank.about, [steps[number] for number in numbers]
        if "cores" not in about:
            return []
        options, optimizer, usage = (about.get(name) or {} for name in ("options", "optimizer", "used"))
        usual_s = statistics.median(steps[number][0] for number in calm)
        before_s = statistics.median(steps[number][0] for number in before) if before else 0.0
        evaluated_s, saved_s, collected_s = zip(*(_extend_pauses(times, usual_s) for times in used), strict=True)
        shares = {name: usage.get(f"{name}_s", 0.0) / usage["wall_s"] for name in _SHARES} if usage else {}
        padded = about.get("padded") or [0.0]
        found.append(
            RankRecord(
                rank=about["rank"], device=about["device"], host=about["host"], threads=about["threads"],
                cores=about["cores"], collected_s=collected_s, evaluated_s=evaluated_s, saved_s=saved_s,
                elements=tuple(int((*times, *[0] * 7)[6]) for times in used), padded_share=statistics.fmean(padded),
                optimizer=optimizer.get("name", ""), is_fused=optimizer.get("is_fused", False),
                can_fuse=optimizer.get("can_fuse", False), find_unused=options.get("find_unused", False),
                has_unused=options.get("num_unused_bytes", 0) > 0, is_static=options.get("is_static", False),
                buffer_bytes=options.get("buffer_bytes", 0), since=window.since, before_s=before_s,
                are_buffers_constant=about.get("are_buffers_constant", False), **about.get("loader", {}),
                **{f"{name}_share": max(0.0, share) for name, share in shares.items()},
            )
        )  # fmt: skip
    return found


def _compare_plans(
    session: Session, folder: Path, records: Sequence[Record], caps: Sequence[int], budget: float | None
) -> list[StepRecord]:
    """Run the program once more, alternating between its own buckets and others; the program's wrapper changes buckets
    between steps."""
    from paceline.report.observed import NOW, AttachedResult

    seen = AttachedResult(Run(session.verb, session.config, session.environment, tuple(records)))
    if seen.buckets is None:
        session.warnings.append("plans were not compared: no messages were recorded")
        return []
    if not caps and seen.verdict in ("keep", "flat"):
        session.warnings.append("plans were not compared: no other buckets are predicted to save more than 1 %")
        return []
    plans: dict[str, float | None] = {NOW: None}
    plans |= {format_bytes(cap): cap / MIB for cap in caps or [seen.rival.cap_bytes]}
    session.config["plans"] = plans
    length = _SWITCH_STEPS + _TURN_STEPS
    rounds = _COMPARISON_STEPS // (length * len(plans))
    if budget is not None:
        rounds = max(2, min(rounds, int(budget / (seen.step_s * length * len(plans)))))
    # Alternate the direction so that each plan comes first as often as last.
    turns = [turn for number in range(rounds) for turn in range(len(plans))[:: 1 if number % 2 == 0 else -1]]
    steps = _WARMUP + length * len(turns)
    if session.progress:
        others = ", ".join(f"{cap:.3g} MiB" for cap in plans.values() if cap is not None)
        text = f"comparing current buckets with {others} in {format_number_of(len(turns), 'turn')}"
        print(f"paceline: {session.verb.split()[0]}: {text}", file=sys.stderr, flush=True)
    session.say_long(seen.step_s * steps)
    race = {"plans": list(plans.values()), "turns": turns, "first": _WARMUP, "length": length}
    ranks = _run(session, folder, {"steps": steps, "stop": True, "race": race})
    if failed := next((r.about["error"] for r in ranks if "error" in r.about), ""):
        session.warnings.append(f"plans were not compared: {failed}")
        return []
    num_steps = min(rank.about.get("num_steps", 0) for rank in ranks)
    num_rounds = max(0, num_steps - _WARMUP) // (length * len(plans))
    if num_rounds < min(rounds, _LEAST_ROUNDS):
        why = f"the program ended at step {num_steps}, and {_LEAST_ROUNDS} rounds take"
        needed = _WARMUP + _LEAST_ROUNDS * length * len(plans)
        session.warnings.append(f"plans were not compared: {why} {needed} steps")
        return []
    if num_rounds < rounds:
        ended = f"the program ended at step {num_steps}"
        session.warnings.append(f"{ended}: plans were compared over {num_rounds} of {rounds} rounds")
        turns = turns[: num_rounds * len(plans)]
    found = []
    for number, label in enumerate(plans):
        begins = [_WARMUP + length * place for place, turn in enumerate(turns) if turn == number]
        used = [begin + step for begin in begins for step in range(_SWITCH_STEPS + 1, length + 1)]
        more = {"note": RACED, "steps_per_turn": _TURN_STEPS, "bucket_bytes": ranks[0].about["layouts"][str(number)]}
        found.append(_build_record(ranks, (), used, label=label, **more))
    return found
