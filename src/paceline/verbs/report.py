"""`paceline.save_report`: shows runs of any kind on a single self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import refuse
from paceline.records.store import naming_damage
from paceline.report.compared import compare_results
from paceline.report.page import PAGE_FILE, save_page
from paceline.report.result import Result, load_result
from paceline.verbs.jobs import Place


@naming_damage()
def save_report(
    runs: Sequence[str | Path | Result] = (), *, page: Place = None, progress: bool | None = None
) -> Result:
    """Write these runs to one page and return its first result: the comparison if there are several runs.

    Args:
        runs: Folders, or results.
        page: The file to write. Default: `report.html` in the run's folder or, for several runs, in the current folder.
    """
    results = load_all(runs)
    one = results[0].folder if len(results) == 1 else None
    results[0].page = save_page(results, Path(page) if page is not None else (one or Path()) / PAGE_FILE)
    return results[0]


@naming_damage()
def load_all(runs: Sequence[str | Path | Result]) -> list[Result]:
    """The results of these runs, after their comparison if there are several of one verb."""
    refuse((not runs, "no run: pass its folder, as in `paceline report runs/20260101-120000-train`"))
    results = [run if isinstance(run, Result) else load_result(run) for run in runs]
    if len({result.run.verb for result in results}) == 1 < len(results):
        results.insert(0, compare_results(results, results[0].run.environment))
    return results
