"""`paceline profile --compare`: two profiles side by side, of the same kind."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.profile_trace import OVERVIEW
from paceline.cli.session import print_json, stdout
from paceline.errors import ConfigError, RecordError
from paceline.records import load_run
from paceline.records.steps import StepRecord

__all__ = ["compare_profiles"]

# What is compared of phases, and its unit.
_QUANTITIES = {
    "step_s": "s", "data_wait_s": "s", "forward_s": "s", "backward_s": "s", "optimizer_s": "s", "compute_s": "s",
    "exposed_comm_s": "s", "busy_comm_s": "s", "comm_overhead": "share", "samples_per_s": "count",
}  # fmt: skip

# What is compared, and the settings that may differ: of phases, only cells that both runs have are compared.
_COMPARED: dict[str, tuple[str, ...]] = {"profile trace": (), "profile phases": ("batch_sizes", "batch_size", "ranks")}


def compare_profiles(first: Path, second: Path, json: bool) -> None:
    """Print both with their ratios. Two runs are not interleaved: the machine may have changed between them."""
    one, two = load_run(first), load_run(second)
    if one.verb != two.verb or one.verb not in _COMPARED:
        raise ConfigError(
            f"{first} is a run of `{one.verb}` and {second} of `{two.verb}`: give two of `profile trace`, or two of "
            "`profile phases`"
        )
    rows = _compare_traces(first, second) if one.verb == "profile trace" else _compare_phases(first, second)
    unlike = {
        name: [one.config[name], two.config.get(name)]
        for name in one.config
        if name not in _COMPARED[one.verb] and one.config[name] != two.config.get(name)
    }
    if json:
        runs = [str(first), str(second)]
        print_json({"runs": runs, "rows": [_row(row) for row in rows], "settings_that_differ": unlike})
        return
    from paceline.report import tables
    from paceline.report.trace_tables import compared_table

    console = stdout()
    console.print(tables.render_terminal(compared_table, rows, f"{first} and {second}", console.width))
    for name, (here, there) in unlike.items():
        console.print(f"they differ in {name}: {here} and {there}", markup=False)
    console.print("two runs, not taken in turns: differences of a few per cent may be the machine's")


def _row(row: Any) -> dict[str, Any]:
    return {"name": row.name, "unit": row.unit, "first": row.first, "second": row.second, "ratio": row.ratio}


def _compare_traces(first: Path, second: Path) -> Sequence[Any]:
    from paceline.predict.overview import ComparedRow, compare_overviews, overview_from_json

    loaded, speeds = [], []
    for path in (first, second):
        try:
            document = json_module.loads((path / OVERVIEW).read_text())
            loaded.append(overview_from_json(document["overviews"][0]))
            facts = document["facts"]
            samples = facts["batch_size"] * facts["accumulate"] * facts["world_size"]
            speeds.append(samples / loaded[-1].step_s)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RecordError(f"{path / OVERVIEW} cannot be read: {error}") from None
    # Steps of different batches are compared by what they get done.
    return [ComparedRow("samples/s", "", *speeds), *compare_overviews(*loaded)]


def _compare_phases(first: Path, second: Path) -> Sequence[Any]:
    from paceline.predict.overview import ComparedRow
    from paceline.report.phase_tables import phase_row

    found = []
    for path in (first, second):
        records = [record for record in load_run(path).records if isinstance(record, StepRecord)]
        found.append({(record.world_size, record.batch_size): phase_row(record) for record in records})
    common = [cell for cell in found[0] if cell in found[1]]
    if not common:
        raise ConfigError(f"{first} and {second} have no number of ranks and batch size in common")
    rows = []
    for world_size, batch_size in common:
        ours, theirs = (cells[world_size, batch_size] for cells in found)
        place = f"{world_size} rank{'s' if world_size > 1 else ''}, batch {batch_size}"
        for name, unit in _QUANTITIES.items():
            if ours[name] is not None or theirs[name] is not None:
                rows.append(ComparedRow(f"{place}: {_name(name)}", unit, ours[name], theirs[name]))
    return rows


def _name(quantity: str) -> str:
    return "samples/s" if quantity == "samples_per_s" else quantity.removesuffix("_s").replace("_", " ")
