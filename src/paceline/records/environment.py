"""Where and how a run was made, and the reasons to doubt what it measured.

What only a rank knows (GPU names, the version of NCCL) is passed in by the measurement as `details`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__, machine
from paceline.records.kinds import ChunksRecord, CollectiveRecord, MemoryBounds, MemoryRecord, Record
from paceline.records.samples import Samples
from paceline.records.steps import StepRecord
from paceline.units import format_bytes, format_duration, format_memory, format_number_of

# What changes a result, and no paths of the machine.
_PREFIXES = (
    "GLOO_", "NCCL_", "OMP_", "MKL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE_", "CUDA_DEVICE_MAX_",
    "CUDA_LAUNCH_",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """The conditions of a run. Two runs are comparable when `differences` finds none. `load_average` is that before the
    run, `stolen` the share of the cores' time that the host of a virtual machine gave to others during it."""

    host: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    python: str
    versions: dict[str, str]
    variables: dict[str, str]
    command_line: str
    git_commit: str | None
    load_average: float | None
    details: dict[str, Any] = field(default_factory=dict)
    stolen: float | None = None

    @property
    def machine(self) -> str:
        """The machine in a few words: processor, cores, memory and, where known, the GPU."""
        gpu = f", {self.details['gpu']}" if self.details.get("gpu") else ""
        return f"{self.cpu}, {self.cores} cores, {format_memory(self.memory_bytes)}{gpu}"

    @property
    def machine_and_torch(self) -> str:
        """What must be the same for times to be put into one table."""
        return f"{self.machine}, torch {self.versions.get('torch', 'unknown')}"

    def differences(self, other: Environment) -> list[str]:
        """What makes numbers from the two environments incomparable; empty when nothing does."""
        here, there = self._list_conditions(), other._list_conditions()
        names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
        return [f"{name}: {here.get(name, 'none')} compared with {there.get(name, 'none')}" for name in names]

    def _list_conditions(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("host", "cpu", "cores", "python")}
        for name, of in (("version", self.versions), ("variable", self.variables), ("detail", self.details)):
            found |= {f"{name} {key}": value for key, value in of.items()}
        return found


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def capture_environment() -> Environment:
    """The environment of this process.

    PACELINE_HOST replaces the host's name in what gets published, and PACELINE_COMMIT names the commit where the
    source was copied without its repository.
    """
    name = Path(sys.argv[0]).name
    command = ["paceline" if name in ("__main__.py", "") else name, *sys.argv[1:]]
    gpu = machine.gpu_name()
    packages = [next(iter(importlib.metadata.distributions(name=name)), None) for name in ("torch", "numpy")]
    return Environment(
        host=os.environ.get("PACELINE_HOST") or platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=machine.cpu_name(),
        cores=machine.count_cores(),
        memory_bytes=machine.total_memory_bytes(),
        python=platform.python_version(),
        versions={"paceline": __version__} | {package.name: package.version for package in packages if package},
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        command_line=" ".join(command),
        git_commit=os.environ.get("PACELINE_COMMIT") or _git_commit(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        details={"gpu": gpu} if gpu else {},
    )


# The kinds of doubt that `--strict` turns into a failure: another run may give another answer.
NOISY = ("inconclusive", "unstable", "drifting", "few")
# Names of doubtful measurements in one line; of more, their number and the worst.
_MOST_NAMES = 3
# Of the time of all cores, what the host of a virtual machine may give to others.
_MOST_STOLEN = 0.1
# In order of gravity. Wrong parameters have a text of their own and are the same kind to a program.
_TEXTS = {
    "wrong": "WRONG DATA at {}: do not use this backend for these messages",
    "parameters": "WRONG PARAMETERS of {}: replicas differ, or are not those of torch's wrapper",
    "above": "faster than one core per rank passes over memory at {}: several cores took part, or it was disturbed",
    "unstable": "unstable at {} (p10 to p90): repeat on a quiet machine or with more --iters",
    "drifting": "not settled at {} (second half compared with the first): raise --warmup",
    "few": "fewer than 5 repetitions at {}: a median of these says little",
    "skewed": "ranks arrive far apart at {}: over half of the time is waiting for the last one",
}


class Doubt(NamedTuple):
    """One reason to doubt a measurement, as one line for people; `kind` is for programs."""

    kind: str
    text: str


_Timed = CollectiveRecord | MemoryRecord | ChunksRecord | StepRecord


def _name(record: _Timed) -> str:
    """What distinguishes this record from the others on the same backend and ranks."""
    if isinstance(record, StepRecord):
        return f"{record.model} in {record.wrapper}{f', {record.label}' if record.label else ''}"
    if isinstance(record, ChunksRecord):
        return format_bytes(record.chunk_bytes)
    if isinstance(record, MemoryRecord):
        return f"{format_bytes(record.num_bytes)} ({record.operation})"
    return format_bytes(record.num_bytes) + (" in shared memory" if record.memory == "shared" else "")


def _find_reasons(r: _Timed, timing: Samples, fraction: float | None) -> Iterator[tuple[str, float, str]]:
    """The kinds of doubt that a record gives, each with how bad it is, and with its details."""
    if r.num_wrong:
        kind, what = ("parameters", "parameters") if isinstance(r, StepRecord) else ("wrong", "elements")
        yield kind, r.num_wrong, f"{r.num_wrong} of {r.num_checked} {what}"
    if fraction is not None and fraction > 1.1:  # a little more than 1 is the noise of both
        yield "above", fraction, f"{fraction:.2f} of memory"
    if timing.count < 5:
        yield "few", -timing.count, ""
    elif timing.noise > 0.25:
        yield "unstable", timing.noise, f"{format_duration(timing.p10_s)} to {format_duration(timing.p90_s)}"
    elif abs(timing.drift) > 0.25:
        yield "drifting", abs(timing.drift), f"{timing.drift:+.0%}"
    # A pass over memory waits for nobody.
    if not isinstance(r, MemoryRecord) and (timing.skew_s or 0.0) > 0.5 * timing.median_s:
        yield "skewed", (timing.skew_s or 0.0) / timing.median_s, ""


def find_doubts(records: Sequence[Record], environment: Environment) -> list[Doubt]:
    """Every reason to doubt the measured records, the gravest first."""
    bounds, cores, steps = MemoryBounds(records), environment.cores, []
    crowded: set[int] = set()
    is_one_host = environment.details.get("hosts", 1) == 1
    found: dict[tuple[str, str, int], list[tuple[float, str]]] = defaultdict(list)
    totals: Counter[tuple[str, int]] = Counter()
    for r in records:
        if isinstance(r, _Timed) and isinstance(r.timing, Samples):
            fraction = bounds.fraction_of(r) if isinstance(r, CollectiveRecord) else None
            backend = "memory" if isinstance(r, MemoryRecord) else r.backend
            totals[backend, r.world_size] += 1
            reasons = list(_find_reasons(r, r.timing, fraction))
            for kind, badness, details in reasons:
                name = _name(r) + (f" ({details})" if details else "")
                found[kind, backend, r.world_size].append((badness, name))
            if isinstance(r, StepRecord):
                steps.append((r, any(kind == "unstable" for kind, *_ in reasons)))
            if r.device == "cpu" and r.world_size > cores and is_one_host:
                crowded.add(r.world_size)
    doubts = []
    for (kind, backend, n), places in sorted(found.items(), key=lambda item: list(_TEXTS).index(item[0][0])):
        names = ", ".join(name for _, name in places)
        if len(places) > _MOST_NAMES and kind not in ("wrong", "parameters"):  # of wrong data, every place counts
            names = f"{len(places)} of {totals[backend, n]} measurements, the worst {max(places)[1]}"
        place = (f"{backend}, " if backend else "") + format_number_of(n, "rank")
        doubts.append(Doubt("wrong" if kind == "parameters" else kind, f"{place}: {_TEXTS[kind].format(names)}"))
    if crowded:
        many = f"{', '.join(map(str, sorted(crowded)))} ranks share {format_number_of(cores, 'core')}"
        doubts.append(Doubt("crowded", f"{many}: their times include waiting for a core"))
    load, stolen = environment.load_average or 0.0, environment.stolen or 0.0
    is_busy, causes = load > 0.5 * cores, []
    steps = [step for step in steps if step[0].role == "job"] or steps  # a tuning is concluded from its candidates
    unstable = [r for r, is_unstable in steps if is_unstable]
    if 2 * len(unstable) > len(steps) and any(r.world_size not in crowded for r in unstable):
        many = f"{len(unstable)} of {len(steps)} variants of the step are unstable"
        causes.append(many if len(steps) > 1 else "the step is unstable")
    if totals and stolen > _MOST_STOLEN:
        causes.append(f"the host took {stolen:.0%} of the cores' time for others")
    because = ", ".join([*causes, *([f"load {load:.1f} on {format_number_of(cores, 'core')}"] if is_busy else [])])
    if causes:
        text = f"the machine was too busy to measure ({because}): nothing can be concluded; repeat on a quiet machine"
        doubts.insert(sum(doubt.kind == "wrong" for doubt in doubts), Doubt("inconclusive", text))
    elif is_busy:
        doubts.append(Doubt("busy", f"the machine was busy before the run ({because}): other work may be in the times"))
    return doubts
