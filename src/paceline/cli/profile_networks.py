"""What `profile comm-table` does: a step is measured on one rank, and its gradients are sent over assumed networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.profiling import open_run, run_on_ranks, show_share
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.predict.networks import MeasuredFabric
    from paceline.training.settings import TrainSettings

__all__ = ["report_networks"]


def _read_curves(paths: Sequence[Path], ranks: Sequence[int]) -> list[MeasuredFabric]:
    from paceline.predict.whatif import build_sweeps
    from paceline.records import CollectiveRecord, load_run

    curves: list[MeasuredFabric] = []
    for path in paths:
        records = [record for record in load_run(path).records if isinstance(record, CollectiveRecord)]
        found = [sweep for sweep in build_sweeps(records) if set(sweep.ranks) & set(ranks)]
        if not found:
            raise ConfigError(f"--curve {path}: no measured all-reduce of {', '.join(map(str, ranks))} ranks is in it")
        curves += found
    return curves


def report_networks(
    settings: TrainSettings,
    ranks: tuple[int, ...],
    network: str,
    curves: Sequence[Path],
    iters: int,
    warmup: int,
    out: Path,
    json: bool,
) -> None:
    from paceline.predict.networks import find_networks

    networks, sweeps = find_networks(network), _read_curves(curves, ranks)
    with open_run("profile comm-table", settings, out) as run:

        def load() -> Callable[..., Any]:
            from paceline.measure.training_traces import measure_job_layers

            return measure_job_layers

        with show_share("profile comm-table") as show:
            profile = run_on_ranks(settings, load, (settings, iters, warmup), show)
        assert run is not None
        from paceline.predict.whatif import build_comm_table
        from paceline.report.comm_tables import comm_row, comm_table, describe_assumptions

        rows = build_comm_table(profile, networks, sweeps, ranks)
        notes = describe_assumptions(rows)
        run.save([profile], notes, {"networks": network, "ranks": list(ranks)})
        run.write_table("table", comm_table, rows, [comm_row(row) for row in rows])
        if json:
            run.print_json({"rows": [comm_row(row) for row in rows]})
            return
        run.print_table(comm_table, rows, f"{settings.model}: communication against computation")
        run.close(notes)
