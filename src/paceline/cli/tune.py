"""`paceline tune`: which buckets for this job on these ranks, how much they gain, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.jobs import build_settings, check_job, read_one, read_world, takes_job
from paceline.cli.options import NETWORK_HELP, Iters, Json, Out
from paceline.errors import ConfigError
from paceline.units import parse_sizes

if TYPE_CHECKING:
    from paceline.cli.profiling import ProfileRun
    from paceline.measure.tune_settings import TuneSettings
    from paceline.tune import Tuning

__all__ = ["tune"]

# A small batch: buckets matter where there is little arithmetic to hide them.
_BATCH_SIZE, _NETWORK_RANKS = 4, 8


@takes_job(leave_out=("plan",), defaults={"batch_size": str(_BATCH_SIZE)})
def tune(
    job: dict[str, Any],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer bucket sizes and rounds: about a minute.")] = False,
    no_confirm: Annotated[
        bool, typer.Option("--no-confirm", help="Predict only: the job itself is never run under a plan.")
    ] = False,
    caps: Annotated[
        str | None,
        typer.Option("--caps", help="Bucket sizes to run: 1MiB,4MiB,25MiB. Default: over the range."),
    ] = None,
    network: Annotated[str | None, typer.Option("--network", help=NETWORK_HELP)] = None,
    network_ranks: Annotated[
        int | None, typer.Option("--network-ranks", help="Ranks on the network, this one included; 8 if not given.")
    ] = None,
    iters: Iters = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Find the best buckets: measure this machine and model, predict every plan, confirm, and write the plan.

    With --network nothing is sent: one rank computes, and its
    buckets take as long as that network would.
    """
    settings = _read(job, quick, no_confirm, caps, network, network_ranks, iters)
    settings.check()
    check_job(settings.job)
    from paceline.cli.profiling import open_run, run_on_ranks, show_cells

    with open_run("tune", settings.job, out) as run:

        def load() -> Callable[..., Any]:
            from paceline.tune import run_tuning

            return run_tuning

        with show_cells("tune", 1) as show:
            records, gradients, default_plan = run_on_ranks(
                settings.job, load, (settings,), lambda message: show(0, message)
            )
        if run is None:
            return
        from paceline.tune import judge_tuning

        _report(run, settings, judge_tuning(settings, records, gradients, default_plan), json)


def _read(
    job: dict[str, Any],
    quick: bool,
    no_confirm: bool,
    caps: str | None,
    network: str | None,
    network_ranks: int | None,
    iters: int | None,
) -> TuneSettings:
    from paceline.measure.tune_settings import FULL, QUICK, TuneSettings
    from paceline.predict.networks import find_network
    from paceline.training.settings import takes_cap_lists

    if network is None and network_ranks is not None:
        raise ConfigError(f"--network-ranks {network_ranks} without a --network to emulate: leave it out, or name one")
    ranks = read_world(job["ranks"], 2 if network is None else 1)
    if len(ranks) != 1:
        raise ConfigError(f"--ranks {job['ranks']}: a job is tuned on one number of ranks")
    train = build_settings(job, ranks[0], read_one(job["batch_size"], "--batch-size"))
    return TuneSettings(
        job=train,
        effort=QUICK if quick else FULL,
        caps_bytes=parse_sizes(caps) if caps is not None else (),
        confirms=not no_confirm,
        iters=iters,
        network=None if network is None else find_network(network),
        network_ranks=_NETWORK_RANKS if network_ranks is None else network_ranks,
        takes_lists=job["wrapper"] != "torch" or takes_cap_lists(),
    )


def _report(run: ProfileRun, settings: TuneSettings, tuning: Tuning, json: bool) -> None:
    from paceline.predict.search import enumerate_caps
    from paceline.predict.simulate import simulate
    from paceline.records import StepRecord
    from paceline.report import tuning as report
    from paceline.report.simulated_timeline import render_timeline
    from paceline.units import format_number_of

    judgement, choice, job = tuning.judgement, tuning.choice, settings.job
    where = f"{settings.network.name}, {settings.network_ranks} ranks, emulated" if settings.network else ""
    title = f"{job.model} on {where or format_number_of(job.ranks, 'rank')}, wrapper {job.wrapper}"
    backend = next(record.backend for record in tuning.records if isinstance(record, StepRecord))
    verdict = report.say_verdict(tuning, f"{title}, {backend}")
    plan_path = run.folder.write("plan.json", tuning.plan.to_json())
    doubts = report.describe_doubts(tuning.model.estimate_doubts(choice.estimate.cuts))
    notes = [
        *report.describe_errors(judgement), doubts, *tuning.model.assumptions, *_describe_torch(tuning), verdict,
    ]  # fmt: skip
    more = {
        "network": None if settings.network is None else settings.network.name,
        "network_ranks": settings.network_ranks if settings.network else None,
        "confirms": settings.confirms,
        "default_buckets": list(tuning.default_plan.bucket_bytes),
    }
    run.save(tuning.records, notes, more)
    run.write_table("grid", report.grid_table, judgement.points, [report.grid_row(p) for p in judgement.points])
    step = choice.estimate.step
    buckets = [(number, bucket, step.backward_s) for number, bucket in enumerate(step.buckets)]
    rows = [{**dataclasses.asdict(bucket), "bucket": number} for number, bucket, _ in buckets]
    run.write_table("buckets", report.bucket_table, buckets, rows)
    default = tuning.model.estimate(tuning.model.cut_like(tuning.default_plan.bucket_bytes)).step
    steps = {"the default": default} | ({} if choice.is_default else {"the plan predicted best": step})
    run.folder.write("simulated-timeline.json", render_timeline(steps))
    model = tuning.model
    intervals = enumerate_caps(model.job.sizes)
    caps = [(i.low_bytes, i.high_bytes, simulate(model.job, i.cuts, model.costs).step_s) for i in intervals]
    figure = report.plot_tuning(tuning, f"Step time against bucket size: {title}", run.machine, caps)
    picture = run.write_figure("tuning", figure)
    if json:
        ranks = {"world_size": settings.network_ranks} if settings.network is not None else {}
        run.print_json(report.tuning_row(tuning, str(plan_path), verdict) | ranks)
        return
    run.print_table(report.grid_table, judgement.points, title)
    run.print_table(report.bucket_table, buckets, "the default" if choice.is_default else "the plan predicted best")
    run.close(notes[:-1])
    from paceline.cli import session

    console = session.stdout()
    console.print(f"plan: {plan_path} (for `train --plan`)")
    console.print(f"picture: {picture}")
    console.print(verdict, markup=False)


def _describe_torch(tuning: Tuning) -> list[str]:
    if tuning.keeps_default and tuning.is_of_torch:
        return ["for torch's own wrapper: DistributedDataParallel(model), as it is"]
    try:
        arguments = tuning.plan.as_torch_kwargs()
    except ConfigError as error:
        return [f"no arguments for torch's wrapper: {error}"]
    listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
    needs = " (torch 2.13 or newer)" if "bucket_cap_mb_list" in arguments else ""
    return [f"for torch's own wrapper: DistributedDataParallel(model, {listed}){needs}"]
