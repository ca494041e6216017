"""`predict` as a result: a step on other networks and numbers of ranks, or backward time against bucket size.

All numbers are simulated, from the records and the request that the run holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import RecordError
from paceline.predict.curves import fit_curve
from paceline.predict.job import build_job_from_profile, build_job_from_tables, draw_jobs
from paceline.predict.networks import AssumedFabric, Fabric, build_measured_fabric, find_network, find_networks
from paceline.predict.search import CapCurve, CapPoint, estimate_caps, estimate_sensitivity, find_best_cuts
from paceline.predict.simulate import MachineCosts
from paceline.predict.whatif import DRAWS, WhatIfRow, describe_scenario, simulate_what_if
from paceline.records import CollectiveRecord, LayerProfileRecord, LayerSizeRecord, LayerTimeRecord
from paceline.records.samples import group_by
from paceline.report.plots import COLORS, MARKERS, draw_line, label_values, new_figure, place_legend
from paceline.report.result import Result
from paceline.report.table import Column, Table, build_row, raw_columns, text_columns
from paceline.units import MIB, format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSIDE = "nvlink"
_MOST_ROWS = 24  # on the terminal, each the best of its number of buckets; the CSV has all bucket sizes


def _advise(row: WhatIfRow) -> str:
    return "the default" if row.keeps_default else _join(row.plateau_low_bytes, row.plateau_high_bytes)


def _join(low_bytes: int, high_bytes: int) -> str:
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


WHAT_IF = (
    *text_columns("network", is_key=True),
    Column("ranks", "world_size", "{:,}".format, "world_size", is_key=True),
    *text_columns("algorithm", priority=1),
    Column("step", "step_s", "ms", "step_s", priority=9),
    Column("90 % (ms)", lambda r: f"{format_ms(r.low_s)} to {format_ms(r.high_s)}", str, priority=8),
    Column("efficiency", "efficiency", "percent.1", "efficiency", priority=7),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=5),
    Column("of step", "exposed_share", "percent.1", "exposed_share"),
    Column("slowest rank", lambda r: r.straggler_s or None, "ms"),
    Column("bucket size", _advise, str, priority=4),
    Column("buckets", "num_buckets", "count", "num_buckets"),
    Column("saves", lambda r: max(0.0, r.gain), "percent.1", priority=3),
    Column("bound by", "bound", str, "bound", priority=2),
    *raw_columns("low_s", "high_s", "efficiency_low", "efficiency_high", "straggler_s", "best_cap_bytes"),
    *raw_columns("plateau_low_bytes", "plateau_high_bytes", "default_step_s", "gain", "keeps_default"),
    *raw_columns("doubt", "source", local_step_s="local_s"),
    Column("source", lambda r: f"{r.source}{', doubtful' if r.doubt else ''}", "text"),
)


class PredictResult(Result):
    """`predict`: rows of networks x ranks. For one row, `step_s`, `interval` and `exposed_s` are its numbers."""

    def _derive(self) -> None:
        config = self.config
        self.profile = self.only(LayerProfileRecord)[0]
        self.job = build_job_from_profile(self.profile, config["gradients"])
        self.fabrics: list[Fabric] = []
        for network in find_networks(config["network"]) if config["network"] is not None else ():
            inside = find_network(config["inside"] or INSIDE)
            self.fabrics.append(AssumedFabric(network, inside, config["ranks_per_node"], config["algorithm"]))
        if sweep := self.only(CollectiveRecord):
            self.fabrics.append(build_measured_fabric(sweep, config["backend"], config["algorithm"]))
        self.scenario: dict[str, Any] = {name: config[name] for name in ("accumulate", "spread")}
        draws = draw_jobs(self.profile, self.job, DRAWS)
        found = (simulate_what_if(self.job, draws, f, config["ranks"], **self.scenario) for f in self.fabrics)
        self.rows = [row for rows in found for row in rows]

    @property
    def step_s(self) -> float:
        return self._only.step_s

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the step, in seconds."""
        return self._only.low_s, self._only.high_s

    @property
    def exposed_s(self) -> float:
        return self._only.exposed_s

    @property
    def _only(self) -> WhatIfRow:
        if len(self.rows) != 1:
            raise RecordError(f"{len(self.rows)} networks and numbers of ranks were predicted: read `rows`")
        return self.rows[0]

    @property
    def answer(self) -> str:
        row = max(self.rows, key=lambda row: row.world_size)
        buckets = "" if row.keeps_default else f"; buckets of {_advise(row)} save {max(0.0, row.gain):.1%}"
        return (
            f"{self.profile.model} on {row.world_size:,} ranks over {row.network}: a step takes "
            f"{format_ms(row.step_s)} ms (90 %: {format_ms(row.low_s)} to {format_ms(row.high_s)}), efficiency "
            f"{row.efficiency:.0%}, bound by {row.bound}{buckets}. Simulated."
        )

    @property
    def findings(self) -> Sequence[str]:
        networks = dict.fromkeys(line for fabric in self.fabrics for line in fabric.assumptions)
        doubtful = [f"{row.network} on {row.world_size:,} ranks: {row.doubt}" for row in self.rows if row.doubt]
        assumed = [*networks, *describe_scenario(self.job, self.fabrics, **self.scenario)]
        return [
            *(f"profile: {line}" for line in self.job.notes),
            *(line if line.startswith(("contention ", "interval: ")) else f"assumed: {line}" for line in assumed),
            *(f"doubtful: {line}" for line in doubtful),
        ]

    def tables(self) -> list[Table]:
        return [Table("table", f"{self.profile.model} on other networks and ranks", WHAT_IF, self.rows, key="rows")]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        title = f"{self.profile.model}: efficiency on other networks"
        return {"efficiency": lambda: plot_efficiency(self.rows, title, "each at its best bucket size; band: 90 %")}

    @property
    def next_steps(self) -> Sequence[str]:
        named, most = self.config["network"], max(row.world_size for row in self.rows)
        network, ranks = "10gbe" if named is None else find_networks(named)[0].name, most if most > 1 else 8
        if self.config.get("is_own", True):
            return (f"paceline.tune(model, step, network={network!r}, network_ranks={ranks})",)
        return (f"paceline tune --model {self.profile.model} --network {network} --network-ranks {ranks}",)

    def to_json(self) -> dict[str, Any]:
        more = {"model": self.profile.model, "assumptions": list(self.findings), "source": "simulated"}
        return super().to_json() | more


def plot_efficiency(rows: Sequence[WhatIfRow], title: str, subtitle: str) -> Figure:
    """Weak-scaling efficiency against ranks, with its interval: a line for each network, hollow where doubtful."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    for number, (network, found) in enumerate(group_by(rows, lambda row: row.network).items()):
        line = sorted(found, key=lambda row: row.world_size)
        shares = [(row.world_size, row.efficiency, row.efficiency_low, row.efficiency_high) for row in line]
        draw_line(axes, number, [(n, *(100 * s for s in rest)) for n, *rest in shares], f"{network} (simulated)", "--")
        for row in (row for row in line if row.doubt):
            marker, color = MARKERS[number % len(MARKERS)], COLORS[number % len(COLORS)]
            axes.plot([row.world_size], [100 * row.efficiency], marker, color=color, ms=5, mfc="white")
    label_values(axes, [row.world_size for row in rows])
    axes.set(ylim=(0, 105), xlabel="ranks", ylabel="weak-scaling efficiency (%)")
    place_legend(figure, axes)
    return figure


POINTS = (
    Column("bucket size", lambda p: _join(p.low_bytes, p.high_bytes), "text", is_key=True),
    *raw_columns("low_bytes", "high_bytes"),
    Column("buckets", lambda p: len(p.cuts), "count", "num_buckets", priority=2),
    Column("backward", "backward_s", "ms", "backward_s", priority=3),
    Column("exposed", "step.exposed_s", "ms", "exposed_s", priority=1),
    Column(None, lambda p: "simulated", key="source"),
)
CHANGES = (
    Column("changed", "what", key="changed", is_key=True),
    Column("by", "factor", "x {:g}".format, "factor", is_key=True),
    Column("best bucket size", lambda c: _join(*c.plateau), priority=3),
    Column(None, lambda c: c.plateau[0], key="plateau_low_bytes"),
    Column(None, lambda c: c.plateau[1], key="plateau_high_bytes"),
    Column("buckets", lambda c: len(c.best.cuts), "count", priority=1),
    Column("backward", "best.backward_s", "ms", priority=2),
    Column("exposed", "best.step.exposed_s", "ms"),
    Column(None, lambda c: build_row(POINTS, c.best), key="best"),
)


class CapsResult(Result):
    """`predict --csv`: backward time for every bucket size, from tables of layers and of all-reduce."""

    def _derive(self) -> None:
        self.job = build_job_from_tables(self.only(LayerSizeRecord), self.only(LayerTimeRecord))
        self.cost = fit_curve((record.num_bytes, record.time_s) for record in self.only(CollectiveRecord))
        costs = MachineCosts(curve=self.cost)
        self.caps, self.changes = estimate_caps(self.job, costs), estimate_sensitivity(self.job, costs, self.cost)
        self.free_plan = find_best_cuts(self.job, costs)

    @property
    def answer(self) -> str:
        return (
            f"Best bucket size: {_join(*self.caps.plateau)}, all within 1 % of "
            f"{format_ms(self.caps.best.backward_s)} ms of backward with communication. Simulated."
        )

    @property
    def findings(self) -> Sequence[str]:
        cuts, free = self.free_plan
        last, size = self.job.gradients[-1].name, self.job.sizes[-1]
        return [
            *self.job.notes,
            f"the best free plan, {len(cuts)} buckets, takes {format_ms(free.over_s)} ms",
            f"the last gradient ({last}, {format_bytes(size)}) is ready only at the end: "
            f"{format_ms(self.cost.estimate_s(size))} ms stay exposed whatever the bucket size",
            "assumed: one message at a time, no copies, no contention; times include the ranks' wait for each other",
        ]

    def tables(self) -> list[Table]:
        counts = group_by(self.caps.points, lambda point: len(point.cuts)).values()
        best = [min(points, key=lambda point: point.backward_s) for points in counts]
        fast = [point for point in best if point.backward_s < 1.5 * self.caps.best.backward_s]
        shown = fast if len(fast) <= _MOST_ROWS else [*fast[: _MOST_ROWS // 2], *fast[-_MOST_ROWS // 2 :]]
        return [
            Table("caps", "backward against bucket size", POINTS, self.caps.points, shown=shown),
            Table("sensitivity", "what would move it", CHANGES, self.changes),
        ]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        where = self.config["csv"]
        return {"caps": lambda: plot_caps(self.caps, "Backward time against bucket size", where)}

    @property
    def next_steps(self) -> Sequence[str]:
        return ("paceline profile layers --model gpt2-tiny", "paceline tune --model gpt2-tiny --ranks 2")

    def to_json(self) -> dict[str, Any]:
        (cuts, free), (low, high) = self.free_plan, self.caps.plateau
        return super().to_json() | {
            "best": build_row(POINTS, self.caps.best), "plateau_low_bytes": low, "plateau_high_bytes": high,
            "free_plan": {"num_buckets": len(cuts), "backward_s": free.over_s},
            "local_backward_s": self.job.backward_s, "notes": list(self.findings), "source": "simulated",
        }  # fmt: skip


def plot_caps(curve: CapCurve, title: str, subtitle: str) -> Figure:
    """Backward time against bucket size, with the plateau of the best, and what one rank takes alone."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    least = max(curve.points[0].high_bytes, 1) / MIB
    draw_caps(axes, curve.points, [point.backward_s for point in curve.points], "predicted")
    low, high = curve.plateau
    axes.axvspan(max(low / MIB, least), high / MIB, color=COLORS[2], alpha=0.15, label="within 1 % of the best")
    mark_best(axes, curve.best.high_bytes, curve.best.backward_s, curve.best.step.local_s, "one rank alone")
    axes.set(xlim=(least, None), ylim=(0, None), ylabel="backward with communication (ms)")
    place_legend(figure, axes)
    return figure


def draw_caps(axes: Axes, points: Sequence[CapPoint], seconds: Sequence[float], label: str) -> None:
    """A line of times against bucket sizes, flat over each interval of caps."""
    xs = [size / MIB for point in points for size in (point.low_bytes, point.high_bytes)]
    axes.plot(xs, [second * 1e3 for second in seconds for _ in range(2)], color=COLORS[0], label=label)
    axes.set(xscale="log", xlabel="bucket size (MiB)")


def mark_best(axes: Axes, cap_bytes: int, best_s: float, alone_s: float, alone: str) -> None:
    """A mark at the best predicted size, and a line at the time without communication."""
    axes.plot([cap_bytes / MIB], [best_s * 1e3], "D", color=COLORS[2], markersize=8, label="best predicted")
    axes.axhline(alone_s * 1e3, color=COLORS[6], ls=":", lw=1, label=alone)
