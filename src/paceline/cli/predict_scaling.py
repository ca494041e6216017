"""What `predict --model-profile` does: a step on other networks and numbers of ranks, from files and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from paceline.predict.networks import Fabric
    from paceline.predict.whatif import Scenario, WhatIfRow
    from paceline.records import LayerProfileRecord
    from paceline.records.store import RunFolder

__all__ = ["WhatIf", "report_what_if"]


_INSIDE = "nvlink"


@dataclass(frozen=True)
class WhatIf:
    """What was typed, as it was typed."""

    model_profile: Path
    allreduce: Path | None
    backend: str | None
    network: str | None
    inside: str | None
    ranks: str
    ranks_per_node: int
    algorithm: str
    accumulate: int
    gradients: str | None
    straggler: str


def report_what_if(asked: WhatIf, out: Path, json: bool) -> None:
    """Everything is read and refused before the run's folder is made."""
    from paceline.predict.job import build_job_from_profile, draw_jobs
    from paceline.predict.whatif import DRAWS, describe_scenario, simulate_what_if
    from paceline.records.store import RunFolder
    from paceline.report.whatif_tables import describe_doubts
    from paceline.units import parse_counts

    ranks = parse_counts(asked.ranks, "--ranks")
    fabrics = _build_fabrics(asked)
    record = _load_profile(asked.model_profile)
    scenario = _read_scenario(asked, record)
    job = build_job_from_profile(record, asked.gradients)
    rows = simulate_what_if(job, draw_jobs(record, job, DRAWS), fabrics, ranks, scenario)
    told = dict.fromkeys(line for fabric in fabrics for line in fabric.assumptions)
    assumptions = [*job.notes, *told, *describe_scenario(job, fabrics, scenario), *describe_doubts(rows)]
    with RunFolder.create(out, "predict") as folder:
        _report(folder, record.model, rows, assumptions, json)


def _load_profile(path: Path) -> LayerProfileRecord:
    from paceline.records import LayerProfileRecord, load_run

    run = load_run(path)
    found = [record for record in run.records if isinstance(record, LayerProfileRecord)]
    if len(found) != 1:
        raise RecordError(
            f"--model-profile {path}: {len(found)} layer profiles are in this run of `{run.verb}`; one is needed, "
            "as `paceline profile layers` makes it"
        )
    return found[0]


def _build_fabrics(asked: WhatIf) -> list[Fabric]:
    from paceline.predict.curves import check_algorithm
    from paceline.predict.networks import AssumedFabric, build_measured_fabric, find_network, find_networks
    from paceline.records import CollectiveRecord, load_run

    check_algorithm(asked.algorithm)
    if asked.network is None and asked.allreduce is None:
        raise ConfigError("no network to predict for: give --network NAMES, --allreduce RUN, or both")
    if asked.backend is not None and asked.allreduce is None:
        raise ConfigError(f"--backend {asked.backend} chooses from an --allreduce run, and there is none")
    fabrics: list[Fabric] = []
    if asked.network is not None:
        if asked.inside is not None and asked.ranks_per_node == 1:
            raise ConfigError(f"--inside {asked.inside} joins the ranks of a node: give --ranks-per-node, too")
        inside = find_network(asked.inside or _INSIDE)
        fabrics += [
            AssumedFabric(network, inside, asked.ranks_per_node, asked.algorithm)
            for network in find_networks(asked.network)
        ]
    elif asked.ranks_per_node != 1 or asked.inside is not None:
        raise ConfigError("--ranks-per-node and --inside shape a --network, and there is none")
    if asked.allreduce is not None:
        records = [record for record in load_run(asked.allreduce).records if isinstance(record, CollectiveRecord)]
        try:
            fabrics.append(build_measured_fabric(records, asked.backend, asked.algorithm))
        except (ConfigError, RecordError) as error:
            raise type(error)(f"--allreduce {asked.allreduce}: {error}") from None
    return fabrics


def _read_scenario(asked: WhatIf, record: LayerProfileRecord) -> Scenario:
    from paceline.predict.scaling import estimate_spread
    from paceline.predict.whatif import Scenario

    if asked.straggler == "profile":
        return Scenario(asked.accumulate, estimate_spread(record.timing.reduced_s))
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", asked.straggler)
    if not match:
        raise ConfigError(
            f"--straggler {asked.straggler!r} is neither a share such as 3% nor `profile`, the spread of the profile"
        )
    return Scenario(asked.accumulate, float(match[1]) / 100)


def _report(folder: RunFolder, model: str, rows: list[WhatIfRow], assumptions: list[str], json: bool) -> None:
    from paceline.cli.session import print_json, stdout
    from paceline.report import plots, tables
    from paceline.report.whatif_tables import plot_efficiency, whatif_row, whatif_table

    shown = [
        column for column in whatif_table if column.name != "slowest rank (ms)" or any(r.straggler_s for r in rows)
    ]
    listed = [whatif_row(row) for row in rows]
    folder.write("table.csv", tables.render_csv(listed))
    notes = "".join(f"- {line}\n" for line in assumptions)
    folder.write("table.md", f"{tables.render_markdown(shown, rows)}\nAssumed:\n\n{notes}")
    figure = plot_efficiency(rows, f"{model}: efficiency on other networks", "each at its best bucket size; band: 90 %")
    folder.write("efficiency.png", plots.render_png(figure))
    folder.write("efficiency.svg", plots.render_svg(figure))
    if json:
        document = {"model": model, "rows": listed, "assumptions": assumptions, "source": "simulated"}
        print_json({"run": str(folder.path), **document})
        return
    console = stdout()
    console.print(tables.render_terminal(shown, rows, f"{model} on other networks and ranks", console.width))
    console.print("assumed:")
    for line in assumptions:
        console.print(f"- {line}", markup=False)
    console.print(f"run: {folder.path}")
