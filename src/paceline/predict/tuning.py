"""Turns the records of one tuning run into the recommended plan, the answer, and the accuracy of the prediction.

This module is pure, so a saved run always gives the same answer. `measure.plan_bench` takes the measurements.
"""

import hashlib
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
from paceline.predict.predictor import Choice, Evidence, Prediction, Predictor
from paceline.predict.race import Interval, Race, judge_race
from paceline.predict.search import PLATEAU, choose_caps, enumerate_caps
from paceline.predict.sending import Sending
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
from paceline.records.checked import decode
from paceline.strategy import DENSE, Strategy
from paceline.units import MIB, format_bytes

DEFAULT, RECOMMENDED, PREDICTIONS = "default", "recommended", "predictions.json"
# Maximum number of plans to confirm.
_MOST_CANDIDATES = 6


@dataclass(frozen=True)
class Effort:
    """Caps to run the job with, rounds within a budget, seconds for the comparison, and messages for contention."""

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
    """Settings of a tuning run. Without `caps_bytes`, a range is chosen. `confirms` is whether to run the job itself,
    and `race_s` limits the time of the plan comparison (by default the effort does). With a `network`, one rank sends
    to `network_ranks - 1` emulated ranks. `takes_lists` is whether the wrapper accepts one cap per bucket. `strategies`
    that communicate in every step are compared as well; with `all`, only the best of them."""

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
        check_options(self)
        emulated = self.network is not None
        what = f"--network {self.network} with --ranks {ranks} and --network-ranks {self.network_ranks}"
        refuse(
            (not emulated and ranks == 1, "one rank sends nothing: tune 2 or more ranks, or emulate a --network"),
            (emulated and ranks != 1, f"{what}: an emulated network has one real rank: use --ranks 1"),
            (emulated and self.network_ranks < 2, f"{what}: use --network-ranks 2 or more"),
            code="ranks",
        )
        instead = "use `paceline predict --strategy`"
        is_ours = self.wrapper == "paceline"
        has_hosts = any("hosts" in one.split("+") for one in self.strategies)
        refuse(
            (self.strategies and not is_ours, f"--strategy needs --wrapper paceline, not {self.wrapper}"),
            (self.strategies and emulated, f"--strategy with --network: codecs need real ranks; {instead}"),
            (has_hosts, f"--strategy with +hosts: tuning has one level of messages; {instead} with --ranks-per-node"),
            code="strategy",
        )
        self.build_curve()
        refuse((min(self.caps_bytes, default=1) < 1, f"--caps {self.caps_bytes}: use at least 1 byte each"))

    def to_json(
        self, gradients: Sequence[Gradient], default_plan: Plan, predictions: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """The data that analyzing a saved run again requires in addition to its records."""
        return {
            "predictions": list(predictions),
            "tune": asdict(self) | {"caps_bytes": list(self.caps_bytes), "strategies": list(self.strategies)},
            "gradients": [asdict(gradient) for gradient in gradients],
            "default_plan": json.loads(default_plan.to_json()),
        }


def score_predictions(points: Sequence[Prediction]) -> dict[str, float]:
    """Accuracy, as fractions: `coverage` of measured steps by 90 % intervals, and their median half-width `width`."""
    errors = [abs(point.error or 0.0) for point in points]
    return {
        "mape": statistics.fmean(errors),
        "max_error": max(errors),
        "coverage": statistics.fmean(bool(point.is_covered) for point in points),
        "width": statistics.median((point.high_s - point.low_s) / 2 / point.step_s for point in points),
    }


@dataclass(frozen=True)
class Tuning:
    """The predictor fitted to the calibration records, and the compared plans (`candidates`), the default first. To use
    a candidate, pass its cap to the wrapper if it is not 0, nothing for the default, and otherwise the plan; always
    pass the strategy. `choice` is the best plan, among those that ran if any did. `points` are a sweep of caps. `race`
    compares the candidates that leave the update unchanged, and is None if none was run; `whole` also includes the
    strategies that change the update. `predicted` has the prediction for every strategy at its best cap, as in
    `list_strategies`."""

    settings: TuneSettings
    records: tuple[Record, ...]
    model: Predictor
    choice: Choice
    points: tuple[Prediction, ...]
    candidates: tuple[Prediction, ...]
    race: Race | None = None
    whole: Race | None = None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)

    @property
    def offers(self) -> list[tuple[Prediction, Interval, Interval]]:
        """The compared plans that change the update, each with its step time relative to the default and to bf16."""
        if self.whole is None:
            return []
        others = [candidate for candidate in self.candidates if not candidate.strategy.is_exact]
        return [(c, self.whole.to_default[c.label], self.whole.ratios[c.label, BF16.text]) for c in others]

    @property
    def notes(self) -> list[str]:
        """Assumptions about strategies and the strategies that were not run."""
        strategies = [Strategy.parse(text) for text in self.predicted]
        codecs = [record for record in self.records if isinstance(record, CodecRecord)]
        ran = {candidate.strategy.text for candidate in self.candidates}
        lines = [f"assumed: {line}" for line in describe_strategies(self.model.job, strategies, codecs)]
        if left := [one.text for one in strategies if not one.is_hook and one.text not in ran]:
            why = "a turn is shorter than a synchronization period, and the job has no sharded optimizer"
            lines.append(f"predicted but not run: {', '.join(left)}; {why}")
        return lines

    @property
    def verdict(self) -> str:
        """One of `race.VERDICTS`; predicted if no plan was run."""
        if self.race is not None:
            return self.race.verdict
        if self.choice.is_clear and any(candidate.label == RECOMMENDED for candidate in self.candidates):
            return "use"
        exact = (candidate for candidate in self.candidates if candidate.strategy.is_exact)
        ratios = [one.step_s / self.choice.default.step_s for one in (*exact, *self.points)]
        return "flat" if min(ratios) >= 1 - PLATEAU and max(ratios) <= 1 + PLATEAU else "default"

    @property
    def answer(self) -> Prediction:
        label = RECOMMENDED if self.verdict == "use" else DEFAULT
        label = label if self.race is None else self.race.winner
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def find_cap(self, candidate: Prediction) -> int:
        """The largest cap that produces these buckets, or 0 if none does."""
        return enumerate_caps(self.model.job.sizes).get(candidate.cuts, (0, 0))[1]

    def estimate_more_s(self) -> float:
        if self.race is None:
            return 0.0
        running = [c.measured for c in self.candidates if c.label in (*self.race.left, DEFAULT)]
        turns_s = (record.steps_per_turn * record.timing.median_s for record in running if record is not None)
        return self.race.rounds_to_decide * sum(turns_s)

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """The prediction for every plan that will be run, to save before the comparison."""
        names = ("label", "cap_bytes", "step_s", "low_s", "high_s")
        return [
            {name: getattr(one, name) for name in names}
            | {"bucket_bytes": list(one.plan.bucket_bytes), "cuts": list(one.cuts), "strategy": one.strategy.text}
            for one in self.candidates
            if one.plan is not None
        ]

    @property
    def measured(self) -> list[Prediction]:
        """The bucket sizes of the sweep that were run."""
        return [point for point in self.points if point.measured is not None]

    @cached_property
    def scores(self) -> dict[str, float | None]:
        """Prediction accuracy, as fractions; None if nothing was measured. `exposed_error` is relative to the mean
        exposed communication, and `exposed_step_error` to the step; the others are as in `score_predictions`."""
        points = self.measured
        if not points:
            names = ("mape", "max_error", "exposed_error", "exposed_step_error", "coverage", "width", "kendall_tau")
            return dict.fromkeys(names)
        pairs = [(point.step_s, point.best_s) for point in points]
        added_s = sum(abs(point.measured_exposed_s or 0.0) for point in points)
        wrong_s = sum(abs(point.exposed_s - (point.measured_exposed_s or 0.0)) for point in points)
        return {
            **score_predictions(points),
            "exposed_error": wrong_s / added_s if added_s else None,
            "exposed_step_error": sum(abs(here - there) for here, there in pairs) / sum(there for _, there in pairs),
            "kendall_tau": kendall_tau(pairs),
        }

    @property
    def noise(self) -> float:
        """The median half-width of the 95 % interval of a measured median in the sweep."""
        noises = [median_noise(point.measured.timing) for point in self.points if point.measured is not None]
        return 1.96 * statistics.median(noises) if noises else 0.0

    @cached_property
    def predicted_gain(self) -> float:
        """The predicted saving of the best plan relative to the default, whether or not this plan ran."""
        if self.race is None:
            return self.choice.gain
        return self.model.choose(self.choice.default.cuts, only_caps=not self.settings.takes_lists).gain

    @property
    def best_predicted(self) -> Prediction:
        return min(self.points, key=lambda point: point.step_s)

    @property
    def best_measured(self) -> Prediction | None:
        return min(self.measured, key=lambda point: point.best_s, default=None)


def hash_predictions(predictions: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(predictions, sort_keys=True).encode()).hexdigest()


def render_predictions(predictions: Sequence[Mapping[str, Any]]) -> str:
    document = {"unix_s": time.time(), "sha256": hash_predictions(predictions), "predictions": predictions}
    return json.dumps(document, indent=1) + "\n"


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's rank correlation tau-b; None if either variable has only one value."""
    first, second = np.triu_indices(len(pairs), 1)
    values = np.reshape(pairs, (-1, 2))
    x, y = np.sign(values[first] - values[second]).T
    scale = math.sqrt(np.count_nonzero(x) * np.count_nonzero(y))
    return float((x * y).sum()) / scale if scale else None


def derive_tuning(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan,
    predictions: Sequence[Mapping[str, Any]] = (),
) -> Tuning:  # fmt: skip
    """Derive a tuning from its records. The predictor uses only the calibration records. If no plan has run yet, search
    for the best ones. Otherwise `predictions` has the cuts of each plan, which cannot be recovered from its bucket
    sizes when dtypes are mixed."""
    model = Predictor.fit(Evidence(records), settings.build_curve())
    jobs = [record for record in records if isinstance(record, StepRecord) and record.role == "job"]
    ran = {record.label: record for record in jobs if record.note}
    named = list_strategies(settings.strategies) if settings.strategies else ()
    models = {one.text: _send_by(model, one, records) for one in named} | {DENSE.text: model}

    def build(label: str, one: Prediction, strategy: Strategy = DENSE) -> Prediction:
        what = f"cap {format_bytes(one.cap_bytes)}" if one.cap_bytes else "free"
        plan = models.get(strategy.text, model).build_plan(gradients, one.cuts, f"tuned: {what}")
        return replace(one, label=label, plan=plan, strategy=strategy, measured=ran.get(label))

    points = _sweep_caps(settings, model, jobs)
    default_cuts = model.cut_like(default_plan.bucket_bytes)
    others = []
    if ran:  # report the plans that ran, not those that would be chosen today
        known = {one["label"]: one for one in predictions}
        for record in ran.values():
            found = known.get(record.label, {})
            strategy = Strategy.parse(found.get("strategy"))
            cuts = found.get("cuts") or model.cut_like(record.bucket_bytes)
            one = replace(models.get(strategy.text, model).predict(cuts), cap_bytes=record.cap_bytes)
            others += [build(record.label, one, strategy)] if record.label != DEFAULT else []
        default = model.predict(default_cuts)
        exact = [one for one in others if one.strategy.is_exact]
        choice = Choice(min([default, *exact], key=lambda one: one.step_s), default, False)
    else:
        choice = model.choose(default_cuts, only_caps=not settings.takes_lists)
    predicted = {}
    for strategy in named:
        sender = models[strategy.text]
        best = choice.best
        if strategy != DENSE:
            best = sender.choose(sender.cut_like(default_plan.bucket_bytes), only_caps=True).best
        predicted[strategy.text] = replace(best, strategy=strategy)
    if not ran:
        others.append(build(RECOMMENDED, replace(choice.best, cap_bytes=0)))
    if not ran and named:  # bf16 and the lossy strategies: all that are named, or the best one
        lossy = [strategy for strategy in named if describe_update(strategy) == "lossy"]
        lossy.sort(key=lambda strategy: predicted[strategy.text].step_s)
        chosen = (BF16, *(lossy[:1] if settings.strategies == EVERY else lossy))
        others += [build(each.text, replace(predicted[each.text], cap_bytes=0), each) for each in chosen]
    elif not ran:
        # The best of the sweep, and every plan whose prediction may be as good as the best.
        best_s = min((point.best_s for point in points if point.measured is not None), default=None)
        may_win = [point for point in points if point.measured is not None and point.best_s == best_s][:1]
        may_win += sorted((p for p in points if p.low_s < choice.best.high_s), key=lambda point: point.step_s)
        others += [build(f"cap {format_bytes(point.cap_bytes)}", point) for point in may_win]
    first = replace(choice.default, label=DEFAULT, plan=default_plan, measured=ran.get(DEFAULT))
    unique = dict[tuple[str, tuple[int, ...]], Prediction]()
    for candidate in (first, *others):  # plans with the same buckets count once
        assert candidate.plan is not None
        sizes = candidate.plan.bucket_bytes if candidate.measured is None else candidate.measured.bucket_bytes
        if ran or candidate is first or settings.wrapper != "torch" or candidate.plan.fits_torch:
            unique.setdefault((candidate.strategy.text, sizes), candidate)
    kept = list(unique.values())
    kept = kept if ran or named else kept[:_MOST_CANDIDATES]
    race = whole = None
    if DEFAULT in ran:
        turns_s = {c.label: c.measured.turns_s for c in kept if c.measured is not None}
        unchanged = {c.label: turns_s[c.label] for c in kept if c.strategy.is_exact}
        race = judge_race(unchanged, DEFAULT, model.limit_gain(default_cuts))
        whole = judge_race(turns_s, DEFAULT) if named else None
    return Tuning(settings, tuple(records), model, choice, points, tuple(kept), race, whole, predicted)


def _sweep_caps(settings: TuneSettings, model: Predictor, jobs: Sequence[StepRecord]) -> tuple[Prediction, ...]:
    """The caps that the job was run with or, if it was not run, would be run with."""
    grid: list[tuple[int, StepRecord | None]] = [(record.cap_bytes, record) for record in jobs if not record.note]
    if not grid:
        caps = settings.caps_bytes or choose_caps(model.job.sizes, settings.amount.num_caps)
        grid = [(cap, None) for cap in caps]
    return tuple(
        replace(model.predict(model.job.cut(cap_bytes)), cap_bytes=cap_bytes, measured=record)
        for cap_bytes, record in grid
    )


def _send_by(model: Predictor, strategy: Strategy, records: Sequence[Record]) -> Predictor:
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
        if taken is None or not isinstance(found.sending, Sending):
            return found
        step_s, cuts = resample.median(taken.timing), cut_like(job.totals, taken.bucket_bytes)
        factor = fit_factor(job, cuts, send(Strategy.parse(taken.label)), step_s)
        return replace(found, sending=found.sending.scale(factor))

    return model.change(change)


def load_tuning(config: dict[str, Any], records: Sequence[Record]) -> Tuning:
    settings: TuneSettings = decode(TuneSettings, config["tune"])
    gradients: list[Gradient] = [decode(Gradient, gradient) for gradient in config["gradients"]]
    default_plan = Plan.from_json(json.dumps(config["default_plan"]))
    return derive_tuning(settings, records, gradients, default_plan, config["predictions"])
