"""Result of `predict scale`: the fastest way to train on each network and number of ranks, with faults and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from paceline.predict.fully_sharded import (
    FULLY_SHARDED,
    Blocks,
    FullySharded,
    count_states,
    estimate_memory,
)
from paceline.predict.goodput import Faults, build_policies
from paceline.predict.job import Job
from paceline.predict.predictor import Prediction
from paceline.predict.strategy_costs import describe_strategies, describe_update, list_strategies
from paceline.predict.whatif import describe_scenario
from paceline.records import CodecRecord
from paceline.records.samples import group_by
from paceline.report.plots import Drawings, Figure, draw_line, label_values, new_figure, place_legend
from paceline.report.prediction_rows import PLACE, describe_rows
from paceline.report.predictions import PredictResult
from paceline.report.strategy_steps import ACCURACY, StrategyStepsResult
from paceline.report.table import Column, Table, raw_columns
from paceline.strategy import Strategy
from paceline.units import format_duration, format_memory, format_ms, format_number_of

_CAPS = 16  # number of bucket sizes tried
_TIME = attrgetter("time_s")
_WORTH = 0.01  # a lossy strategy is shown if it saves more than this fraction of the time


@dataclass(frozen=True)
class Outlook:
    """A strategy on a network and number of ranks. `share` is the goodput at the best save interval, and `time_s` the
    time for all samples, including faults. Its bounds come only from the interval of the step."""

    name: str
    row: Prediction
    memory_bytes: int
    save_every_s: float
    share: float
    time_s: float
    fits: bool

    @property
    def update(self) -> str:
        return "exact" if self.name == FULLY_SHARDED else describe_update(self.row.strategy)

    @property
    def bounds_s(self) -> tuple[float, float]:
        row = self.row
        return self.time_s * row.low_s / row.step_s, self.time_s * row.high_s / row.step_s


_COLUMNS = (
    *(replace(column, value=f"row.{column.value}") for column in PLACE),
    Column("strategy", "name", key="strategy", is_key=True),
    Column("update", "update", key="update", priority=2),
    Column("step", "row.step_s", "ms", "step_s", priority=9),
    Column("90 % (ms)", lambda o: f"{format_ms(o.row.low_s)} to {format_ms(o.row.high_s)}", str, priority=6),
    Column("useful", "share", "{:.1%}".format, "useful_share", priority=5),
    Column("all samples", "time_s", format_duration, "time_s", priority=8),
    Column("memory", "memory_bytes", format_memory, "memory_bytes", priority=7),
    Column("fits", lambda o: None if o.fits else False, "yes", priority=4),
    Column("doubtful", lambda o: bool(o.row.doubt) or None, "yes", priority=3),
    *raw_columns("row.low_s", "row.high_s", "fits", "save_every_s", "row.doubt", "row.source"),
    *raw_columns(time_low_s="bounds_s.0", time_high_s="bounds_s.1"),
)


class OutlookResult(StrategyStepsResult):
    """Result of `predict scale`: `outlooks` has every strategy on every network and number of ranks, and `chosen` the
    fastest exact one for each, followed by the fastest overall if that is not exact."""

    def _simulate(self, draws: Sequence[Job]) -> None:
        config = self.config
        self.blocks = Blocks.read(self.profile)
        self.codecs = self.only(CodecRecord)
        self.strategies = list_strategies([name for name in config["strategies"] if name != FULLY_SHARDED])
        self.num_states = count_states(config["optimizer"], config["momentum"])
        ranks = [count for count in config["ranks"] if count > 1]
        self.outlooks: list[Outlook] = []
        for fabric in self.fabrics:
            for strategy in self.strategies:
                sends = self._send_by(strategy, fabric, _CAPS)
                found = self._simulate_on(fabric, draws, ranks, **sends)
                self.outlooks += [self._evaluate(strategy.text, strategy, row) for row in found]
            if FULLY_SHARDED in config["strategies"]:
                found = self._simulate_on(fabric, draws, ranks, send=lambda count, *_: FullySharded(self.blocks, count))
                self.outlooks += [self._evaluate(FULLY_SHARDED, None, row) for row in found]
        self.rows = [one.row for one in self.outlooks]
        places = group_by(self.outlooks, lambda one: (one.row.network, one.row.world_size))
        self.chosen = [one for found in places.values() for one in _choose(found)]

    def _evaluate(self, name: str, strategy: Strategy | None, row: Prediction) -> Outlook:
        config, count = self.config, row.world_size
        memory = estimate_memory(self.job, strategy, self.blocks, self.num_states, count)
        saved = (1 + self.num_states) * self.job.num_bytes / (count if strategy is None else 1)
        costs = {
            "step": row.step_s, "save": saved / config["save_bytes_per_s"], "restart": config["restart_s"],
            "detect": config["detect_s"],
        }  # fmt: skip
        (policy, *_) = build_policies(costs, Faults(config["mtbf_per_rank_s"] / count, count))
        every_s = policy.find_best_interval()
        share = policy.estimate_share(every_s)
        steps = config["total_samples"] / (count * self.profile.batch_size)
        fits = config["memory_bytes"] is None or memory <= config["memory_bytes"]
        time_s = steps * row.step_s / share if share else float("inf")
        row = row if strategy is None else replace(row, strategy=strategy)
        return Outlook(name, row, memory, every_s, share, time_s, fits)

    @property
    def answer(self) -> str:
        most = max(one.row.world_size for one in self.outlooks)
        network = self.fabrics[-1].name
        last = [one for one in self.chosen if (one.row.network, one.row.world_size) == (network, most)]
        where = f"{self.profile.model} on {most:,} ranks over {network}"
        if not last:
            return f"{where}: no strategy fits in the specified memory. Simulated."
        texts = [
            f"{one.name} ({one.update}) trains on {self.config['total_samples']:,.0f} samples in "
            f"{format_duration(one.time_s)} (90 %: {' to '.join(map(format_duration, one.bounds_s))}), with "
            f"{format_memory(one.memory_bytes)} per rank"
            for one in last
        ]
        busy = ", from times measured on a busy machine" if self.busy else ""
        lossy = f" {ACCURACY[0].upper()}{ACCURACY[1:]}." if len(last) > 1 else ""
        return f"{where}: {'; '.join(texts)}. Simulated{busy}.{lossy}"

    @property
    def findings(self) -> Sequence[str]:
        config = self.config
        mtbf, detect, restart = (
            format_duration(config[f"{name}_s"]) for name in ("mtbf_per_rank", "detect", "restart")
        )
        rate, states = config["save_bytes_per_s"] / 1e9, format_number_of(self.num_states, "tensor")
        assumed = [
            f"a rank fails once in {mtbf} on average, and a fault stops all ranks; it is detected after {detect}, and "
            f"a restart takes {restart}",
            f"a save stops training while one rank (with {FULLY_SHARDED}: every rank) writes {rate:g} GB/s; the save "
            "interval is optimal",
            f"memory counts parameters, gradients, {states} of optimizer state per parameter and the strategy's state, "
            "but not activations",
            f"{FULLY_SHARDED}: one unit per block and a root unit, gathered again in backward, as in torch's "
            "fully_shard; an all-gather or a reduce-scatter takes half as long as an all-reduce",
            "each rank computes as long as in the profile on any number of ranks (weak scaling)",
            *describe_strategies(self.job, self.strategies, self.codecs),
        ]
        assumed += [line for fabric in self.fabrics for line in fabric.assumptions]
        assumed += describe_scenario(self.job, self.fabrics, **self.scenario)
        return describe_rows(self.rows, assumed, "assumed")

    def tables(self) -> list[Table]:
        title = f"{self.profile.model}: the fastest exact strategy, and the fastest overall"
        return [Table("scale", title, _COLUMNS, self.chosen, key="rows")]

    def page_tables(self) -> list[Table]:
        title = f"{self.profile.model}: every strategy"
        return [*self.tables(), Table("strategies", title, _COLUMNS, self.outlooks, key="strategies")]

    def files(self) -> dict[str, str | bytes]:
        return {"strategies.csv": self.page_tables()[-1].csv()}

    def figures(self) -> Drawings:
        return {"scale": lambda: plot_times(self)}

    @property
    def next_steps(self) -> Sequence[str]:
        return (f"paceline scale ranks --model {self.profile.model}",) if not self.config["is_own"] else ()

    def to_json(self) -> dict[str, Any]:
        return PredictResult.to_json(self) | {"strategies": self.page_tables()[-1].rows_json()}


def _choose(found: Sequence[Outlook]) -> list[Outlook]:
    """The fastest exact strategy that fits, and the fastest overall if that saves more than 1 % of the time."""
    fitting = [one for one in found if one.fits]
    exact = min((one for one in fitting if one.update == "exact"), key=_TIME, default=None)
    best = min(fitting, key=_TIME, default=None)
    if best is None:
        return []
    is_better = exact is None or best.time_s < exact.time_s * (1 - _WORTH)
    return [*([exact] if exact else []), *([best] if is_better and best is not exact else [])]


def plot_times(result: OutlookResult) -> Figure:
    """Plot the time for all samples against ranks: one line per network, for the fastest strategy."""
    samples = f"{result.config['total_samples']:,.0f} samples"
    figure, axes = new_figure(f"{result.profile.model}: time for {samples}", "fastest strategy, with faults; simulated")
    for number, (network, found) in enumerate(group_by(result.chosen, lambda one: one.row.network).items()):
        best = group_by(found, lambda one: one.row.world_size)
        line = [min(same, key=_TIME) for same in best.values()]
        points = [(o.row.world_size, *(s / 3600 for s in (o.time_s, *o.bounds_s))) for o in line]
        draw_line(axes, number, points, f"{network} (simulated)", "--")
    label_values(axes, [one.row.world_size for one in result.outlooks])
    axes.set(yscale="log", xlabel="ranks", ylabel=f"hours for {samples}")
    place_legend(figure, axes)
    return figure
