"""`paceline.bench`: how fast collectives and data-parallel wrappers are on this machine or cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.measure.settings import (
    DEFAULT_MODELS,
    WRAPPERS,
    ChunkSettings,
    CollectiveSettings,
    GroupSettings,
    WrapperSettings,
)
from paceline.records.exchange import load_table
from paceline.records.kinds import ITEM_BYTES, CollectiveRecord
from paceline.records.store import Run, load_run
from paceline.runtime.environment import read_place
from paceline.runtime.session import Session, choose_ranks, joins_world, open_session
from paceline.units import parse_size, parse_sizes

if TYPE_CHECKING:
    from paceline.report.collectives import ChunksResult, CollectiveResult
    from paceline.report.steps import WrappersResult

SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_CHUNK_ELEMENTS = (10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7)

Names = str | Sequence[str]
Sizes = str | Sequence[str | int]


def allreduce(
    ranks: int | Sequence[int] | None = None,
    sizes: Sizes = SIZES,
    backend: Names = "gloo",
    *,
    collective: str = "all_reduce",
    op: str = "sum",
    dtype: str = "float32",
    device: str = "auto",
    memory: Names = "ordinary",
    limit: bool = False,
    iters: int | None = None,
    warmup: int | None = None,
    compare: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> CollectiveResult:
    """How fast is all-reduce here? Backends x ranks x sizes in turns, with every element checked.

    `ranks`: numbers of ranks; by default that of the launched world or, in a plain process, 2. `sizes`: with their unit
    ("25MiB"), or bytes. `backend`: one or several, "gloo,shm" or a list. `collective`: all_reduce, all_gather,
    reduce_scatter or broadcast. `op`: sum, avg, min, max or prod. `memory`: of the vectors: ordinary, shared (backend
    shm alone), or both. `limit`: measure what memory could do, too. `iters`, `warmup`: by default as the time allows.
    `compare`: a run folder, or a table of others. `out`: save the run in a new folder there.
    Inside a launched world this is collective: every rank must call it and gets the same result.
    """
    requested, notes = choose_ranks(_read_counts(ranks))
    names = _read_names(memory)
    settings = CollectiveSettings(
        sizes=_read_sizes(sizes),
        collective=collective,
        op=op,
        memories=("ordinary", "shared") if "both" in names else tuple(sorted(names)),
        limit=limit,
        backends=_read_names(backend),
        ranks=requested,
        dtype=dtype,
        device=device,
        iters=iters,
        warmup=warmup,
    )
    _check(settings)
    compared: Sequence[CollectiveRecord] = load_table(Path(compare)) if compare is not None else []
    if compared and not any(record.collective == collective for record in compared):
        raise ConfigError(f"{compare} holds {compared[0].collective} and no {collective}: nothing to compare")
    with _open("bench allreduce", settings, out, progress) as session:
        session.warnings += notes
        measured = session.ask("paceline.measure.collectives:measure_collectives", (settings,))
        run = session.save(measured.records, measured.details)
        from paceline.report.collectives import CollectiveResult

        result = CollectiveResult(run, session.folder, compared, _find_differences(run, compare))
        session.write(result)
        return result


def chunks(
    ranks: int | Sequence[int] | None = None,
    total: str | int = "240MB",
    chunks: Sizes | None = None,
    backend: Names = "gloo",
    *,
    dtype: str = "float32",
    device: str = "auto",
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> ChunksResult:
    """What does cutting one message into chunks cost? The time of a fixed total, by the size of its chunks.

    `total` and `chunks` carry their unit ("240MB") or are bytes; by default the chunks go from ten thousand elements to
    all of them. The other arguments are those of `allreduce`.
    Inside a launched world this is collective: every rank must call it and gets the same result.
    """
    requested, notes = choose_ranks(_read_counts(ranks))
    total_bytes = parse_size(total) if isinstance(total, str) else total
    if chunks is None:
        steps = [count * ITEM_BYTES.get(dtype, 4) for count in _CHUNK_ELEMENTS]
        chunk_bytes: tuple[int, ...] = (*(step for step in steps if step < total_bytes), total_bytes)
    else:
        chunk_bytes = _read_sizes(chunks)
    settings = ChunkSettings(
        total_bytes=total_bytes,
        chunks=chunk_bytes,
        backends=_read_names(backend),
        ranks=requested,
        dtype=dtype,
        device=device,
        iters=iters,
        warmup=warmup,
    )
    _check(settings)
    with _open("bench chunks", settings, out, progress) as session:
        session.warnings += notes
        measured = session.ask("paceline.measure.collectives:measure_chunks", (settings,))
        run = session.save(measured.records, measured.details)
        from paceline.report.collectives import ChunksResult

        result = ChunksResult(run, session.folder)
        session.write(result)
        return result


def wrappers(
    models: Names = DEFAULT_MODELS,
    wrappers: Names = WRAPPERS,
    ranks: int | Sequence[int] | None = None,
    backend: Names = "gloo",
    *,
    batch_size: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    threads: int = 1,
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> WrappersResult:
    """Is Paceline's wrapper faster than torch's, here? Replicas of a model take steps in turns, one for each wrapper.

    `models`: names of built-in models. `wrappers`: bare, torch, torch-tuned, paceline and its reducers
    (paceline-flat, ...). `batch_size`: samples per rank, by default the model's own. `dtype`: float32 or bfloat16.
    The other arguments are those of `allreduce`.
    Inside a launched world this is collective: every rank must call it and gets the same result.
    """
    requested, notes = choose_ranks(_read_counts(ranks))
    settings = WrapperSettings(
        models=_read_names(models),
        wrappers=_read_names(wrappers),
        batch_size=batch_size,
        backends=_read_names(backend),
        ranks=requested,
        dtype=dtype,
        device=device,
        threads=threads,
        iters=iters,
        warmup=warmup,
    )
    _check(settings)
    with _open("bench wrappers", settings, out, progress) as session:
        session.warnings += notes
        measured = session.ask("paceline.measure.wrappers:measure_wrappers", (settings,))
        run = session.save(measured.records, measured.details)
        from paceline.report.steps import WrappersResult

        result = WrappersResult(run, session.folder)
        session.write(result)
        return result


def _open(
    verb: str, settings: GroupSettings, out: str | Path | None, progress: bool | None
) -> contextlib.AbstractContextManager[Session]:
    config = dataclasses.asdict(settings)
    return open_session(verb, config, ranks=max(settings.ranks), out=out, progress=progress)


def _check(settings: GroupSettings) -> None:
    """Refuse what cannot be measured anywhere, or not on this host, before any rank starts."""
    settings.check()
    most = max(settings.ranks)
    settings.check_host((read_place().local_world_size or 1) if joins_world(most) else most)


def _find_differences(run: Run, compare: str | Path | None) -> list[str]:
    """What makes this run and the compared one incomparable; a table that is no run does not say."""
    if compare is None or not (Path(compare).is_dir() or Path(compare).suffix == ".json"):
        return []
    return run.environment.differences(load_run(compare).environment)


def _read_counts(ranks: int | Sequence[int] | None) -> tuple[int, ...] | None:
    counts = (ranks,) if isinstance(ranks, int) else None if ranks is None else tuple(dict.fromkeys(ranks))
    if counts is not None and (not counts or min(counts) < 1):
        raise ConfigError(f"ranks {ranks}: at least one number of at least 1 is needed")
    return counts


def _read_names(names: Names) -> tuple[str, ...]:
    """The names of a list, or of a comma-separated text, without repeats."""
    found = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in found if name.strip()))


def _read_sizes(sizes: Sizes) -> tuple[int, ...]:
    """Bytes of sizes that carry their unit, or are bytes already."""
    if isinstance(sizes, str):
        return parse_sizes(sizes)
    return tuple(dict.fromkeys(parse_size(size) if isinstance(size, str) else size for size in sizes))
