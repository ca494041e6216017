"""Steps of a training job: the only record type for timed steps, and the numbers derived from it.

`measure.steps` decides which steps are interleaved.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from paceline.errors import MeasurementError, RecordError
from paceline.records.checked import Checked, Count, PositiveCount, Seconds, one_of
from paceline.records.kinds import CollectiveRecord, Record, Timed, bus_factor
from paceline.records.samples import Ratio, Samples, compare_times
from paceline.units import format_rate

PHASES = ("data_wait", "forward", "backward", "optimizer")
ROLES = ("job", "plain", "local", "disturbed", "together", "coded")
RACED = "confirmed"  # the note on job steps that ran for a plan comparison
# The fields of a record that hold samples, besides `timing`. Fields after the phases are samples of other kinds of
# steps.
EXTRA_SAMPLES = (
    "marked", *PHASES, "no_comm", "no_comm_backward", "busy", "under_way", "overlapped", "alone", "host",
)  # fmt: skip


def _median_difference(here: Samples, there: Samples) -> float:
    return statistics.median(a - b for a, b in zip(here.reduced_s, there.reduced_s, strict=True))


def reduce_turns(steps_s: Sequence[float], steps_per_turn: int) -> list[float]:
    """The median step of each turn: consecutive steps are not independent samples."""
    return [statistics.median(steps_s[at : at + steps_per_turn]) for at in range(0, len(steps_s), steps_per_turn)]


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """Steps of one variant of a job. In all variants of a cell, repetitions with the same number are adjacent in time,
    so they can be compared in pairs.

    `timing` has plain steps. Other kinds of steps of the same variant were interleaved with them; None means not
    measured. `marked` steps have phase markers, `no_comm` have communication off (`no_comm_backward` is their
    backward), and `busy` is the time with at least one message in flight. The phases (`backward` includes its waits)
    belong to `marked`, or to `timing` without it. `host` is the host time of a step whose `timing` is GPU time.

    `role`: `job` is the job itself; `plain` the bare model; `local` the wrapper in a world of one rank; `disturbed` the
    bare model while `num_messages` messages of `message_bytes` are sent during backward, where `under_way` is the mean
    time of a message, `overlapped` its part before the end of backward, and `alone` its time on an idle
    machine; `together` the bare model on all ranks at once, without messages; `coded` the job with the strategy in its
    label. `bucket_bytes` lists the wrapper's buckets in launch order, and `num_bytes` is the number of bytes that a
    rank passes to all-reduce per step, gradients only. `cell_size` is the samples per rank (`mode` weak) or over all
    ranks (strong). `num_parameters` counts tensors. `num_wrong` of `num_checked` parameters differed between ranks, or
    from torch's. `held_bytes` is the memory of the replica and its wrapper between steps, `peak_step_bytes` the
    additional memory at the peak of a step; each is the maximum over ranks. `steps_per_turn` consecutive repetitions
    were one turn of this variant.
    """

    kind: ClassVar[str] = "step"
    model: str
    wrapper: str
    backend: str
    device: str
    world_size: PositiveCount
    batch_size: PositiveCount
    timing: Timed
    data: str = ""
    precision: str = "fp32"
    accumulate: PositiveCount = 1
    threads: Count = 0
    configuration: str = ""
    role: Annotated[str, one_of(ROLES)] = "job"
    label: str = ""
    mode: Annotated[str, one_of(("", "weak", "strong"))] = ""
    cell_size: int = 0
    cap_bytes: Count = 0
    bucket_bytes: tuple[Count, ...] = ()
    message_bytes: int = 0
    num_bytes: Count = 0
    num_messages: Count = 0
    num_parameters: Count = 0
    marked: Samples | None = None
    data_wait: Samples | None = None
    forward: Samples | None = None
    backward: Samples | None = None
    optimizer: Samples | None = None
    no_comm: Samples | None = None
    no_comm_backward: Samples | None = None
    busy: Samples | None = None
    under_way: Samples | None = None
    overlapped: Samples | None = None
    alone: Samples | None = None
    host: Samples | None = None
    num_wrong: int | None = None
    num_checked: int | None = None
    held_bytes: int = 0
    peak_step_bytes: int = 0
    steps_per_turn: PositiveCount = 1
    order_seed: int | None = None

    def find_faults(self) -> Iterator[str]:
        if self.mode and self.threads < 1:
            yield f"{self.threads} threads per rank in a scaling study: must be at least 1"
        samples = self.batch_size * self.accumulate * (self.world_size if self.mode == "strong" else 1)
        if self.mode and samples != self.cell_size:
            yield f"{samples} samples in a cell of {self.cell_size} ({self.mode})"
        is_disturbed = self.role == "disturbed"
        messages = {self.message_bytes > 0, self.under_way is not None, self.overlapped is not None}
        if messages != {is_disturbed} or (is_disturbed and self.num_messages < 1) or (self.alone and not is_disturbed):
            yield "single messages are timed in disturbed steps, and only there"
        yield from self.find_uneven(*EXTRA_SAMPLES)

    @property
    def variant(self) -> str:
        return self.wrapper if self.wrapper in ("none", "dp") else f"{self.wrapper} on {self.backend}"

    @property
    def place(self) -> str:
        label = f", {self.label}" if self.label else ""
        return f"{self.model}, {self.variant}, {self.world_size} ranks{label}"

    @property
    def job(self) -> tuple[str, str, str, str]:
        """The fields that determine the computation of a step."""
        return self.model, self.data, self.device, self.precision

    @property
    def cell(self) -> tuple[Any, ...]:
        """The properties that two records of a job share if their repetitions are adjacent in time."""
        return (self.mode, self.cell_size) if self.mode else (self.world_size, self.batch_size)

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_bytes)

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.batch_size * self.accumulate

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.global_batch_size / self.timing.median_s

    @property
    def comm_off(self) -> Samples | None:
        """Steps with communication off, if there is communication and they were timed."""
        return self.no_comm if self.world_size > 1 else None

    @property
    def exposed_s(self) -> float:
        """Step time minus that of the same step with communication off; 0 if noise makes it negative."""
        return 0.0 if self.comm_off is None else max(0.0, _median_difference(self.timing, self.comm_off))

    @property
    def compute_s(self) -> float:
        """The step with communication off."""
        return (self.comm_off or self.timing).median_s

    @property
    def overhead(self) -> float:
        return self.exposed_s / (self.exposed_s + self.compute_s)

    @property
    def exposed_noise_s(self) -> float | None:
        """The half-width of the 95 % interval of exposed communication; None with too few ranks or repetitions."""
        if self.comm_off is None:
            return None
        ratio = compare_times(self.timing.reduced_s, self.comm_off.reduced_s)
        return None if ratio.noise is None else ratio.noise * self.comm_off.median_s

    @property
    def busy_s(self) -> float | None:
        return None if self.busy is None else self.busy.median_s

    @property
    def overlap(self) -> float | None:
        """1 - exposed / busy: the fraction of communication hidden behind backward."""
        return None if not self.busy_s else 1 - self.exposed_s / self.busy_s

    @property
    def busbw_bytes_per_s(self) -> float | None:
        if not self.busy_s or self.world_size == 1:
            return None
        return self.num_bytes / self.busy_s * bus_factor("all_reduce", self.world_size)

    def phase(self, name: str) -> Samples:
        """The samples of a phase or kind of steps; RecordError if they were not measured."""
        found: Samples | None = getattr(self, name)
        if found is None:
            raise RecordError(f"{self.place}: {name} was not measured")
        return found

    @property
    def turns_s(self) -> list[float]:
        return reduce_turns(self.timing.reduced_s, self.steps_per_turn)

    @property
    def gap_s(self) -> float:
        """The part of a marked step outside its phases: host work between them."""
        parts = [part for name in PHASES if (part := getattr(self, name)) is not None]
        rows = zip((self.marked or self.timing).seconds, *(part.seconds for part in parts), strict=True)
        gaps = [max(0.0, max(step) - max(sum(rank) for rank in zip(*rest, strict=True))) for step, *rest in rows]
        return float(statistics.median(gaps))

    @property
    def cost(self) -> Ratio:
        """Overhead of the phase markers: marked steps divided by plain steps of the same repetition."""
        return Ratio(1.0, 0.0) if self.marked is None else compare_times(self.marked.reduced_s, self.timing.reduced_s)


def compare_steps(record: StepRecord, reference: StepRecord) -> Ratio:
    """Step time divided by the reference's in the same repetition. The two are adjacent in time, so a slow period
    affects both."""
    if record is reference:
        return Ratio(1.0, 0.0)
    here, there = ((r.cell, r.job, r.timing.count) for r in (record, reference))
    if here != there:
        raise RecordError(f"{record.place} and {reference.place} were not interleaved: {here} and {there}")
    return compare_times(record.timing.reduced_s, reference.timing.reduced_s)


@dataclass(frozen=True)
class WrapperComparison:
    """A wrapper compared with torch's DDP, with tuned DDP and with the bare module on the same backend, and with DDP on
    gloo, the default without Paceline; None for those that were not measured."""

    record: StepRecord
    bare: StepRecord | None
    to_torch: Ratio | None
    to_tuned: Ratio | None
    to_bare: Ratio | None
    to_torch_on_gloo: Ratio | None

    @property
    def added_s(self) -> float | None:
        """Median overhead over the bare module's step of the same repetition."""
        return _median_difference(self.record.timing, self.bare.timing) if self.bare else None

    @property
    def host_us_per_parameter(self) -> float | None:
        """Host time per parameter that the wrapper adds. Known only on one CPU rank, if it exceeds the noise."""
        here, is_clear = self.record, self.to_bare is not None and self.to_bare.is_clear
        is_known = is_clear and (here.world_size, here.device) == (1, "cpu") and here.num_parameters
        return 1e6 * self.added_s / here.num_parameters if is_known and self.added_s is not None else None

    @property
    def added_bytes(self) -> int | None:
        """Peak memory beyond that of the bare module; None if it was not measured."""
        if self.bare is None or not self.record.held_bytes:
            return None
        here, there = self.record, self.bare
        return here.held_bytes + here.peak_step_bytes - there.held_bytes - there.peak_step_bytes


def compare_wrappers(records: Sequence[StepRecord]) -> list[WrapperComparison]:
    """Each record compared with its references, in the original order."""
    known = {(record.wrapper, record.backend, record.job, record.cell): record for record in records}
    comparisons = []
    for r in records:
        places = (("torch", r.backend), ("torch-tuned", r.backend), ("bare", r.backend), ("torch", "gloo"))
        others = [known.get((wrapper, backend, r.job, r.cell)) for wrapper, backend in places]
        ratios = [None if other is None else compare_steps(r, other) for other in others]
        comparisons.append(WrapperComparison(r, others[2], *ratios))
    return comparisons


@dataclass(frozen=True)
class ScalePoint:
    """A number of ranks compared with one rank without a wrapper, in the same cell. Weak-scaling efficiency is
    T(1)/T(n) at equal samples per rank; strong-scaling speed-up is T(1)/T(n) at equal samples over all ranks, and its
    efficiency is that divided by n. A point interleaved with a straggler `is_disturbed` and must not be used."""

    record: StepRecord
    alone: StepRecord
    ratio: Ratio  # T(1)/T(n), repetition by repetition
    is_disturbed: bool = False

    @property
    def share(self) -> int:
        """The number of ranks that share the work of a single rank."""
        return 1 if self.record.mode == "weak" else self.record.world_size

    @property
    def speedup(self) -> float:
        """Samples per second relative to one rank."""
        return self.ratio.value * (self.record.world_size // self.share)

    @property
    def efficiency(self) -> float:
        return self.speedup / self.record.world_size

    @property
    def efficiency_noise(self) -> float | None:
        """The half-width of the 95 % interval."""
        return None if self.ratio.noise is None else self.ratio.noise / self.share

    @property
    def slowdown(self) -> float:
        """The slowdown of a rank's compute by other ranks: its compute time divided by its part of T(1)."""
        return self.record.compute_s / (self.alone.timing.median_s / self.share)


def list_points(records: Sequence[StepRecord]) -> list[ScalePoint]:
    """Each record compared with the single rank of its cell, in the original order; omits cells without one."""
    alone = {(r.cell, r.job): r for r in records if r.world_size == 1 and r.wrapper == "none"}
    pairs = [(r, alone[r.cell, r.job]) for r in records if (r.cell, r.job) in alone]
    turns = attrgetter("cell", "job", "world_size", "source")
    disturbed = set(map(turns, filter(find_straggler, records)))
    return [ScalePoint(r, one, compare_steps(one, r), turns(r) in disturbed) for r, one in pairs]


def find_peak_of(record: StepRecord, collectives: Sequence[CollectiveRecord]) -> float | None:
    """The peak bus bandwidth of an all-reduce like that of the step, from its fastest repetition; None if either was
    not measured. MeasurementError "above-peak" if the step exceeds it: bytes or seconds were miscounted."""
    place, rates = attrgetter("backend", "world_size", "device", "source"), []
    for c in collectives:
        if c.collective == "all_reduce" and place(c) == place(record):
            times_s = [time_s for time_s in getattr(c.timing, "reduced_s", ()) if time_s > 0]
            rates.append(c.busbw_bytes_per_s * c.time_s / min(times_s, default=c.time_s))
    rate, peak = record.busbw_bytes_per_s, max(rates, default=None)
    if rate is None or peak is None:
        return None
    if rate > peak * (1 + 1e-9):  # margin for rounding: the two are computed differently
        found = f"{format_rate(rate)} GB/s ({record.num_bytes} bytes in {record.num_messages} messages)"
        limit = f"the peak of {format_rate(peak)} GB/s that an all-reduce alone reached"
        text = f"{record.place}: {found} is above {limit}: the bookkeeping is wrong; report a bug"
        raise MeasurementError(text, code="above-peak")
    return peak


@dataclass(frozen=True)
class Straggler:
    """A rank that is far slower than the others in most steps, because another process uses its core."""

    record: StepRecord
    rank: int
    share: float
    excess: float


def find_straggler(record: StepRecord) -> Straggler | None:
    """The rank that is by far the slowest in most steps without communication; None if that varies."""
    if record.comm_off is None or record.comm_off.num_ranks < 2:
        return None
    rows = record.comm_off.seconds
    slowest = [max(range(len(row)), key=row.__getitem__) for row in rows]
    rank = statistics.mode(slowest)
    share = slowest.count(rank) / len(rows)
    middles = [statistics.median(row[number] for row in rows) for number in range(len(rows[0]))]
    others = statistics.median(middle for number, middle in enumerate(middles) if number != rank)
    excess = middles[rank] / others - 1
    return Straggler(record, rank, share, excess) if share > 2 / 3 and excess > 0.1 else None


# -- traced steps of any data-parallel program -------------------------------------------------------------------------

# Messages that a backend transfers at the same time; 1 if unknown.
SERVERS = {"gloo": 2}


@dataclass(frozen=True)
class TracedMessage(Checked):
    """One all-reduce of gradients: launch, start of the transfer, and end, in seconds since backward began."""

    num_bytes: PositiveCount
    launch_s: float
    start_s: float
    done_s: float

    def find_faults(self) -> Iterator[str]:
        if not self.launch_s <= self.start_s <= self.done_s < math.inf:
            yield f"launched at {self.launch_s} s, started at {self.start_s} s and ended at {self.done_s} s"


RESENT = "gradients"


@dataclass(frozen=True)
class Stall(Checked):
    """Any other collective: its start in seconds since backward began, its duration, and the part of the duration in
    which the rank computed nothing. It is named after its operation; `RESENT` marks gradients that an earlier
    micro-batch of the step sent."""

    start_s: float
    took_s: Seconds
    blocked_s: Seconds
    name: str = ""


@dataclass(frozen=True)
class OperatorTime(Checked):
    name: str
    own_s: Seconds


@dataclass(frozen=True, kw_only=True)
class TracedStepRecord(Record):
    """One step of one rank. Its last backward begins after `before_s`, and the other times count from there. The rank's
    own backward ends at `backward_s`; the last message ends at `over_s`, and the step `after_s` later. `ready_s` and
    `gradient_bytes` list the gradients in ready order. `alone_s` are the backwards under `no_sync`, which send nothing.
    `launch_s` is the host time to launch a message; 0 if the device computes meanwhile. `are_sizes_known` is False
    if the trace has only the sizes of messages, not those of gradients. A step without messages sent nothing.
    `num_other` counts all-reduces inside backward that carried no gradients, and `stalls` are all other collectives.
    `data_s` and `forward_s` are parts of `before_s` (on a GPU, data only while it was idle), `optimizer_s` of
    `after_s`; 0 if they are unknown. `operators` are the longest ones.

    On a GPU, `idle_s` is its idle time without exposed communication. Kernels that overlapped messages took `beside_s`,
    against `without_s` for the same kernels without messages; only kernels that ran both ways in this step count."""

    kind: ClassVar[str] = "traced_step"
    rank: int
    world_size: int
    device: str
    backend: str
    host: str
    number: int
    before_s: Seconds
    backward_s: Seconds
    after_s: Seconds
    gradient_bytes: tuple[int, ...]
    ready_s: tuple[Seconds, ...]
    messages: tuple[TracedMessage, ...]
    alone_s: tuple[Seconds, ...] = ()
    launch_s: Seconds = 0.0
    are_sizes_known: bool = True
    num_other: int = 0
    data_s: Seconds = 0.0
    forward_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    stalls: tuple[Stall, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    idle_s: Seconds = 0.0
    beside_s: Seconds = 0.0
    without_s: Seconds = 0.0

    @property
    def place(self) -> str:
        return f"step {self.number} of rank {self.rank}"

    def find_faults(self) -> Iterator[str]:
        if len(self.ready_s) != len(self.gradient_bytes) or not self.ready_s or max(self.ready_s) > self.backward_s:
            yield "gradients outside of its backward"
        if not self.backward_s:
            yield "a backward of 0 s"

    @property
    def over_s(self) -> float:
        """When the last gradient was reduced."""
        return max([self.backward_s, *(message.done_s for message in self.messages)])

    @property
    def step_s(self) -> float:
        return self.before_s + self.over_s + self.after_s

    @property
    def exposed_s(self) -> float:
        """From the end of the rank's own backward to the end of the last message."""
        return self.over_s - self.backward_s

    @property
    def layout(self) -> tuple[int, ...]:
        return tuple(message.num_bytes for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class RankRecord(Record):
    """One rank of an attached program: its work outside timed steps, and its configuration. Each tuple has one value
    per timed step: seconds in full garbage collections (host time), in evaluation and in saving checkpoints, which step
    times exclude, and the elements of the step's batches. `cpu_share` (above 1 with several threads), `queued_share`
    (waiting for a core) and `throttled_share` (by a container's limits) are fractions of wall time. `padded_share` is
    the fraction of padding in the batches of recorded steps. `buffer_bytes` are broadcast in each forward.
    `delivered_share` is the fraction of data-loader time spent on transferring batches that were already complete. If
    the step time changed for good, only the steps since step `since` count, and earlier ones took `before_s`."""

    kind: ClassVar[str] = "rank"
    rank: int
    device: str
    host: str
    threads: PositiveCount
    cores: PositiveCount
    collected_s: tuple[Seconds, ...]
    evaluated_s: tuple[Seconds, ...]
    saved_s: tuple[Seconds, ...]
    elements: tuple[Count, ...]
    cpu_share: Seconds = 0.0
    queued_share: Seconds = 0.0
    throttled_share: Seconds = 0.0
    padded_share: Seconds = 0.0
    optimizer: str = ""
    is_fused: bool = False
    can_fuse: bool = False
    find_unused: bool = False
    has_unused: bool = False
    is_static: bool = False
    buffer_bytes: Count = 0
    are_buffers_constant: bool = False
    num_workers: Count = 0
    are_workers_persistent: bool = False
    delivered_share: Seconds = 0.0
    since: Count = 0
    before_s: Seconds = 0.0

    @property
    def place(self) -> str:
        return f"rank {self.rank}"
