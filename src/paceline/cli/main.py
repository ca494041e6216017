"""The `paceline` command: its verbs, and how errors become exit codes. `paceline.verbs` implements the verbs."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import JOB_OPTIONS, OPTIONS, add_command, find_flag, print_result
from paceline.errors import ConfigError, PacelineError, TrainingError, refuse
from paceline.units import parse_size, size_range

app = typer.Typer(
    name="paceline",
    help="Data-parallel training for PyTorch that shows where each step's time goes, predicts how it scales, "
    "and picks the bucket size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure collectives and wrappers on this machine or cluster.", no_args_is_help=True)
profile = typer.Typer(help="Show where the time of training steps goes.", no_args_is_help=False)
scale = typer.Typer(help="Does it scale? Batch sizes, ranks, large batches.", no_args_is_help=True)
predict = typer.Typer(no_args_is_help=False)
for group, name in ((bench, "bench"), (profile, "profile"), (predict, "predict"), (scale, "scale")):
    app.add_typer(group, name=name)


def _allreduce(
    min_size: str | None = None, max_size: str | None = None, factor: float | None = None, **given: Any
) -> Any:
    from paceline.records.kinds import ITEM_BYTES
    from paceline.verbs import bench

    if (min_size, max_size, factor) != (None, None, None):
        if "sizes" in given:
            raise ConfigError("--sizes with --min-size, --max-size or --factor: give either a list or a range")
        if min_size is None or max_size is None:
            raise ConfigError("a range of sizes needs --min-size (-b) and --max-size (-e)")
        multiple = ITEM_BYTES.get(given.get("dtype", "float32"), 1)
        ends = parse_size(min_size), parse_size(max_size)
        given["sizes"] = size_range(*ends, 2.0 if factor is None else factor, multiple)
    return bench.allreduce(**given)


add_command(
    bench, "allreduce", _allreduce,
    "ranks:bench backend:bench sizes min_size max_size factor collective op dtype device memory iters warmup limit "
    "compare strict",
    "How fast is all-reduce here? Measures backends x ranks x sizes, and checks every element.",
)  # fmt: skip
add_command(
    bench, "chunks", "verbs.bench:chunks", "ranks:bench backend:bench total chunks dtype device iters warmup strict",
    "What does splitting one message into chunks cost? Measures the total time for each chunk size.",
)  # fmt: skip
add_command(
    bench, "wrappers", "verbs.bench:wrappers",
    "models wrappers backend:bench ranks:bench batch_size:wrappers dtype device threads:wrappers iters warmup strict",
    "Is Paceline's wrapper faster than torch's here? Interleaves steps of one replica per wrapper.",
)  # fmt: skip
add_command(
    app, "doctor", "verbs.doctor:doctor", "hosts:doctor interface port folder:run env python ssh check_timeout -out",
    "Is this machine ready to train? Checks everything that ranks need, then runs a real all-reduce on two ranks.\n\n"
    "With --hosts, checks other hosts over ssh: versions, clocks, interfaces, free space and bandwidth.",
)  # fmt: skip


def _run(*, progress: bool, **given: Any) -> Any:
    from paceline.verbs.run import run

    def show(stream: str, text: str) -> None:
        print(text, end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)

    raise typer.Exit(run(show=show, **given))


add_command(
    app, "run", _run,
    "command:run hosts slurm kubernetes nodes ranks_per_node:run name time partition gpus_per_node "
    "sbatch image kind volume folder:run env grace interface port python ssh check_timeout wait dry_run "
    "-out -json -wide",
    "Run a command on several hosts: over ssh (--hosts), with Slurm (--slurm), or with Kubernetes (--kubernetes).\n\n"
    "Works with any command that runs under torchrun, including Paceline's own: paceline run --hosts a:8,b:8 -- "
    "paceline train. On SIGTERM or SIGUSR1, `paceline train` saves a checkpoint; a restarted job resumes from it.",
)  # fmt: skip


def _train(*, compare: tuple[Path, Path] | None = None, **given: Any) -> Any:
    from paceline.verbs.train import compare_runs, train

    if compare is None:
        return train(**given)
    others = ", ".join(find_flag(name) for name in given if name not in ("out", "progress"))
    refuse((others, f"{others} with --compare, which does not train: leave it out"))
    return compare_runs(compare, given["out"])


add_command(
    app, "train", _train,
    f"{JOB_OPTIONS} ranks:train epochs steps global_batch_size:train batch_growth grow tail clip lr momentum "
    "trust_coefficient weight_decay schedule lr_warmup lr_drops ghost_batchnorm label_smoothing augment cutout "
    "test_samples strategy workers profile:train compare:train resume save_every mtbf:train keep on_fault max_faults "
    "spares hang_timeout tensorboard watch",
    "Train a model on one rank or many, and see where the time goes.\n\n"
    "With several numbers of ranks, trains one run after the other and compares results and speed.",
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
            raise ConfigError(f"--compare cannot be combined with {verb}: leave out {verb}")
        for flag in [name for name, given in (("--json", json), ("--wide", wide)) if given]:
            raise ConfigError(f"{flag} before {verb} has no effect: write profile {verb} {flag}")
        return
    if compare is None:
        print(context.get_help())
        raise typer.Exit(2)
    from paceline.verbs.profile import compare as run

    raise typer.Exit(print_result(run(*compare), json, wide))


add_command(
    profile, "phases", "verbs.profile:profile", f"{JOB_OPTIONS} ranks:phases batch_size:phases iters warmup strict",
    "Time data loading, forward, backward, optimizer and communication (exposed and total).",
    model="cnn", kind="phases",
)  # fmt: skip
add_command(
    profile, "layers", "verbs.profile:profile", f"{JOB_OPTIONS} ranks:layers iters warmup strict",
    "Time the forward and backward of each block, and when each gradient is ready, on one rank.",
    model="cnn", kind="layers",
)  # fmt: skip
add_command(
    profile, "trace", "verbs.profile:trace", f"{JOB_OPTIONS} steps:trace warmup memory:trace shapes plot strict",
    "Record steps on all ranks as one Perfetto trace, and estimate what would make them faster.",
    model="cnn", plot=False,
)  # fmt: skip
add_command(
    profile, "comm-table", "verbs.profile:comm_table",
    f"{JOB_OPTIONS} profiles ranks:table network:table curves iters warmup",
    "Compare the cost of sending gradients on other networks with the measured computation of a step.",
)  # fmt: skip
add_command(
    profile, "attach", "verbs.attach:attach", "command:run steps:attach stop",
    "Profile your own program without editing it: paceline profile -- torchrun --nproc-per-node 2 train.py\n\n"
    "Shows where the time of a step goes, what limits it, and the best bucket size with its predicted gain.",
    command=(),
)  # fmt: skip


_PROFILES = ("phases", "layers", "trace", "comm-table", "attach")
_FOR_CSV, _FOR_TRACE = "ranks backend measured", "network ranks ranks_per_node inside algorithm"


def _predict(
    *, csv: Path | None = None, profile: Path | None = None, traces: list[Path] | None = None, progress: bool,
    out: Path, **given: Any,
) -> Any:  # fmt: skip
    from paceline.verbs.predict import predict, predict_csv, predict_trace

    sources = [flag for flag, value in (("--model-profile", profile), ("--csv", csv), ("--trace", traces)) if value]
    others = [name for name in given if name not in (_FOR_CSV if csv else _FOR_TRACE).split()]
    refuse(
        (not sources, "nothing to predict from: give --trace FILE, --model-profile RUN or --csv FOLDER"),
        (len(sources) > 1, f"{' and '.join(sources)} are {len(sources)} sources: give one of them"),
        (not csv and "measured" in given, "--measured needs --csv, which is not given"),
        (not profile and "strategy" in given,
         f"--strategy with {''.join(sources)}: tables and traces have neither gradient shapes nor codec costs; give "
         "--model-profile, a run of `paceline profile layers`"),
        (not profile and others, f"{', '.join(map(find_flag, others))} with {''.join(sources)}: give --model-profile"),
    )  # fmt: skip
    if traces:
        return predict_trace(traces, out=out, **given)
    if profile is not None:
        return predict(profile, out=out, **given)
    ranks = given.pop("ranks", (None,))
    what = f"--ranks {','.join(map(str, ranks))} with --csv: one number is needed, as in the all-reduce table"
    refuse((len(ranks) != 1, what))
    return predict_csv(csv or "", ranks=ranks[0], out=out, **given)


def _predict_goodput(*, progress: bool, **given: Any) -> Any:
    from paceline.verbs.predict import predict_goodput

    return predict_goodput(**given)


add_command(
    predict, "", _predict,
    "traces profile network ranks:predict csv measured allreduce backend:predict ranks_per_node inside algorithm "
    "accumulate gradients straggler strategy:several",
    "What will a step cost with other bucket sizes, networks and numbers of ranks?\n\n"
    "Predicts from torch.profiler traces of your own job (--trace), a profile (--model-profile), or tables (--csv).",
)  # fmt: skip
add_command(
    predict, "goodput", _predict_goodput,
    "runs:goodput mtbf mtbf_per_rank ranks:goodput step_seconds save_seconds detect_seconds restart_seconds "
    "spare_seconds shrink_seconds save_every:goodput all_lost repair horizon",
    "How much of a job's time is productive under faults, how often should it save, and which policy is best?\n\n"
    "Uses measured costs: steps and saves of a training run, and restarts from `paceline faults --restart`.",
)  # fmt: skip
_FOR_COMMAND = "steps caps budget out progress"


def _tune(*, command: list[str] | None = None, **given: Any) -> Any:
    from paceline.verbs.attach import attach
    from paceline.verbs.tune import tune

    if not command:
        refuse(("steps" in given, "--steps is for a command after --, and there is none: leave it out"))
        return tune(**{"model": "cnn", **given})
    others = ", ".join(find_flag(name) for name in given if name not in _FOR_COMMAND.split())
    refuse((others, f"{others} with a command after --: your program decides that itself; leave it out"))
    return attach(command, race=True, **given)


add_command(
    app, "tune", _tune,
    f"{JOB_OPTIONS} -plan -accumulate batch_size:tune command:run steps:tune quick confirm caps network:tune "
    "network_ranks iters budget strategy:several strict",
    "Find the best buckets: measure this machine and model, predict all plans, compare the best, save the winner.\n\n"
    "With --network, nothing is sent: one rank computes, and its messages take as long as on that network.\n\n"
    "Your own program: paceline tune -- torchrun --nproc-per-node 2 train.py (runs it twice, about 100 steps each).",
)  # fmt: skip


def _watch(*, command: list[str] | None = None, out: Path, **given: Any) -> Any:
    from paceline.verbs.attach import attach
    from paceline.verbs.watch import watch

    words = command or []
    is_run = len(words) == 1 and Path(words[0]).is_dir()
    if is_run:
        refuse(("every" in given, "--every with a run: leave it out"))
        os.nice(5)  # the ranks come first
        return watch(words[0], **given)
    return attach(words, **{"every": 50, **given}, steps=0, out=out)


add_command(
    app, "watch", _watch, "command:watch every port:watch browser",
    "Watch a training run on a live page, served only on this machine, and in the terminal: paceline watch FOLDER\n\n"
    "Or watch your own program, with a line every few steps and a summary of where its time went: "
    "paceline watch -- torchrun --nproc-per-node 2 train.py",
)  # fmt: skip
add_command(
    app, "faults", "studies.fault_trials:faults", "faults backend:faults systems ranks:faults trials patience restart "
    "on_fault:faults state device:faults resume",
    "Which faults are identified, and how soon? Repeatedly kills, stops or hangs a small job.\n\n"
    "Compares with torchrun and torch's own wrapper, interleaved; each job has its own processes.",
)  # fmt: skip
add_command(
    app, "report", "verbs.report:save_report", "runs:report page -out",
    "Show any run on one self-contained HTML page, or compare several runs.",
)  # fmt: skip


add_command(
    scale, "batch", "studies.scale:batch",
    f"{JOB_OPTIONS} -ranks -accumulate -wrapper -backend -sync_batchnorm -plan batch_size:batch epochs:batch resume "
    "strict",
    "Which batch size keeps one rank busy? Trains whole epochs at each size: time, samples/s and memory.\n\n"
    "The first epoch is a warm-up.",
)  # fmt: skip
add_command(
    scale, "ranks", "studies.scale:ranks",
    f"{JOB_OPTIONS} -sync_batchnorm -plan ranks:scale batch_size:scale wrapper:scale backend:scale global_batch_size "
    "network:scale predict_ranks iters resume strict",
    "Do more ranks help? Weak and strong scaling of wrappers: speed-up, communication, bandwidth and predictions.",
)  # fmt: skip
add_command(
    scale, "large-batch", "studies.scale:large_batch",
    f"{JOB_OPTIONS} -accumulate model:small ranks:one batch_size:large base_batch_size global_batch_size recipes "
    "seeds epochs:large updates lr:large momentum weight_decay schedule:large lr_drops tail augment cutout "
    "test_samples evaluations at_once resume",
    "What does a large global batch cost in test accuracy, and which recipe restores it? Several seeds each.",
)  # fmt: skip
add_command(
    scale, "strategies", "studies.scale:strategies",
    f"{JOB_OPTIONS} -sync_batchnorm -plan -wrapper model:small data:study ranks:study strategies workers:study seeds "
    "epochs:study steps lr:study momentum weight_decay schedule:large lr_drops lr_warmup tail augment cutout "
    "test_samples global_batch_size:train evaluations target at_once resume",
    "What does sending less cost in test accuracy? The same job with each strategy, several seeds each.",
)  # fmt: skip
add_command(
    scale, "report", "studies.scale:report", "runs resume",
    "Put the whole study on one page: tables, figures and findings, from finished runs or measured here.",
)  # fmt: skip


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
    """Rewrite `--channels 32 64 128` as `--channels 32,64,128`, and `--trace A B` as `--trace A --trace B`, because
    click's options take one word each; and `profile -- COMMAND` as `profile attach -- COMMAND`. Everything after -- is
    unchanged."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, command = arguments[:end], arguments[end:]
    if command and arguments[:1] == ["profile"] and not set(arguments) & set(_PROFILES):
        arguments.insert(1, "attach")
    joined: list[str] = []
    for argument in arguments:
        if len(joined) > 1 and joined[-2] == "--channels" and argument.isdigit():
            joined[-1] += f",{argument}"
        elif len(joined) > 1 and joined[-2] == "--trace" and not argument.startswith("-"):
            joined += ["--trace", argument]
        else:
            joined.append(argument)
    return joined + command


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 the result is a failure, 2 user error, 130 interrupted."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    try:
        app(args=_join_lists([word for word in arguments[:end] if word != "--debug"] + arguments[end:]))
    except PacelineError as error:
        if debug:
            traceback.print_exc()
        else:
            first = str(error).splitlines()[0]
            more = "" if first == str(error) else " (--debug shows the traceback)"
            print(f"paceline: error: {first}{more}", file=sys.stderr)
        sys.exit(1 if isinstance(error, TrainingError) else 2)
    except (OSError, MemoryError, RecursionError, OverflowError, UnicodeError) as error:
        # Problems of a file or the machine that no check anticipated; a broken pipe is `paceline ... | head`.
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if debug:
            traceback.print_exc()
        else:
            text = next(iter(str(error).splitlines()), "") or "not enough memory"
            print(f"paceline: error: {type(error).__name__}: {text[:300]} (--debug shows where)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        if not getattr(error, "was_reported", False):  # a session reports what it saved
            print("paceline: interrupted: nothing was saved", file=sys.stderr)
        sys.exit(130)
