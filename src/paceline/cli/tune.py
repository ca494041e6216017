"""`paceline tune`: which buckets for this job on these ranks, how much they gain, and how sure that is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.jobs import build_settings, read_one, read_world, takes_job
from paceline.cli.options import MEASUREMENT, NETWORK_HELP, Iters, Json, Out, Wide, print_result
from paceline.errors import ConfigError


@takes_job(
    leave_out=("plan", "accumulate"),
    defaults={"batch_size": "4"},
    help={"batch_size": "Samples per rank. Small by default: buckets matter where little arithmetic hides them."},
)
def tune(
    job: dict[str, Any],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer bucket sizes and rounds: about a minute.", rich_help_panel=MEASUREMENT),
    ] = False,
    no_confirm: Annotated[
        bool,
        typer.Option(
            "--no-confirm", help="Predict only: the job is never run under a plan.", rich_help_panel=MEASUREMENT
        ),
    ] = False,
    caps: Annotated[
        str | None,
        typer.Option(
            "--caps", help="Bucket sizes to run: 1MiB,4MiB,25MiB. Default: a range.", rich_help_panel=MEASUREMENT
        ),
    ] = None,
    network: Annotated[str | None, typer.Option("--network", help=NETWORK_HELP, rich_help_panel=MEASUREMENT)] = None,
    network_ranks: Annotated[
        int | None,
        typer.Option(
            "--network-ranks", help="Ranks on the network, this one included. Default: 8.", rich_help_panel=MEASUREMENT
        ),
    ] = None,
    iters: Iters = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the best buckets: measure this machine and model, predict every plan, confirm, and save the plan.

    With --network nothing is sent: one rank computes, and its buckets take as long as that network would.
    """
    from paceline.verbs.tune import tune as run_tune

    ranks = read_world(job["ranks"], 2 if network is None else 1)
    if len(ranks) != 1:
        raise ConfigError(f"--ranks {job['ranks']}: a job is tuned on one number of ranks")
    train = build_settings(job, ranks[0], read_one(job["batch_size"], "--batch-size"))
    result = run_tune(
        quick=quick,
        confirm=not no_confirm,
        caps=caps or (),
        network=network,
        network_ranks=network_ranks,
        iters=iters,
        out=out,
        progress=True,
        **{field.name: getattr(train, field.name) for field in dataclasses.fields(train)},
    )
    raise typer.Exit(print_result(result, json, wide))
