"""The table and the picture of steps on other networks and numbers of ranks. All numbers are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.predict.whatif import WhatIfRow
from paceline.report.plots import COLORS, new_figure
from paceline.report.tables import Column
from paceline.units import format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _advise(row: WhatIfRow) -> str:
    if row.keeps_default:
        return "the default"
    return f"{format_bytes(row.plateau_low_bytes)} to {format_bytes(row.plateau_high_bytes)}"


whatif_table: Sequence[Column] = (
    Column("network", lambda r: r.network, False),
    Column("ranks", lambda r: f"{r.world_size:,}"),
    Column("algorithm", lambda r: r.algorithm, False),
    Column("step (ms)", lambda r: format_ms(r.step_s)),
    Column("90 % (ms)", lambda r: f"{format_ms(r.low_s)} to {format_ms(r.high_s)}", is_optional=True),
    Column("efficiency", lambda r: f"{r.efficiency:.1%}"),
    Column("exposed (ms)", lambda r: format_ms(r.exposed_s)),
    Column("of step", lambda r: f"{r.exposed_share:.1%}", is_optional=True),
    Column("bucket size", _advise, False),
    Column("buckets", lambda r: str(r.num_buckets), is_optional=True),
    Column("saves", lambda r: f"{max(0.0, r.gain):.1%}"),
    Column("slowest rank (ms)", lambda r: format_ms(r.straggler_s)),
    Column("bound by", lambda r: r.bound, False),
    Column("source", lambda r: f"{r.source}{', doubtful' if r.doubt else ''}", False),
)


def whatif_row(row: WhatIfRow) -> dict[str, Any]:
    """One row of `predict --json` and of its table.csv; shares are fractions of 1."""
    return {
        "network": row.network,
        "world_size": row.world_size,
        "algorithm": row.algorithm,
        "step_s": row.step_s,
        "low_s": row.low_s,
        "high_s": row.high_s,
        "local_step_s": row.local_s,
        "efficiency": row.efficiency,
        "efficiency_low": row.efficiency_low,
        "efficiency_high": row.efficiency_high,
        "exposed_s": row.exposed_s,
        "exposed_share": row.exposed_share,
        "straggler_s": row.straggler_s,
        "best_cap_bytes": row.best_cap_bytes,
        "plateau_low_bytes": row.plateau_low_bytes,
        "plateau_high_bytes": row.plateau_high_bytes,
        "num_buckets": row.num_buckets,
        "default_step_s": row.default_step_s,
        "gain": row.gain,
        "keeps_default": row.keeps_default,
        "bound": row.bound,
        "doubt": row.doubt,
        "source": row.source,
    }


def describe_doubts(rows: Sequence[WhatIfRow]) -> list[str]:
    """Why not to trust some rows, one line each."""
    return [f"doubtful: {row.network} on {row.world_size:,} ranks: {row.doubt}" for row in rows if row.doubt]


def plot_efficiency(rows: Sequence[WhatIfRow], title: str, subtitle: str) -> Figure:
    """Weak scaling efficiency against ranks, with its interval: a line for each network, hollow where doubtful."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    ranks = sorted({row.world_size for row in rows})
    for number, network in enumerate(dict.fromkeys(row.network for row in rows)):
        line = sorted((row for row in rows if row.network == network), key=lambda row: row.world_size)
        color, marker = COLORS[number % len(COLORS)], _MARKERS[number % len(_MARKERS)]
        xs = [row.world_size for row in line]
        axes.plot(xs, [100 * row.efficiency for row in line], "--", color=color, label=f"{network} (simulated)")
        axes.fill_between(
            xs,
            [100 * row.efficiency_low for row in line],
            [100 * row.efficiency_high for row in line],
            color=color,
            alpha=0.12,
        )
        for row in line:
            face = "white" if row.doubt else color
            axes.plot([row.world_size], [100 * row.efficiency], marker, color=color, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 105)
    axes.set_xlabel("ranks")
    axes.set_ylabel("weak scaling efficiency (%)")
    axes.legend(fontsize=8.5, frameon=False)
    return figure
