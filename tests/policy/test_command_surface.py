"""The command surface is frozen in command_surface.txt, and an option has one meaning in all verbs."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from paceline.cli.main import app
from paceline.cli.options import add_command
from paceline.training.settings import TrainSettings

from .reading import expect_none

FROZEN = Path(__file__).with_name("command_surface.txt")
UPDATE = "PACELINE_UPDATE_SURFACE"
# Verbs behind commands that prepare what was typed; and options that are no arguments, or whose switch turns one off.
PREPARED = {
    "_allreduce": "verbs.bench:allreduce", "_predict": "verbs.predict:predict",
    "_predict_goodput": "verbs.predict:predict_goodput",
    "_run": "verbs.run:run", "_train": "verbs.train:train", "_tune": "verbs.tune:tune", "_watch": "verbs.watch:watch",
}  # fmt: skip
OWN = ("out", "json", "wide", "strict", "confirm")


def walk_commands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Every verb with its command. Typed loosely: some versions of typer bring their own click, some use click's."""

    def walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{words} {name}", child)

    return walk("paceline", typer.main.get_command(app))


def show_default(default: Any) -> str:
    """The default as text, "none" for each of the ways in which the versions of click say that there is none."""
    if default is None or default == () or default == [] or type(default).__name__ == "Sentinel":
        return "none"
    if callable(default):
        return "computed"
    if isinstance(default, list | tuple):
        return ",".join(str(item) for item in default)
    return str(getattr(default, "value", default))  # an Enum shows what one types


def render_surface(app: typer.Typer) -> str:
    """The verbs, each with its arguments and options: names, default, and whether it must be given."""
    lines = []
    for words, command in walk_commands(app):
        lines.append(words)
        rows = []
        for parameter in command.params:
            is_option = parameter.opts[0].startswith("-")
            names = ", ".join(parameter.opts) if is_option else f"<{parameter.name}>"
            if parameter.secondary_opts:
                names += " / " + ", ".join(parameter.secondary_opts)
            need = "required" if parameter.required else f"default: {show_default(parameter.default)}"
            hidden = ", hidden" if getattr(parameter, "hidden", False) else ""
            repeated = ", repeatable" if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
            rows.append((is_option, f"  {names}  {need}{repeated}{hidden}"))
        # Options by name, for their order is not a promise; the order of arguments is one.
        lines += [row for is_option, row in rows if not is_option]
        lines += sorted(row for is_option, row in rows if is_option)
    return "\n".join(lines) + "\n"


def diff_surface(frozen: str, now: str) -> str:
    """What changed, with what to do about it; empty if nothing did."""
    lines = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=30)
    text = "\n".join(lines)
    if not text:
        return ""
    return (
        f"the command surface changed:\n{text}\nIf this is meant, run `{UPDATE}=1 python -m pytest "
        "tests/policy/test_command_surface.py`, commit command_surface.txt and say it in CHANGELOG.md."
    )


def find_double_meanings(app: typer.Typer) -> list[str]:
    """The options that several verbs share and that are a switch in one and take a value in another.

    Their help may differ, for it is written for the command at hand.
    """
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for words, command in walk_commands(app):
        for parameter in command.params:
            for name in (*parameter.opts, *parameter.secondary_opts):
                if name.startswith("--"):
                    kinds[name]["a switch" if getattr(parameter, "is_flag", False) else "a value"].append(words)
    return [
        f"{name}: " + "; ".join(f"{', '.join(verbs)}: {kind}" for kind, verbs in by_kind.items())
        for name, by_kind in sorted(kinds.items())
        if len(by_kind) > 1
    ]


def find_wrong_defaults(app: typer.Typer) -> list[str]:
    """The options that show another default than the argument of the verb, or else the setting of its job, has."""
    wrong = []
    for words, command in walk_commands(app):
        made = inspect.getclosurevars(inspect.unwrap(command.callback)).nonlocals if command.callback else {}
        if "verb" not in made:
            continue
        verb = made["verb"] if isinstance(made["verb"], str) else PREPARED[made["verb"].__name__]
        module, _, name = verb.partition(":")
        home = importlib.import_module(f"paceline.{module}")
        arguments = {n: p.default for n, p in inspect.signature(getattr(home, name)).parameters.items()}
        known = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
        known |= getattr(home, "JOB_DEFAULTS", {})
        known |= {n: default for n, default in arguments.items() if default not in (None, inspect.Parameter.empty)}
        known |= made["always"]
        for n, option in made["options"].items():
            shown, has = show_default(option.default), show_default(known.get(n))
            if n not in OWN and shown not in ("none", has):
                wrong.append(f"{words} --{n}: {shown} is shown, and {has} is used")
    return wrong


def build_app(*, default: str = "gloo", is_switch: bool = False) -> typer.Typer:
    """A made-up command line with two verbs that share an option."""
    made_up = typer.Typer(add_completion=False)
    inner = typer.Typer()

    @made_up.command()
    def run(
        file: str,
        more: list[str] = typer.Argument(None),
        backend: str = typer.Option("gloo", "--backend", "-b", help="Which one."),
    ) -> None: ...

    @inner.command()
    def one(
        backend: str = typer.Option(default, "--backend", help="Another text."),
        size: str = typer.Option(..., "--size"),
        out: Path = typer.Option(Path("runs"), "--out"),
        tag: list[str] = typer.Option([], "--tag"),
        fast: bool = typer.Option(False, "--fast/--slow"),
        iters: int | None = typer.Option(None, "--iters"),
        secret: bool = typer.Option(False, "--secret", hidden=True),
    ) -> None: ...

    @inner.callback()
    def group() -> None: ...

    if is_switch:

        @inner.command()
        def two(backend: bool = typer.Option(False, "--backend")) -> None: ...

    made_up.add_typer(inner, name="bench")
    return made_up


def test_command_surface_is_the_frozen_one() -> None:
    now = render_surface(app)
    if os.environ.get(UPDATE) == "1":
        FROZEN.write_text(now, encoding="utf-8")
    difference = diff_surface(FROZEN.read_text(encoding="utf-8") if FROZEN.exists() else "", now)
    assert not difference, difference


def test_option_has_one_meaning_in_all_verbs() -> None:
    expect_none(find_double_meanings(app))


def test_shown_defaults_are_those_of_the_verbs() -> None:
    expect_none(find_wrong_defaults(app))


def test_a_wrong_default_is_found() -> None:
    made_up = typer.Typer()
    add_command(made_up, "one", "studies.scale:batch", "epochs batch_size:batch seed", "A help.")
    add_command(made_up, "two", "verbs.tune:tune", "batch_size:large", "A help.")
    first, second = find_wrong_defaults(made_up)
    assert first.endswith("one --epochs: 1 is shown, and 3 is used")
    assert second.endswith("two --batch_size: 512 is shown, and 4 is used")


def test_surface_shows_everything_that_is_promised() -> None:
    assert render_surface(build_app()).splitlines() == [
        "paceline",
        "paceline bench",
        "paceline bench one",
        "  --backend  default: gloo",
        "  --fast / --slow  default: False",
        "  --iters  default: none",
        "  --out  default: runs",
        "  --secret  default: False, hidden",
        "  --size  required",
        "  --tag  default: none, repeatable",
        "paceline run",
        "  <file>  required",
        "  <more>  default: none, repeatable",
        "  --backend, -b  default: gloo",
    ]


def test_a_changed_surface_is_found() -> None:
    frozen = render_surface(build_app())
    assert diff_surface(frozen, frozen) == ""
    difference = diff_surface(frozen, render_surface(build_app(default="nccl")))
    assert "-  --backend  default: gloo" in difference and "+  --backend  default: nccl" in difference
    assert f"{UPDATE}=1" in difference
    assert diff_surface(render_surface(app).replace("paceline doctor\n", ""), render_surface(app))


def test_a_double_meaning_is_found() -> None:
    assert find_double_meanings(build_app()) == []
    (found,) = find_double_meanings(build_app(is_switch=True))
    assert found.startswith("--backend: ") and "paceline bench two: a switch" in found and "paceline run" in found
