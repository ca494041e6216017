"""A tuning run as a whole: from its records to the recommended plan, the answer, and how right the prediction was.
Pure, so that a saved run gives the same answer again; measuring is in `measure.tuning`."""

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

from paceline.errors import ConfigError, refuse
from paceline.machine import canonical_backend
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
# As many plans are confirmed at most.
_MOST_CANDIDATES = 6
# Measured steps differ clearly if their paired ratios do, with this chance of an error on each side.
_CLEAR = 0.005


@dataclass(frozen=True)
class Candidate:
    """A plan of the race, and what is predicted for it. A wrapper is given its cap where `cap_bytes` is not 0, nothing
    where it is the default, else the plan; and the strategy."""

    label: str
    cap_bytes: int
    plan: Plan
    estimate: Estimate
    strategy: Strategy = DENSE


@dataclass(frozen=True)
class Effort:
    """How much is measured: caps of the job itself, rounds within a budget, seconds of the race, and sizes of the
    messages that disturb."""

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
    """What a tuning is to do with a job. Without `caps_bytes` a range is chosen. `confirms` is whether the job itself
    is run at all, and `race_s` how long plans race at most (by default as the effort says). With a `network`, one rank
    sends to `network_ranks - 1` others that do not exist. `takes_lists`: the wrapper can be given a cap for each
    bucket. With `strategies` those of them race, too, that are sent in every step; of `all`, the best."""

    wrapper: str = "paceline"
    effort: str = "full"
    caps_bytes: tuple[int, ...] = ()
    confirms: bool = True
    iters: int | None = None
    network: str | None = None
    network_ranks: int = 2
    takes_lists: bool = True
    race_s: float | None = None
    strategies: tuple[str, ...] = ()

    @property
    def amount(self) -> Effort:
        return EFFORTS[self.effort]

    def build_curve(self) -> CostCurve | None:
        """What messages cost on the emulated network; None where they are measured."""
        if self.network is None:
            return None
        network = find_network(self.network).as_written
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
        refuse(
            (self.strategies and self.wrapper != "paceline",
             f"--strategy races in --wrapper paceline, not {self.wrapper}"),
            (self.strategies and self.network is not None,
             f"--strategy with --network {self.network}: codecs need ranks; use `paceline predict --strategy` for it"),
            (any("hosts" in one.split("+") for one in self.strategies),
             "--strategy with +hosts: messages inside a host and between hosts look alike here; use `paceline "
             "predict --strategy` with --ranks-per-node"),
            code="strategy",
        )  # fmt: skip
        self.build_curve()
        refuse(
            (self.iters is not None and self.iters < 2, f"--iters {self.iters}: 2 or more, to know the noise"),
            (min(self.caps_bytes, default=1) < 1, f"--caps {self.caps_bytes}: at least 1 byte each"),
            (self.race_s is not None and not 0 < self.race_s < math.inf, f"--budget {self.race_s}: above 0 seconds"),
        )

    def to_json(
        self, gradients: Sequence[Gradient], default_plan: Plan, predictions: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """What a saved run needs, besides its records, to be judged again."""
        return {
            "predictions": list(predictions),
            "tune": asdict(self) | {"caps_bytes": list(self.caps_bytes), "strategies": list(self.strategies)},
            "gradients": [asdict(gradient) for gradient in gradients],
            "default_plan": json.loads(default_plan.to_json()),
        }


@dataclass(frozen=True)
class Judged:
    """What was predicted for one plan, and what it took. `turns_s` are its steps in turns with the other plans."""

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    turns_s: Sequence[float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def score_predictions(points: Sequence[Judged]) -> dict[str, float]:
    """How right predictions were, as fractions: `coverage` is the share of steps in their 90 % intervals, `width` the
    median half-width of these."""
    errors = [abs(point.error) for point in points]
    return {
        "mape": statistics.fmean(errors),
        "max_error": max(errors),
        "coverage": statistics.fmean(point.low_s <= point.measured_s <= point.high_s for point in points),
        "width": statistics.median((point.high_s - point.low_s) / 2 / point.predicted_s for point in points),
    }


@dataclass(frozen=True)
class Differences:
    """How right predictions are about the differences between the plans of a case. `r2` is 1 - sum (p - m)^2 / sum m^2:
    m is a measured step minus the mean of its case, p the same of the predicted ones, both over the measured mean. Of
    `num_pairs` pairs of plans that differ clearly as measured, `num_right` are predicted in that order."""

    r2: float | None
    num_pairs: int
    num_right: int


def score_differences(cases: Sequence[Sequence[Judged]]) -> Differences:
    """Over all cases; each has plans that took turns in one run."""
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
    sweep of caps. `candidates` are the plans of the race, the default first; `race` is None where they did not run. It
    is of those that leave the update as it is; `whole` is of all, with strategies that do not. `predicted` has what is
    predicted for every strategy, with its best cap, in the order of `prefer`."""

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
        """The plans of the race that change the update: each with its step over the default's, and over bf16's."""
        if self.whole is None:
            return []
        others = [candidate for candidate in self.candidates if not candidate.strategy.is_exact]
        return [(c, self.whole.to_default[c.label], self.whole.ratios[c.label, BF16.text]) for c in others]

    @property
    def notes(self) -> list[str]:
        """What is assumed of strategies, and which did not run."""
        strategies = [Strategy.parse(text) for text in self.predicted]
        codecs = [record for record in self.records if isinstance(record, CodecRecord)]
        ran = {candidate.strategy.text for candidate in self.candidates}
        lines = [f"assumed: {line}" for line in describe_strategies(self.model.job, strategies, codecs)]
        if left := [one.text for one in strategies if not one.is_hook and one.text not in ran]:
            why = "a turn of the race is a few steps, not a period, and a sharded optimizer is not the job's own"
            lines.append(f"predicted and not run: {', '.join(left)}; {why}")
        return lines

    @property
    def verdict(self) -> str:
        """One of `race.VERDICTS`; where no plan ran, it is predicted."""
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
        """The largest cap that makes these buckets; 0 where none does."""
        return enumerate_caps(self.model.job.sizes).get(candidate.estimate.cuts, (0, 0))[1]

    def estimate_more_s(self) -> float:
        """How long the rounds would take that may decide the race."""
        if self.race is None:
            return 0.0
        labels = [c.label for c in self.candidates if c.label in (*self.race.left, DEFAULT)]
        running = [self.confirmed[label] for label in labels]
        return self.race.rounds_to_decide * sum(record.steps_per_turn * record.timing.median_s for record in running)

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """What is predicted for every plan that will run, for the record."""
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
        """The bucket sizes of the sweep that ran."""
        return [
            Judged(p.estimate.step_s, p.estimate.low_s, p.estimate.high_s, p.best_s, p.measured.turns_s)
            for p in self.points
            if p.measured is not None
        ]

    @cached_property
    def scores(self) -> dict[str, float | None]:
        """How right the predictions were, as fractions; None where nothing was measured. `exposed_error` is the mean
        error over what communication adds on average, `exposed_step_error` over the step; `coverage` is the share of
        points in their intervals, `width` the median half-width of these."""
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
        """The half-width of the 95 % interval of a median of the sweep."""
        noises = [median_noise(point.measured.timing) for point in self.points if point.measured is not None]
        return 1.96 * statistics.median(noises) if noises else 0.0

    @property
    def spread(self) -> float:
        """How much longer the slowest cap takes than the quickest."""
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
    """The file that is written before the race begins."""
    document = {"unix_s": time.time(), "sha256": hash_predictions(predictions), "predictions": predictions}
    return json.dumps(document, indent=1) + "\n"


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The rank correlation tau-b of two orders; None where either of them has but one value."""
    first, second = np.triu_indices(len(pairs), 1)
    values = np.reshape(pairs, (-1, 2))
    x, y = np.sign(values[first] - values[second]).T
    scale = math.sqrt(np.count_nonzero(x) * np.count_nonzero(y))
    return float((x * y).sum()) / scale if scale else None


def judge_tuning(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan,
    predictions: Sequence[Mapping[str, Any]] = (),
) -> Tuning:  # fmt: skip
    """Everything that follows from the records of a tuning; the predictor sees those that may calibrate it. Where plans
    raced, `predictions` say where each was cut: that does not follow from its bytes where dtypes are mixed."""
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
    if ran:  # judged is what ran, not what would be chosen today
        known, others = {one["label"]: one for one in predictions}, []
        for record in (record for record in ran if record.label != DEFAULT):
            found = known.get(record.label, {})
            strategy = Strategy.parse(found.get("strategy"))
            cuts = found.get("cuts") or model.cut_like(record.bucket_bytes)
            estimate = models.get(strategy.text, model).estimate(cuts)
            others.append(build(record.label, record.cap_bytes, estimate, strategy))
    elif strategies:  # bfloat16, and those that change more: all that are named, or the best
        others = [build(RECOMMENDED, 0, choice.estimate)]
        lossy = [one for one in strategies if describe_update(one) == "lossy"]
        lossy.sort(key=lambda one: predicted[one.text].step_s)
        chosen = lossy[:1] if settings.strategies == EVERY else lossy
        others += [build(one.text, 0, predicted[one.text], one) for one in (BF16, *chosen)]
    else:
        others = [build(RECOMMENDED, 0, choice.estimate)]
        # The best of the sweep, and all that may be as good as the best by what is predicted.
        best = min((point for point in points if point.measured is not None), key=lambda p: p.best_s, default=None)
        may_win = (point for point in points if point.estimate.low_s < choice.estimate.high_s)
        for point in [*filter(None, [best]), *sorted(may_win, key=lambda point: point.estimate.step_s)]:
            others.append(build(f"cap {format_bytes(point.cap_bytes)}", point.cap_bytes, point.estimate))
    confirmed, unique = {record.label: record for record in ran}, dict[tuple[str, tuple[int, ...]], Candidate]()
    for candidate in (default, *others):  # a plan with the buckets of another one is that one
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
    """The predictor of the same job with another strategy."""
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
