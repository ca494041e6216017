"""The `paceline` command: its verbs, and how errors become exit codes. What a verb does lives in its own module."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from paceline.cli import bench, doctor, predict, profile, scale, train, tune
from paceline.errors import PacelineError, TrainingError

app = typer.Typer(
    name="paceline",
    help="Data-parallel training for PyTorch that measures itself, predicts itself and tunes itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)
app.command("train")(train.train)
app.add_typer(profile.app, name="profile")
app.command("predict")(predict.predict)
app.command("tune")(tune.tune)
app.add_typer(scale.app, name="scale")


def _print_version(wanted: bool) -> None:
    if wanted:
        import paceline

        print(f"paceline {paceline.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    pass


def _join_lists(arguments: list[str]) -> list[str]:
    """`--channels 32 64 128` as `--channels 32,64,128`: click's options take one word each."""
    joined: list[str] = []
    for argument in arguments:
        if len(joined) > 1 and joined[-2] == "--channels" and argument.isdigit():
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
    return joined


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 the result says failed, 2 the user can fix it, 130 interrupted."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        app(args=_join_lists([argument for argument in arguments if argument != "--debug"]))
    except PacelineError as error:
        if debug:
            traceback.print_exc()
        else:
            first = str(error).splitlines()[0]
            more = "" if first == str(error) else " (--debug shows the traceback)"
            print(f"paceline: error: {first}{more}", file=sys.stderr)
        sys.exit(1 if isinstance(error, TrainingError) else 2)
    except KeyboardInterrupt as error:
        if not getattr(error, "was_reported", False):  # a session says itself what is saved
            print("paceline: interrupted: nothing was saved", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `paceline ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
