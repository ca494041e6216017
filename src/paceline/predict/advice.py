"""What would make a step faster, and by how much, from the overviews of its ranks. Pure; nothing is measured here.

Every advice has its number: what the step could be shorter by, as computed from the trace. Where that takes an
assumption, the text states it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RecordError
from paceline.predict.overview import Lateness, Overview
from paceline.units import format_duration

# Below these shares of the step nothing is advised: noise between runs is of that size.
_WORTH, _IDLE_WORTH = 0.05, 0.2
_TINY_KERNEL_S = 10e-6
# A batch that keeps the GPU busy has this much more work than fills the step as it is.
_FILL = 1.1
# Dense peaks with tensor cores in bf16 (fp16 on V100 and T4) over fp32 without, from the makers' data sheets.
_PEAK_RATIOS = (
    (re.compile(r"H100|H200|GH200", re.I), 989 / 67), (re.compile(r"A100|A800", re.I), 312 / 19.5),
    (re.compile(r"B200|B100|GB200", re.I), 2250 / 80), (re.compile(r"V100", re.I), 125 / 15.7),
    (re.compile(r"T4", re.I), 65 / 8.1), (re.compile(r"L40|L4\b|RTX|A10\b|A40", re.I), 4.0),
)  # fmt: skip
_UNKNOWN_RATIO = 8.0
_WITHOUT_BF16 = re.compile(r"V100|T4\b|TITAN V|RTX 20\d\d|Quadro RTX", re.I)


@dataclass(frozen=True)
class StepFacts:
    """What the trace does not say about its step. `accumulate` counts micro-batches of one optimizer step."""

    batch_size: int
    accumulate: int = 1
    precision: str = "fp32"
    world_size: int = 1
    is_compiled: bool = False


@dataclass(frozen=True)
class Advice:
    """One thing to do. `gain_s` is what a step could be shorter by; `certainty` says how that was found:
    `computed` from the trace, `at most` (a bound), or `estimated` (with an assumption that the text states)."""

    kind: str
    text: str
    gain_s: float
    certainty: str
    step_s: float

    @property
    def factor(self) -> float:
        """How many times as fast a step would be."""
        return self.step_s / max(self.step_s - self.gain_s, 1e-12)


def advise(overviews: Sequence[Overview], facts: StepFacts, lateness: Lateness | None = None) -> list[Advice]:
    """What to do, the largest gain first; where nothing is worth it, what bounds the step.

    Judged by the rank that waits least for messages: the others' messages also hold the time that they wait for it.
    """
    if not overviews:
        raise RecordError("no overview to judge by: record at least one rank")
    busiest = min(overviews, key=lambda overview: overview.seconds("communication"))
    found = [
        *_on_messages(busiest, facts),
        *_on_lateness(busiest, lateness, max(overview.seconds("communication") for overview in overviews)),
        *_on_data(busiest),
        *_on_copies(busiest),
        *_on_optimizer(busiest),
        *_on_host(busiest, facts),
        *_on_launches(busiest),
        *_on_tensor_cores(busiest, facts),
        *_on_small_kernels(busiest, facts),
    ]
    return sorted(found, key=lambda advice: -advice.gain_s) or [_name_bound(busiest)]


def _on_messages(overview: Overview, facts: StepFacts) -> list[Advice]:
    exposed_s, step_s = overview.seconds("communication"), overview.step_s
    if facts.world_size < 2 or exposed_s < _WORTH * step_s:
        return []
    gpu = overview.gpu
    share = gpu.communication_share if gpu else overview.share("communication")
    of_what = "kernel time" if gpu else "the step"
    later = share / (share + 2 * (1 - share))
    more = 2 * facts.accumulate
    halved_s = min(exposed_s, overview.message_s / 2)
    found = [
        Advice(
            "accumulate",
            f"messages are {share:.0%} of {of_what}, and {format_duration(exposed_s)} per step is exposed: "
            f"accumulating over {more} micro-batches instead of {facts.accumulate} would bring them to about "
            f"{later:.0%} and save {format_duration(exposed_s / more)} per micro-batch",
            exposed_s / 2,
            "computed",
            step_s,
        ),
        Advice(
            "compress",
            f"{format_duration(exposed_s)} of messages per step is exposed: half the bytes, by a communication hook "
            f"that sends bf16, would save about {format_duration(halved_s)} if their time follows their size",
            halved_s,
            "estimated",
            step_s,
        ),
    ]
    backward_s = overview.phases_s.get("backward", 0.0)
    if 0 < overview.message_s < backward_s:
        found.append(
            Advice(
                "buckets",
                f"messages take {format_duration(overview.message_s)} and backward {format_duration(backward_s)}, yet "
                f"{format_duration(exposed_s)} is exposed: another plan of buckets (--plan) could hide "
                "nearly all of it",
                exposed_s,
                "at most",
                step_s,
            )
        )
    return found


def _on_lateness(overview: Overview, lateness: Lateness | None, waited_s: float) -> list[Advice]:
    if lateness is None:
        return []
    # Who is late to a message that arithmetic hides delays nobody.
    gain_s = min(lateness.mean_s, waited_s)
    if gain_s < _WORTH * overview.step_s:
        return []
    late = format_duration(lateness.mean_s)
    if lateness.share < 0.75:
        text = f"ranks come to messages {late} apart, and take turns in being last: look for other load on the hosts"
    else:
        text = (
            f"the others wait {late} per step for rank {lateness.rank}, last in {lateness.share:.0%} of steps: look at "
            "its cores, its GPU's clock, and the size of its batches"
        )
    return [Advice("late rank", text, gain_s, "at most", overview.step_s)]


def _on_data(overview: Overview) -> list[Advice]:
    waited_s = overview.seconds("data")
    if waited_s < _WORTH * overview.step_s:
        return []
    text = (
        f"the step waits {format_duration(waited_s)} for data, {overview.share('data'):.0%} of it: smaller inputs, or "
        "batches that are made ahead"
    )
    return [Advice("data", text, waited_s, "at most", overview.step_s)]


def _on_copies(overview: Overview) -> list[Advice]:
    copied_s = overview.seconds("copy")
    if copied_s < _WORTH * overview.step_s:
        return []
    text = (
        f"copies take {format_duration(copied_s)} in which nothing else runs, {overview.share('copy'):.0%} of the "
        "step: pin the batches' memory and copy with non_blocking=True"
    )
    return [Advice("copies", text, copied_s, "at most", overview.step_s)]


def _on_optimizer(overview: Overview) -> list[Advice]:
    seconds, passes = overview.phases_s.get("optimizer", 0.0), overview.optimizer_passes
    if seconds < 0.1 * overview.step_s or passes < 2:
        return []
    gain_s = seconds * (1 - 1 / passes)
    text = (
        f"the optimizer takes {format_duration(seconds)}, {seconds / overview.step_s:.0%} of the step, and goes over "
        f"the parameters with {passes} operators: with fused=True it is one, at most {format_duration(gain_s)} less"
    )
    return [Advice("optimizer", text, gain_s, "at most", overview.step_s)]


def _on_host(overview: Overview, facts: StepFacts) -> list[Advice]:
    idle_s = overview.seconds("cpu") + overview.seconds("other")
    if overview.gpu is None or idle_s < _IDLE_WORTH * overview.step_s:
        return []
    compiled = "" if facts.is_compiled else ", or --compile"
    # The host's time is that of its launches, whatever they work on; the GPU's grows with the batch.
    needed = facts.batch_size * _FILL / max(overview.gpu.busy, 1e-3)
    text = (
        f"the GPU is {overview.gpu.busy:.0%} busy, and {format_duration(idle_s)} of the step is the host's: a batch of "
        f"{2 ** math.ceil(math.log2(needed))} instead of {facts.batch_size}, if memory allows{compiled}; bounded by "
        f"the GPU alone, a step would be {overview.step_s / (overview.step_s - idle_s):.1f} times as fast"
    )
    return [Advice("host", text, idle_s, "at most", overview.step_s)]


def _on_launches(overview: Overview) -> list[Advice]:
    gpu = overview.gpu
    if gpu is None or gpu.num_kernels < 1:
        return []
    mean_s = gpu.kernel_s / gpu.num_kernels
    launching_s = gpu.num_kernels * gpu.launch_s
    gain_s = min(launching_s, overview.seconds("cpu") + overview.seconds("other"))
    if mean_s > _TINY_KERNEL_S or gain_s < _WORTH * overview.step_s:
        return []
    text = (
        f"{gpu.num_kernels:.0f} kernels per step of {format_duration(mean_s)} each take {format_duration(launching_s)} "
        "to launch: --compile, or a CUDA graph, launches fewer"
    )
    return [Advice("launches", text, gain_s, "at most", overview.step_s)]


def _on_tensor_cores(overview: Overview, facts: StepFacts) -> list[Advice]:
    gpu = overview.gpu
    if gpu is None or gpu.missed_s < _WORTH * overview.step_s:
        return []
    ratio = next((ratio for pattern, ratio in _PEAK_RATIOS if pattern.search(gpu.name)), _UNKNOWN_RATIO)
    assumed = max(1.0, ratio / 2)
    # A step is never shorter than the host's own work.
    gain_s = min(gpu.missed_s * (1 - 1 / assumed), max(0.0, overview.step_s - overview.host_s))
    if gain_s < _WORTH * overview.step_s:
        return []
    half = "fp16" if _WITHOUT_BF16.search(gpu.name) else "bf16"
    todo = f"--precision {half}" if facts.precision == "fp32" else "sizes that are multiples of 8"
    text = (
        f"tensor cores idle: {format_duration(gpu.missed_s)} of matrix kernels per step do not use them: {todo}; "
        f"estimated {format_duration(gain_s)} less, if they become {assumed:.1f} times as fast, half of what the peaks "
        f"of {gpu.name or 'a GPU that is not known'} promise"
    )
    return [Advice("tensor cores", text, gain_s, "estimated", overview.step_s)]


def _on_small_kernels(overview: Overview, facts: StepFacts) -> list[Advice]:
    gpu = overview.gpu
    if gpu is None or gpu.sm_efficiency is None or gpu.busy <= 0:
        return []
    filled = min(1.0, gpu.sm_efficiency / gpu.busy)
    gain_s = overview.seconds("kernel") * (1 - filled)
    if filled > 0.6 or gain_s < _WORTH * overview.step_s:
        return []
    text = (
        f"while kernels run, {filled:.0%} of the SMs have a block: a batch larger than {facts.batch_size} costs little "
        f"more, at most {format_duration(gain_s)} less for the same samples"
    )
    return [Advice("batch", text, gain_s, "at most", overview.step_s)]


def _name_bound(overview: Overview) -> Advice:
    largest = max(overview.steps[0].seconds, key=overview.seconds)
    first = ""
    if largest == "kernel" and overview.kernels:
        first = f", of which {overview.kernels[0].name} takes {format_duration(overview.kernels[0].time_s)}"
    elif largest == "cpu" and overview.operators:
        first = f", of which {overview.operators[0].name} takes {format_duration(overview.operators[0].self_s)}"
    name = {"kernel": "kernels", "cpu": "operators", "communication": "messages"}.get(largest, largest)
    text = (
        f"nothing stands out: the step is bound by {name}, {overview.share(largest):.0%} of "
        f"{format_duration(overview.step_s)}{first}"
    )
    return Advice("bound", text, 0.0, "computed", overview.step_s)
