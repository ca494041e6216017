"""The table of communication against computation: its columns for people, and its rows for JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.predict.whatif import CommRow
from paceline.report.tables import Column
from paceline.units import format_bytes, format_ms

comm_table: Sequence[Column] = (
    Column("model", lambda r: r.model, False),
    Column("gradients", lambda r: format_bytes(r.num_bytes)),
    Column("network", lambda r: r.step.network, False),
    Column("ranks", lambda r: str(r.step.world_size)),
    Column("compute (ms)", lambda r: format_ms(r.step.local_s)),
    Column("comm (ms)", lambda r: format_ms(r.message_s)),
    Column("overhead", lambda r: f"{r.overhead:.1%}"),
    Column("step (ms)", lambda r: format_ms(r.step.step_s)),
    Column("exposed", lambda r: f"{r.step.exposed_share:.1%}"),
    Column("source", lambda r: f"compute {r.compute_source}, comm {r.step.source}", False),
)


def comm_row(row: CommRow) -> dict[str, Any]:
    """One row of `profile comm-table --json` and of its table.csv; shares are fractions of 1."""
    step = row.step
    return {
        "model": row.model,
        "gradient_bytes": row.num_bytes,
        "network": step.network,
        "world_size": step.world_size,
        "compute_s": step.local_s,
        "backward_s": row.backward_s,
        "compute_source": row.compute_source,
        "comm_s": row.message_s,
        "overhead": row.overhead,
        "algorithm": step.algorithm,
        "step_s": step.step_s,
        "low_s": step.low_s,
        "high_s": step.high_s,
        "exposed_s": step.exposed_s,
        "exposed_overhead": step.exposed_share,
        "best_cap_bytes": step.best_cap_bytes,
        "assumption": row.assumption,
        "source": step.source,
    }


def describe_assumptions(rows: Sequence[CommRow]) -> list[str]:
    """What the table takes for granted, one line for each network and one for the columns."""
    return [
        *dict.fromkeys(row.assumption for row in rows),
        "overhead: all gradients in one message after backward; step and exposed: the best bucket size, as `predict` "
        "finds it",
    ]
