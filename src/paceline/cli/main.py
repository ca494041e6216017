"""The `paceline` command: its verbs, and how errors become exit codes. What a verb does lives in `paceline.verbs`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import (
    BACKENDS,
    JOB,
    JOB_OPTIONS,
    MEASUREMENT,
    NETWORK_HELP,
    OPTIONS,
    RANKS,
    Option,
    add_command,
    find_flag,
    print_result,
    read_one,
)
from paceline.errors import ConfigError, PacelineError, TrainingError
from paceline.units import parse_counts, parse_size, size_range

app = typer.Typer(
    name="paceline",
    help="Data-parallel training for PyTorch that measures itself, predicts itself and tunes itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure collectives and wrappers on this machine or cluster.", no_args_is_help=True)
profile = typer.Typer(help="See where the time of training steps goes.", no_args_is_help=False)
scale = typer.Typer(help="Does it scale? Batch sizes, ranks, large batches.", no_args_is_help=True)
for group, name in ((bench, "bench"), (profile, "profile"), (scale, "scale")):
    app.add_typer(group, name=name)


# -- bench and doctor --------------------------------------------------------------------------------------------------


def _allreduce(
    min_size: str | None = None, max_size: str | None = None, factor: float | None = None, **given: Any
) -> Any:
    from paceline.records.kinds import ITEM_BYTES
    from paceline.verbs import bench

    if (min_size, max_size, factor) != (None, None, None):
        if "sizes" in given:
            raise ConfigError("--sizes contradicts --min-size, --max-size and --factor: give a list or a range")
        if min_size is None or max_size is None:
            raise ConfigError("a range of sizes needs --min-size (-b) and --max-size (-e)")
        multiple = ITEM_BYTES.get(given.get("dtype", "float32"), 1)
        ends = parse_size(min_size), parse_size(max_size)
        given["sizes"] = size_range(*ends, 2.0 if factor is None else factor, multiple)
    return bench.allreduce(**given)


add_command(
    bench, "allreduce", _allreduce,
    "How fast is all-reduce here? Backends x ranks x sizes in one run, every element checked.",
    "ranks backend sizes min_size max_size factor collective op dtype device memory iters warmup limit compare strict",
    ranks=RANKS,
    backend=BACKENDS,
    memory=Option(
        JOB, "Where vectors are: ordinary, shared (backend shm alone), or both, in turns.", default="ordinary"
    ),
)  # fmt: skip
add_command(
    bench, "chunks", "bench:chunks",
    "What does cutting one message into chunks cost? Total time by elements per all-reduce.",
    "ranks backend total chunks dtype device iters warmup strict", ranks=RANKS, backend=BACKENDS,
)  # fmt: skip
add_command(
    bench, "wrappers", "bench:wrappers",
    "Is Paceline's wrapper faster than torch's, here? Replicas of a model take steps in turns, one per wrapper.",
    "models wrappers backend ranks batch_size dtype device threads iters warmup strict",
    ranks=RANKS,
    backend=BACKENDS,
    batch_size=Option(JOB, "Samples per rank in a step. Default: the model's own.", read=read_one),
    threads=Option(JOB, OPTIONS["threads"].help, default=1),
)  # fmt: skip
add_command(
    app, "doctor", "doctor:doctor",
    "Is this machine ready to train? Checks everything that ranks need, then runs a real all-reduce on two of them.",
    "", without="out",
)  # fmt: skip


# -- train, profile, predict and tune ----------------------------------------------------------------------------------

add_command(
    app, "train", "train:train", "Train a model on one rank or many, and see where the time goes.",
    f"{JOB_OPTIONS} epochs steps global_batch_size batch_growth grow tail clip lr momentum trust_coefficient "
    "weight_decay schedule lr_warmup lr_drops ghost_batchnorm label_smoothing augment cutout test_samples profile "
    "resume save_every keep tensorboard",
    ranks=Option(JOB, "Number of ranks. Default: the launched world's, else 1.", read=read_one),
    global_batch_size=Option(JOB, "Samples of one step over all ranks.", int),
    profile=Option(MEASUREMENT, "Time forward, backward and optimizer of each step.", default=False),
)  # fmt: skip


@profile.callback(invoke_without_command=True)
def _profile(
    context: typer.Context,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two runs of one kind of profile.")
    ] = None,
    json: bool = OPTIONS["json"].build_info("json"),
    wide: bool = OPTIONS["wide"].build_info("wide"),
) -> None:
    if (verb := context.invoked_subcommand) is not None:
        if compare is not None:
            raise ConfigError(f"--compare stands alone: leave out {verb}")
        for flag in [name for name, given in (("--json", json), ("--wide", wide)) if given]:
            raise ConfigError(f"{flag} before {verb} has no effect: write profile {verb} {flag}")
        return
    if compare is None:
        print(context.get_help())
        raise typer.Exit(2)
    from paceline.verbs.profile import compare as run

    raise typer.Exit(print_result(run(*compare), json, wide))


add_command(
    profile, "phases", "profile:phases",
    "Data wait, forward, backward, optimizer, and communication: exposed (compared with steps without) and busy.",
    f"{JOB_OPTIONS} iters warmup",
    {"model": "cnn"},
    ranks=Option(JOB, "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.", read=parse_counts),
    batch_size=Option(JOB, "Samples per rank in a micro-batch: 32,128. Default: 32.", read=parse_counts),
)  # fmt: skip
add_command(
    profile, "layers", "profile:layers",
    "When each gradient is ready, and forward and backward of each block, on one rank.",
    f"{JOB_OPTIONS} iters warmup", {"model": "cnn"},
)  # fmt: skip
add_command(
    profile, "trace", "profile:trace",
    "Record steps on every rank as one Perfetto trace, and say with numbers what would make them faster.",
    f"{JOB_OPTIONS} steps warmup memory shapes plot",
    {"model": "cnn", "plot": False},
    steps=Option(MEASUREMENT, "Steps that are recorded.", default=3),
    memory=Option(MEASUREMENT, "Record allocations, too.", default=False, flags="--memory-use"),
)  # fmt: skip
add_command(
    profile, "comm-table", "profile:comm_table",
    "What gradients cost on given networks, compared with the measured computation of a step.",
    f"{JOB_OPTIONS} network curves iters warmup",
    {"model": "cnn"},
    ranks=Option(JOB, OPTIONS["ranks"].help, read=parse_counts),
    network=Option(JOB, NETWORK_HELP, default="nvlink,pcie4,hdr,10gbe"),
)  # fmt: skip


def _predict(*, csv: Path | None = None, profile: Path | None = None, progress: bool, out: Path, **given: Any) -> Any:
    from paceline.verbs.predict import predict, predict_csv

    if csv is not None and profile is not None:
        raise ConfigError("--csv and --model-profile are two sources: give one of them")
    if csv is not None and given:
        flags = ", ".join(map(find_flag, given))
        raise ConfigError(f"{flags} with --csv, which uses its tables only: give --model-profile")
    if csv is not None:
        return predict_csv(csv, out=out)
    if profile is None:
        raise ConfigError("nothing to predict from: give --model-profile RUN or --csv FOLDER")
    return predict(profile, out=out, **given)


add_command(
    app, "predict", _predict,
    "What will a step cost: on other networks and ranks (--model-profile), or with other bucket sizes (--csv)?",
    "profile network ranks csv allreduce backend ranks_per_node inside algorithm accumulate gradients straggler",
    ranks=RANKS, backend=Option(JOB, BACKENDS.help),
)  # fmt: skip
add_command(
    app, "tune", "tune:tune",
    "Find the best buckets: measure this machine and model, predict every plan, confirm, and save the plan.\n\n"
    "With --network nothing is sent: one rank computes, and its buckets take as long as that network would.",
    f"{JOB_OPTIONS} quick confirm caps network network_ranks iters",
    {"model": "cnn"},
    without="plan accumulate",
    batch_size=Option(
        JOB, "Samples per rank. Small by default: buckets matter where little arithmetic hides them.", default="4",
        read=read_one,
    ),
    network=Option(MEASUREMENT, NETWORK_HELP),
)  # fmt: skip


# -- scale -------------------------------------------------------------------------------------------------------------


def _study(name: str) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        from paceline.verbs import scale

        if "resume" in given:
            scale.check_resume(n for n in given if n not in ("resume", "progress", "at_once", "runs"))
        return getattr(scale, name)(**given)

    return run


add_command(
    scale, "batch", _study("batch"),
    "Which batch size keeps one rank busy? Whole epochs at each size: time, samples/s and memory.\n\n"
    "The first epoch is a warm-up.",
    f"{JOB_OPTIONS} epochs resume",
    without="ranks accumulate wrapper backend sync_batchnorm plan",
    batch_size=Option(JOB, "Batch sizes: 32,128,512,2048 (the default)", read=parse_counts),
    epochs=Option(OPTIONS["epochs"].panel, OPTIONS["epochs"].help, default=3),
)  # fmt: skip
add_command(
    scale, "ranks", _study("ranks"),
    "Do more ranks help? Weak and strong scaling of all wrappers: speed-up, communication, bandwidth, prediction.",
    f"{JOB_OPTIONS} global_batch_size network predict_ranks iters resume",
    without="sync_batchnorm plan",
    ranks=Option(
        JOB, "Numbers of ranks: 1,2,4. Default: 1,2,4,... up to the cores or GPUs, or to the launched world.",
        read=parse_counts,
    ),
    batch_size=Option(JOB, "Samples per rank (weak scaling): 8,32 (the default)", read=parse_counts),
    wrapper=Option(JOB, "paceline, torch or dp; several are compared in turns", default="paceline,torch"),
    backend=Option(
        JOB, "auto, gloo, shm (shared memory) or nccl; several are compared in turns: gloo,shm", default="auto"
    ),
    network=Option(MEASUREMENT, NETWORK_HELP, default="10gbe,100gbe"),
)  # fmt: skip
add_command(
    scale, "large-batch", _study("large_batch"),
    "What does a large global batch cost in test accuracy, and which recipe repairs it? Several seeds each.",
    f"{JOB_OPTIONS} base_batch_size global_batch_size recipes seeds epochs updates lr momentum weight_decay schedule "
    "lr_drops tail augment cutout test_samples evaluations at_once resume",
    without="accumulate",
    model=Option(
        JOB, "cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION. Default: a small cnn.", default="cnn"
    ),
    ranks=Option(JOB, "Number of ranks. Default: the launched world's, else 1.", read=read_one),
    batch_size=Option(JOB, "What a rank computes at once; larger batches accumulate. Default: 512.", read=read_one),
    epochs=Option(OPTIONS["epochs"].panel, OPTIONS["epochs"].help, default=6),
    lr=Option(OPTIONS["lr"].panel, OPTIONS["lr"].help, default=0.005),
    schedule=Option(OPTIONS["schedule"].panel, OPTIONS["schedule"].help, default="cosine"),
)  # fmt: skip
add_command(
    scale, "report", _study("report"),
    "The whole study on one page: tables, figures and findings, from finished runs or measured here with defaults.",
    "resume",
    runs=Option(
        JOB, "Finished runs of scale batch, ranks or large-batch. Default: measure all three.", list[Path],
        flags="argument",
    ),
)  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


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
