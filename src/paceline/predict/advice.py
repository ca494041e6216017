"""What would make a step faster, and by how much, from the overviews of its ranks. Nothing is measured here."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import RecordError
from paceline.predict.traces import GpuUse, Lateness, Overview
from paceline.units import format_duration

# Below these shares of the step nothing is advised: noise between runs is of that size.
WORTH, _IDLE_WORTH = 0.05, 0.2
_TINY_KERNEL_S = 10e-6
# A batch that keeps the GPU busy has this much more work than fills the step as it is.
_FILL = 1.1
# Dense peaks with tensor cores in bf16 (fp16 on V100 and T4) over fp32 without, from the makers' data sheets.
_PEAK_RATIOS = (
    ("H100|H200|GH200", 989 / 67), ("A100|A800", 312 / 19.5), ("B200|B100|GB200", 2250 / 80), ("V100", 125 / 15.7),
    ("T4", 65 / 8.1), (r"L40|L4\b|RTX|A10\b|A40", 4.0), ("", 8.0),
)  # fmt: skip
_WITHOUT_BF16 = re.compile(r"V100|T4\b|TITAN V|RTX 20\d\d|Quadro RTX", re.I)

Found = tuple[str, float, str, str]  # kind, gain_s, certainty and text of an advice


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


class MessageShare(NamedTuple):
    """The share of messages in kernel time or, where no kernel sends them, in the step, and that of the optimizer, 0
    where it is not known. `rank` is the one that waits least for messages: those of the others also hold the time that
    they wait for it."""

    share: float
    of: str
    optimizer: float
    rank: int

    def estimate(self, times: float) -> float:
        """The share of messages in a step of `times` as many micro-batches: messages and optimizer stay one each."""
        once = self.share + self.optimizer
        return self.share / (once + times * (1 - once))


def find_message_share(overviews: Sequence[Overview]) -> MessageShare:
    first = _pick_first(overviews)
    if first.gpu is not None and first.gpu.communication_share:
        return MessageShare(first.gpu.communication_share, "kernel time", 0.0, first.rank)
    optimizer = first.phases_s.get("optimizer", 0.0) / first.step_s
    return MessageShare(first.share("communication"), "the step", optimizer, first.rank)


def _pick_first(overviews: Sequence[Overview]) -> Overview:
    return min(overviews, key=lambda overview: overview.seconds("communication"))


def advise(overviews: Sequence[Overview], facts: StepFacts, lateness: Lateness | None = None) -> list[Advice]:
    """What to do, the largest gain first; where nothing is worth it, what bounds the step."""
    if not overviews:
        raise RecordError("no overview to judge by: record at least one rank")
    first = _pick_first(overviews)
    found = [*_on_messages(first, facts), *_on_waiting(first)]
    if lateness is not None:
        found += _on_lateness(lateness, max(overview.seconds("communication") for overview in overviews), first.step_s)
    if first.gpu is not None:
        found += _on_gpu(first, first.gpu, facts)
    advice = [Advice(kind, text, gain_s, certainty, first.step_s) for kind, gain_s, certainty, text in found]
    return sorted(advice, key=lambda one: -one.gain_s) or [_name_bound(first)]


def _on_messages(overview: Overview, facts: StepFacts) -> Iterator[Found]:
    exposed_s, message_s = overview.seconds("communication"), overview.message_s
    if facts.world_size < 2 or exposed_s < WORTH * overview.step_s:
        return
    exposed, more = format_duration(exposed_s), 2 * facts.accumulate
    found = find_message_share([overview])
    text = f"messages are {found.share:.0%} of {found.of}, and {exposed} per step is exposed: "
    text += f"accumulating over {more} micro-batches instead of {facts.accumulate} would bring them to about "
    text += f"{found.estimate(2):.0%} and save {format_duration(exposed_s / more)} per micro-batch"
    yield "accumulate", exposed_s / 2, "computed", text
    halved_s, backward_s = min(exposed_s, message_s / 2), overview.phases_s.get("backward", 0.0)
    text = f"{exposed} of messages per step is exposed: half the bytes, by a communication hook "
    text += f"that sends bf16, would save about {format_duration(halved_s)} if their time follows their size"
    yield "compress", halved_s, "estimated", text
    if 0 < message_s < backward_s:
        text = f"messages take {format_duration(message_s)} and backward {format_duration(backward_s)}, yet "
        text += f"{exposed} is exposed: another plan of buckets (--plan) could hide nearly all of it"
        yield "buckets", exposed_s, "at most", text


def _on_lateness(lateness: Lateness, waited_s: float, step_s: float) -> Iterator[Found]:
    # Who is late to a message that arithmetic hides delays nobody.
    gain_s, late = min(lateness.mean_s, waited_s), format_duration(lateness.mean_s)
    text = f"ranks come to messages {late} apart, and take turns in being last: look for other load on the hosts"
    if lateness.share >= 0.75:
        text = f"the others wait {late} per step for rank {lateness.rank}, last in {lateness.share:.0%} of steps: look "
        text += "at its cores, its GPU's clock, and the size of its batches"
    if gain_s >= WORTH * step_s:
        yield "late rank", gain_s, "at most", text


def _on_waiting(overview: Overview) -> Iterator[Found]:
    """Data, copies, and an optimizer that goes over the parameters again and again."""
    for category, kind, text in (
        ("data", "data", "the step waits {} for data, {:.0%} of it: smaller inputs, or batches that are made ahead"),
        ("copy", "copies", "copies take {} in which nothing else runs, {:.0%} of the step: pin the batches' memory "
         "and copy with non_blocking=True"),
    ):  # fmt: skip
        waited_s, share = overview.seconds(category), overview.share(category)
        if share >= WORTH:
            yield kind, waited_s, "at most", text.format(format_duration(waited_s), share)
    seconds, passes = overview.phases_s.get("optimizer", 0.0), overview.optimizer_passes
    if seconds >= 0.1 * overview.step_s and passes > 1:
        text = f"the optimizer takes {format_duration(seconds)}, {seconds / overview.step_s:.0%} of the step, and goes "
        text += f"over the parameters with {passes} operators: with fused=True it is one"
        yield "optimizer", seconds * (1 - 1 / passes), "at most", text


def _on_gpu(overview: Overview, gpu: GpuUse, facts: StepFacts) -> Iterator[Found]:
    step_s, worth_s = overview.step_s, WORTH * overview.step_s
    idle_s = overview.seconds("cpu") + overview.seconds("other")
    if idle_s >= _IDLE_WORTH * step_s:
        # The host's time is that of its launches, whatever they work on; the GPU's grows with the batch.
        needed = facts.batch_size * _FILL / max(gpu.busy, 1e-3)
        text = f"the GPU is {gpu.busy:.0%} busy, and {format_duration(idle_s)} of the step is the host's: a batch of "
        text += f"{2 ** math.ceil(math.log2(needed))} instead of {facts.batch_size}, if memory allows"
        text += f"{'' if facts.is_compiled else ', or --compile'}; bounded by the GPU alone, a step would be "
        text += f"{step_s / (step_s - idle_s):.1f} times as fast"
        yield "host", idle_s, "at most", text
    mean_s, launching_s = gpu.kernel_s / gpu.num_kernels, gpu.num_kernels * gpu.launch_s
    if gpu.num_kernels >= 1 and mean_s <= _TINY_KERNEL_S and min(launching_s, idle_s) >= worth_s:
        text = f"{gpu.num_kernels:.0f} kernels per step of {format_duration(mean_s)} each take "
        text += f"{format_duration(launching_s)} to launch: --compile, or a CUDA graph, launches fewer"
        yield "launches", min(launching_s, idle_s), "at most", text
    assumed = max(1.0, next(ratio for names, ratio in _PEAK_RATIOS if re.search(names, gpu.name, re.I)) / 2)
    # A step is never shorter than the host's own work.
    gain_s = min(gpu.missed_s * (1 - 1 / assumed), max(0.0, step_s - overview.host_s))
    if gain_s >= worth_s:
        half = "fp16" if _WITHOUT_BF16.search(gpu.name) else "bf16"
        todo = f"--precision {half}" if facts.precision == "fp32" else "sizes that are multiples of 8"
        text = f"{format_duration(gpu.missed_s)} of matrix kernels per step do not use tensor cores: {todo}; estimated "
        text += f"{format_duration(gain_s)} less, if they become {assumed:.1f} times as fast, half of what the peaks "
        text += f"of {gpu.name or 'a GPU that is not known'} promise"
        yield "tensor cores", gain_s, "estimated", text
    filled = 1.0 if gpu.sm_efficiency is None or gpu.busy <= 0 else min(1.0, gpu.sm_efficiency / gpu.busy)
    gain_s = overview.seconds("kernel") * (1 - filled)
    if filled <= 0.6 and gain_s >= worth_s:
        text = f"while kernels run, {filled:.0%} of the SMs have a block: a batch larger than {facts.batch_size} costs "
        text += f"little more, at most {format_duration(gain_s)} less for the same samples"
        yield "batch", gain_s, "at most", text


def _name_bound(overview: Overview) -> Advice:
    largest = max(overview.steps[0].seconds, key=overview.seconds)
    name = {"kernel": "kernels", "cpu": "operators", "communication": "messages"}.get(largest, largest)
    text = f"nothing stands out: the step is bound by {name}, {overview.share(largest):.0%} of "
    text += format_duration(overview.step_s)
    most = {"kernel": [(row.name, row.time_s) for row in overview.kernels[:1]]}
    most["cpu"] = [(row.name, row.self_s) for row in overview.operators[:1]]
    text += "".join(f", of which {row} takes {format_duration(time_s)}" for row, time_s in most.get(largest, []))
    return Advice("bound", text, 0.0, "computed", overview.step_s)
