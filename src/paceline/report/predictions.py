"""Results of `predict` and `tune`: step times for other networks, rank counts and bucket sizes.

The conclusions are drawn in `predict`; this module only presents them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.errors import ConfigError, RecordError
from paceline.plan import INDEX_BYTES, Plan, plan_like_torch
from paceline.predict.curves import DRAWS
from paceline.predict.job import Job, build_job_from_profile, draw_jobs
from paceline.predict.networks import (
    AssumedFabric,
    Fabric,
    MeasuredFabric,
    build_measured_fabric,
    find_network,
    find_networks,
)
from paceline.predict.predictor import Prediction, find_evidence
from paceline.predict.search import (
    PLATEAU,
    CapCurve,
    CapPoint,
    estimate_caps,
    estimate_closed_form,
    estimate_sensitivity,
    find_best_cuts,
    scale_curve,
)
from paceline.predict.sending import Sending
from paceline.predict.simulate import MODEL_ERROR, SimulatedStep, simulate
from paceline.predict.strategy_costs import describe_update
from paceline.predict.tables import TABLE_ERROR, TabledJob
from paceline.predict.tuning import DEFAULT, PREDICTIONS, TuneSettings, Tuning, hash_predictions, load_tuning
from paceline.predict.whatif import describe_scenario, simulate_what_if
from paceline.records import (
    CapTimeRecord,
    CollectiveRecord,
    LayerProfileRecord,
    LayerSizeRecord,
    LayerTimeRecord,
    StepRecord,
)
from paceline.records.findings import add_busy
from paceline.records.samples import group_by
from paceline.records.store import load_json
from paceline.report.plots import (
    COLORS,
    MARKERS,
    Drawings,
    Figure,
    build_panels,
    draw_line,
    label_values,
    new_figure,
    place_legend,
)
from paceline.report.prediction_rows import (
    BUCKETS,
    GRID,
    PREDICTED,
    RACE,
    WHAT_IF,
    advise_size,
    compare_plans,
    describe_rows,
    draw_caps,
    draw_measured,
    format_interval,
    join_sizes,
)
from paceline.report.result import Result, describe_job
from paceline.report.table import SIMULATED, Column, Table, build_row, raw_columns
from paceline.units import MIB, format_bytes, format_duration, format_ms, format_number_of, format_rate

if TYPE_CHECKING:
    from matplotlib.axis import Axis

# terminal rows: the widest ranges of bucket sizes, and the last one; the CSV has all ranges
_MOST_ROWS = 24
# If a comparison takes more seconds than this, the plans hardly differ, so it is not worth running.
_MOST_BUDGET_S = 600
_ROWS = (256, 1024, 4096)  # assumed distinct tokens per rank, used when the tables do not give the number


class PredictResult(Result):
    """Result of `predict`: one row per network and number of ranks. With a single row, `step_s`, `interval` and
    `exposed_s` return its values."""

    json_columns: ClassVar[Sequence[Column]] = (*raw_columns("profile.model", assumptions="findings"), SIMULATED)

    def _derive(self) -> None:
        config = self.config
        self.profile = self.only(LayerProfileRecord)[0]
        self.job = build_job_from_profile(self.profile, config["gradients"])
        per_node = config["ranks_per_node"] or 1
        measured = self.build_sweep(self.only(CollectiveRecord), config)
        networks = find_networks(config["network"]) if config["network"] is not None else []
        # With both a sweep and a multi-node network, the sweep describes the links inside a node.
        joins = measured is not None and networks and per_node > 1 and config["inside"] is None
        inside = measured if joins and measured else find_network(config["inside"] or "nvlink")
        self.fabrics: list[Fabric] = [
            *(AssumedFabric(network, inside, per_node, config["algorithm"]) for network in networks),
            *([measured] if measured and not joins else []),
        ]
        self.scenario: dict[str, Any] = {name: config[name] for name in ("accumulate", "spread")}
        self.scenario["slow"] = config.get("slow", 0.0)
        self.scenario["evidence"] = find_evidence(self.records)
        self.busy: Sequence[str] = config["busy"]  # inputs that were measured on a busy machine
        self.rows: list[Prediction] = []
        self._simulate(draw_jobs(self.profile, self.job, DRAWS))

    def _simulate(self, draws: Sequence[Job]) -> None:
        for fabric in self.fabrics:
            self.rows += self._simulate_on(fabric, draws, self.config["ranks"])

    def _simulate_on(self, fabric: Fabric, draws: Sequence[Job], ranks: Sequence[int], **more: Any) -> list[Prediction]:
        swept = MeasuredFabric in (type(fabric), type(getattr(fabric, "inside", None)))
        busy = [name for name in self.busy if name == "profile" or swept]
        rows = simulate_what_if(self.job, draws, fabric, ranks, **self.scenario, **more)
        return [replace(row, doubt=add_busy(row.doubt, busy)) for row in rows]

    @staticmethod
    def build_sweep(sweep: Sequence[CollectiveRecord], config: dict[str, Any]) -> MeasuredFabric | None:
        """The measured fabric of a prediction with this configuration, if it has one."""
        host = {"ranks_per_node": config["ranks_per_node"] or 0, "cores": config["cores"]}
        return build_measured_fabric(sweep, config["backend"], config["algorithm"], **host) if sweep else None

    @property
    def step_s(self) -> float:
        return self._only.step_s

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the step time, in seconds."""
        return self._only.low_s, self._only.high_s

    @property
    def exposed_s(self) -> float:
        return self._only.exposed_s

    @property
    def _only(self) -> Prediction:
        if len(self.rows) != 1:
            raise RecordError(f"{len(self.rows)} networks and rank counts were predicted; read `rows` instead")
        return self.rows[0]

    @property
    def answer(self) -> str:
        row = max(self.rows, key=lambda row: row.world_size)
        buckets = "" if row.keeps_default else f"; buckets of {advise_size(row)} save {max(0.0, row.gain):.1%}"
        busy = ", from times measured on a busy machine" if self.busy else ""
        return (
            f"{self.profile.model} on {row.world_size:,} ranks over {row.network}: a step takes "
            f"{format_ms(row.step_s)} ms (90 %: {format_ms(row.low_s)} to {format_ms(row.high_s)}), efficiency "
            f"{row.efficiency:.0%}, bound by {row.bound}{buckets}. Simulated{busy}."
        ) + (f" Doubtful: {row.doubt}." if row.doubt else "")

    @property
    def findings(self) -> Sequence[str]:
        assumed = [line for fabric in self.fabrics for line in fabric.assumptions]
        assumed += describe_scenario(self.job, self.fabrics, **self.scenario)
        return [*(f"profile: {line}" for line in self.job.notes), *describe_rows(self.rows, assumed, "assumed")]

    def tables(self) -> list[Table]:
        title = f"{self.profile.model} on other networks and rank counts"
        return [Table("table", title, WHAT_IF, self.rows, key="rows")]

    def figures(self) -> Drawings:
        title = f"{self.profile.model}: efficiency on other networks"
        return {"efficiency": lambda: plot_efficiency(self.rows, title, "best bucket size for each; 90 % intervals")}

    @property
    def next_steps(self) -> Sequence[str]:
        named, most = self.config["network"], max(row.world_size for row in self.rows)
        network, ranks = "10gbe" if named is None else find_networks(named)[0].name, most if most > 1 else 8
        if self.config["is_own"]:
            return (f"paceline.tune(model, step, network={network!r}, network_ranks={ranks})",)
        return (f"paceline tune --model {self.profile.model} --network {network} --network-ranks {ranks}",)


def plot_efficiency(rows: Sequence[Prediction], title: str, subtitle: str) -> Figure:
    """Plot weak-scaling efficiency against ranks: one line with its interval per network, and hollow markers for
    doubtful predictions."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    for number, (network, found) in enumerate(group_by(rows, lambda row: row.network).items()):
        line = sorted(found, key=lambda row: row.world_size)
        shares = [(row.world_size, row.efficiency, *row.efficiency_bounds) for row in line]
        draw_line(axes, number, [(n, *(100 * s for s in rest)) for n, *rest in shares], f"{network} (simulated)", "--")
        for row in (row for row in line if row.doubt):
            marker, color = MARKERS[number % len(MARKERS)], COLORS[number % len(COLORS)]
            axes.plot([row.world_size], [100 * row.efficiency], marker, color=color, ms=5, mfc="white")
    label_values(axes, [row.world_size for row in rows])
    axes.set(ylim=(0, 105), xlabel="ranks", ylabel="weak-scaling efficiency (%)")
    place_legend(figure, axes)
    return figure


POINTS = (
    Column("bucket size", lambda p: join_sizes(p.low_bytes, p.high_bytes), "text", is_key=True),
    *raw_columns("low_bytes", "high_bytes"),
    Column("buckets", lambda p: len(p.cuts), "count", "num_buckets", priority=2),
    Column("backward", "backward_s", "ms", "backward_s", priority=3),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=1),
    SIMULATED,
)
CHANGES = (
    Column("changed", lambda c: c.what or "nothing", key="changed", is_key=True),
    Column("by", "factor", "x {:g}".format, "factor", is_key=True),
    Column("best bucket size", lambda c: join_sizes(*c.plateau), priority=3),
    *raw_columns(plateau_low_bytes="plateau.0", plateau_high_bytes="plateau.1"),
    Column("buckets", lambda c: len(c.chosen.cuts), "count", "num_buckets", priority=1),
    Column("backward", "chosen.backward_s", "ms", "backward_s", priority=2),
    Column("exposed", "chosen.exposed_s", "ms", "exposed_s"),
    Column("beyond the table", lambda c: c.is_beyond or None, "yes", priority=1),
    *raw_columns("is_beyond"),
    SIMULATED,
)


SPLITS = (
    Column("rows per rank", "num_rows", "count", "num_rows", is_key=True),
    Column("lookup rows", "num_bytes", "bytes", "num_bytes", priority=2),
    Column("best bucket size", lambda s: join_sizes(*s.caps.plateau), priority=3),
    *raw_columns(plateau_low_bytes="caps.plateau.0", plateau_high_bytes="caps.plateau.1"),
    Column("backward", "caps.best.backward_s", "ms", "backward_s", priority=3),
    Column("exposed", "caps.best.exposed_s", "ms", "exposed_s", priority=3),
    Column("best free plan", "free.exposed_s", "ms", "free_exposed_s", priority=3),
    Column("best free plan, 1/10 latency", "quick.exposed_s", "ms", "quick_exposed_s", priority=1),
    *raw_columns("late_bytes"),
    SIMULATED,
)


class Split(NamedTuple):
    """A tied tensor sent in two parts: the head's gradient early, and the lookups' gradient as `rows` rows per rank."""

    job: Job
    caps: CapCurve
    cuts: tuple[int, ...]  # cuts of the best free plan
    free: SimulatedStep
    quick: SimulatedStep  # the best free plan with a tenth of the latency

    @property
    def num_rows(self) -> int:
        return self.job.tail[0][0].num_rows

    @property
    def num_bytes(self) -> int:
        return self.num_rows * (self.job.tail[0][0].row_bytes + INDEX_BYTES)

    @property
    def late_bytes(self) -> int:
        """Bytes of the bucketed gradients that become ready only at the end of backward."""
        job = self.job
        ready = zip(job.sizes, job.ready_s, strict=True)
        return sum(size for size, ready_s in ready if ready_s >= job.backward_s * (1 - 1e-9))


class CapsResult(Result):
    """Result of `predict --csv`: backward time for every bucket size, from tables of layers and of all-reduce.

    The tables do not include contention, so there are two curves: `caps` uses the tables alone, and `expected` adds the
    assumed contention, which is zero on a CPU. `measured` has times at some bucket sizes, and `fitted` is the curve
    that reproduces them, with one fitted rate for the mutual slowdown of messages and compute; None without them.
    `recommended` is the range of sizes to use, at most `risk` slower than the best size on each curve behind the
    answer. `splits` shows what Paceline's wrapper gains when the first and the last layer share a tied tensor.
    """

    json_columns = (
        Column(None, lambda result: build_row(POINTS, result.caps.best), key="best"),
        Column(None, lambda result: build_row(POINTS, result.expected.best), key="expected_best"),
        *raw_columns(plateaus="caps.plateaus", expected_plateaus="expected.plateaus", interval_s="interval"),
        *raw_columns(plateau_low_bytes="caps.plateau.0", plateau_high_bytes="caps.plateau.1"),
        *raw_columns("shared", "default_s", "default_expected_s", "closed_form_bytes", notes="findings"),
        *raw_columns("keeps_default", "risk", "factor", "fitted_s"),
        *raw_columns(recommended_low_bytes="recommended.0", recommended_high_bytes="recommended.1"),
        *raw_columns(alpha_s="line.alpha_s", beta_bytes_per_s="line.bytes_per_s", local_backward_s="job.backward_s"),
        *raw_columns(expected_s="expected.best.backward_s"),
        Column(
            None,
            lambda result: {"num_buckets": len(result.free_plan[0]), "backward_s": result.free_plan[1].over_s},
            key="free_plan",
        ),
        SIMULATED,
    )

    def _derive(self) -> None:
        sweep = self.only(CollectiveRecord)
        tables = self.only(LayerSizeRecord), self.only(LayerTimeRecord), sweep, self.only(CapTimeRecord)
        self.model = model = TabledJob(*tables, self.config.get("untied", False))
        self.job, self.cost, self.line, self.measured = model.job, model.curve, model.line, model.measured
        self.is_on_gpu, self.unexplained = model.is_on_gpu, model.unexplained
        self.caps = replace(estimate_caps(self.job, model.costs), most_bytes=self.cost.sizes[-1])
        self.expected = estimate_caps(self.job, model.slowed) if self.is_on_gpu else self.caps
        default = plan_like_torch(self.job.gradients, range(len(self.job.gradients)))
        costs = [model.costs, model.slowed, *([model.calibration.draw()] if model.calibration else [])]
        self.default_s, self.default_expected_s, *fitted_s = (simulate(self.job, default, c).over_s for c in costs)
        self.closed_form_bytes = estimate_closed_form(self.job, self.line.alpha_s)
        self.factor = model.calibration.factor if model.calibration else None
        self.fitted = estimate_caps(self.job, model.calibration.draw()) if model.calibration else None
        self.shared, self.recommended, self.risk = self._recommend()
        self.chosen_default_s = fitted_s or [self.default_s, self.default_expected_s][: len(self.bases)]
        pairs = zip(self.chosen_default_s, self.bases.values(), strict=True)
        self.keeps_default = all(default_s <= curve.best.backward_s * (1 + PLATEAU) for default_s, curve in pairs)
        step = model.build_predictor().predict((self.fitted or self.expected).best.cuts)
        around_s = self.job.before_s + self.job.after_s
        self.interval = step.low_s - around_s, step.high_s - around_s

    def _recommend(self) -> tuple[list[tuple[int, int]], tuple[int, int], float]:
        """Return three things: the ranges of sizes that are within 1 % of the best on every curve behind the answer;
        the recommended range, which is the widest of these or, if there are none, the sizes that lose least; and how
        much slower than the best the recommended sizes may be."""
        curves = list(self.bases.values())
        losses = {
            points[0].cuts: max(p.backward_s / c.best.backward_s - 1 for p, c in zip(points, curves, strict=True))
            for points in zip(*(curve.points for curve in curves), strict=True)
        }
        shared = self.caps.list_ranges(lambda point: losses[point.cuts] <= PLATEAU)
        ranges = shared or self.caps.list_ranges(lambda point: losses[point.cuts] == min(losses.values()))
        low, high = max(ranges, key=lambda sizes: sizes[1] / sizes[0])
        return shared, (low, high), max(losses[p.cuts] for p in self.caps.points if low <= p.high_bytes <= high)

    @cached_property
    def changes(self) -> list[CapCurve]:
        """How the best bucket size changes with the inputs; the first is the unchanged one."""
        return [self.caps, *estimate_sensitivity(self.job, self.model.costs, self.cost)]

    @cached_property
    def free_plan(self) -> tuple[tuple[int, ...], SimulatedStep]:
        """The best plan from the tables without a uniform cap."""
        return find_best_cuts(self.job, self.model.costs)

    @cached_property
    def splits(self) -> list[Split]:
        """Uses assumed numbers of rows, because the tables do not give the number of distinct tokens per rank."""
        found, costs = list[Split](), self.model.costs
        world_size, quick = self.only(CollectiveRecord)[0].world_size, replace(costs, curve=scale_curve(self.cost, 0.1))
        for num_rows in _ROWS if self.job.lookups else ():
            lookups = tuple(replace(one, num_rows=num_rows) for one in self.job.lookups)
            job = replace(self.job, lookups=lookups).split(world_size)
            if not job.tail:
                continue
            caps = estimate_caps(job, costs)
            (cuts, free), (_, other) = (find_best_cuts(job, c, [caps.best.cuts]) for c in (costs, quick))
            if free.tail:  # the best plan sends the head's part early
                found.append(Split(job, caps, cuts, free, other))
        return found

    @property
    def curves(self) -> dict[str, CapCurve]:
        """The predicted curves, by the inputs that they use."""
        found = {"from the tables": self.caps} | ({"with contention": self.expected} if self.is_on_gpu else {})
        return found | ({} if self.fitted is None else {"fitted": self.fitted})

    @property
    def bases(self) -> dict[str, CapCurve]:
        """The curves behind the answer: the fitted curve or, without measured times, all of them."""
        return self.curves if self.fitted is None else {"fitted": self.fitted}

    @property
    def fitted_s(self) -> float | None:
        return None if self.fitted is None else self.fitted.best.backward_s

    def predict_s(self, record: CapTimeRecord, curve: CapCurve) -> float:
        """The prediction for a measured record."""
        point = self._find_point(record, curve)
        return point.step_s if record.of == "step" else point.backward_s

    def _find_point(self, record: CapTimeRecord, curve: CapCurve) -> CapPoint:
        cap_bytes = min(record.cap_bytes, self.job.num_bytes)
        return next(point for point in curve.points if point.high_bytes >= cap_bytes)

    @property
    def answer(self) -> str:
        beyond = "; some messages are larger than any in the table" if self.caps.is_beyond else ""
        bests = [curve.best.backward_s for curve in self.bases.values()]
        interval = f" (90 %: {' to '.join(map(format_ms, self.interval))})"
        best = f"{' and '.join(map(format_ms, bests))} ms{interval}"
        default = f"{' and '.join(map(format_ms, self.chosen_default_s))} ms"
        either = ", without and with the contention assumed for NCCL" if len(bests) > 1 else ""
        if self.keeps_default:
            text = f"Keep torch's default buckets: backward with communication takes {default}, within 1 % of "
            text += f"the best, {best}{either}"
        else:
            text = f"Use a bucket size of {join_sizes(*self.recommended)}: backward with communication is at most "
            text += f"{self.risk:.1%} slower than with the best size, {best}{either}; torch's default takes {default}"
        doubt = ", doubtful: no rate explains the measured times" if self.unexplained > PLATEAU else ""
        return f"{text}. {self._describe_basis()} Simulated{doubt}{beyond}."

    def _describe_basis(self) -> str:
        """The measured times behind the prediction, as a sentence."""
        if self.factor is None:
            return "Not fitted to a measured time: pass one with --measured 25MiB=724ms."
        times = ", ".join(
            f"{format_ms(m.timing.center_s)} ms at {format_bytes(m.cap_bytes)}" for m in self.measured[:3]
        )
        more = f" and {len(self.measured) - 3} more" if len(self.measured) > 3 else ""
        what = format_number_of(len(self.measured), f"measured {self.measured[0].of} time")
        return f"Fitted to {what} ({times}{more})."

    @property
    def findings(self) -> Sequence[str]:
        job, line, (cuts, free) = self.job, self.line, self.free_plan
        last, size = job.gradients[-1].name, job.sizes[-1]
        return [
            *job.notes,
            *(text for name, curve in self.curves.items() for text in self._describe_ranges(name, curve)),
            f"linear fit of all-reduce: alpha {format_ms(line.alpha_s)} ms, beta {format_rate(line.bytes_per_s)} GB/s, "
            f"residuals up to {line.max_rel_residual:.0%}; predictions use the line, not the table's points",
            "closed form when communication is the bottleneck: b* = B sqrt(alpha / T) = "
            f"{format_bytes(round(self.closed_form_bytes))}; here communication takes "
            f"{format_ms(job.num_bytes / line.bytes_per_s)} ms and backward {format_ms(job.backward_s)} ms",
            f"best plan from the tables without a uniform cap: {len(cuts)} buckets, {format_ms(free.over_s)} ms",
            f"the last gradient ({last}, {format_bytes(size)}) is ready only at the end of backward: "
            f"{format_ms(self.cost.estimate_s(size))} ms are exposed at any bucket size",
            *self._describe_splits(),
            "assumed: one message at a time and no copies; times include waiting for other ranks",
            *self._describe_contention(),
            *(self._describe_measured(name, curve) for name, curve in self._list_unfitted()),
            *self._describe_others(),
        ]

    def _describe_others(self) -> list[str]:
        """Describe the leave-one-out error: each measured time compared with a prediction fitted to the others."""
        if len(self.measured) < 2:
            return []
        errors = []
        for number, record in enumerate(self.measured):
            factors = self.model.calibration.factors if self.model.calibration else ()
            costs = self.model.scale(statistics.geometric_mean(factors[:number] + factors[number + 1 :]))
            took_s = simulate(self.job, self._find_point(record, self.caps).cuts, costs).step_s
            errors.append((took_s - self.model.around_s(record)) / record.timing.center_s - 1)
        off, least, most = statistics.fmean(map(abs, errors)), min(errors), max(errors)
        return [f"predictions fitted to the other measured times are {off:.1%} off ({least:+.1%} to {most:+.1%})"]

    def _list_unfitted(self) -> list[tuple[str, CapCurve]]:
        """The curves that do not use the measured times; empty without measured times."""
        return [(name, curve) for name, curve in self.curves.items() if self.measured and curve is not self.fitted]

    def _describe_contention(self) -> list[str]:
        error = f"model errors with standard deviations of {MODEL_ERROR:.0%} of the exposed communication and "
        error += f"{TABLE_ERROR:.0%} of the step"
        if self.factor is None:
            drawn = "contention and of the table within its standard deviations"
            return [
                f"contention: {self.model.contention.basis}"
                f"{'; the tables do not include it, but --measured and `paceline tune` do' * self.is_on_gpu}",
                f"interval: 90 % of {DRAWS} draws of {drawn}, plus {error}",
            ]
        fitted = f"messages and compute run at {1 / self.factor:.0%} of their normal speed while they overlap"
        if self.factor < 1:
            fitted = f"messages take {self.factor:.0%} of the time in the table, and compute is not slowed down"
        found = [f"contention: fitted to the measured times: {fitted}", f"interval: 90 % of {DRAWS} draws of {error}"]
        if self.unexplained > PLATEAU:
            found.append(f"doubtful: the model leaves up to {self.unexplained:.1%} of a measured time unexplained")
        return found

    def _describe_splits(self) -> list[str]:
        if not self.splits:
            return []
        exposed = ", ".join(f"{format_ms(s.free.exposed_s)} ms with {s.num_rows} rows" for s in self.splits)
        was = format_ms(self.free_plan[1].exposed_s)
        first, asked, (rows, *_) = self.splits[0], "(embeddings='rows')" * self.is_on_gpu, self.splits[0].free.tail
        text = "sends the head's gradient early, and the lookups' gradient as the rows in each rank's batch"
        late, late_s = format_bytes(first.late_bytes), self.cost.estimate_s(first.late_bytes)
        every = self.only(CollectiveRecord)[0].world_size * first.num_rows * first.job.tail[0][0].row_bytes
        both, one = (format_ms(self.cost.estimate_s(size)) for size in (first.late_bytes + every, 1))
        left = f"{late} of other gradients also become ready only at the end of backward; sending them takes "
        left += f"{format_ms(late_s)} ms, and sending {first.num_rows} rows per rank "
        left += f"{format_ms(rows.done_s - rows.start_s)} ms; together they take {both} ms; one element takes "
        left += f"{one} ms on the fitted line; with a tenth of the latency, "
        return [
            f"paceline.DDP{asked} {text}; without a uniform cap, the best plan exposes {exposed} instead of {was} ms",
            f"{left}{format_ms(first.quick.exposed_s)} ms would be exposed",
        ]

    def _describe_ranges(self, name: str, curve: CapCurve) -> list[str]:
        others = [sizes for sizes in curve.plateaus if sizes != curve.plateau]
        best = f"{name}: {join_sizes(*curve.plateau)} is within 1 % of the best, {format_ms(curve.best.backward_s)} ms"
        default_s = self.default_s if curve is self.caps else self.default_expected_s
        best += f"; torch's default takes {format_ms(default_s)} ms"
        more = f"{format_number_of(len(others), 'more range')} of sizes within 1 % of the best, {name}"
        return [best, *([f"{more}: {join_sizes(others[0][0], others[-1][1])}"] if others else [])]

    def _describe_measured(self, name: str, curve: CapCurve) -> str:
        errors = [self.predict_s(record, curve) / record.timing.center_s - 1 for record in self.measured]
        best = min(self.measured, key=lambda record: record.timing.center_s)
        inside = [record for record in self.measured if curve.is_fast(self._find_point(record, curve))]
        off = statistics.fmean(map(abs, errors))
        text = f"measured at {len(errors)} bucket sizes: predictions {name} are {off:.1%} off on average "
        text += f"({min(errors):+.1%} to {max(errors):+.1%}); the best measured size is {format_bytes(best.cap_bytes)}"
        if not inside:
            return f"{text}; no measured size lies in a predicted range"
        lost = 1 - best.timing.center_s / min(record.timing.center_s for record in inside)
        missed = f"{lost:.1%} faster than the best measured size in a predicted range"
        return f"{text}, {'which lies in a predicted range' if best in inside else missed}"

    def tables(self) -> list[Table]:
        fast = [point for point in self.caps.points if point.backward_s < 1.5 * self.caps.best.backward_s]
        # Merge neighbors with the same number of buckets and times within 5 % into one row that shows the first time.
        like = itertools.groupby(fast, lambda p: (len(p.cuts), p.backward_s // (0.05 * self.caps.best.backward_s)))
        rows = [replace(run[0], high_bytes=run[-1].high_bytes) for run in (list(points) for _, points in like)]
        widest = sorted(rows[:-1], key=lambda row: row.low_bytes / row.high_bytes)[: _MOST_ROWS - 1]
        shown = [row for row in rows if row in (*widest, rows[-1])]
        expected_s = {point.cuts: point.backward_s for point in self.expected.points}
        slowed = Column("with contention", lambda p: expected_s[p.cuts], "ms", "expected_s", priority=2)
        columns = (*POINTS[:-1], *((slowed,) if self.is_on_gpu else ()), POINTS[-1])
        compared = (
            Column("bucket size", "cap_bytes", "bytes", "cap_bytes", is_key=True),
            Column("time of", "of", key="of", is_key=True),
            Column("measured", "timing.center_s", "ms", "measured_s", priority=2),
            *self._compare("predicted", "predicted_s", "error", self.caps),
            *(self._compare("with contention", "expected_s", "expected_error", self.expected) * self.is_on_gpu),
            *([] if self.fitted is None else self._compare("fitted", "fitted_s", "fitted_error", self.fitted)),
        )
        return [
            Table("caps", "backward against bucket size", columns, self.caps.points, shown=shown),
            *([Table("split", "tied tensor sent in two parts", SPLITS, self.splits)] if self.splits else []),
            Table("sensitivity", "sensitivity of the best bucket size, from the tables only", CHANGES, self.changes),
            *([Table("measured", "measured and predicted", compared, self.measured)] if self.measured else []),
        ]

    def _compare(self, name: str, key: str, error_key: str, curve: CapCurve) -> list[Column]:
        def find_error(record: CapTimeRecord) -> float:
            return self.predict_s(record, curve) / record.timing.center_s - 1

        predicted = Column(name, lambda record: self.predict_s(record, curve), "ms", key, priority=2)
        return [predicted, Column("error", find_error, "{:+.1%}".format, error_key)]

    def figures(self) -> Drawings:
        found = {"caps": lambda: plot_caps(self), "sensitivity": lambda: plot_sensitivity(self)}
        return found | ({"split": lambda: plot_split(self)} if self.splits else {})

    @property
    def next_steps(self) -> Sequence[str]:
        return () if self.measured else ("paceline predict --csv FOLDER --measured 25MiB=724ms",)


def plot_caps(result: CapsResult) -> Figure:
    """Plot time against bucket size: the prediction with the plateau around its best, and any measurements."""
    curve, measured, best = result.caps, result.measured, result.caps.best
    of = measured[0].of if measured else "backward"
    subtitle = f"{result.config['csv']}; predictions are simulated"
    figure, axes = new_figure(f"{of.capitalize()} time against bucket size", subtitle)
    sizes = [curve.points[0].low_bytes, result.closed_form_bytes, *(record.cap_bytes for record in measured)]
    least, most = min(sizes) / MIB, max(*sizes, result.job.num_bytes) / MIB
    around_s = best.step_s - best.backward_s if of == "step" else 0.0
    ends = best.high_bytes, best.backward_s + around_s
    alone_s = result.job.backward_s + around_s
    draw_caps(axes, curve.points, lambda point: point.backward_s + around_s, ends, alone_s)
    for color, (name, found) in zip((2, 3, 5), result.curves.items(), strict=False):
        if found is not curve:
            ends_s = [(p, p.backward_s + around_s) for p in found.points]
            line = [(size / MIB, at_s * 1e3) for p, at_s in ends_s for size in (p.low_bytes, p.high_bytes)]
            axes.plot(*zip(*line, strict=True), ":", color=COLORS[color], lw=1.2, label=f"predicted, {name}")
        for number, (low, high) in enumerate(found.plateaus):
            label = "_" if number else f"within 1 % of the best, {name}"
            first = least if low == curve.points[0].low_bytes else low / MIB  # smaller caps give the same buckets
            axes.axvspan(first, high / MIB, color=COLORS[color], alpha=0.15, lw=0, label=label)
    axes.axvline(result.closed_form_bytes / MIB, color=COLORS[4], ls="--", lw=1, label="closed form b*")
    if measured:
        points = [(r.cap_bytes / MIB, r.timing.center_s * 1e3, None, None) for r in measured]
        draw_measured(axes, points, "measured (imported)")
    # The axis starts just below the minimum so that differences of one percent are visible.
    times = [alone_s, 1.3 * ends[1], *(record.timing.center_s for record in measured)]
    limits = (0.97e3 * min(times), 1.03e3 * max(times))
    axes.set(xlim=(least, most), ylim=limits, ylabel=f"{of} with communication (ms)")
    _label_plainly(axes.xaxis)
    place_legend(figure, axes)
    return figure


def _label_plainly(axis: Axis) -> None:
    """Numbers instead of powers of ten, and no minor ticks, which would take half of the drawing time."""
    axis.set_major_formatter("{x:g}")
    axis.axes.minorticks_off()


def plot_sensitivity(result: CapsResult) -> Figure:
    """The best bucket sizes with one input scaled: model bytes B, latency alpha, or bandwidth beta."""
    named = {"B": "model bytes (B)", "alpha": "latency (alpha)", "beta": "bandwidth (beta)"}
    figure, grid = build_panels(list(named.values()), "Sensitivity of the best bucket size", "simulated")
    for axes, what in zip(grid, named, strict=True):
        curves = sorted((c for c in result.changes if c.what in ("", what)), key=lambda curve: curve.factor)
        for curve in curves:
            lows, highs = ([size / MIB for size in sizes] for sizes in zip(*curve.plateaus, strict=True))
            axes.vlines([curve.factor] * len(lows), lows, highs, color=COLORS[2], alpha=0.35, lw=4)
            face = "white" if curve.is_beyond else COLORS[0]
            ends = [size / MIB for size in curve.plateau]
            axes.plot([curve.factor] * 2, ends, "o-", color=COLORS[0], mfc=face, lw=2)
        power = {"B": 1.0, "alpha": 0.5, "beta": 0.0}[what]
        form = [result.closed_form_bytes * curve.factor**power / MIB for curve in curves]
        axes.plot([curve.factor for curve in curves], form, "--", color=COLORS[3], lw=1)
        axes.set(xscale="log", yscale="log", xlabel="multiplied by")
        label_values(axes, [curve.factor for curve in curves], "x {:g}".format)
        _label_plainly(axes.yaxis)
    grid[0].set_ylabel("bucket size (MiB)")
    grid[0].plot([], [], "o-", color=COLORS[0], label="widest range within 1 % of the best")
    if any(curve.is_beyond for curve in result.changes):
        grid[0].plot([], [], "o-", color=COLORS[0], mfc="white", label="the same, extrapolated beyond the table")
    grid[0].plot([], [], color=COLORS[2], alpha=0.35, lw=4, label="other ranges within 1 %")
    grid[0].plot([], [], "--", color=COLORS[3], lw=1, label="closed form b*")
    place_legend(figure, grid[0])
    return figure


def plot_split(result: CapsResult) -> Figure:
    """Plot the timeline of a tied tensor that is sent whole or in two parts: backward on top, messages below."""
    split, (cuts, whole) = result.splits[0], result.free_plan
    name = split.job.tail[0][0].name
    title = f"{name}, shared with the head: sent as one tensor and in two parts"
    figure, axes = new_figure(title, f"{result.config['csv']}; simulated, each with its best plan")
    rows = f"{split.num_rows} rows per rank"
    ways = (("one tensor", result.job, cuts, whole), (f"head and {rows}", split.job, split.cuts, split.free))
    for number, (way, job, ends, step) in enumerate(ways):
        top, place = -3 * number, [gradient.name for gradient in job.gradients].index(name)
        tied = step.buckets[bisect.bisect_right(ends, place)]
        others = [span for span in step.buckets if span is not tied]
        kinds = (("other buckets", 5, others), ("bucket with the tied tensor", 1, [tied]))
        axes.broken_barh([(0, step.backward_s * 1e3)], (top, 0.9), color=COLORS[0], label="backward")
        for label, color, spans in (*kinds, ("rows of the lookups", 2, step.tail)):
            bars = [(span.start_s * 1e3, (span.done_s - span.start_s) * 1e3) for span in spans]
            axes.broken_barh(bars, (top - 1, 0.9), color=COLORS[color], ec="white", lw=0.3, label=label)
        exposed = f"{way}: {format_ms(step.exposed_s)} ms exposed"
        axes.text(0, top + 1.05, exposed, fontsize=9)
    axes.axvline(result.job.backward_s * 1e3, color=COLORS[6], ls=":", lw=1, label="end of backward")
    axes.set(yticks=[], xlabel="time since backward began (ms)", ylim=(-4.2, 1.8))
    place_legend(figure, axes)
    return figure


class TuneResult(Result):
    """Result of `tune`; `plan` is the answer. `verdict` is "use" (this plan), "default" (the default is best), "flat"
    (all compared plans take the same time, or none can save 1 %) or "undecided". `gain` is the fraction of a
    step that the plan saves compared with the default, with its 95 % `gain_interval`. `regret` is how much slower than
    the best plan it may be: the estimate and the upper bound; None if no plan was run. `candidates` are the bucket
    sizes of the sweep, and `rows` the compared plans."""

    json_columns = (
        *raw_columns("step.model", "step.wrapper", "step.backend", "verdict", noise="tuning.noise"),
        Column(None, lambda r: r.tuning.settings.network_ranks if r.tuning.settings.network else r.step.world_size,
               key="world_size"),
        Column(None, lambda r: r.tuning.race is None, key="is_predicted"),
        *raw_columns("tuning.predicted_gain", gain="gain", gain_low="gain_interval.0", gain_high="gain_interval.1"),
        *raw_columns(regret="regret.0", regret_high="regret.1"),
        *raw_columns(best_predicted_cap_bytes="tuning.best_predicted.cap_bytes"),
        *raw_columns(best_measured_cap_bytes="tuning.best_measured.cap_bytes"),
        *raw_columns(plan_measured_s="tuning.answer.measured_s"),
        *raw_columns(default_measured_s="tuning.candidates.0.measured_s"),
        Column(None, lambda r: None if r.folder is None else str(r.folder / "plan.json"), key="plan"),
    )  # fmt: skip

    @cached_property
    def tuning(self) -> Tuning:
        return load_tuning(self.config, self.records)

    @property
    def plan(self) -> Plan:
        plan = self.tuning.answer.plan
        assert plan is not None
        return plan

    @property
    def gain(self) -> float | None:
        return None if self._saved is None else self._saved[0]

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        return None if self._saved is None else self._saved[1:]

    @property
    def _saved(self) -> tuple[float, float, float] | None:
        return None if self.tuning.race is None else self.tuning.race.gain.saved

    @property
    def regret(self) -> tuple[float, float] | None:
        if self.tuning.race is None:
            return None
        value, _, high = self.tuning.race.regret
        return value, high

    @property
    def verdict(self) -> str:
        return self.tuning.verdict

    @property
    def candidates(self) -> Sequence[Prediction]:
        return self.tuning.points

    @property
    def noise(self) -> list[str]:
        """`--strict` fails if the comparison is undecided; without a comparison the usual rules apply."""
        return super().noise if self.tuning.race is None else [self.answer] if self.verdict == "undecided" else []

    @property
    def rows(self) -> list[Prediction]:
        tuning = self.tuning
        return [] if tuning.race is None else compare_plans(tuning.race, tuning.candidates, tuning.whole)

    @property
    def step(self) -> StepRecord:
        """Any step record of the run, for the fields that all steps have in common."""
        return self.only(StepRecord)[0]

    @property
    def title(self) -> str:
        settings, step = self.tuning.settings, self.step
        ranks = format_number_of(step.world_size, "rank")
        sheet = f"{settings.network} at its nominal speed, {settings.network_ranks} ranks, emulated"
        where = sheet if settings.network else ranks
        return f"{step.model} on {where}, wrapper {step.wrapper}, backend {step.backend}"

    @property
    def answer(self) -> str:
        return f"{self.title}: {describe_answer(self.tuning)}{describe_offers(self.tuning)}."

    @property
    def findings(self) -> Sequence[str]:
        tuning = self.tuning
        doubts = tuning.model.estimate_doubts(tuning.answer.cuts)
        first, listed = next(iter(doubts)), ", ".join(f"{name} {share:.1%}" for name, share in doubts.items())
        return [
            *describe_errors(tuning),
            f"standard deviation of the prediction by input: {listed}; to reduce it, measure {first} again",
            f"contention: {tuning.model.costs.contention.basis}",
            *self._check_predictions(),
            describe_torch(tuning, self.plan),
            *tuning.notes,
        ]

    def _check_predictions(self) -> list[str]:
        """Whether the predictions match the file that was written before the comparison."""
        path = None if self.folder is None else self.folder / PREDICTIONS
        if path is None or not path.exists():
            return []
        written, now = load_json(path, "").get("sha256"), hash_predictions(self.config["predictions"])
        if written != now:
            return [f"{PREDICTIONS} does not match the predictions of this run: one of the two was changed"]
        return [f"predictions were saved before the comparison began ({PREDICTIONS}, sha256 {now[:12]})"]

    def tables(self) -> list[Table]:
        answer, rows = self.tuning.answer, self.rows
        step = answer.step
        buckets = [(number, bucket, step.backward_s) for number, bucket in enumerate(step.buckets)]
        title = "default plan" if answer.label == DEFAULT else "recommended plan"
        tables = [
            Table("race", "plan comparison", RACE, rows),
            Table("strategies", "predicted strategies", PREDICTED, self._list_strategies()),
            Table("grid", "step time by bucket size", GRID, self.candidates),
            Table("buckets", f"{title} (predicted)", BUCKETS, buckets),
        ]
        return [table for table in tables if table.rows]

    def _list_strategies(self) -> list[Prediction]:
        """Each strategy with its measured step and the bytes that a rank sends."""
        tuning, rows = self.tuning, []
        measured = {c.strategy.text: c.measured for c in tuning.candidates if c.label != DEFAULT}
        for text, one in tuning.predicted.items():
            sending = Sending(one.strategy, self.step.world_size, is_in_place=self.step.backend == "shm")
            sent_bytes = sending.count_sent(tuning.model.job, one.cuts)
            rows.append(replace(one, measured=measured.get(text), sent_bytes=sent_bytes))
        return rows

    def figures(self) -> Drawings:
        tuning, title = self.tuning, f"Step time against bucket size: {self.title}"
        found = {"tuning": lambda: plot_tuning(tuning, title, self.machine)}
        if tuning.race is not None:
            found = {"race": lambda: plot_race(self, self.machine)} | found
        return found

    def files(self) -> dict[str, str | bytes]:
        return {"plan.json": self.plan.to_json()}

    @property
    def next_steps(self) -> Sequence[str]:
        if self.folder is None or self.config.get("data") is None:
            return ("paceline.DDP(model, plan=result.plan)",)
        job = describe_job({"model": self.step.model, "wrapper": self.step.wrapper} | self.config)
        # An emulated network has one local rank; on the real network, a launcher starts the ranks.
        ranks = "" if self.tuning.settings.network else f" --ranks {self.step.world_size}"
        if self.verdict == "use":
            return (f"paceline train {job}{ranks} --plan {self.folder / 'plan.json'}",)
        if self.verdict == "undecided":
            settings, race = self.tuning.settings, self.tuning.race
            assert race is not None
            spent_s, share = settings.race_s or settings.amount.confirm_s, race.rounds_to_decide / race.num_rounds
            effort = " --quick" if settings.effort == "quick" else ""
            more = f" --strategy {','.join(settings.strategies)}" if settings.strategies else ""
            budget_s = math.ceil(spent_s * (1 + share) / 10) * 10
            if budget_s > _MOST_BUDGET_S:
                return (f"paceline train {job}{ranks}",)
            return (f"paceline tune {job}{ranks}{describe_network(settings)}{more}{effort} --budget {budget_s}",)
        return (f"paceline tune {job}{' --ranks 2' if not ranks else ' --network 1gbe --network-ranks 8'}",)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | self.tuning.scores


def describe_offers(tuning: Tuning) -> str:
    """The gains of strategies that change the update, in sentences; empty if none was requested."""
    offers = [(candidate.label, format_interval(to_default)) for candidate, to_default, _ in tuning.offers]
    said = [f"{label} changes the step time by {ratio}" for label, ratio in offers]
    if tuning.whole is None:  # fastest first
        others = [(one.step_s, text) for text, one in tuning.predicted.items() if not one.strategy.is_exact]
        said = [f"{text} is predicted to take {format_ms(step_s)} ms" for step_s, text in sorted(others)[:2]]
    if not said:
        return ""
    lossy = [(c.label, to_bf16) for c, _, to_bf16 in tuning.offers if describe_update(c.strategy) == "lossy"]
    if lossy and not any(ratio.high < 1 and ratio.value < 1 - PLATEAU for _, ratio in lossy):
        names = " and ".join(label for label, _ in lossy)
        said.append(f"not worth it here: bf16 with tuned buckets is as fast as {names} in this measurement")
    note = "these change the update and are never chosen automatically; to compare their accuracy, use"
    return f"; {'; '.join(said)}; {note} `paceline scale strategies`"


def describe_errors(tuning: Tuning) -> list[str]:
    """The accuracy of the predictions, in sentences."""
    lines = []
    if tuning.measured:
        scores = {name: "unknown" if score is None else f"{score:.1%}" for name, score in tuning.scores.items()}
        said = {name: score.replace("100.0%", "100%") for name, score in scores.items()}
        tau = tuning.scores["kendall_tau"]
        added = statistics.median((point.measured_exposed_s or 0.0) / point.best_s for point in tuning.measured)
        by = f"is off by {said['exposed_error']}, or {said['exposed_step_error']} of a step"
        lines.append(
            f"predicted steps are off by {said['mape']} on average and by {said['max_error']} at most; "
            f"exposed communication {by if added > tuning.noise else 'is within the noise'}; "
            f"{said['coverage']} of the measured points lie in their 90 % intervals (±{said['width']}); "
            f"rank correlation {'unknown' if tau is None else f'{tau:.2f}'}; noise {tuning.noise:.1%}"
        )
    odd = [format_bytes(point.cap_bytes) for point in tuning.points if not point.same_layout]
    return [*lines, f"the wrapper's buckets differ from the simulation at {', '.join(odd)}"] if odd else lines


def describe_plan(tuning: Tuning, candidate: Prediction) -> str:
    count = format_number_of(candidate.num_buckets, "bucket")
    cap = candidate.cap_bytes or tuning.find_cap(candidate)
    if candidate.label == DEFAULT:
        return f"the default ({count})"
    return f"{f'bucket size {format_bytes(cap)}' if cap else 'the recommended plan'} ({count})"


def describe_answer(tuning: Tuning) -> str:
    """The answer as one sentence, without the final period."""
    race, answer, choice = tuning.race, tuning.answer, tuning.choice
    what = describe_plan(tuning, answer)
    if race is None:
        if tuning.verdict == "use":
            return f"use {what}: predicted {choice.gain:.1%} faster than the default; no plan was run"
        why = "all plans are predicted within 1 % of it" if tuning.verdict == "flat" else "no plan is clearly faster"
        return f"{'flat: ' if tuning.verdict == 'flat' else ''}keep {what}: {why}; no plan was run"
    rounds = format_number_of(race.num_rounds, "alternating round")
    count = len(race.to_default)
    if count == 1:
        return f"flat: all plans have the same buckets as {what}"
    most = race.regret[2]
    regret = f"another plan may be up to {most:.1%} faster" if math.isfinite(most) else "too few rounds for a bound"
    regret = regret if most >= 5e-4 else "no other plan is faster"  # it would be 0.0 %
    if race.verdict == "use":
        gain = f"{1 - race.gain.value:.1%} ({1 - race.gain.high:.1%} to {1 - race.gain.low:.1%})"
        return f"use {what}: {gain} faster than the default over {rounds}; {regret}"
    if race.verdict == "flat" and not race.is_level:
        return f"flat: {race.limit} (predicted, and consistent with {rounds}); keep {what}"
    if race.verdict == "flat":
        return f"flat: all {count} compared plans are within ±1 % of {what} over {rounds}; keep it"
    if race.verdict == "default":
        why = "the others are slower" if race.left == (DEFAULT,) else regret
        return f"{what} is the best of {count} plans over {rounds}: {why}"
    more = f"about {race.rounds_to_decide:,} more rounds ({format_duration(tuning.estimate_more_s())}) would decide"
    if race.regret[2] == math.inf:
        return f"undecided: {rounds} are too few to compare {count} plans; keep {what}; {more}"
    return f"undecided: {what} is at most {most:.1%} slower than the best of {count} plans after {rounds}; {more}"


def describe_network(settings: TuneSettings) -> str:
    """Command-line options for the emulated network."""
    return f" --network {settings.network} --network-ranks {settings.network_ranks}" if settings.network else ""


def describe_torch(tuning: Tuning, plan: Plan) -> str:
    """The same plan as arguments of torch's own wrapper."""
    if tuning.answer.label == DEFAULT and tuning.settings.wrapper == "torch":
        return "for torch's own wrapper: DistributedDataParallel(model), without options"
    try:
        arguments = plan.as_torch_kwargs()
    except ConfigError as error:
        return f"torch's own wrapper cannot use this plan: {error}"
    listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
    needs = " (torch 2.13 or newer)" if "bucket_cap_mb_list" in arguments else ""
    return f"for torch's own wrapper: DistributedDataParallel(model, {listed}){needs}"


def plot_race(result: TuneResult, subtitle: str) -> Figure:
    """Plot each plan's step time relative to the default's, with the deciding interval and the prediction."""
    rows, race, tuning = result.rows[::-1], result.tuning.race, result.tuning
    assert race is not None
    figure, axes = new_figure(f"{result.title}: {describe_answer(tuning)}", f"{subtitle}; predictions are simulated")
    axes.axvspan(-100 * PLATEAU, 100 * PLATEAU, color=COLORS[6], alpha=0.08, lw=0, label="within 1 % of the default")
    axes.axvline(0, color=COLORS[6], lw=1)
    styles = {
        "use": (COLORS[2], "to use"), "keep": (COLORS[2], "to keep"), "": (COLORS[0], "not decided"),
        "slower": (COLORS[1], "slower than another plan"), "within 1 %": (COLORS[5], "shown to be within 1 %"),
        "beaten": (COLORS[1], "slower than another plan"), "faster": (COLORS[3], "faster, and changes the update"),
    }  # fmt: skip
    for place, row in enumerate(rows):
        color, label = styles[row.status]
        seen = {text.get_label() for text in axes.get_lines()}
        ratio = row.ratios[DEFAULT]
        value, low, high = (100 * (end - 1) for end in (ratio.value, ratio.low, ratio.high))
        if ratio.is_known:
            axes.plot([low, high], [place, place], "|-", color=color, lw=2, ms=9)
        axes.plot([value], [place], "o", color=color, ms=7, label="_" if label in seen else label)
        predicted = 100 * (row.step_s / tuning.choice.default.step_s - 1)
        axes.plot([predicted], [place], "D", color=COLORS[6], mfc="none", ms=7, label="_" if place else "predicted")
    names = [f"{row.label} ({format_number_of(row.num_buckets, 'bucket')})" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.set(ylim=(-0.6, len(rows) - 0.4), xlabel="step time relative to the default (%), with its interval")
    place_legend(figure, axes)
    return figure


def plot_tuning(tuning: Tuning, title: str, subtitle: str) -> Figure:
    """Plot step time against bucket size: predicted for every cap, measured for some."""
    points = tuning.points
    sources = {point.measured.source for point in points if point.measured} or {"simulated"}
    figure, axes = new_figure(title, f"{subtitle}; predictions are simulated, points are {', '.join(sorted(sources))}")
    least, most = min(p.cap_bytes for p in points) / 1.5, max(p.cap_bytes for p in points) * 1.5
    caps = estimate_caps(tuning.model.job, tuning.model.costs).points
    caps = tuple(cap for cap in caps if cap.high_bytes >= least and cap.low_bytes <= most) or caps[-1:]
    best = tuning.best_predicted
    draw_caps(axes, caps, lambda cap: cap.step_s, (best.cap_bytes, best.step_s), tuning.model.plain_s, points)
    axes.set(xlim=(least / MIB, most / MIB), ylabel="step (ms)")
    timings = [(p.cap_bytes / MIB, p.measured.timing) for p in points if p.measured is not None]
    if measured := [(size, *(1e3 * s for s in (t.median_s, t.p10_s, t.p90_s))) for size, t in timings]:
        draw_measured(axes, measured, "measured: median, p10 to p90", lw=1)
    place_legend(figure, axes)
    return figure
