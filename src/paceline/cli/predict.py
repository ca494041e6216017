"""`paceline predict`: what a step will cost, before anyone pays for it. Needs no torch and starts no rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.jobs import Accumulate
from paceline.cli.options import BACKEND_HELP, NETWORK_HELP, Json, Out, Ranks
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.predict.curves import MeasuredCurve
    from paceline.predict.job import Job

__all__ = ["predict"]

_MOST_ROWS = 24
_RANKS = "8,64,1024,16384"


def predict(
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="A folder with layer-sizes, layer-times and allreduce-times as CSV files."),
    ] = None,
    model_profile: Annotated[
        Path | None, typer.Option("--model-profile", help="A run of `profile layers`: its folder or its run.json.")
    ] = None,
    allreduce: Annotated[
        Path | None, typer.Option("--allreduce", help="A run of `bench allreduce`; beyond its ranks it is scaled.")
    ] = None,
    backend: Annotated[str | None, typer.Option("--backend", help=BACKEND_HELP)] = None,
    network: Annotated[str | None, typer.Option("--network", help=NETWORK_HELP)] = None,
    ranks: Ranks = None,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", help="Ranks that share a node, and its link to the --network.")
    ] = 1,
    inside: Annotated[
        str | None, typer.Option("--inside", help="The network between the ranks of a node. Default: nvlink.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="auto, ring, tree, two-level, gloo or shared (memory)")
    ] = "auto",
    accumulate: Accumulate = None,
    gradients: Annotated[
        str | None, typer.Option("--gradients", help="fp32 or bf16. Default: as they are in the profile.")
    ] = None,
    straggler: Annotated[
        str,
        typer.Option("--straggler", help="How much ranks differ: a standard deviation such as 3%, or `profile`'s."),
    ] = "0%",
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """What will a step cost: on other networks and ranks (--model-profile), or with other bucket sizes (--csv)?"""
    if csv is not None and model_profile is not None:
        raise ConfigError("--csv and --model-profile are two models: give one of them")
    if model_profile is not None:
        from paceline.cli.predict_scaling import WhatIf, report_what_if

        asked = WhatIf(
            model_profile=model_profile,
            allreduce=allreduce,
            backend=backend,
            network=network,
            inside=inside,
            ranks=_RANKS if ranks is None else ranks,
            ranks_per_node=ranks_per_node,
            algorithm=algorithm,
            accumulate=1 if accumulate is None else accumulate,
            gradients=gradients,
            straggler=straggler,
        )
        report_what_if(asked, out, json)
        return
    if csv is None:
        raise ConfigError("nothing to predict from: give --model-profile RUN or --csv FOLDER")
    stray = {
        "--allreduce": allreduce is not None,
        "--backend": backend is not None,
        "--network": network is not None,
        "--ranks": ranks is not None,
        "--ranks-per-node": ranks_per_node != 1,
        "--inside": inside is not None,
        "--algorithm": algorithm != "auto",
        "--accumulate": accumulate is not None,
        "--gradients": gradients is not None,
        "--straggler": straggler != "0%",
    }
    if any(stray.values()):
        names = ", ".join(name for name, is_given in stray.items() if is_given)
        raise ConfigError(f"{names} with --csv, whose tables are all it uses: give --model-profile instead")
    from paceline.records.store import RunFolder

    job, curve = _load(csv)
    with RunFolder.create(out, "predict") as folder:
        _report(folder, csv, job, curve, json)


def _find(folder: Path, stem: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--csv {folder}: no such folder")
    found = sorted(folder.glob(f"{stem}*.csv"))
    if len(found) != 1:
        what = "no file" if not found else f"{len(found)} files"
        raise ConfigError(f"--csv {folder}: {what} named {stem}*.csv; one is needed")
    return found[0]


def _load(folder: Path) -> tuple[Job, MeasuredCurve]:
    from paceline.predict.curves import fit_curve
    from paceline.predict.job import build_job_from_tables
    from paceline.records.exchange import load_layer_sizes, load_layer_times, load_table

    sizes = load_layer_sizes(_find(folder, "layer-sizes"))
    times = load_layer_times(_find(folder, "layer-times"))
    records = [record for record in load_table(_find(folder, "allreduce-times")) if record.world_size > 1]
    worlds = {(record.backend, record.world_size) for record in records}
    if len(worlds) != 1:
        raise ConfigError(f"--csv {folder}: all-reduce of {len(worlds)} backends or numbers of ranks; one is needed")
    curve = fit_curve((record.num_bytes, record.time_s) for record in records)
    return build_job_from_tables(sizes, times), curve


def _report(folder: object, csv: Path, job: Job, curve: MeasuredCurve, json: bool) -> None:
    from paceline.cli.session import print_json, stdout
    from paceline.predict.search import estimate_caps, estimate_sensitivity, find_best_cuts
    from paceline.predict.simulate import MachineCosts
    from paceline.records.store import RunFolder
    from paceline.report import cap_tables, plots, tables
    from paceline.units import format_bytes, format_ms

    assert isinstance(folder, RunFolder)
    costs = MachineCosts(curve=curve)
    caps = estimate_caps(job, costs)
    changes = estimate_sensitivity(job, costs, curve)
    cuts, free = find_best_cuts(job, costs)
    low, high = caps.plateau
    floor_s = curve.estimate_s(job.sizes[-1])
    notes = [
        *job.notes,
        f"best bucket size: {format_bytes(low)} to {format_bytes(high)}, all within 1 % of "
        f"{format_ms(caps.best.backward_s)} ms; "
        f"the best free plan, {len(cuts)} buckets, takes {format_ms(free.over_s)} ms",
        f"the last gradient ({job.gradients[-1].name}, {format_bytes(job.sizes[-1])}) is ready only at the end: "
        f"{format_ms(floor_s)} ms stay exposed whatever the bucket size",
        "assumed: one message at a time, no copies, no contention; the times include what ranks waited for each other",
    ]
    runs = cap_tables.merge_points(caps.points)
    document = {
        "caps": [cap_tables.cap_row(point) for point in caps.points],
        "best": cap_tables.cap_row(caps.best),
        "plateau_low_bytes": low,
        "plateau_high_bytes": high,
        "free_plan": {"num_buckets": len(cuts), "backward_s": free.over_s},
        "sensitivity": [cap_tables.change_row(change) for change in changes],
        "local_backward_s": caps.local_s,
        "notes": notes,
        "source": "simulated",
    }
    folder.write("caps.csv", tables.render_csv([cap_tables.cap_row(point) for point in caps.points]))
    folder.write("caps.md", tables.render_markdown(cap_tables.cap_table, runs))
    folder.write("sensitivity.md", tables.render_markdown(cap_tables.change_table, changes))
    for name, figure in (
        ("caps", cap_tables.plot_caps(caps, "Backward time against bucket size", str(csv.name))),
        ("sensitivity", cap_tables.plot_sensitivity(changes, "What would move the best bucket size", str(csv.name))),
    ):
        folder.write(f"{name}.png", plots.render_png(figure))
        folder.write(f"{name}.svg", plots.render_svg(figure))
    if json:
        print_json({"run": str(folder.path), **document})
        return
    console = stdout()
    fast = [run for run in runs if run[0].backward_s < 1.5 * caps.best.backward_s]
    shown = fast if len(fast) <= _MOST_ROWS else [*fast[: _MOST_ROWS // 2], *fast[-_MOST_ROWS // 2 :]]
    console.print(tables.render_terminal(cap_tables.cap_table, shown, "backward against bucket size", console.width))
    console.print(tables.render_terminal(cap_tables.change_table, changes, "what would move it", console.width))
    for note in notes:
        console.print(note, markup=False)
    console.print(f"run: {folder.path}")
