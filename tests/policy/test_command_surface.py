"""The command surface is frozen in command_surface.txt, and an option has the same meaning in all verbs."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from paceline.cli.commands import Command
from paceline.cli.main import app

from .reading import expect_none

FROZEN = Path(__file__).with_name("command_surface.txt")
UPDATE = "PACELINE_UPDATE_SURFACE"


def walk_commands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Every verb with its command. Loosely typed, because some versions of typer vendor click."""

    def walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{words} {name}", child)

    return walk("paceline", typer.main.get_command(app))


def show_default(default: Any) -> str:
    """The default as text; versions of click represent "none" in different ways."""
    if default is None or default == () or default == [] or type(default).__name__ == "Sentinel":
        return "none"
    if callable(default):
        return "computed"
    if isinstance(default, list | tuple):
        return ",".join(str(item) for item in default)
    return str(getattr(default, "value", default))  # for an Enum, the text that a user types


def render_surface(app: typer.Typer) -> str:
    """The verbs with their arguments and options: names, default, and whether they are required."""
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
        # Options are sorted because their order is not part of the interface; that of arguments is.
        lines += [row for is_option, row in rows if not is_option]
        lines += sorted(row for is_option, row in rows if is_option)
    return "\n".join(lines) + "\n"


def diff_surface(frozen: str, now: str) -> str:
    """The difference and how to fix it; empty if there is none."""
    lines = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=30)
    text = "\n".join(lines)
    if not text:
        return ""
    return (
        f"the command surface changed:\n{text}\nIf this is meant, run `{UPDATE}=1 python -m pytest "
        "tests/policy/test_command_surface.py`, commit command_surface.txt and add it to CHANGELOG.md."
    )


def find_double_meanings(app: typer.Typer) -> list[str]:
    """Options that are a switch in one verb and take a value in another.

    Their help may differ, because it is written for each command.
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


def find_options_without_help(app: typer.Typer) -> list[str]:
    """Options that neither the verb's docstring nor the settings explain."""
    return [
        f"{words}: {parameter.opts[0]}"
        for words, command in walk_commands(app)
        for parameter in command.params
        if not parameter.help
    ]


def find_python(app: typer.Typer) -> list[str]:
    """Options whose help contains Python names or literals, which users do not type in a shell."""
    python = re.compile(r"""\bpaceline\.\w|\bresult\.\w|`\w+_\w+`|["]""")
    return [
        f"{words}: {parameter.opts[0]}: {parameter.help}"
        for words, command in walk_commands(app)
        for parameter in command.params
        if python.search(parameter.help or "")
    ]


def build_app(*, default: str = "gloo", is_switch: bool = False) -> typer.Typer:
    """A fake command line with two verbs that share an option."""
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


def test_every_option_has_help() -> None:
    expect_none(find_options_without_help(app))


def test_no_help_contains_python() -> None:
    expect_none(find_python(app))


def test_an_option_without_help_is_found() -> None:
    assert "paceline bench one: --size" in find_options_without_help(build_app())


def compare_sizes(
    sizes: tuple[int, ...] = (), *, out: str | None = None, is_fast: bool = True, lr: float = 0.5, **job: Any
) -> None:
    """Compares.

    Args:
        sizes: The sizes,
            in two lines.
        lr: The rate in Python.
    """


def test_options_follow_from_the_arguments_of_the_verb_and_the_settings_of_its_job(monkeypatch) -> None:
    monkeypatch.setattr("paceline.cli.commands._load", lambda place: compare_sizes)
    command = Command("here", without="out", job="-model clip", help={"seed": "A seed."}, panels={"lr": "Output"})
    found = command.parameters
    assert {"is_fast", "lr", "sizes", "data", "clip", "json"} <= set(found) and not {"out", "model"} & set(found)
    assert found["sizes"].help == "The sizes, in two lines." and found["seed"].help == "A seed."
    assert found["lr"].help == "Peak learning rate." and found["lr"].panel == "Output"
    assert (found["lr"].shown_default, found["data"].shown_default, found["clip"].kind) == (0.5, "synthetic", float)
    assert found["is_fast"].flag == "--no-is-fast" and found["is_fast"].read(True) is False
    assert (
        found["channels"].read("8,8") == (8, 8) and found["seed"].read("-3") == -3 and found["clip"].panel == "Learning"
    )


def test_surface_shows_every_property() -> None:
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
