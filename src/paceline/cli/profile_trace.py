"""What `profile trace` makes of the ranks' traces: one file for Perfetto, tables, advice, a picture."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Any

from paceline.cli.session import stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.profiling import ProfileRun
    from paceline.measure.training_traces import TracedJob
    from paceline.training.settings import TrainSettings

__all__ = ["OVERVIEW", "report_trace"]

OVERVIEW = "overview.json"
_MOST_ROWS = 12


def report_trace(run: ProfileRun, settings: TrainSettings, traced: Sequence[TracedJob], plot: bool, json: bool) -> None:
    """Write everything into the run's folder, and print what a person wants to know first: what to do."""
    from paceline.predict.advice import StepFacts, advise
    from paceline.predict.overview import build_overview, find_lateness, overview_to_json
    from paceline.predict.traces import merge_traces, save_trace
    from paceline.report import trace_tables

    traces = [one.trace for one in traced]
    first = traced[0]
    facts = StepFacts(first.batch_size, first.accumulate, first.precision, first.world_size, settings.compile)
    overviews = [build_overview(trace) for trace in traces]
    advice = advise(overviews, facts, find_lateness(traces))
    save_trace(merge_traces(traces), run.folder.path / "trace.json.gz")
    document = {
        "overviews": [overview_to_json(overview) for overview in overviews],
        "facts": dataclasses.asdict(facts),
        "advice": [trace_tables.advice_row(item) for item in advice],
    }
    run.folder.write(OVERVIEW, json_module.dumps(document, indent=1) + "\n")
    run.save([], [item.text for item in advice], {})
    columns = trace_tables.choose_overview_columns(overviews)
    run.write_table("overview", columns, overviews, [trace_tables.overview_row(o) for o in overviews])
    operators, kernels = overviews[0].operators, overviews[0].kernels
    run.write_table("operators", trace_tables.operator_table, operators, [dataclasses.asdict(row) for row in operators])
    if kernels:
        run.write_table("kernels", trace_tables.kernel_table, kernels, [dataclasses.asdict(row) for row in kernels])
    picture = _draw(run, settings, traced) if plot else None
    if json:
        run.print_json(document | {"picture": None if picture is None else str(picture)})
        return
    ranks = f"{first.world_size} rank{'s' if first.world_size > 1 else ''}"
    what = f"{settings.model} on {ranks}, batch {first.batch_size}, {first.precision}"
    run.print_table(columns, overviews, what)
    if kernels:
        run.print_table(trace_tables.kernel_table, kernels[:_MOST_ROWS], "kernels of rank 0")
    else:
        run.print_table(trace_tables.operator_table, operators[:_MOST_ROWS], "operators of rank 0")
    for number, item in enumerate(advice, 1):
        gain = f" ({item.certainty} {item.factor:.2f} x as fast)" if item.gain_s else ""
        stdout().print(f"{number}. {item.text}{gain}", markup=False)
    where = [f"picture: {picture}"] if picture is not None else []
    run.close([f"trace: {run.folder.path / 'trace.json.gz'} (open it in ui.perfetto.dev)", *where])


def _draw(run: ProfileRun, settings: TrainSettings, traced: Sequence[TracedJob]) -> Any:
    from paceline.predict.overview import build_lanes
    from paceline.report.timeline import plot_timeline

    lanes = build_lanes([one.trace for one in traced])
    ranks = f"{len(traced)} rank{'s' if len(traced) > 1 else ''}"
    title = f"One step of {settings.model} on {ranks} ({settings.wrapper})"
    return run.write_figure("timeline", plot_timeline(lanes, title, run.machine))
