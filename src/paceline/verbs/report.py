"""`paceline.save_report`: shows runs of any kind on a single self-contained HTML page; also exports their records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import refuse
from paceline.records.exchange import export_parquet
from paceline.records.store import naming_damage, write_new
from paceline.report.compared import compare_results
from paceline.report.page import PAGE_FILE, save_page
from paceline.report.result import Result, load_result
from paceline.verbs.jobs import Place

RECORDS_FILE = "records.parquet"


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


@naming_damage()
def save_records(runs: Sequence[str | Path], *, page: Place = None) -> Path:
    """Write the records of these runs to one Parquet file, and return its path.

    Args:
        runs: Folders.
        page: The file to write, which must not exist. Default: `records.parquet` in the run's folder or, for several
            runs, in the current folder.
    """
    refuse((not runs, "no run is given: name its folder, as in `paceline report runs/20260101-120000-train`"))
    loaded = {str(run): load_result(run) for run in runs}
    found = {name: result.run for name, result in loaded.items()}
    what = f"{', '.join(found)}: no records to export (a training run has its steps in metrics.jsonl)"
    refuse((not any(run.records for run in found.values()), what))
    content = export_parquet(found)
    one = next(iter(loaded.values())).folder if len(loaded) == 1 else None
    file = Path(page) if page is not None else (one or Path()) / RECORDS_FILE
    write_new(file, content, replace=page is None)
    return file
