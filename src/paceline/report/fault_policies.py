"""`predict goodput` as a result: the goodput of each fault policy and how often to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.predict.goodput import ALL_LOST, Faults, Goodput, average_costs, estimate_goodput, is_ahead
from paceline.records.kinds import CostRecord
from paceline.report.plots import Drawings, Figure, draw_line, new_figure, place_legend
from paceline.report.result import Result
from paceline.report.table import SIMULATED, Column, Table, raw_columns
from paceline.units import format_duration, format_number_of

_POINTS = 60  # points per line
_MOST_ON_A_HOST = 16  # GPUs
_NAMES = {
    "step": "a step",
    "save": "the checkpoint stall",
    "write": "the background write",
    "detect": "detecting a fault",
    "restart": "a restart",
    "spare": "takeover by a spare",
    "shrink": "continuing on fewer ranks",
}


def _percent(share: float) -> str:
    """A percentage with enough digits to differ visibly from 100 %."""
    return f"{share:.1%}" if share < 0.99 else f"{share:.2%}"


_COLUMNS = (
    Column("policy", "policy.name", key="policy", is_key=True),
    Column("useful", "share", _percent, "useful_share", priority=9),
    Column("90 %", lambda one: f"{_percent(one.low)} to {_percent(one.high)}", str, priority=8),
    Column("save every", "interval_s", format_duration, "interval_s", priority=7),
    Column("steps lost", "steps_lost", lambda steps: f"{steps:,.1f}", "steps_lost_per_fault", priority=6),
    Column("cost per fault", "fault_s", format_duration, "fault_s", priority=5),
    Column("lost to saves", "saving", "{:.2%}".format, "saves_share", priority=3),
    Column("lost to faults", "failing", "{:.2%}".format, "faults_share", priority=4),
    Column("idle ranks", "policy.num_idle", "number", "idle_ranks", priority=1),
    Column("of all ranks", "of_ranks", _percent, "useful_share_of_ranks", priority=2),
    *raw_columns("best_interval_s", useful_low="low", useful_high="high"),
    *raw_columns(interval_low_s="good_intervals_s.0", interval_high_s="good_intervals_s.1"),
    SIMULATED,
)
_COSTS = (
    Column("cost", lambda one: _NAMES[one.name], key="cost", is_key=True),
    Column("mean", lambda one: average_costs([one])[one.name], format_duration, priority=2),
    Column("times", lambda one: len(one.seconds), "number", "num_measured", priority=1),
    Column("from", "note", "words", "note"),
    *raw_columns("name", "source"),
    Column(None, lambda one: average_costs([one])[one.name], key="mean_s"),
)


class GoodputResult(Result):
    """Result of `predict goodput`: one row per policy with known costs, best first, and the values of the best one."""

    json_columns = (
        *raw_columns("faults.mtbf_s", "faults.ranks", "faults.all_lost", "faults.repair_s", "config.horizon_s"),
        *raw_columns(policy="best.policy.name", useful_share="share", interval_s="save_interval_s"),
        *raw_columns(useful_low="interval.0", useful_high="interval.1"),
        SIMULATED,
    )

    def _derive(self) -> None:
        asked = {name: self.config[name] for name in ("mtbf_s", "ranks", "all_lost", "repair_s")}
        self.faults = Faults(**asked, usable=self.config.get("usable_ranks"))
        asked_s = self.config.get("interval_s")
        self.rows = estimate_goodput(self.only(CostRecord), self.faults, self.config["horizon_s"], asked_s)
        self.best: Goodput = self.rows[0]
        self.share, self.save_interval_s = self.best.share, self.best.interval_s
        # covers 90 % of runs of this length, without the model's error
        self.interval = self.best.low, self.best.high

    @property
    def answer(self) -> str:
        best = self.best
        ranks, every = format_number_of(self.faults.ranks, "rank"), format_duration(self.faults.mtbf_s)
        if best.share < 0.01:
            long = format_duration(best.policy.restart_s)
            return f"{ranks} with a fault every {every} make no progress: a restart takes {long}. Simulated."
        clauses = [
            f"{ranks} with a fault every {every}: with {best.policy.name}, {_percent(best.share)} of the time is "
            f"useful (90 %: {_percent(best.low)} to {_percent(best.high)}), "
            f"saving every {format_duration(best.interval_s)}",
            *(f"with {one.policy.name} {_percent(one.share)}" for one in self.rows[1:]),
        ]
        return f"{'; '.join(clauses)}. Simulated; the interval does not include the model's error."

    @property
    def findings(self) -> Sequence[str]:
        return [*self._compare(), *self._describe_interval(), *self._list_assumptions()]

    def _compare(self) -> list[str]:
        """Whether the best policy is significantly better than each of the others."""
        best, name = self.best, self.best.policy.name
        sure = "{} is better than {}: a larger fraction of rank time is useful"
        unsure = "{} may be better than {}: the measured costs are not conclusive"
        return [(sure if is_ahead(best, one) else unsure).format(name, one.policy.name) for one in self.rows[1:]]

    def _describe_interval(self) -> list[str]:
        one, (low_s, high_s) = self.best, self.best.good_intervals_s
        best = ""
        if one.interval_s != one.best_interval_s:
            share = one.policy.estimate_share(one.best_interval_s)
            best = f"the best interval is {format_duration(one.best_interval_s)}, with {_percent(share)}; "
        return [
            f"{best}any interval from {format_duration(low_s)} to {format_duration(high_s)} costs at most 0.1 % "
            "more time than the best",
            "the 90 % interval covers the spread of the measured costs, and the number and times of faults in "
            f"{format_duration(self.config['horizon_s'])} (--horizon); see docs/faults.md for the model's error",
        ]

    def _list_assumptions(self) -> Iterator[str]:
        costs, ranks, usable = self.only(CostRecord), self.faults.ranks, self.faults.usable
        names = {record.name for record in costs}
        measured, policies = self.config.get("measured_ranks") or ranks, {row.policy.name for row in self.rows}
        absent = [name for name in ("spare", "shrink") if name not in names]
        if ranks == 1:
            yield "left out: spare and shrink, because one rank has no replica to continue from"
        elif absent:
            options = " and ".join(f"--{name}-seconds" for name in absent)
            yield f"left out: {' and '.join(absent)}, not measured by any run; pass {options}"
        if "detect" not in names:
            yield "assumed: faults are detected immediately; pass --detect-seconds"
        if once := [_NAMES[r.name] for r in costs if r.source == "measured" and len(r.seconds) == 1]:
            yield f"assumed: {', '.join(once)}, measured once, may be 20 % off (one standard deviation)"
        if measured != ranks:
            yield f"assumed: steps, saves and recovery take as long on {ranks:,} ranks as on {measured:,}"
        if len(policies) > 1:
            lost = f"{100 * self.faults.all_lost:.3g} % of the faults leave no replica"
            yield f"assumed: {lost}, such as the loss of the only host (--all-lost)"
            if not self.is_on_one_host:
                yield "spare and shrink work within one host; across hosts the launcher restarts the job"
        if "shrink" in policies:
            returns = format_duration(self.faults.repair_s + average_costs(costs).get("restart", 0.0))
            pause = "and its return pauses the job as long as its loss did"
            yield f"assumed: with shrink a lost rank returns after {returns}, {pause}"
            if usable is None:
                yield "assumed: with shrink all other ranks can share the global batch (a training run can confirm it)"
            else:
                why = "because more cannot divide the global batch evenly"
                yield f"with shrink {usable:,} of {ranks:,} ranks continue while one is missing, {why}"

    def tables(self) -> list[Table]:
        costs = Table("costs", "Input costs", _COSTS, self.only(CostRecord))
        at = "its best interval" if self.config.get("interval_s") is None else "the specified interval"
        title = f"Fraction of time spent on useful work, each policy at {at}"
        return [Table("table", title, _COLUMNS, self.rows, key="policies"), costs]

    def figures(self) -> Drawings:
        return {"goodput": lambda: plot_goodput(self)}

    @property
    def next_steps(self) -> Sequence[str]:
        policy = self.best.policy
        every = f"auto --mtbf {max(1.0, policy.mtbf_s):.0f}s"
        if policy.lost not in (1.0, ALL_LOST):  # auto does not know this fraction
            every = f"{max(1.0, self.best.best_interval_s):.0f}s"
        train = " ".join(filter(None, ("paceline train", self.config.get("job"))))
        if self.is_on_one_host:
            train += f" --ranks {self.faults.ranks} --save-every {every} --on-fault {policy.name}"
            train += f" --spares {policy.num_idle}" if policy.num_idle > 1 else ""
        else:
            mtbf = f"{max(1.0, self.faults.mtbf_s):.0f}s"
            train = f"paceline run --hosts HOSTS -- {train} --save-every auto --mtbf {mtbf}"
        return (train,) if self.share >= 0.01 else ()

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks fit on one host: this one, the measured one, or one with many GPUs."""
        known = self.run.environment.cores, self.config.get("measured_ranks") or 1
        return self.faults.ranks <= max(_MOST_ON_A_HOST, *known)


def plot_goodput(result: GoodputResult) -> Figure:
    """Plot useful time against the save interval: one line per policy, with a marker at the interval in the table."""
    ranks, every = format_number_of(result.faults.ranks, "rank"), format_duration(result.faults.mtbf_s)
    title = f"{ranks}, a fault every {every}: fraction of time spent on useful work"
    figure, axes = new_figure(title, "marker: the interval in the table; simulated")
    low_s = min(row.interval_s for row in result.rows) / 20
    high_s = max(row.interval_s for row in result.rows) * 20
    for number, row in enumerate(result.rows):
        first_s = max(low_s, row.policy.step_s)
        xs = [first_s * (high_s / first_s) ** (place / _POINTS) for place in range(_POINTS + 1)]
        line = [(x, 100 * row.policy.estimate_share(x), None, None) for x in xs]
        draw_line(axes, number, line, f"{row.policy.name} (simulated)", marker="")
        draw_line(axes, number, [(row.interval_s, 100 * row.share, None, None)], "_", "", ms=7)
    axes.set_xscale("log")
    axes.set(ylim=(0, 102), xlabel="training time between saves (s)", ylabel="useful time (%)")
    place_legend(figure, axes)
    return figure
