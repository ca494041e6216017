"""The `paceline` command: its verbs and how errors become exit codes. `paceline.verbs` implements the verbs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from paceline.cli.commands import Command, Group
from paceline.errors import ConfigError, PacelineError, TrainingError, refuse
from paceline.options import MEASUREMENT, OUTPUT, refuse_given
from paceline.units import parse_size, size_range

app = typer.Typer(
    name="paceline",
    cls=Group,
    help="Data-parallel training for PyTorch that shows where each step's time goes, predicts how it scales, "
    "and picks the bucket size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    cls=Group, help="Measure collectives and wrappers on this machine or cluster.", no_args_is_help=True
)
profile = typer.Typer(no_args_is_help=True)
scale = typer.Typer(cls=Group, help="Does it scale? Batch sizes, ranks, large batches.", no_args_is_help=True)
predict = typer.Typer(no_args_is_help=False)
for group, name in ((bench, "bench"), (profile, "profile"), (predict, "predict"), (scale, "scale")):
    app.add_typer(group, name=name)
_NETWORKS = (
    "nvlink, pcie4, hdr, 100gbe, 10gbe, ..., bandwidth and latency (10Gb/s,50us), or a measured cluster: a100-hdr, "
    "h100-rdma, gh200-slingshot, ..."
)
_STRATEGIES = "Compare strategies: all, or a list: bf16,powersgd:4,diloco:100+int8"
_COMMAND = "The command to run, after --, as in -- python train.py"


def _allreduce(
    min_size: str | None = None, max_size: str | None = None, factor: float | None = None, **given: Any
) -> Any:
    """Measures sizes in a list, or in a range as nccl-tests does.

    Args:
        min_size: Smallest size of a range: 8B
        max_size: Largest size of a range: 128MiB
        factor: Factor between the sizes of a range. Default: 2.
    """
    from paceline.records.kinds import ITEM_BYTES
    from paceline.verbs import bench

    if (min_size, max_size, factor) != (None, None, None):
        if "sizes" in given:
            raise ConfigError("--sizes with --min-size, --max-size or --factor: pass either a list or a range")
        if min_size is None or max_size is None:
            raise ConfigError("a range of sizes needs --min-size (-b) and --max-size (-e)")
        multiple = ITEM_BYTES.get(given.get("dtype", "float32"), 1)
        ends = parse_size(min_size), parse_size(max_size)
        given["sizes"] = size_range(*ends, 2.0 if factor is None else factor, multiple)
    return bench.allreduce(**given)


Command("verbs.bench:allreduce", _allreduce, is_strict=True).add(
    bench, "allreduce", "How fast is all-reduce here? Measures backends x ranks x sizes, and checks every element."
)
Command("verbs.bench:chunks", like=["verbs.bench:allreduce"], is_strict=True).add(
    bench, "chunks", "What does splitting one message into chunks cost? Measures the total time for each chunk size."
)
Command("verbs.bench:wrappers", like=["verbs.bench:allreduce"], is_strict=True).add(
    bench, "wrappers", "Is Paceline's wrapper faster than torch's here? Interleaves steps of one replica per wrapper."
)
Command("verbs.doctor:doctor", like=["verbs.run:run"]).add(
    app,
    "doctor",
    "Is this machine ready to train? Checks everything that ranks need, then runs a real all-reduce on two ranks.\n\n"
    "With --hosts, checks other hosts over ssh: versions, clocks, interfaces, free space and bandwidth.",
)


Command("verbs.demo:demo").add(
    app,
    "demo",
    "See what this does, in half a minute: find, explain and fix a mistake in a small program, and measure again."
    "\n\nStarts two CPU ranks and needs nothing else. Ends with a measured gain, its interval, and a page.",
)


def _run(**given: Any) -> Any:
    from paceline.verbs.run import run

    def show(stream: str, text: str) -> None:
        print(text, end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)

    raise typer.Exit(run(show=show, **given))


Command("verbs.run:run", _run, without="json details").add(
    app,
    "run",
    "Run a command on several hosts: over ssh (--hosts), with Slurm (--slurm), or with Kubernetes (--kubernetes).\n\n"
    "Works with any command that runs under torchrun, including Paceline's own: paceline run --hosts a:8,b:8 -- "
    "paceline train. On SIGTERM or SIGUSR1, `paceline train` saves a checkpoint; a restarted job resumes from it.",
)


def _train(*, compare: tuple[Path, Path] | None = None, **given: Any) -> Any:
    """Trains, or compares two runs.

    Args:
        ranks: Number of ranks, or several: 1,2. Default: the launched world's, else 1.
        compare: Compare two runs (folders) without training.
    """
    from paceline.verbs.train import compare_runs, train

    if compare is None:
        return train(**given)
    refuse_given(
        [name for name in given if name not in ("out", "progress")],
        "with --compare, which does not train: leave it out",
    )
    return compare_runs(compare, given["out"])


Command("verbs.train:train", _train).add(
    app,
    "train",
    "Train a model on one rank or many, and see where the time goes.\n\n"
    "With several numbers of ranks, trains one run after the other and compares results and speed.",
)


def _compare(*, compare: tuple[Path, Path] | None = None) -> Any:
    """Compares two profiles.

    Args:
        compare: Compare two runs of the same kind of profile.
    """
    from paceline.verbs.profile import compare as compare_profiles

    if compare is None:
        raise ConfigError("nothing to compare: pass --compare and two runs")
    return compare_profiles(*compare)


Command("verbs.profile:compare", _compare, without="first second").add(
    profile, "", "Show where the time of training steps goes."
)
Command(
    "verbs.profile:profile",
    without="kind",
    help={
        "ranks": "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.",
        "batch_size": "Samples per rank in a micro-batch: 32,128. Default: 32.",
    },
    is_strict=True,
    always={"model": "cnn", "kind": "phases"},
    quick={"iters": 10, "warmup": 1},
).add(profile, "phases", "Time data loading, forward, backward, optimizer and communication (exposed and total).")
Command(
    "verbs.profile:profile",
    without="kind",
    help={"ranks": "Must be 1: layers are timed on one rank."},
    is_strict=True,
    always={"model": "cnn", "kind": "layers"},
    quick={"iters": 10, "warmup": 1},
).add(profile, "layers", "Time the forward and backward of each block, and when each gradient is ready, on one rank.")
Command(
    "verbs.profile:trace",
    like=["verbs.profile:profile"],
    help={"steps": "Number of steps to record."},
    flags={"memory": "--memory-use"},
    is_strict=True,
    always={"model": "cnn", "plot": False},
    quick={"steps": 1, "warmup": 1},
).add(profile, "trace", "Record steps on all ranks as one Perfetto trace, and estimate what would make them faster.")
Command("verbs.profile:comm_table", help={"ranks": "Numbers of ranks."}, quick={"iters": 5, "warmup": 1}).add(
    profile,
    "comm-table",
    "Compare the cost of sending gradients on other networks with the measured computation of a step.",
)
Command(
    "verbs.attach:attach",
    without="every race caps budget port browser",
    help={"command": _COMMAND},
    always={"command": ()},
    quick={"steps": 24},
).add(
    profile,
    "attach",
    "Profile your own program without editing it: paceline profile -- torchrun --nproc-per-node 2 train.py\n\n"
    "Shows where the time of a step goes, what limits it, and the best bucket size with its predicted gain.",
)


_FOR_CSV, _FOR_TRACE = "ranks backend measured untied", "network ranks ranks_per_node inside algorithm measured"


def _predict(
    *,
    traces: Sequence[str | Path] | None = None,
    profile: Path | None = None,
    csv: Path | None = None,
    measured: str | None = None,
    untied: bool = False,
    out: Path,
    **given: Any,
) -> Any:
    """Predicts from one of three sources.

    Args:
        traces: Traces of your job from torch.profiler: one file per rank.
        profile: Folder of a run of `profile layers`.
        csv: Folder with layer-sizes, layer-times and allreduce-times, instead of a profile.
        measured: With --csv or --trace: a step time of your job to fit the prediction: 25MiB=724ms, several, or
            a table of bucket_size and step_s or backward_s.
        untied: With --csv: the token embedding and the head are two tensors, although their sizes are equal.
    """
    from paceline.verbs.predict import predict, predict_csv, predict_trace

    given |= ({} if measured is None else {"measured": measured}) | ({"untied": True} if untied else {})
    sources = [flag for flag, value in (("--model-profile", profile), ("--csv", csv), ("--trace", traces)) if value]
    others = [name for name in given if name not in (_FOR_CSV if csv else _FOR_TRACE).split()]
    refuse(
        (not sources, "nothing to predict from: pass --trace FILE, --model-profile RUN or --csv FOLDER"),
        (len(sources) > 1, f"{' and '.join(sources)} are {len(sources)} sources: pass one of them"),
        (profile and measured, "--measured needs --csv or --trace"),
        (not csv and untied, "--untied needs --csv"),
        (not profile and "strategy" in given,
         f"--strategy with {''.join(sources)}: tables and traces have neither gradient shapes nor codec costs; pass "
         "--model-profile, a run of `paceline profile layers`"),
    )  # fmt: skip
    refuse_given([] if profile else others, f"with {''.join(sources)}: pass --model-profile")
    if traces:
        return predict_trace(traces, out=out, **given)
    if profile is not None:
        return predict(profile, out=out, **given)
    ranks = given.pop("ranks", (None,))
    what = f"--ranks {','.join(map(str, ranks))} with --csv: must be a single number, as in the all-reduce table"
    refuse((len(ranks) != 1, what))
    return predict_csv(csv or "", ranks=ranks[0], out=out, **given)


Command("verbs.predict:predict", _predict, help={"strategy": _STRATEGIES}, flags={"profile": "--model-profile"}).add(
    predict,
    "",
    "What will a step cost with other bucket sizes, networks and numbers of ranks?\n\n"
    "Predicts from torch.profiler traces of your own job (--trace), a profile (--model-profile), or tables (--csv).",
)
Command("verbs.predict:predict_goodput", help={"runs": "Folders of training runs, and of `faults --restart`."}).add(
    predict,
    "goodput",
    "How much of a job's time is productive under faults, how often should it save, and which policy is best?\n\n"
    "Uses measured costs: steps and saves of a training run, and restarts from `paceline faults --restart`.",
)
Command(
    "verbs.predict:predict_scale",
    help={"profile": "Folder of a run of `profile layers`."},
    flags={"profile": "--model-profile"},
).add(
    predict,
    "scale",
    "How long does training take on 8 to 16,384 ranks, with faults, and which strategy is fastest and fits?\n\n"
    "Everything is simulated from a profile: no other machine is needed.",
)
_FOR_COMMAND = "steps caps budget out progress"


def _tune(*, command: Sequence[str] | None = None, steps: int | None = None, **given: Any) -> Any:
    """Tunes a built-in job, or a command.

    Args:
        command: The command to run, after --, as in -- torchrun --nproc-per-node 2 train.py
        steps: For a command after --: number of steps to observe first. Default: 48.
    """
    from paceline.verbs.attach import attach
    from paceline.verbs.tune import tune

    given |= {} if steps is None else {"steps": steps}
    if command and given.pop("quick", False):
        given = {"steps": 24, "budget": 30.0} | given
    if not command:
        refuse((steps is not None, "--steps applies only to a command after --: leave it out"))
        return tune(**{"model": "cnn", **given})
    is_script = Path(command[0]).suffix == ".py" and shutil.which(command[0]) is None
    typed = shlex.join(["python", *command])
    refuse((is_script, f"{command[0]} is not a command: write how to start it, as in `paceline tune -- {typed}`"))
    others = [name for name in given if name not in _FOR_COMMAND.split()]
    refuse_given(others, "with a command after --: your program decides this itself; leave it out")
    return attach(command, race=True, **given)


Command(
    "verbs.tune:tune",
    _tune,
    job="-plan -accumulate",
    help={
        "batch_size": "Samples per rank. Default: 4, so that compute does not hide communication.",
        "wrapper": "paceline or torch",
        "network": f"Emulate this network: {_NETWORKS}",
        "strategy": _STRATEGIES,
        "confirm": "Only predict; do not run the job with the plans.",
        "budget": "Time limit for comparing plans, in seconds. Default: 60, with --quick 30.",
    },
    panels={"network": MEASUREMENT},
    is_strict=True,
).add(
    app,
    "tune",
    "Find the best buckets: measure this machine and model, predict all plans, compare the best, save the winner.\n\n"
    "With --network, nothing is sent: a single rank computes, and its messages take as long as on that network.\n\n"
    "Your own program: paceline tune -- torchrun --nproc-per-node 2 train.py (runs it twice, about 100 steps each).",
)


def _watch(*, command: Sequence[str] | None = None, every: int | None = None, out: Path, **given: Any) -> Any:
    """Watches a run, or a command.

    Args:
        command: Folder of a training run, or a command after --
        every: For a command: print a line every N steps. Default: 50.
    """
    from paceline.verbs.attach import attach
    from paceline.verbs.watch import watch

    words = list(command or [])
    is_run = len(words) == 1 and Path(words[0]).is_dir()
    name = words[0] if words else ""
    advice = "name the folder of a run, or write a command after --: paceline watch -- python train.py"
    refuse(
        (not words, f"nothing to watch: {advice}"),
        (
            len(words) == 1 and not is_run and shutil.which(name) is None,
            f"{name} is neither a folder nor a command: {advice}",
        ),
    )
    if is_run:
        refuse((every is not None, "--every applies only to a command after --, not to a run: leave it out"))
        os.nice(5)  # do not slow down the ranks
        return watch(words[0], **given)
    return attach(words, every=50 if every is None else every, steps=0, out=out, **given)


Command("verbs.attach:attach", _watch, without="steps stop race caps budget", panels={"port": OUTPUT}).add(
    app,
    "watch",
    "Watch a training run on a live page, served only on this machine, and in the terminal: paceline watch FOLDER\n\n"
    "Or watch your own program, with a line every few steps and a summary of where its time went: "
    "paceline watch -- torchrun --nproc-per-node 2 train.py",
)
Command("studies.fault_trials:faults", quick={"faults": "kill,exception", "backend": "shm", "systems": "train"}).add(
    app,
    "faults",
    "Which faults are identified, and how soon? Repeatedly kills, stops or hangs a small job.\n\n"
    "Compares with torchrun and torch's own wrapper, interleaved; each job has its own processes.",
)


def _report(*, format: str = "html", **given: Any) -> Any:
    """Reports runs.

    Args:
        format: html (writes one page), md (prints Markdown, for a pull request or the summary of a CI job), or parquet
            (writes the raw records, for pandas or DuckDB)
    """
    from paceline.report.page import render_markdown
    from paceline.verbs.report import load_all, save_records, save_report

    refuse((format not in ("html", "md", "parquet"), f"--format {format} is unknown: use html, md or parquet"))
    if format == "html":
        return save_report(**given)
    if format == "parquet":
        given.pop("progress", None)
        print(f"records: {save_records(given.pop('runs', None) or (), **given)}")
        raise typer.Exit
    refuse(("page" in given, "--page with --format md, which writes no page: leave it out"))
    print(render_markdown(load_all(given.get("runs") or ())), end="")
    raise typer.Exit


Command("verbs.report:save_report", _report, help={"runs": "Folders of runs; several are compared."}).add(
    app, "report", "Show any run on one self-contained HTML page, or compare several runs."
)
Command(
    "studies.scale:batch",
    job="-ranks -accumulate -wrapper -backend -sync_batchnorm -plan",
    help={"batch_size": "Batch sizes to compare.", "epochs": "Number of passes over the data at each batch size."},
    is_strict=True,
    quick={"batch_size": (32, 512), "epochs": 2},
).add(
    scale,
    "batch",
    "Which batch size keeps one rank busy? Trains whole epochs at each size: time, samples/s and memory.\n\n"
    "The first epoch is a warm-up.",
)
Command(
    "studies.scale:ranks",
    job="-sync_batchnorm -plan",
    like=["studies.scale:batch"],
    help={
        "ranks": "Numbers of ranks. Default: 1,2,4,... up to the number of cores or GPUs, or to the launched world.",
        "batch_size": "Samples per rank (weak scaling).",
        "global_batch_size": "Samples per step over all ranks (strong scaling). Default: divisible by all rank counts.",
        "wrapper": "paceline, torch or dp; several are interleaved",
        "backend": "auto, gloo, shm (shared memory) or nccl; several are interleaved: gloo,shm",
        "network": f"Predict scaling on these networks: {_NETWORKS}",
        "predict_ranks": "Predict scaling for these numbers of ranks.",
    },
    panels={"network": MEASUREMENT},
    is_strict=True,
    quick={"batch_size": (8,), "iters": 10},
).add(
    scale,
    "ranks",
    "Do more ranks help? Weak and strong scaling of wrappers: speed-up, communication, bandwidth and predictions.",
)
_RECIPES = "momentum weight_decay lr_drops tail augment cutout test_samples"
_OF_ACCURACY = {
    "model": "cnn, resnet18, ..., hf:NAME, or FILE.py:FUNCTION. Default: a small cnn.",
    "schedule": "constant, linear, cosine (the default), piecewise (with --lr-drops)",
}
Command(
    "studies.scale:large_batch",
    job=f"-accumulate {_RECIPES}",
    like=["studies.scale:batch"],
    help=_OF_ACCURACY
    | {
        "base_batch_size": "Baseline: the global batch size that --lr is tuned for.",
        "global_batch_size": "Samples per step over all ranks: 1024,8192. Default: 16 times the baseline.",
        "batch_size": "Largest micro-batch per rank; larger batches are accumulated.",
        "ranks": "Number of ranks. Default: the launched world's, else 1.",
    },
    quick={"seeds": 1, "epochs": 2},
).add(
    scale,
    "large-batch",
    "What does a large global batch cost in test accuracy, and which recipe restores it? Several seeds each.",
)
Command(
    "studies.scale:strategies",
    job=f"-sync_batchnorm -plan -wrapper steps lr_warmup global_batch_size {_RECIPES}",
    like=["studies.scale:large_batch", "studies.scale:batch"],
    help=_OF_ACCURACY
    | {
        "data": "As in train. Default: synthetic:noisy; with --model, synthetic.",
        "strategies": "all, or a list: int8,topk:0.01,... dense and bf16 are always included.",
        "workers": "Replicas in one process that exchange data as ranks would. Default: 4.",
        "ranks": "Number of ranks to use instead of --workers, which makes times meaningful. Default: none.",
        "epochs": "Number of passes over the data. Default: 6.",
        "seeds": "Number of runs of each strategy.",
    },
    quick={"seeds": 1, "epochs": 2},
).add(
    scale,
    "strategies",
    "What does sending less cost in test accuracy? The same job with each strategy, several seeds each.",
)
Command("studies.scale:report", help={"runs": "Folders of finished studies. Default: measure all three."}).add(
    scale,
    "report",
    "Combine the scaling studies on one page: tables, figures and findings, from finished or new runs.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import paceline

        print(f"paceline {paceline.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, metavar="", help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", metavar="", help="Show the traceback of an error."),
) -> None:
    pass


def _is_program(word: str) -> bool:
    return Path(word).suffix == ".py" or (not word.startswith("-") and shutil.which(word) is not None)


def _join_lists(arguments: list[str]) -> list[str]:
    """Rewrite `--channels 32 64 128` as `--channels 32,64,128`, and `--trace A B` as `--trace A --trace B`, because
    each of click's options takes a single word. Also rewrite `profile -- COMMAND` as `profile attach -- COMMAND`.
    Everything after -- is unchanged."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, command = arguments[:end], arguments[end:]
    profiles = {known.name for known in profile.registered_commands}
    if command and arguments[:1] == ["profile"] and not profiles & set(arguments):
        arguments.insert(1, "attach")
    elif arguments[:1] == ["profile"] and len(arguments) > 1 and _is_program(name := arguments[1]):
        typed = shlex.join(["python", *arguments[1:]] if Path(name).suffix == ".py" else arguments[1:])
        advice = f"write a command after --, as in `paceline profile -- {typed}`"
        raise ConfigError(f"{name} is not a kind of profile: {advice}")
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
        # File or machine problems that no check anticipated; `paceline ... | head` causes a broken pipe.
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
        if not getattr(error, "was_reported", False):  # a session has already reported what it saved
            print("paceline: interrupted: nothing was saved", file=sys.stderr)
        sys.exit(130)
