"""`paceline doctor`: is the set-up sane? The checks themselves live in `measure.health`."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")] = False,
) -> None:
    """Is my set-up sane? Looks at everything ranks need, then runs a real all-reduce on two of them."""
    from rich.markup import escape

    from paceline.cli.session import print_json, stderr, stdout
    from paceline.measure.health import check_health

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    console = stdout()
    checks = []
    with stderr().status("checking"):
        for check in check_health():
            checks.append(check)
            if not json:
                console.print(f"[{colors[check.status]}]{check.status:>4}[/]  {check.name:<18} {escape(check.found)}")
                if check.advice:
                    console.print(f"      {'':<18} {escape(check.advice)}")
    broken = [check.name for check in checks if check.status == "fail"]
    if json:
        fields = ("name", "status", "found", "advice")
        print_json({"ok": not broken, "checks": [{f: getattr(check, f) for f in fields} for check in checks]})
    else:
        proven = any(check.name == "2-rank all-reduce" and check.status == "ok" for check in checks)
        fine = "fine: ranks start, meet and reduce correctly" if proven else "nothing broken, but no rank was started"
        console.print(f"broken: {', '.join(broken)}" if broken else fine)
    raise typer.Exit(1 if broken else 0)
