"""`paceline.demo`: finds the mistake in a small program and measures a step with and without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline.workloads
from paceline.records.findings import describe_load
from paceline.report.observed import NOW, AttachedResult
from paceline.report.page import save_page
from paceline.report.prediction_rows import format_cap
from paceline.report.table import Column, Table
from paceline.units import format_duration, format_number_of
from paceline.verbs.attach import attach
from paceline.verbs.jobs import Place

PROGRAM = Path(paceline.workloads.__file__).parent / "slow_program.py"
_STEPS = 24  # observed before the comparison


@dataclass(frozen=True)
class _Variant:
    name: str
    num_messages: int
    step_s: float
    share: float  # fraction of the longest step


_VARIANTS = (
    Column("buckets", "name", key="buckets", is_key=True),
    Column("messages", "num_messages", "number", "num_messages", is_key=True),
    Column("step", "step_s", "ms", "step_s", is_key=True),
    Column("relative", "share", "bar"),
)


class DemoResult(AttachedResult):
    """Result of `demo`: the comparison of the program's own buckets with the best predicted ones."""

    @property
    def variants(self) -> list[_Variant]:
        """The program with its own buckets and with others; empty if nothing was compared."""
        found = [(name, len(one.bucket_bytes), one.timing.median_s) for name, one in self.raced.items()]
        longest_s = max((step_s for *_, step_s in found), default=0.0)
        named = {name: "as written" if name == NOW else f"bucket_cap_mb={format_cap(self.config['plans'][name])}"
                 for name, *_ in found}  # fmt: skip
        return [_Variant(named[name], count, step_s, step_s / longest_s) for name, count, step_s in found]

    @property
    def answer(self) -> str:
        shown = self.variants
        if self.race is None or len(shown) < 2:
            return "No gain was measured: the program was not compared with other buckets; the warning says why."
        own, other = shown[0], shown[-1]
        found = f"Found: the program sends {format_number_of(own.num_messages, 'message')} per step"
        if self.exposed_s is not None:
            found += f", and {self.exposed_s / self.step_s:.0%} of a step is exposed communication"
        ratio = self.race.to_default[next(name for name in self.raced if name != NOW)]
        gain, low, high = ratio.saved
        if self.verdict != "use":
            interval = f"{low:.0%} to {high:.0%}" if ratio.is_known else "too few rounds for an interval"
            how = "the interval of the saving includes 0, or is within 1 %"
            return f"{found}. No gain was shown with {other.name}: {how} ({gain:.0%}; 95 %: {interval})."
        times = f"{format_duration(other.step_s)} instead of {format_duration(own.step_s)}"
        return (
            f"{found}. Fixed: with {other.name}, a step takes {times}, {gain:.0%} less (95 %: {low:.0%} to {high:.0%})."
        )

    @property
    def headline(self) -> str:
        return self.answer

    @property
    def warnings(self) -> tuple[str, ...]:
        """At most one line about other load on the machine, because the interval of the comparison reflects noise."""
        if self.race is None or not self.doubts:
            return super().warnings
        load = ", ".join(part for found in describe_load(self.run.environment) for part in found)
        return (f"the machine was busy ({load}); the interval allows for it",) if load else ()

    def tables(self) -> list[Table]:
        title = "step time, measured in alternating turns"
        return [Table("demo", title, _VARIANTS, self.variants), *super().tables()]

    @property
    def next_steps(self) -> Sequence[str]:
        if self.verdict == "use":
            return ("paceline profile -- torchrun --nproc-per-node 2 train.py",)
        return ("paceline demo",)


def demo(*, out: Place = None, progress: bool | None = None) -> DemoResult:
    """Why is a small program slow, and what fixes it? Profiles it, finds better buckets, and compares both.

    Args:
        out: Save the run in a new subfolder of this folder.
    """
    if progress:
        program = "/".join(PROGRAM.parts[-2:])
        print(f"paceline: demo: profiling {program} on 2 ranks: about 20 s", file=sys.stderr, flush=True)
    attached = attach([sys.executable, str(PROGRAM)], steps=_STEPS, race=True, out=out, progress=progress)
    result = DemoResult(attached.run, attached.folder)
    if result.folder is not None:
        result.page = save_page([result], result.folder)
    return result
