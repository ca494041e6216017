"""`paceline.bench`: how fast collectives and data-parallel wrappers are on this machine or cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import ConfigError
from paceline.measure.bench_settings import ChunkSettings, CollectiveSettings, GroupSettings, WrapperSettings
from paceline.records.exchange import load_table
from paceline.records.kinds import ITEM_BYTES, CollectiveRecord
from paceline.records.store import Run, is_run_path, load_run
from paceline.runtime.ranks.place import read_place
from paceline.runtime.ranks.session import joins_world, open_session
from paceline.units import parse_size
from paceline.verbs.jobs import Counts, Names, Place, Sizes, choose_up_to, finish, list_names, list_sizes

if TYPE_CHECKING:
    from paceline.report.step_tables import WrappersResult
    from paceline.report.sweeps import ChunksResult, CollectiveResult

# Values that `quick` uses for settings that are not specified.
_QUICK = {"iters": 10, "warmup": 1}
_QUICK_MODELS = ("mlp", "cnn")


def allreduce(
    ranks: Counts | None = None, sizes: Sizes = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB"),
    backend: Names = "gloo", *, collective: str = "all_reduce", op: str = "sum", dtype: str = "float32",
    device: str = "auto", memory: Names = "ordinary", limit: bool = False, quick: bool = False,
    iters: int | None = None, warmup: int | None = None, compare: Place = None, out: Place = None,
    progress: bool | None = None,
) -> CollectiveResult:  # fmt: skip
    """How fast is all-reduce here? Interleaves backends x ranks x sizes, and checks every element.

    Inside a launched world this is collective: every rank must call it and gets the same result.

    Args:
        ranks: Numbers of ranks: 2,4,6. Default: the launched world's, else 2.
        sizes: Sizes to measure, with a unit: 1MiB,25MiB
        backend: gloo, shm (shared memory) or nccl; several are interleaved: gloo,shm
        collective: all_reduce, all_gather, reduce_scatter or broadcast
        op: sum, avg, min, max or prod
        dtype: float32, bfloat16, int64, ...
        device: auto (GPUs if there is one for each rank), cpu or cuda
        memory: Memory of the vectors: ordinary, shared (shm backend only), or both, interleaved.
        quick: At most 10 repetitions, for a rough answer.
        limit: Also measure memory bandwidth, and print each row's fraction of it.
        iters: Timed repetitions. Default: as time allows, up to 100.
        warmup: Warm-up repetitions before timing. Default: as time allows, up to 3.
        compare: Compare with another run, or with a table: CSV, Markdown.
        out: Save the run in a new subfolder of this folder.
        progress: True shows a bar on a terminal and lines elsewhere, None only a bar, False nothing.
    """
    given, names = dict(locals()), list_names(memory)
    memories = ("ordinary", "shared") if "both" in names else tuple(sorted(names))
    compared: Sequence[CollectiveRecord] = load_table(Path(compare)) if compare is not None else []
    if compared and not any(record.collective == collective for record in compared):
        raise ConfigError(f"{compare} has {compared[0].collective} but no {collective}: nothing to compare")

    def build(run: Run, folder: Path | None) -> CollectiveResult:
        from paceline.report.sweeps import CollectiveResult

        # Differences that make two runs incomparable; a table does not record its environment.
        is_run = compare is not None and is_run_path(compare)
        differences = run.environment.differences(load_run(compare or "").environment) if is_run else []
        return CollectiveResult(run, folder, compared, differences)

    own, load = {"sizes": list_sizes(sizes), "memories": memories}, "collectives:measure_collectives"
    return cast("CollectiveResult", _measure("bench allreduce", load, CollectiveSettings, given, own, build))


def chunks(
    ranks: Counts | None = None, total: str | int = "240MB", chunks: Sizes | None = None, backend: Names = "gloo", *,
    dtype: str = "float32", device: str = "auto", quick: bool = False, iters: int | None = None,
    warmup: int | None = None, out: Place = None, progress: bool | None = None,
) -> ChunksResult:  # fmt: skip
    """What does splitting one message into chunks cost? Measures the time of a fixed total for each chunk size.

    The other arguments are as in `allreduce`.
    Inside a launched world this is collective: every rank must call it and gets the same result.

    Args:
        total: Total size to reduce (240MB is 60 million floats).
        chunks: Chunk sizes: 40kB,4MB,... Default: from 10,000 elements to all of them.
    """
    given, total_bytes = dict(locals()), parse_size(total) if isinstance(total, str) else total
    if chunks is None:
        steps = [factor * 10**power * ITEM_BYTES.get(dtype, 4) for power in range(4, 8) for factor in (1, 3)]
        chunks = (*(step for step in steps if step < total_bytes), total_bytes)
    own = {"chunks": list_sizes(chunks), "total_bytes": total_bytes}
    return cast("ChunksResult", _measure("bench chunks", "collectives:measure_chunks", ChunkSettings, given, own))


def wrappers(
    models: Names = WrapperSettings.models, wrappers: Names = WrapperSettings.wrappers, ranks: Counts | None = None,
    backend: Names = "gloo", *, batch_size: int | None = None, dtype: str = "float32", device: str = "auto",
    threads: int = 1, quick: bool = False, iters: int | None = None, warmup: int | None = None, out: Place = None,
    progress: bool | None = None,
) -> WrappersResult:  # fmt: skip
    """Is Paceline's wrapper faster than torch's here? Interleaves steps of one replica per wrapper.

    The other arguments are as in `allreduce`.
    Inside a launched world this is collective: every rank must call it and gets the same result.

    Args:
        models: Built-in models: mlp,cnn,gpt2-tiny,... Default: five small ones.
        wrappers: bare, torch, torch-tuned, paceline, paceline-simple, ... Default: all but paceline-tuned.
        batch_size: Samples per rank in a step. Default: the model's own.
        dtype: float32 or bfloat16
        quick: At most 10 repetitions of a few models, for a rough answer.
        threads: CPU threads per rank for torch.
    """
    given, load = dict(locals()), "wrappers:measure_wrappers"
    if quick and models == WrapperSettings.models:
        models = _QUICK_MODELS
    own = {"models": list_names(models), "wrappers": list_names(wrappers)}
    return cast("WrappersResult", _measure("bench wrappers", load, WrapperSettings, given, own))


def _measure(
    verb: str, load: str, kind: type[GroupSettings], given: Mapping[str, Any], own: dict[str, Any], build: Any = None
) -> Any:
    """Build settings from a verb's arguments (`given`) and the values that it has parsed (`own`), check them, and
    measure."""
    ranks, notes = choose_up_to(given["ranks"], 2)
    own |= {"ranks": ranks, "backends": list_names(given["backend"])}
    if given["quick"]:
        own |= {name: count if given[name] is None else given[name] for name, count in _QUICK.items()}
    settings = kind(
        **{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given} | own
    )
    settings.check()
    most = max(ranks)
    settings.check_host((read_place().local_world_size or 1) if joins_world(most) else most)
    config = dataclasses.asdict(settings)
    with open_session(verb, config, ranks=most, out=given["out"], progress=given["progress"]) as session:
        session.warnings += notes
        session.say_long(settings.limit_s or 0.0)
        measured = session.ask(f"paceline.measure.{load}", (settings,))
        return finish(session, measured.records, measured.details, build)
