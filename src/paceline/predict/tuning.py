"""One tuning run: turns its records into the recommended plan, the answer, and the accuracy of the prediction.

Pure, so a saved run always gives the same answer; the measurements are taken in `measure.tuning`.
"""

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from paceline.errors import refuse
from paceline.machine import canonical_backend
from paceline.options import check_options, option
from paceline.plan import Gradient, Plan, cut_like
from paceline.predict.curves import CostCurve, Resample, median_noise
from paceline.predict.job import Job
from paceline.predict.networks import AssumedFabric, find_network
from paceline.predict.predictor import Choice, Estimate, Evidence, Predictor
from paceline.predict.race import Interval, Race, estimate_ratio, judge_race
from paceline.predict.search import PLATEAU, choose_caps, enumerate_caps
from paceline.predict.simulate import MachineCosts
from paceline.predict.strategy_costs import (
    BF16,
    EVERY,
    describe_strategies,
    describe_update,
    find_codec,
    fit_factor,
    fit_sending,
    list_strategies,
)
from paceline.records import CodecRecord, Record, StepRecord
from paceline.strategy import DENSE, Strategy
from paceline.units import MIB, format_bytes

DEFAULT, RECOMMENDED, PREDICTIONS = "default", "recommended", "predictions.json"
# Maximum number of plans to confirm.
_MOST_CANDIDATES = 6
# Two measured steps differ clearly if the interval of their paired ratios excludes 1, with this error probability on
# each side.
_CLEAR = 0.005


@dataclass(frozen=True)
class Candidate:
    """One compared plan and its prediction. A wrapper gets its cap if `cap_bytes` is not 0, no arguments if it is the
    default, and otherwise the plan; and always the strategy."""

    label: str
    cap_bytes: int
    plan: Plan
    estimate: Estimate
    strategy: Strategy = DENSE


@dataclass(frozen=True)
class Effort:
    """Measurement effort: caps to run the job with, rounds within a time budget, seconds for the comparison, and sizes
    of the messages used to measure contention."""

    num_caps: int
    min_rounds: int
    max_rounds: int
    budget_s: float
    confirm_s: float
    message_bytes: tuple[int, ...]


EFFORTS = {
    "full": Effort(8, 12, 60, 75.0, 60.0, (MIB // 16, MIB, 8 * MIB)),
    "quick": Effort(5, 8, 20, 20.0, 30.0, (MIB // 4, 4 * MIB)),
}


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a tuning. Without `caps_bytes` a range is chosen. `confirms` says whether to run the job itself, and
    `race_s` limits the time of the plan comparison (by default the effort does). With a `network`, one rank sends to
    `network_ranks - 1` ranks that do not exist. `takes_lists` says whether the wrapper accepts one cap per bucket. With
    `strategies`, those that communicate in every step are compared as well; with `all`, only the best of them."""

    wrapper: str = option("paceline", choices=("paceline", "torch"))
    effort: str = option("full", choices=EFFORTS)
    caps_bytes: tuple[int, ...] = ()
    confirms: bool = True
    iters: int | None = option(None, least=2, each_s=1e-6, advice=", to estimate the noise")
    network: str | None = None
    network_ranks: int = 2
    takes_lists: bool = True
    race_s: float | None = option(None, above=0)
    strategies: tuple[str, ...] = ()

    @property
    def amount(self) -> Effort:
        return EFFORTS[self.effort]

    def build_curve(self) -> CostCurve | None:
        """The cost curve of the emulated network; None if costs are measured."""
        if self.network is None:
            return None
        network = find_network(self.network).as_written
        return AssumedFabric(network, network).build_curve(self.network_ranks)

    def check(self, ranks: int) -> None:
        """Raise ConfigError if this number of ranks cannot be tuned."""
        check_options(self)
        what = f"--network {self.network} with --ranks {ranks} and {self.network_ranks} on the network"
        refuse(
            (self.network is None and ranks == 1,
             "one rank sends nothing: tune 2 or more ranks, or emulate a --network"),
            (self.network is not None and (ranks != 1 or self.network_ranks < 2),
             f"{what}: an emulated network has one real rank: use --ranks 1 and --network-ranks 2 or more"),
            code="ranks",
        )  # fmt: skip
        refuse(
            (self.strategies and self.wrapper != "paceline",
             f"--strategy needs --wrapper paceline, not {self.wrapper}"),
            (self.strategies and self.network is not None,
             f"--strategy with --network {self.network}: codecs need real ranks; use `paceline predict --strategy`"),
            (any("hosts" in one.split("+") for one in self.strategies),
             "--strategy with +hosts: tuning cannot tell messages inside a host from those between hosts; use "
             "`paceline predict --strategy` with --ranks-per-node"),
            code="strategy",
        )  # fmt: skip
        self.build_curve()
        refuse((min(self.caps_bytes, default=1) < 1, f"--caps {self.caps_bytes}: use at least 1 byte each"))

    def to_json(
        self, gradients: Sequence[Gradient], default_plan: Plan, predictions: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """What is needed besides the records to analyse a saved run again."""
        return {
            "predictions": list(predictions),
            "tune": asdict(self) | {"caps_bytes": list(self.caps_bytes), "strategies": list(self.strategies)},
            "gradients": [asdict(gradient) for gradient in gradients],
            "default_plan": json.loads(default_plan.to_json()),
        }


@dataclass(frozen=True)
class Judged:
    """The prediction for one plan and its measured time. `turns_s` are its step times, interleaved with the other
    plans."""

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    turns_s: Sequence[float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def score_predictions(points: Sequence[Judged]) -> dict[str, float]:
    """Prediction accuracy, as fractions: `coverage` is the share of measured steps inside their 90 % intervals, `width`
    is the median half-width of those intervals."""
    errors = [abs(point.error) for point in points]
    return {
        "mape": statistics.fmean(errors),
        "max_error": max(errors),
        "coverage": statistics.fmean(point.low_s <= point.measured_s <= point.high_s for point in points),
        "width": statistics.median((point.high_s - point.low_s) / 2 / point.predicted_s for point in points),
    }


@dataclass(frozen=True)
class Differences:
    """Accuracy of the predicted differences between the plans of a case. `r2` is 1 - sum (p - m)^2 / sum m^2, where m
    is a measured step minus the mean of its case, p is the same for the predicted step, and both are divided by the
    measured mean. `num_pairs` pairs of plans clearly differ as measured; `num_right` of them are predicted in that
    order."""

    r2: float | None
    num_pairs: int
    num_right: int


def score_differences(cases: Sequence[Sequence[Judged]]) -> Differences:
    """Score all cases; the plans of each case were interleaved in one run."""
    wrong = total = 0.0
    num_pairs = num_right = 0
    for points in cases:
        measured, predicted = np.array([(point.measured_s, point.predicted_s) for point in points]).T
        here, there = measured - measured.mean(), predicted - predicted.mean()
        wrong += float(((there - here) ** 2).sum() / measured.mean() ** 2)
        total += float((here**2).sum() / measured.mean() ** 2)
        for one, other in itertools.combinations(points, 2):
            if (ratio := estimate_ratio(one.turns_s, other.turns_s, _CLEAR)).is_clear:
                num_pairs += 1
                num_right += (one.predicted_s < other.predicted_s) == (ratio.high < 1)
    return Differences(1 - wrong / total if total else None, num_pairs, num_right)


@dataclass(frozen=True)
class GridPoint:
    """One cap: its prediction and, if the job was run with it, its measurement."""

    cap_bytes: int
    estimate: Estimate
    plain_s: float
    measured: StepRecord | None = None

    @property
    def measured_s(self) -> float | None:
        return None if self.measured is None else self.measured.timing.median_s

    @property
    def best_s(self) -> float:
        """The best estimate of the step time: measured if available, otherwise predicted."""
        return self.estimate.step_s if self.measured_s is None else self.measured_s

    @property
    def error(self) -> float | None:
        return None if self.measured_s is None else self.estimate.step_s / self.measured_s - 1

    @property
    def exposed_s(self) -> float | None:
        """Measured exposed communication."""
        return None if self.measured_s is None else self.measured_s - self.plain_s

    @property
    def same_layout(self) -> bool:
        """Whether the wrapper used the same buckets as the simulation."""
        simulated = tuple(bucket.num_bytes for bucket in self.estimate.step.buckets)
        return self.measured is None or self.measured.bucket_bytes == simulated


@dataclass(frozen=True)
class Tuning:
    """The predictor fitted to the calibration records, its choice, and its accuracy. `points` are a sweep of caps.
    `candidates` are the compared plans, the default first. `race` compares those that leave the update unchanged and is
    None if none was run; `whole` also includes the strategies that change the update. `predicted` has the prediction
    for every strategy at its best cap, in the order of `list_strategies`."""

    settings: TuneSettings
    records: tuple[Record, ...]
    model: Predictor
    choice: Choice
    points: tuple[GridPoint, ...]
    candidates: tuple[Candidate, ...]
    confirmed: Mapping[str, StepRecord]
    race: Race | None
    whole: Race | None = None
    predicted: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def offers(self) -> list[tuple[Candidate, Interval, Interval]]:
        """The compared plans that change the update, each with its step time relative to the default and to bf16."""
        if self.whole is None:
            return []
        others = [candidate for candidate in self.candidates if not candidate.strategy.is_exact]
        return [(c, self.whole.to_default[c.label], self.whole.ratios[c.label, BF16.text]) for c in others]

    @property
    def notes(self) -> list[str]:
        """Assumptions about strategies, and the strategies that were not run."""
        strategies = [Strategy.parse(text) for text in self.predicted]
        codecs = [record for record in self.records if isinstance(record, CodecRecord)]
        ran = {candidate.strategy.text for candidate in self.candidates}
        lines = [f"assumed: {line}" for line in describe_strategies(self.model.job, strategies, codecs)]
        if left := [one.text for one in strategies if not one.is_hook and one.text not in ran]:
            why = "a turn is shorter than a synchronization period, and the job has no sharded optimizer"
            lines.append(f"predicted and not run: {', '.join(left)}; {why}")
        return lines

    @property
    def verdict(self) -> str:
        """One of `race.VERDICTS`; predicted if no plan was run."""
        if self.race is not None:
            return self.race.verdict
        if self.choice.is_clear and any(candidate.label == RECOMMENDED for candidate in self.candidates):
            return "use"
        exact = (c.estimate for c in self.candidates if c.strategy.is_exact)
        estimates = [*exact, *(point.estimate for point in self.points)]
        ratios = [estimate.step_s / self.choice.default.step_s for estimate in estimates]
        return "flat" if min(ratios) >= 1 - PLATEAU and max(ratios) <= 1 + PLATEAU else "default"

    @property
    def answer(self) -> Candidate:
        """The plan to use."""
        label = RECOMMENDED if self.verdict == "use" else DEFAULT
        label = label if self.race is None else self.race.winner
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def find_cap(self, candidate: Candidate) -> int:
        """The largest cap that produces these buckets, or 0 if none does."""
        return enumerate_caps(self.model.job.sizes).get(candidate.estimate.cuts, (0, 0))[1]

    def estimate_more_s(self) -> float:
        """Estimated time of the further rounds that would decide the comparison."""
        if self.race is None:
            return 0.0
        labels = [c.label for c in self.candidates if c.label in (*self.race.left, DEFAULT)]
        running = [self.confirmed[label] for label in labels]
        return self.race.rounds_to_decide * sum(record.steps_per_turn * record.timing.median_s for record in running)

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """The prediction for every plan that will be run, to save before the comparison."""
        return [
            {"label": c.label, "cap_bytes": c.cap_bytes, "bucket_bytes": list(c.plan.bucket_bytes),
             "cuts": list(c.estimate.cuts), "step_s": c.estimate.step_s, "low_s": c.estimate.low_s,
             "high_s": c.estimate.high_s, "strategy": c.strategy.text}
            for c in self.candidates
        ]  # fmt: skip

    @property
    def measured(self) -> list[GridPoint]:
        return [point for point in self.points if point.measured is not None]

    @property
    def judged(self) -> list[Judged]:
        """The bucket sizes of the sweep that were run."""
        return [
            Judged(p.estimate.step_s, p.estimate.low_s, p.estimate.high_s, p.best_s, p.measured.turns_s)
            for p in self.points
            if p.measured is not None
        ]

    @cached_property
    def scores(self) -> dict[str, float | None]:
        """Prediction accuracy, as fractions; None if nothing was measured. `exposed_error` is the mean error relative
        to the mean exposed communication, and `exposed_step_error` relative to the step; `coverage` is the share of
        points inside their intervals, `width` is the median half-width of the intervals."""
        points = self.measured
        if not points:
            names = ("mape", "max_error", "exposed_error", "exposed_step_error", "coverage", "width", "kendall_tau")
            return dict.fromkeys(names)
        pairs = [(point.estimate.step_s, point.best_s) for point in points]
        added_s = sum(abs(point.exposed_s or 0.0) for point in points)
        wrong_s = sum(abs(point.estimate.exposed_s - (point.exposed_s or 0.0)) for point in points)
        return {
            **score_predictions(self.judged),
            "exposed_error": wrong_s / added_s if added_s else None,
            "exposed_step_error": sum(abs(here - there) for here, there in pairs) / sum(there for _, there in pairs),
            "kendall_tau": kendall_tau(pairs),
        }

    @property
    def noise(self) -> float:
        """The median half-width of the 95 % interval of a measured median in the sweep."""
        noises = [median_noise(point.measured.timing) for point in self.points if point.measured is not None]
        return 1.96 * statistics.median(noises) if noises else 0.0

    @property
    def spread(self) -> float:
        """How much longer the slowest cap takes than the fastest."""
        times = [point.best_s for point in self.points]
        return max(times) / min(times) - 1

    @property
    def best_predicted(self) -> GridPoint:
        return min(self.points, key=lambda point: point.estimate.step_s)

    @property
    def best_measured(self) -> GridPoint | None:
        return min(self.measured, key=lambda point: point.best_s, default=None)


def hash_predictions(predictions: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(predictions, sort_keys=True).encode()).hexdigest()


def render_predictions(predictions: Sequence[Mapping[str, Any]]) -> str:
    """The contents of the file that is saved before the comparison begins."""
    document = {"unix_s": time.time(), "sha256": hash_predictions(predictions), "predictions": predictions}
    return json.dumps(document, indent=1) + "\n"


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's rank correlation tau-b; None if either variable has only one value."""
    first, second = np.triu_indices(len(pairs), 1)
    values = np.reshape(pairs, (-1, 2))
    x, y = np.sign(values[first] - values[second]).T
    scale = math.sqrt(np.count_nonzero(x) * np.count_nonzero(y))
    return float((x * y).sum()) / scale if scale else None


def judge_tuning(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan,
    predictions: Sequence[Mapping[str, Any]] = (),
) -> Tuning:  # fmt: skip
    """Derive a tuning from its records; the predictor uses only the calibration records. If plans were run,
    `predictions` gives the cuts of each, which cannot be recovered from its bucket sizes when dtypes are mixed."""
    model = Predictor.fit(Evidence(records), settings.build_curve())
    choice = model.choose(model.cut_like(default_plan.bucket_bytes), only_caps=not settings.takes_lists)
    jobs = [record for record in records if isinstance(record, StepRecord) and record.role == "job"]
    grid: list[tuple[int, StepRecord | None]] = [(record.cap_bytes, record) for record in jobs if not record.note]
    if not grid:
        caps = settings.caps_bytes or choose_caps(model.job.sizes, settings.amount.num_caps)
        grid = [(cap, None) for cap in caps]
    points = tuple(GridPoint(cap, model.estimate(model.job.cut(cap)), model.plain_s, record) for cap, record in grid)

    def build(label: str, cap_bytes: int, estimate: Estimate, strategy: Strategy = DENSE) -> Candidate:
        what = f"cap {format_bytes(cap_bytes)}" if cap_bytes else "free"
        sender = model if strategy == DENSE else models.get(strategy.text, model)
        plan = sender.build_plan(gradients, estimate.cuts, f"tuned: {what}")
        return Candidate(label, cap_bytes, plan, estimate, strategy)

    default = Candidate(DEFAULT, 0, default_plan, choice.default)
    ran = [record for record in jobs if record.note]
    strategies = list_strategies(settings.strategies) if settings.strategies else ()
    models, sizes = {one.text: _send_by(model, one, records) for one in strategies}, default_plan.bucket_bytes
    predicted = {
        text: choice.estimate if text == DENSE.text else one.choose(one.cut_like(sizes), only_caps=True).estimate
        for text, one in models.items()
    }
    if ran:  # report the plans that ran, not those that would be chosen today
        known, others = {one["label"]: one for one in predictions}, []
        for record in (record for record in ran if record.label != DEFAULT):
            found = known.get(record.label, {})
            strategy = Strategy.parse(found.get("strategy"))
            cuts = found.get("cuts") or model.cut_like(record.bucket_bytes)
            estimate = models.get(strategy.text, model).estimate(cuts)
            others.append(build(record.label, record.cap_bytes, estimate, strategy))
    elif strategies:  # bf16 and the lossy strategies: all that are named, or the best one
        others = [build(RECOMMENDED, 0, choice.estimate)]
        lossy = [one for one in strategies if describe_update(one) == "lossy"]
        lossy.sort(key=lambda one: predicted[one.text].step_s)
        chosen = lossy[:1] if settings.strategies == EVERY else lossy
        others += [build(one.text, 0, predicted[one.text], one) for one in (BF16, *chosen)]
    else:
        others = [build(RECOMMENDED, 0, choice.estimate)]
        # The best of the sweep, and every plan whose prediction may be as good as the best.
        best = min((point for point in points if point.measured is not None), key=lambda p: p.best_s, default=None)
        may_win = (point for point in points if point.estimate.low_s < choice.estimate.high_s)
        for point in [*filter(None, [best]), *sorted(may_win, key=lambda point: point.estimate.step_s)]:
            others.append(build(f"cap {format_bytes(point.cap_bytes)}", point.cap_bytes, point.estimate))
    confirmed, unique = {record.label: record for record in ran}, dict[tuple[str, tuple[int, ...]], Candidate]()
    for candidate in (default, *others):  # plans with the same buckets count once
        measured = confirmed.get(candidate.label)
        found_sizes = candidate.plan.bucket_bytes if measured is None else measured.bucket_bytes
        unique.setdefault((candidate.strategy.text, found_sizes), candidate)
    kept = [c for c in unique.values() if ran or c is default or settings.wrapper != "torch" or c.plan.fits_torch]
    kept = kept if ran or strategies else kept[:_MOST_CANDIDATES]
    race = whole = None
    if DEFAULT in confirmed:
        turns_s = {c.label: confirmed[c.label].turns_s for c in kept if c.strategy.is_exact}
        race = judge_race(turns_s, DEFAULT, model.limit_gain(choice.default.cuts))
        whole = judge_race({c.label: confirmed[c.label].turns_s for c in kept}, DEFAULT) if strategies else None
    return Tuning(settings, tuple(records), model, choice, points, tuple(kept), confirmed, race, whole, predicted)


def _send_by(model: Predictor, strategy: Strategy, records: Sequence[Record]) -> Predictor:
    """The predictor for the same job with another strategy."""
    plain = next(record for record in records if isinstance(record, StepRecord) and record.role == "plain")
    codecs = [record for record in records if isinstance(record, CodecRecord)]
    is_shared, name = canonical_backend(plain.backend) == "shm", find_codec(codecs, strategy)
    coded = [r for r in records if isinstance(r, StepRecord) and r.role == "coded"]
    taken = next((r for r in coded if find_codec(codecs, Strategy.parse(r.label)) == name), None)

    def change(job: Job, costs: MachineCosts, resample: Resample) -> MachineCosts:
        def send(one: Strategy) -> MachineCosts:
            sending = fit_sending(one, plain.world_size, codecs, resample, is_in_place=is_shared)
            return replace(costs, sending=sending)

        found = send(strategy)
        if taken is None or found.sending is None:
            return found
        step_s, cuts = resample.median(taken.timing), cut_like(job.totals, taken.bucket_bytes)
        factor = fit_factor(job, cuts, send(Strategy.parse(taken.label)), step_s)
        return replace(found, sending=found.sending.scale(factor))

    return model.change(change)


def load_tuning(config: dict[str, Any], records: Sequence[Record]) -> Tuning:
    """The tuning of a saved run."""
    lists = {name: tuple(config["tune"][name]) for name in ("caps_bytes", "strategies")}
    settings = TuneSettings(**config["tune"] | lists)
    gradients = tuple(Gradient(**g | {"shape": tuple(g["shape"])}) for g in config["gradients"])
    default_plan = Plan.from_json(json.dumps(config["default_plan"]))
    return judge_tuning(settings, records, gradients, default_plan, config["predictions"])
