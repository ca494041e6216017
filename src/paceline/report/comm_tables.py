"""The table of communication against computation: its columns for people, and its rows for JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.report.tables import Column
from paceline.units import format_bytes, format_ms

__all__ = ["comm_row", "comm_table", "describe_assumptions"]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


# Rows are `predict.comm_table.CommRow`; report and predict do not import each other.
comm_table: Sequence[Column] = (
    Column("model", lambda r: r.step.model, False),
    Column("gradients", lambda r: format_bytes(r.step.gradient_bytes)),
    Column("network", lambda r: r.network, False),
    Column("ranks", lambda r: str(r.world_size)),
    Column("compute (ms)", lambda r: format_ms(r.step.compute_s)),
    Column("comm (ms)", lambda r: format_ms(r.comm_s)),
    Column("overhead", lambda r: _percent(r.overhead)),
    Column("exposed at best", lambda r: _percent(r.exposed_overhead)),
    Column("source", lambda r: f"compute {r.step.source}, comm {r.source}", False),
)


def comm_row(row: Any) -> dict[str, Any]:
    """One row of `profile comm-table --json` and of its table.csv; shares are fractions of 1."""
    return {
        "model": row.step.model,
        "gradient_bytes": row.step.gradient_bytes,
        "network": row.network,
        "world_size": row.world_size,
        "compute_s": row.step.compute_s,
        "backward_s": row.step.backward_s,
        "compute_source": row.step.source,
        "comm_s": row.comm_s,
        "overhead": row.overhead,
        "exposed_s": row.exposed_s,
        "exposed_overhead": row.exposed_overhead,
        "assumption": row.assumption,
        "source": row.source,
    }


def describe_assumptions(rows: Sequence[Any]) -> list[str]:
    """What the table takes for granted, one line for each network and one for the columns."""
    networks = dict.fromkeys((row.network, row.assumption) for row in rows)
    return [
        *(f"{network}: {assumption}" for network, assumption in networks),
        "overhead: all gradients in one message after backward; exposed at best: all of backward hides communication",
    ]
