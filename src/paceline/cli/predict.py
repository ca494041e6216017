"""`paceline predict`: what a step will cost, before anyone pays for it. Needs no torch and starts no rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.jobs import Accumulate
from paceline.cli.options import BACKEND_HELP, JOB, NETWORK_HELP, Json, Out, Ranks, Wide, print_result
from paceline.errors import ConfigError
from paceline.units import parse_counts

_RANKS = "8,64,1024,16384"


def predict(
    context: typer.Context,
    model_profile: Annotated[
        Path | None,
        typer.Option("--model-profile", help="A run of `profile layers`: its folder.", rich_help_panel=JOB),
    ] = None,
    network: Annotated[str | None, typer.Option("--network", help=NETWORK_HELP, rich_help_panel=JOB)] = None,
    ranks: Ranks = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", help="Instead: a folder with layer-sizes, layer-times and allreduce-times.", rich_help_panel=JOB
        ),
    ] = None,
    allreduce: Annotated[
        Path | None,
        typer.Option(
            "--allreduce", help="A run of `bench allreduce`; beyond its ranks it is scaled.", rich_help_panel=JOB
        ),
    ] = None,
    backend: Annotated[str | None, typer.Option("--backend", help=BACKEND_HELP, rich_help_panel=JOB)] = None,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", help="Ranks that share a node, and its link.", rich_help_panel=JOB)
    ] = 1,
    inside: Annotated[
        str | None,
        typer.Option("--inside", help="The network inside a node. Default: nvlink.", rich_help_panel=JOB),
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="auto, ring, tree, two-level, gloo or shared", rich_help_panel=JOB)
    ] = "auto",
    accumulate: Accumulate = None,
    gradients: Annotated[
        str | None, typer.Option("--gradients", help="fp32 or bf16. Default: the profile's.", rich_help_panel=JOB)
    ] = None,
    straggler: Annotated[
        str,
        typer.Option(
            "--straggler", help="How much ranks differ: 3% (standard deviation), or profile.", rich_help_panel=JOB
        ),
    ] = "0%",
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """What will a step cost: on other networks and ranks (--model-profile), or with other bucket sizes (--csv)?"""
    from paceline.verbs.predict import predict as run_predict
    from paceline.verbs.predict import predict_csv

    if csv is not None and model_profile is not None:
        raise ConfigError("--csv and --model-profile are two sources: give one of them")
    if csv is not None:
        given = [
            f"--{name.replace('_', '-')}"
            for name, value in context.params.items()
            if name not in ("csv", "out", "json", "wide") and value not in (None, 1, "auto", "0%")
        ]
        if given:
            raise ConfigError(f"{', '.join(given)} with --csv, which uses its tables only: give --model-profile")
        raise typer.Exit(print_result(predict_csv(csv, out=out), json, wide))
    if model_profile is None:
        raise ConfigError("nothing to predict from: give --model-profile RUN or --csv FOLDER")
    result = run_predict(
        model_profile,
        network=network,
        ranks=parse_counts(_RANKS if ranks is None else ranks, "--ranks"),
        allreduce=allreduce,
        backend=backend,
        ranks_per_node=ranks_per_node,
        inside=inside,
        algorithm=algorithm,
        accumulate=1 if accumulate is None else accumulate,
        gradients=gradients,
        straggler=straggler,
        out=out,
    )
    raise typer.Exit(print_result(result, json, wide))
