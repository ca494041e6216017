"""The result of `predict --strategy`: step times by strategy and the bandwidths at which the fastest one changes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from paceline.predict.job import Job
from paceline.predict.networks import AssumedFabric, Fabric, find_network, find_networks
from paceline.predict.predictor import Prediction
from paceline.predict.race import Interval
from paceline.predict.strategy_costs import (
    BF16,
    UPDATES,
    Sweep,
    choose_fastest,
    compare_rows,
    describe_strategies,
    describe_update,
    fit_sending,
    is_worth_it,
    list_strategies,
    prefer,
    sweep_bandwidths,
)
from paceline.predict.whatif import count_per_host, is_shared
from paceline.records import CodecRecord
from paceline.report.plots import Drawings, Figure, draw_line, label_values, new_figure, place_legend
from paceline.report.prediction_rows import PLACE, format_interval, pick
from paceline.report.predictions import PredictResult
from paceline.report.table import Column, Table, build_row, raw_columns
from paceline.strategy import DENSE, Strategy
from paceline.units import format_ms

# Number of bucket sizes tried for each strategy on a network, and at each bandwidth.
_CAPS, _SWEPT_CAPS = 48, 10
_LATENCY_S = 50e-6  # latency of a link, for networks that do not specify one
ACCURACY = "a lossy strategy may cost accuracy, which is not predicted here: see `paceline scale strategies`"


def _format_change(ratio: Interval) -> str:
    return "=" if ratio.low == ratio.high else format_interval(ratio, "{:+.0%}")


def _get_step(strategy: str, row: tuple[int, float, str, Mapping[str, float]]) -> float:
    return row[3][strategy]


STRATEGIES = (
    *PLACE,
    *pick(strategy=0, update=7, sent=5, step=9, interval=3),
    Column("vs. dense", "ratios.dense", _format_change, priority=2),
    Column("vs. bf16", "ratios.bf16", _format_change, priority=6),
    Column("bucket size", lambda r: None if r.strategy.outer else r.cap_bytes, "bytes", "best_cap_bytes"),
    *raw_columns("low_s", "high_s", "num_buckets", "doubt", "exposed_s"),
    Column(None, is_worth_it, key="is_worth_it"),
    *raw_columns("source", to_dense="ratios.dense.value", to_dense_low="ratios.dense.low"),
    *raw_columns(to_dense_high="ratios.dense.high", to_bf16="ratios.bf16.value"),
    *raw_columns(to_bf16_low="ratios.bf16.low", to_bf16_high="ratios.bf16.high"),
)


_CELL = (
    *raw_columns("network", "world_size", winner="winner.strategy.text", exact="exact.strategy.text"),
    *raw_columns(lossy="lossy.strategy.text", schedule="schedule.strategy.text"),
)


class Cell:
    """The strategies on one network and number of ranks, and the fastest exact one, lossy one and schedule."""

    def __init__(self, rows: Sequence[Prediction]) -> None:
        self.rows, self.network, self.world_size = rows, rows[0].network, rows[0].world_size
        self._by_name = {row.strategy.text: row for row in rows}
        self.dense, self.bf16 = self._by_name[DENSE.text], self._by_name[BF16.text]
        self.exact, _, self.lossy, self.schedule = map(self._find_fastest, UPDATES)

    def _find_fastest(self, update: str) -> Prediction | None:
        steps_s = {row.strategy.text: row.step_s for row in self.rows if describe_update(row.strategy) == update}
        return self._by_name[choose_fastest(steps_s)] if steps_s else None

    @property
    def winner(self) -> Prediction:
        """The fastest strategy that sends in every step; within 1 %, the one that changes the update least."""
        names = prefer(row.strategy for row in self.rows if not row.strategy.outer)
        return self._by_name[choose_fastest({one.text: self._by_name[one.text].step_s for one in names})]

    def describe(self) -> str:
        assert self.exact is not None
        text = f"The fastest exact strategy is {self.exact.strategy.text}, {format_ms(self.exact.step_s)} ms"
        text += f"; bf16 takes {format_ms(self.bf16.step_s)} ms."
        for row, kind in ((self.lossy, "lossy strategy"), (self.schedule, "schedule")):
            if row is None:
                continue
            name, ratio = row.strategy.text, row.ratios[BF16.text]
            if is_worth_it(row):
                less = f"{1 - ratio.value:.0%} less than bf16 (90 %: {1 - ratio.high:.0%} to {1 - ratio.low:.0%})"
                text += f" The fastest {kind} is {name}, {format_ms(row.step_s)} ms, {less}."
            else:
                why = f"none is significantly (more than 1 %) faster than bf16 ({name}: {_format_change(ratio)})"
                text += f" A {kind} is not worth it here: {why}."
        return text


class StrategyStepsResult(PredictResult):
    """`predict --strategy`: `cells` has one entry per network and number of ranks, with a row for each strategy;
    `sweeps` has the steps by bandwidth for each number of ranks; `rows` has the rows of all cells."""

    def _simulate(self, draws: Sequence[Job]) -> None:
        self.strategies = list_strategies(self.config["strategies"])
        self.codecs = self.only(CodecRecord)
        self.cells: list[Cell] = []
        ranks = self.config["ranks"]
        for fabric in self.fabrics:
            sent = {one.text: self._send_by(one, fabric, _CAPS) for one in self.strategies}
            found = {text: self._simulate_on(fabric, draws, ranks, **sends) for text, sends in sent.items()}
            for place, world_size in enumerate(ranks):
                if world_size > 1:
                    rows = {text: rows[place] for text, rows in found.items()}
                    self.cells.append(Cell(compare_rows(rows, self.strategies)))
        self.rows = [row for cell in self.cells for row in cell.rows]

    def _send_by(self, strategy: Strategy, fabric: Fabric, most_caps: int) -> dict[str, Any]:
        def send(world_size: int, factor: float, resample: Any) -> Any:
            per_host = count_per_host(fabric, world_size)
            return fit_sending(strategy, world_size, self.codecs, resample, factor, is_shared(fabric), per_host)

        return {"send": send, "most_caps": most_caps}

    @property
    def _latency(self) -> str:
        network = self.config["network"]
        named = find_networks(network)[0].latency_s if network is not None else _LATENCY_S
        return f"{1e6 * (named or _LATENCY_S):g}us"

    @cached_property
    def sweeps(self) -> dict[int, Sweep]:
        """For each number of ranks, the steps by bandwidth, with the first network's latency and nodes."""
        config, latency = self.config, self._latency
        ordered, per_node = prefer(self.strategies), config["ranks_per_node"] or 1
        joined = (f.inside for f in self.fabrics if isinstance(f, AssumedFabric) and f.network.ranks_per_node == 1)
        inside = next(joined, None)

        def estimate(world_size: int, rate: float) -> dict[str, float]:
            link = find_network(f"{rate / 1e9:.6g}Gb/s,{latency}")
            fabric = AssumedFabric(link, inside, per_node) if inside is not None else AssumedFabric(link, link)
            found = dict[str, float]()
            for one in ordered:
                (row,) = self._simulate_on(fabric, (), [world_size], **self._send_by(one, fabric, _SWEPT_CAPS))
                found[one.text] = row.step_s
            return found

        counts = [world_size for world_size in config["ranks"] if world_size > 1]
        return {count: sweep_bandwidths(functools.partial(estimate, count)) for count in counts}

    @property
    def answer(self) -> str:
        cell = max(self.cells, key=lambda cell: cell.world_size)
        busy = ", from times measured on a busy machine" if self.busy else ""
        has_gain = any(row is not None and is_worth_it(row) for row in (cell.lossy, cell.schedule))
        lossy = f" Note: {ACCURACY}." if has_gain else ""
        where = f"{self.profile.model} on {cell.world_size:,} ranks over {cell.network}"
        return f"{where}. {cell.describe()} Simulated{busy}.{lossy}"

    @property
    def findings(self) -> Sequence[str]:
        last = max(self.cells, key=lambda cell: cell.world_size)
        others = [cell for cell in self.cells if cell is not last]
        crossings = [
            f"on {world_size:,} ranks, {above} is fastest above {rate / 1e9:.3g} Gb/s, and {below} below"
            for world_size, sweep in self.sweeps.items()
            for rate, below, above in sweep.crossings
        ]
        same = [(n, sweep.rows[0][1]) for n, sweep in self.sweeps.items() if not sweep.crossings]
        assumed = describe_strategies(self.job, self.strategies, self.codecs)
        return [
            *(f"{cell.world_size:,} ranks over {cell.network}: {cell.describe()}" for cell in others),
            *crossings,
            *(f"on {n:,} ranks {fastest} is fastest at every bandwidth" for n, fastest in same),
            *self._name_schedules(),
            ACCURACY,
            *(f"assumed: {line}" for line in assumed),
            *super().findings,
        ]

    def _name_schedules(self) -> list[str]:
        """The fastest schedules at the lowest and the highest bandwidth, on the most ranks."""
        if not (names := [one.text for one in self.strategies if one.outer]) or not self.sweeps:
            return []
        world_size, sweep = max(self.sweeps.items())
        found = []
        for rate in (min(sweep.steps_s), max(sweep.steps_s)):
            steps_s = {name: sweep.steps_s[rate][name] for name in names}
            fastest = choose_fastest(steps_s)
            found.append(f"{fastest} at {rate / 1e9:g} Gb/s ({format_ms(steps_s[fastest])} ms)")
        return [f"on {world_size:,} ranks the fastest schedule is {' and '.join(found)}"]

    def tables(self) -> list[Table]:
        swept = [(n, *row) for n, sweep in self.sweeps.items() for row in sweep.rows]
        columns = (
            Column("ranks", "0", "{:,}".format, "world_size", is_key=True),
            Column("bandwidth (Gb/s)", lambda r: r[1] / 1e9, "{:g}".format, "gbit_per_s", is_key=True),
            Column("fastest", "2", key="fastest", priority=9),
            Column("step (ms)", lambda r: r[3][r[2]], format_ms, "fastest_s", priority=8),
            *(
                Column(f"{one.text} (ms)", functools.partial(_get_step, one.text), format_ms, f"{one.text}_s")
                for one in self.strategies
            ),
        )
        title = f"{self.profile.model}: the fastest strategy by bandwidth, at a latency of {self._latency}"
        return [
            Table("strategies", f"{self.profile.model}: step time by strategy", STRATEGIES, self.rows, key="rows"),
            Table("bandwidths", title, columns, swept, key="bandwidths"),
        ]

    def figures(self) -> Drawings:
        return {"bandwidths": lambda: plot_bandwidths(self)}

    @property
    def next_steps(self) -> Sequence[str]:
        if self.config["is_own"]:
            return ("paceline.tune(model, step, strategy='all')",)
        return (f"paceline tune --model {self.profile.model} --strategy all",)

    def to_json(self) -> dict[str, Any]:
        cells = [
            build_row(_CELL, cell) | {"is_worth_it": cell.lossy is not None and is_worth_it(cell.lossy)}
            for cell in self.cells
        ]
        crossings = [
            {"world_size": n, "bits_per_s": rate, "below": below, "above": above}
            for n, sweep in self.sweeps.items()
            for rate, below, above in sweep.crossings
        ]
        return super().to_json() | {"cells": cells, "crossings": crossings}


def plot_bandwidths(result: StrategyStepsResult) -> Figure:
    """Plot step time against link bandwidth, on the most ranks, with a line for each strategy."""
    world_size, sweep = max(result.sweeps.items())
    title = f"{result.profile.model} on {world_size:,} ranks: step time by bandwidth and strategy"
    figure, axes = new_figure(title, "each with its best buckets; dotted: where the fastest changes; simulated")
    for number, strategy in enumerate(result.strategies):
        points = [(rate / 1e9, 1e3 * steps_s[strategy.text], None, None) for rate, steps_s in sweep.steps_s.items()]
        draw_line(axes, number, points, strategy.text, "--" if strategy.is_exact else "-")
    for rate, *_ in sweep.crossings:
        axes.axvline(rate / 1e9, color="#555555", ls=":", lw=1)
    label_values(axes, [rate / 1e9 for rate in sweep.steps_s], "{:g}".format)
    axes.set(yscale="log", xlabel="bandwidth (Gb/s)", ylabel="step (ms)")
    place_legend(figure, axes)
    return figure
