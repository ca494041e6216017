"""CLI commands, whose options are a verb's arguments and the settings of its job. Also prints results."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json as encoder
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.errors import ConfigError, refuse
from paceline.options import FLAGS, JOB, LEARNING, MEASUREMENT, OUTPUT, PANELS, RESUMED, find_flag, refuse_given
from paceline.training.schedules import parse_growths
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.report.result import Result

# Training settings accepted by a verb with `**job`, most common first. A verb with `**settings` accepts all of them.
JOB_OPTIONS = (
    "model data ranks batch_size accumulate precision wrapper backend device threads compile sync_batchnorm plan seed "
    "samples context tokenizer channels hidden dropout optimizer"
)
_ARGUMENTS = ("command", "runs")  # arguments without a flag
_OF_PYTHON = ("step", "progress", "show")  # arguments that are not options
COMMON = {
    "out": "Folder for the run's new subfolder.",
    "iters": "Timed repetitions. Default: as time allows, up to 100.",
    "warmup": "Warm-up repetitions before timing. Default: as time allows, up to 3.",
    "strict": "Exit with 1 if a result is too noisy, and say why.",
    "json": "Print one JSON document and nothing else on stdout.",
    "details": "Print everything: all tables and columns, assumptions, self-checks and notes.",
}
# The panels of verb arguments; all others are in the job panel. Settings name their panels.
_PANELS = {
    LEARNING: "epochs lr schedule recipes",
    MEASUREMENT: "at_once budget caps compare confirm evaluations every faults iters limit memory network_ranks "
    "patience predict_ranks quick restart seeds shapes steps stop strict systems target trials updates warmup",
    OUTPUT: "browser details format json out page plot resume watch",
}

_MOST_TEXT = 4096  # the longest path on Linux; no valid list or number is longer


def check_typed(value: Any, flag: str) -> None:
    """Refuse text that cannot be a valid path, list or number."""
    for item in value if isinstance(value, list | tuple) else (value,):
        text = str(item)
        refuse(
            (len(text) > _MOST_TEXT, f"{flag} {text[:40]!r}... has {len(text)} characters: use at most {_MOST_TEXT}"),
            ("\0" in text, f"{flag} {text[:40]!r}... contains a null character: remove it"),
        )


def _read_number(text: str, flag: str) -> int:
    if "," in text:
        raise ConfigError(f"{flag} {text[:40]}: must be a single number here")
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ConfigError(f"{flag} {text[:40]!r} is not a whole number")
    return int(text)


def _read_channels(text: str, flag: str) -> tuple[int, ...]:
    """Parse a list of numbers that may repeat, unlike `parse_counts`: two layers may have the same size."""
    return tuple(number for part in text.split(",") for number in parse_counts(part, flag))


def _read_drops(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} cannot be parsed: use fractions of the run, such as 0.5,0.75") from None


# How to parse an option: (text to find in the annotation, type for the parser, conversion). The first match counts.
_KINDS: dict[str, tuple[Any, Callable[[Any, str], Any] | None]] = {
    "tuple[Path, Path]": (tuple[Path, Path], None),
    "Growths": (str, lambda text, _: parse_growths(text)),
    "tuple[int, ...]": (str, _read_channels),
    "tuple[float, ...]": (str, _read_drops),
    "Counts": (str, parse_counts),
    "Sequence[int]": (str, parse_counts),
    "Sequence[str | Path": (list[Path], None),
    "Sequence[Result": (list[Path], None),
    "Path": (Path, None),
    "Place": (Path, None),
    "str": (str, None),
    "Any": (str, None),
    "Names": (str, None),
    "Sizes": (str, None),
    "bool": (bool, None),
    "int": (str, _read_number),
    "float": (float, None),
}


# Placeholders for option values in the help text; flags have none.
_METAVARS: dict[Any, str] = {bool: "", float: "NUMBER", Path: "PATH", list[Path]: "PATH"}


class Group(TyperGroup):
    """A group of commands."""

    def get_help_option(self, ctx: Any) -> Any:
        return _hide_type(super().get_help_option(ctx))


def _hide_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


@dataclass(frozen=True)
class _Parameter:
    """An option of a command. `annotation` and `default` are those of the verb's argument or of the setting."""

    name: str
    annotation: str
    default: Any
    help: str
    panel: str
    flag: str

    @cached_property
    def kind(self) -> Any:
        if self.annotation.startswith("Sequence[str]") or (self.annotation == "Names" and self.name in FLAGS):
            return list[str]
        return self._conversion[0]

    @cached_property
    def _conversion(self) -> tuple[Any, Callable[[Any, str], Any] | None]:
        return next(kind for text, kind in _KINDS.items() if text in self.annotation)

    @property
    def shown_default(self) -> Any:
        """The default that the help shows. It is not passed to the verb, which has its own default."""
        if self.kind is bool:
            return None if self.default is None else False
        if "default" in self.help.lower() or self.kind == list[str] or self.default in (None, "", ()):
            return None
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple | list) else self.default

    def read(self, value: Any) -> Any:
        """The verb's argument, parsed from the typed text."""
        if self.name != "command":  # a command after -- is passed on unchecked
            check_typed(value, self.flag)
        if self.default is True:  # a flag that turns the option off
            return not value
        convert = self._conversion[1]
        return value if convert is None else convert(value, self.flag)

    def build(self) -> inspect.Parameter:
        """The parameter that typer turns into an option."""
        help = self.help.replace("[", "\\[")  # brackets are not markup
        names = self.flag.split()
        metavar = _METAVARS.get(self._conversion[0], "TEXT")
        if self.name in _ARGUMENTS:
            info = typer.Argument(None, help=help, metavar=self.name.upper())
        else:
            names += [short for short in FLAGS.get(self.name, "").split()[1:] if len(names) == 1]
            if self.kind is bool and self.default is None:
                names = [f"{self.flag}/--no-{self.flag[2:]}"]
            shown = self.shown_default
            if self._conversion[1] is _read_number:
                shown = None if shown is None else str(shown)
                metavar = "NUMBER"
            if self._conversion[0] == tuple[Path, Path]:
                metavar = "RUN RUN"
            info = typer.Option(shown, *names, help=help, rich_help_panel=self.panel, metavar=metavar)
        kind = self.kind if self.shown_default is not None else self.kind | None
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def read_help(function: Callable[..., Any]) -> dict[str, str]:
    """The help of arguments, from `Args:` in a docstring."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    _, *found = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _load(place: str) -> Callable[..., Any]:
    """A function of the package: "verbs.bench:chunks"."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"paceline.{module}"), name)
    return found


@dataclass(frozen=True)
class Command:
    """A command that calls a verb with `always` and the options that the user typed. The verb defines all other
    defaults.

    Its options are the arguments of `adapter` and of the verb, except `without`. A verb with `**job` also takes
    `JOB_OPTIONS`, modified by `job`: "lr -plan" adds lr and removes plan. `help`, `flags` and `panels` override those
    of individual options, and `quick` has the values that `--quick` sets for options that the user omits. The help of
    all other options comes from the first of these that has one: the docstring of `adapter`, the settings, the
    docstring of the verb, or the docstring of a function in `like`.
    """

    verb: str
    adapter: Callable[..., Any] | None = None
    without: str = ""
    job: str = ""
    like: Sequence[str] = ()
    help: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    panels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_strict: bool = False
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, _Parameter]:
        """The options by name, in panel order."""
        verb = _load(self.verb)
        arguments: dict[str, inspect.Parameter] = {**inspect.signature(verb).parameters}
        typed: dict[str, str] = {"out": COMMON["out"], **self.help}  # in Python, nothing is saved by default
        if self.adapter is not None:
            arguments |= inspect.signature(self.adapter).parameters
            typed = read_help(self.adapter) | typed
        docs: dict[str, str] = dict(COMMON)
        for function in [*map(_load, reversed(self.like)), verb]:
            docs |= read_help(function)
        fields: dict[str, Any] = {}
        names = [name for name, argument in arguments.items() if argument.kind is not argument.VAR_KEYWORD]
        if "job" in arguments or "settings" in arguments:
            from paceline.training.train_settings import TrainSettings

            fields = {field.name: field for field in dataclasses.fields(TrainSettings)}
            names += fields if "settings" in arguments else [*JOB_OPTIONS.split(), *self.job.split()]
        names += ["strict", "json", "details"] if self.is_strict else ["json", "details"]
        if self.quick:
            names.append("quick")
            shown = " ".join(f"{find_flag(name)} {_show(value)}" for name, value in self.quick.items())
            typed["quick"] = f"Measure less, for a rough answer: {shown}, unless specified."
        removed = {*_OF_PYTHON, *self.without.split(), *(name[1:] for name in self.job.split() if name[0] == "-")}
        found: dict[str, _Parameter] = {}
        default: Any
        for name in dict.fromkeys(names):
            if name in removed or name.startswith("-"):
                continue
            argument, field = arguments.get(name), fields.get(name)
            annotation, default = "bool", False
            panel = next((panel for panel, names in _PANELS.items() if name in names.split()), JOB)
            help = typed.get(name) or (field and field.metadata["option"].help) or docs.get(name, "")
            if argument is not None:
                annotation = argument.annotation
                default = None if argument.default is argument.empty else argument.default
                if default is None and field is not None and name not in typed:  # the settings have the default
                    default = field.default
            elif field is not None:
                annotation, default, panel = field.type, field.default, field.metadata["option"].panel
            default = self.always.get(name, Path("runs") if name == "out" else default)
            flag = self.flags.get(name) or find_flag(name)
            flag = f"--no-{flag[2:]}" if default is True else flag
            found[name] = _Parameter(name, annotation, default, help, self.panels.get(name, panel), flag)
        return dict(sorted(found.items(), key=lambda item: PANELS.index(item[1].panel)))

    def add(self, app: typer.Typer, name: str, help: str) -> None:
        """Add this command; without a `name` it becomes the default command of a group."""
        lazy = type("Lazy", (_Lazy, TyperCommand if name else Group), {"command": self})
        if name:
            app.command(name, cls=lazy, help=help)(lambda: None)
        else:
            app.callback(cls=lazy, invoke_without_command=True, help=help)(lambda: None)

    def build(self) -> Any:
        """The parser's command, which provides the options and the callback."""
        parameters = [inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [parameter.build() for parameter in self.parameters.values()]

        def run(context_: typer.Context, **values: Any) -> None:
            self.run(context_, values)

        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        alone = typer.Typer(add_completion=False)
        alone.command()(run)
        return typer.main.get_command(alone)

    def run(self, context: typer.Context, values: Mapping[str, Any]) -> None:
        """Call the verb with the typed options and print its result."""
        given = dict(self.always)
        for name, parameter in self.parameters.items():
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given[name] = parameter.read(values[name])
        if (command := context.invoked_subcommand) is not None:
            flags = ", ".join(self.parameters[name].flag for name in given)
            refuse((flags, f"{flags} before {command} has no effect: put options after {command}"))
            return
        json, details, strict = (given.pop(name, False) for name in ("json", "details", "strict"))
        if (format := given.get("format")) in ("md", "parquet"):
            shown = [flag for flag, is_given in (("--json", json), ("--details", details)) if is_given]
            why = "it has everything: leave it out"
            refuse((shown, f"{' and '.join(shown)} with --format {format}: {why}"))
        if "resume" in given and self.verb.startswith("studies."):
            ignored = [name for name in given if name not in ("resume", "at_once", "trials", "runs")]
            refuse_given(ignored, RESUMED, code="resume")
        if self.quick and given.pop("quick", False):
            given = {**self.quick, **given}
        if "out" in self.parameters and "resume" not in given:
            given.setdefault("out", values["out"])
        verb = _load(self.verb)
        if "progress" in inspect.signature(verb).parameters:
            given["progress"] = True
        result = (self.adapter or verb)(**given)
        raise typer.Exit(print_result(result, json, details, strict))


class _Lazy:
    """A parser's command whose options and function come from the verb, which is imported when they are needed."""

    command: Command

    @cached_property
    def built(self) -> Any:
        built = self.command.build()
        for param in built.params:
            if param.param_type_name == "argument":
                param.display_type = lambda _: ""  # the option's name is self-explanatory
        return built

    params = property(lambda self: self.built.params, lambda self, _: None)
    callback = property(lambda self: self.built.callback, lambda self, _: None)

    def get_help_option(self, ctx: Any) -> Any:
        return _hide_type(super().get_help_option(ctx))  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A usage error always shows the usage: for a missing value, the parser does not set the context."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except _USAGE_ERROR as error:
            error.ctx = error.ctx or ctx
            raise


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's class, or the copy in typer


def print_result(result: Result, json: bool, details: bool = False, strict: bool = False) -> int:
    """Print a result on rank 0. Returns the exit code: 1 for a failure or, with `strict`, for noise; else 0."""
    from paceline.runtime.ranks.place import read_place

    try:
        leads = read_place().rank == 0
    except ConfigError:  # only some of a launcher's variables are set: no other rank would print
        leads = True
    if leads:
        if json:
            print(encoder.dumps(result.to_json(), indent=1, allow_nan=False))
        else:  # fit the terminal, or COLUMNS; redirected output is not limited
            width = None if details else shutil.get_terminal_size((0, 0)).columns or None
            print(result.text(width, details=details))
    reasons: Sequence[str] = [result.failure] if result.failure else result.noise if strict else []
    for reason in reasons if leads else []:
        print(f"paceline: failed{'' if result.failure else ' (--strict)'}: {reason}", file=sys.stderr)
    return 1 if reasons else 0
