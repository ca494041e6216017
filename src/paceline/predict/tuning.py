"""A tuning run as a whole: from its records to the recommended plan, the answer, and how right the prediction was.
Pure, so that a saved run gives the same answer again; measuring is in `measure.tuning`."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from paceline.errors import ConfigError, RecordError, refuse
from paceline.plan import Gradient, Plan, plan_like_torch
from paceline.predict.curves import CostCurve, median_noise
from paceline.predict.networks import AssumedFabric, find_network
from paceline.predict.predictor import Choice, Estimate, Evidence, Predictor
from paceline.predict.search import choose_caps
from paceline.records import LayerProfileRecord, Record, StepRecord
from paceline.records.samples import Ratio, compare_times
from paceline.units import MIB, format_bytes

RECOMMENDED = "recommended"
# A label and how to cut the job's gradients into buckets: a cap, a plan, or neither, which is the wrapper's default.
Candidate = tuple[str, int, Plan | None]


@dataclass(frozen=True)
class Effort:
    """How much is measured: caps of the job itself, rounds within a budget, and sizes of the messages that disturb."""

    num_caps: int
    min_rounds: int
    max_rounds: int
    budget_s: float
    confirm_s: float
    message_bytes: tuple[int, ...]


EFFORTS = {
    "full": Effort(8, 12, 60, 75.0, 30.0, (MIB // 16, MIB, 8 * MIB)),
    "quick": Effort(5, 8, 20, 20.0, 10.0, (MIB // 4, 4 * MIB)),
}


@dataclass(frozen=True)
class TuneSettings:
    """What a tuning is to do with a job. Without `caps_bytes` a range is chosen. `confirms` is whether the job itself
    is run at all. With a `network`, one rank sends to `network_ranks - 1` others that do not exist. `takes_lists`: the
    wrapper can be given a cap for each bucket."""

    wrapper: str = "paceline"
    effort: str = "full"
    caps_bytes: tuple[int, ...] = ()
    confirms: bool = True
    iters: int | None = None
    network: str | None = None
    network_ranks: int = 2
    takes_lists: bool = True

    @property
    def amount(self) -> Effort:
        return EFFORTS[self.effort]

    def build_curve(self) -> CostCurve | None:
        """What messages cost on the emulated network; None where they are measured."""
        if self.network is None:
            return None
        network = find_network(self.network)
        return AssumedFabric(network, network).build_curve(self.network_ranks)

    def check(self, ranks: int) -> None:
        """Refuse what cannot be tuned on this number of ranks."""
        if self.wrapper not in ("paceline", "torch"):
            raise ConfigError(f"--wrapper {self.wrapper} has no buckets to tune: use paceline or torch")
        what = f"--network {self.network} with --ranks {ranks} and {self.network_ranks} on the network"
        refuse(
            (self.network is None and ranks == 1,
             "one rank sends nothing: tune 2 or more, or give a --network to emulate"),
            (self.network is not None and (ranks != 1 or self.network_ranks < 2),
             f"{what}: one rank sends, to others that do not exist: use --ranks 1 and --network-ranks 2 or more"),
            code="ranks",
        )  # fmt: skip
        self.build_curve()
        refuse(
            (self.iters is not None and self.iters < 2, f"--iters {self.iters}: 2 or more, to know the noise"),
            (min(self.caps_bytes, default=1) < 1, f"--caps {self.caps_bytes}: at least 1 byte each"),
        )

    def to_json(self, gradients: Sequence[Gradient], default_plan: Plan) -> dict[str, Any]:
        """What a saved run needs, besides its records, to be judged again."""
        return {
            "tune": asdict(self) | {"caps_bytes": list(self.caps_bytes)},
            "gradients": [asdict(gradient) for gradient in gradients],
            "default_plan": json.loads(default_plan.to_json()),
        }


@dataclass(frozen=True)
class GridPoint:
    """One cap: what was predicted for it and, where the job was run, what it took."""

    cap_bytes: int
    estimate: Estimate
    plain_s: float
    measured: StepRecord | None = None

    @property
    def measured_s(self) -> float | None:
        return None if self.measured is None else self.measured.timing.median_s

    @property
    def best_s(self) -> float:
        """What is known best of its step: measured where it was, else predicted."""
        return self.estimate.step_s if self.measured_s is None else self.measured_s

    @property
    def error(self) -> float | None:
        return None if self.measured_s is None else self.estimate.step_s / self.measured_s - 1

    @property
    def exposed_s(self) -> float | None:
        """What communication added to the step."""
        return None if self.measured_s is None else self.measured_s - self.plain_s

    @property
    def same_layout(self) -> bool:
        """Whether the wrapper's buckets are the simulated ones."""
        simulated = tuple(bucket.num_bytes for bucket in self.estimate.step.buckets)
        return self.measured is None or self.measured.bucket_bytes == simulated


@dataclass(frozen=True)
class Tuning:
    """The predictor fitted to the records that may calibrate it, what it chose, and how right it was. `points` are a
    sweep of caps; `confirmed` has, by label, the steps of the plans that were run in turns."""

    settings: TuneSettings
    records: tuple[Record, ...]
    model: Predictor
    choice: Choice
    default_plan: Plan
    recommended_plan: Plan
    points: tuple[GridPoint, ...]
    confirmed: Mapping[str, StepRecord]

    @property
    def recommended(self) -> str:
        """The label of what was chosen."""
        return "default" if self.choice.is_default else RECOMMENDED

    @property
    def keeps_default(self) -> bool:
        """Whether the default is the answer: nothing better was predicted, or it did not prove better."""
        if self.gain is None:
            return self.choice.is_default or self.is_flat
        return not (self.gain.is_clear and self.gain.value < 1)

    @property
    def plan(self) -> Plan:
        """The answer."""
        return self.default_plan if self.keeps_default else self.recommended_plan

    @property
    def candidates(self) -> list[Candidate]:
        """What is confirmed in turns: the default, the recommended plan if it is another, and the best cap."""
        found: list[Candidate] = [("default", 0, None)]
        if not self.choice.is_default:
            found.append((RECOMMENDED, 0, self.recommended_plan))
        best = self.best_measured
        return found if best is None or best.measured is None else [*found, (best.measured.label, best.cap_bytes, None)]

    @property
    def measured(self) -> list[GridPoint]:
        return [point for point in self.points if point.measured is not None]

    @cached_property
    def scores(self) -> dict[str, float | None]:
        """How right the predictions were, as fractions; None where nothing was measured. `exposed_error` is the mean
        error over what communication adds on average, `exposed_step_error` over the step; `coverage` is the share of
        points in their intervals."""
        points = self.measured
        if not points:
            names = ("mape", "max_error", "exposed_error", "exposed_step_error", "coverage", "kendall_tau")
            return dict.fromkeys(names)
        pairs = [(point.estimate.step_s, point.best_s) for point in points]
        errors = [abs(point.error or 0.0) for point in points]
        added_s = sum(abs(point.exposed_s or 0.0) for point in points)
        wrong_s = sum(abs(point.estimate.exposed_s - (point.exposed_s or 0.0)) for point in points)
        return {
            "mape": statistics.fmean(errors),
            "max_error": max(errors),
            "exposed_error": wrong_s / added_s if added_s else None,
            "exposed_step_error": sum(abs(here - there) for here, there in pairs) / sum(there for _, there in pairs),
            "coverage": sum(p.estimate.low_s <= p.best_s <= p.estimate.high_s for p in points) / len(points),
            "kendall_tau": kendall_tau(pairs),
        }

    @property
    def noise(self) -> float:
        """The half-width of the 95 % interval of a median here."""
        noises = [median_noise(point.measured.timing) for point in self.points if point.measured is not None]
        return 1.96 * statistics.median(noises) if noises else 0.0

    @property
    def spread(self) -> float:
        """How much longer the slowest cap takes than the quickest."""
        times = [point.best_s for point in self.points]
        return max(times) / min(times) - 1

    @property
    def is_flat(self) -> bool:
        """Whether all caps cost the same within twice the noise."""
        widths = [(p.estimate.high_s - p.estimate.low_s) / 2 / p.estimate.step_s for p in self.points]
        return self.spread < 2 * (self.noise or statistics.median(widths))

    @property
    def best_predicted(self) -> GridPoint:
        return min(self.points, key=lambda point: point.estimate.step_s)

    @property
    def best_measured(self) -> GridPoint | None:
        return min(self.measured, key=lambda point: point.best_s, default=None)

    @property
    def regret(self) -> float | None:
        """The recommended plan's time over the best measured one's, minus 1; of those that were confirmed in turns."""
        if self.confirmed:
            times = {label: record.timing.median_s for label, record in self.confirmed.items()}
            return times[self.recommended] / min(times.values()) - 1
        best, chosen = self.best_measured, self.best_predicted
        return None if best is None or chosen.measured is None else chosen.best_s / best.best_s - 1

    @property
    def gain(self) -> Ratio | None:
        """The recommended plan over the default, step by step."""
        if self.recommended == "default" or "default" not in self.confirmed:
            return None
        mine, theirs = (self.confirmed[label].timing.reduced_s for label in (self.recommended, "default"))
        return compare_times(mine, theirs)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The rank correlation tau-b of two orders; None where either of them has but one value."""
    first, second = np.triu_indices(len(pairs), 1)
    values = np.reshape(pairs, (-1, 2))
    x, y = np.sign(values[first] - values[second]).T
    scale = math.sqrt(np.count_nonzero(x) * np.count_nonzero(y))
    return float((x * y).sum()) / scale if scale else None


def judge_tuning(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan
) -> Tuning:
    """Everything that follows from the records of a tuning; the predictor sees those that may calibrate it."""
    model = Predictor.fit(Evidence(records), settings.build_curve())
    default_cuts = model.cut_like(default_plan.bucket_bytes)
    choice, plan = model.choose(default_cuts, only_caps=not settings.takes_lists), default_plan
    if not choice.is_default:
        what = f"cap {format_bytes(choice.cap_bytes)}" if choice.cap_bytes else "free"
        plan = model.build_plan(gradients, choice.estimate.cuts, f"tuned: {what}")
        if settings.wrapper == "torch":
            plan.as_torch_kwargs()  # refuses what torch's rule cannot make, before anything is confirmed
    jobs = [record for record in records if isinstance(record, StepRecord) and record.role == "job"]
    grid: list[tuple[int, StepRecord | None]] = [(record.cap_bytes, record) for record in jobs if not record.note]
    if not grid:
        caps = settings.caps_bytes or choose_caps(model.job.sizes, settings.amount.num_caps)
        grid = [(cap, None) for cap in caps]
    points = tuple(GridPoint(cap, model.estimate(model.job.cut(cap)), model.plain_s, record) for cap, record in grid)
    confirmed = {record.label: record for record in jobs if record.note}
    recommended = confirmed.get(RECOMMENDED)
    if recommended is not None and recommended.bucket_bytes != plan.bucket_bytes:
        # Judged is what was recommended when it was confirmed, not what would be recommended today.
        estimate = model.estimate(model.cut_like(recommended.bucket_bytes))
        plan = model.build_plan(gradients, estimate.cuts, "tuned")
        choice = Choice(estimate, 0, False, 1 - estimate.step_s / model.estimate(default_cuts).step_s)
    elif recommended is None and confirmed:
        choice = replace(choice, is_default=True)
    return Tuning(settings, tuple(records), model, choice, default_plan, plan, points, confirmed)


def load_tuning(config: dict[str, Any], records: Sequence[Record], plan_text: str | None = None) -> Tuning:
    """The tuning of a saved run. `plan_text` is its plan.json, which runs of versions 1 and 2 need."""
    if "tune" in config:
        settings = TuneSettings(**config["tune"] | {"caps_bytes": tuple(config["tune"]["caps_bytes"])})
        gradients = tuple(Gradient(**gradient) for gradient in config["gradients"])
        return judge_tuning(settings, records, gradients, Plan.from_json(json.dumps(config["default_plan"])))
    if plan_text is None:
        raise RecordError("this tuning is of an older version and its plan.json is missing: it cannot be judged again")
    plan = Plan.from_json(plan_text)
    profile = next(record for record in records if isinstance(record, LayerProfileRecord))
    place = {gradient.name: index for index, gradient in enumerate(plan.gradients)}
    order = [place[parameter.name] for parameter in profile.parameters]
    default = plan_like_torch(plan.gradients, order, config["default_buckets"])
    ranks = config["network_ranks"] or 2
    settings = TuneSettings(config["wrapper"], network=config["network"], network_ranks=ranks)
    return judge_tuning(settings, records, plan.gradients, default)
