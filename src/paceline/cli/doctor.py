"""`paceline doctor`: is this machine ready to train?"""

from __future__ import annotations

import typer

from paceline.cli.options import Json, Wide, print_result


def doctor(json: Json = False, wide: Wide = False) -> None:
    """Is this machine ready to train? Checks everything that ranks need, then runs a real all-reduce on two of them."""
    from paceline.verbs.doctor import doctor

    raise typer.Exit(print_result(doctor(progress=True), json, wide))
