"""Results of `bench allreduce` and `bench chunks`: tables, figures and findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.predict.curves import FamilyCurve, fit_collectives
from paceline.records import ChunksRecord, CollectiveRecord, MemoryRecord
from paceline.records.exchange import export_allreduce_times
from paceline.records.kinds import MemoryBounds
from paceline.records.samples import Ratio, Samples, compare_times, group_by
from paceline.records.store import Run
from paceline.report.plots import MARKERS, Axes, Drawings, Figure, draw_line, label_values, new_figure, place_legend
from paceline.report.result import Result
from paceline.report.table import Column, Table, build_row, format_ratio, raw_columns, text_columns
from paceline.units import GB, format_bytes, format_duration, format_number_of, format_rate

Pair = tuple[CollectiveRecord | None, CollectiveRecord | None]


class CollectiveResult(Result):
    """Result of `bench allreduce`: one row per backend, memory, number of ranks and size, and a line fitted to each
    curve. `compared` are rows of another run or table; `differences` are reasons why they are not comparable."""

    def __init__(
        self,
        run: Run,
        folder: Path | None = None,
        compared: Sequence[CollectiveRecord] = (),
        differences: Sequence[str] = (),
    ) -> None:
        super().__init__(run, folder)
        self.compared, self._differences = compared, differences
        self.bounds = MemoryBounds(run.records)
        self.rows = self.only(CollectiveRecord)
        self.fits = fit_collectives(self.rows)  # one (record, fitted line `time = alpha + size / beta`) per curve
        self._columns = build_columns(self.rows, self.bounds)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*super().warnings, *(f"the runs differ in {difference}" for difference in self._differences))

    @property
    def answer(self) -> str:
        most, size = max((record.world_size, record.num_bytes) for record in self.rows)
        last = [record for record in self.rows if (record.world_size, record.num_bytes) == (most, size)]
        parts = [
            f"{format_duration(r.time_s)} on {_name_backend(r)}"
            + (f" (busbw {format_rate(r.busbw_bytes_per_s)} GB/s)" if most > 1 else "")
            for r in sorted(last, key=lambda record: record.time_s)
        ]
        where = f"{format_bytes(size)} on {format_number_of(most, 'rank')}"
        wrong = sum(record.num_wrong or 0 for record in self.rows)
        checked = f"{wrong} elements were WRONG" if wrong else "Every element was correct"
        return f"{self.rows[0].collective} of {where} takes {', '.join(parts)}. {checked}."

    @property
    def findings(self) -> list[str]:
        pairs = [
            f"{where}: {', '.join(f'{format_bytes(size)} {format_ratio(ratio)}' for size, ratio in found)}"
            for where, found in self.ratios.items()
        ]
        fits = [*pairs, *(_describe_fit(record, fit) for record, fit in self.fits)]
        alone = "1 rank: nothing is sent, so busbw is 0 and the time is the overhead of the call"
        return [*fits, alone] if any(record.world_size == 1 for record in self.rows) else fits

    @property
    def ratios(self) -> dict[str, list[tuple[int, Ratio]]]:
        """Each backend and memory relative to the first backend on each number of ranks, by size, if interleaved."""
        found = dict[str, list[tuple[int, Ratio]]]()
        for (n, num_bytes), rows in group_by(self.rows, lambda r: (r.world_size, r.num_bytes)).items():
            times = [(_name_backend(row), row.timing.reduced_s) for row in rows if isinstance(row.timing, Samples)]
            for name, seconds in times[1:]:
                (first, first_s), is_pair = times[0], len(seconds) == len(times[0][1])
                if name != first and is_pair:
                    where = f"{name} / {first}, {format_number_of(n, 'rank')}, interleaved"
                    found.setdefault(where, []).append((num_bytes, compare_times(seconds, first_s)))
        return found

    def tables(self) -> list[Table]:
        tables = [Table("table", self.rows[0].collective, self._columns, self.rows, key="rows")]
        if self.compared:
            tables.append(Table("comparison", "compared with the other table", COMPARISON, self.pairs))
        return tables

    @property
    def pairs(self) -> list[Pair]:
        """Matching rows of this run and the other table; an unmatched row has None on the other side."""
        ours, theirs = self.rows, self.compared
        pairs: list[Pair] = []
        for here in ours:
            pairs += [(here, there) for there in theirs if _is_same(here, there)] or [(here, None)]
        pairs += [(None, there) for there in theirs if not any(_is_same(here, there) for here in ours)]

        place = attrgetter("backend", "memory", "world_size", "num_bytes")
        return sorted(pairs, key=lambda pair: place(pair[0] or pair[1]))

    def figures(self) -> Drawings:
        subtitle = f"{self.machine}; {self.rows[0].dtype}, {self.rows[0].op}"
        known = {(record.backend, record.world_size) for record in self.rows}
        # With more than six curves, draw only the backends and ranks of this run: others would be indistinguishable.
        few = len({(r.backend, r.memory, r.device, r.world_size, r.note) for r in self.compared}) <= 6
        drawn = [*self.rows, *(r for r in self.compared if few or (r.backend, r.world_size) in known)]
        return {
            "time": lambda: plot_time(drawn, subtitle, self.bounds.records),
            "bandwidth": lambda: plot_bandwidth(drawn, subtitle),
        }

    def files(self) -> dict[str, str | bytes]:
        is_reduced = self.rows[0].collective == "all_reduce"
        return {"allreduce-times.csv": export_allreduce_times(self.rows)} if is_reduced else {}

    @property
    def next_steps(self) -> list[str]:
        n = max(record.world_size for record in self.rows)
        return [f"paceline bench chunks --ranks {n}", f"paceline tune --ranks {n}"]

    def to_json(self) -> dict[str, Any]:
        document = super().to_json()
        document["fits"] = [build_row(_CURVE, record) | build_row(_FIT, fit) for record, fit in self.fits]
        if self.compared:
            sides = [[one and build_row(self._columns, one) for one in pair] for pair in self.pairs]
            document["comparison"] = [{"here": here, "there": there} for here, there in sides]
        return document


class ChunksResult(Result):
    """Result of `bench chunks`: the total time for one size, split into messages of various sizes."""

    def _derive(self) -> None:
        self.rows = self.only(ChunksRecord)

    @property
    def answer(self) -> str:
        parts = []
        for (backend, n), mine in group_by(self.rows, lambda record: (record.backend, record.world_size)).items():
            fastest, slowest = (
                f"{format_number_of(r.num_messages, 'message')} of {format_bytes(r.chunk_bytes)} "
                f"({format_duration(r.time_s)})"
                for r in (pick(mine, key=lambda record: record.time_s) for pick in (min, max))
            )
            parts.append(f"{backend}, {format_number_of(n, 'rank')}: fastest with {fastest}, slowest with {slowest}.")
        return f"{format_bytes(self.rows[0].total_bytes)} in chunks. {' '.join(parts)}"

    def tables(self) -> list[Table]:
        return [Table("table", f"{format_bytes(self.rows[0].total_bytes)} in chunks", CHUNKS, self.rows, key="rows")]

    def figures(self) -> Drawings:
        subtitle = f"{self.machine}; {self.rows[0].dtype}, sum"
        return {"chunks": lambda: plot_chunks(self.rows, subtitle)}

    @property
    def next_steps(self) -> list[str]:
        return [f"paceline tune --ranks {max(record.world_size for record in self.rows)}"]


def _name_backend(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


# Columns in the middle and at the end of every timed row. If an imported table has no median, `statistic` is `mean` and
# `median_s` holds the mean.
_SPREAD = (
    Column("mean", "timing.mean_s", "ms", "mean_s", priority=-1),
    Column("p10", "timing.p10_s", "ms", "p10_s", priority=-2),
    Column("p90", "timing.p90_s", "ms", "p90_s", priority=-2),
    Column("algbw", "algbw_bytes_per_s", "GB/s", "algbw_gbps", priority=1),
)
_MEASURED = (
    Column("#wrong", "num_wrong", "number", "nwrong"),
    Column("iters", "timing.count", "number", "iters", priority=-2),
    *raw_columns("timing.statistic", "timing.skew_s"),
    *text_columns("source"),
)


def build_columns(records: Sequence[CollectiveRecord], bounds: MemoryBounds) -> list[Column]:
    """The columns, named as in nccl-tests where possible; with memory unless all of it is ordinary."""
    is_plain = all(record.memory == "ordinary" for record in records)
    return [
        *raw_columns("collective"),
        *text_columns("backend", is_key=True),
        Column(None if is_plain else "memory", "memory", key="memory", is_key=True),
        *text_columns("device", is_key=True),
        Column("ranks", "world_size", "number", "world_size", is_key=True),
        Column("size", "num_bytes", "bytes", "num_bytes", is_key=True),
        Column("count", "num_elements", "count", priority=-3),
        Column("type", "dtype", key="dtype"),
        Column("redop", "op", key="op"),
        Column("time", "time_s", "ms", "median_s", priority=3),
        *_SPREAD,
        Column("busbw", "busbw_bytes_per_s", "GB/s", "busbw_gbps", priority=2),
        Column("bound", bounds.bound_s, "ms", "memory_bound_s", priority=-1),
        Column("of memory", bounds.fraction_of, "percent", "fraction_of_memory", priority=1),
        *_MEASURED,
    ]


CHUNKS = (
    *text_columns("backend", "device", is_key=True),
    Column("ranks", "world_size", "number", "world_size", is_key=True),
    Column("elements", "chunk_elements", "count", priority=1),
    Column("chunk", "chunk_bytes", "bytes", "chunk_bytes", is_key=True),
    Column("messages", "num_messages", "count", "num_messages", priority=2),
    Column("total time", "time_s", "ms", "median_s", priority=3),
    *_SPREAD,
    *raw_columns("total_bytes", "dtype"),
    Column(None, "busbw_bytes_per_s", "GB/s", "busbw_gbps"),
    *_MEASURED,
)


COMPARISON = (
    Column("backend", lambda p: _name_backend(p[0] or p[1]), key="backend", is_key=True),
    Column("ranks", lambda p: (p[0] or p[1]).world_size, "number", "world_size", is_key=True),
    Column("size", lambda p: (p[0] or p[1]).num_bytes, "bytes", "num_bytes", is_key=True),
    Column("this run", "0.time_s", "ms", "here_s", priority=2),
    Column("other", "1.time_s", "ms", "there_s", priority=2),
    Column("this / other", lambda p: p[0] and p[1] and p[0].time_s / p[1].time_s, "ratio", "ratio", priority=3),
    Column("this busbw", "0.busbw_bytes_per_s", "GB/s", "here_busbw_gbps"),
    Column("other busbw", "1.busbw_bytes_per_s", "GB/s", "there_busbw_gbps"),
    Column("other source", lambda p: f"{p[1].source}, {p[1].timing.statistic}" if p[1] else None, key="there_is"),
    Column("from", "1.note", key="from", priority=-1),
)


_CURVE = raw_columns("collective", "backend", "memory", "device", "world_size")
_FIT = (
    *raw_columns("alpha_s", "max_rel_residual", "min_bytes", "max_bytes", beta_bytes_per_s="bytes_per_s"),
    Column(None, lambda fit: list(fit.residuals), key="residuals"),
)


def _describe_fit(record: CollectiveRecord, fit: FamilyCurve) -> str:
    check = f"residuals up to {fit.max_rel_residual:.0%}" if len(fit.residuals) > 2 else "not checked (only two sizes),"
    return (
        f"fit: {_name_backend(record)}, {format_number_of(record.world_size, 'rank')}: time = "
        f"{format_duration(fit.alpha_s)} + size / {format_rate(fit.bytes_per_s)} GB/s, {check} from "
        f"{format_bytes(fit.min_bytes)} to {format_bytes(fit.max_bytes)}"
    )


def _is_same(here: CollectiveRecord, there: CollectiveRecord) -> bool:
    """Whether two rows are comparable measurements. An "unknown" field of an imported table matches any value."""
    same_type = here.dtype == there.dtype or "unknown" in (here.dtype, there.dtype)
    exact = ("collective", "backend", "memory", "device", "world_size", "num_bytes", "op")
    return same_type and all(getattr(here, name) == getattr(there, name) for name in exact)


def _plot(
    title: str, subtitle: str, records: Sequence[Any], y: Callable[[Any, float], float], bounds: Sequence[Any] = ()
) -> tuple[Figure, Axes]:
    """One line per backend, memory, number of ranks and source, with a band from p10 to p90 if there are samples.
    `bounds` are the limits set by memory bandwidth."""

    def x(r: Any) -> int:
        return r.chunk_elements if isinstance(r, ChunksRecord) else int(r.num_bytes)

    def place(r: Any) -> tuple[str, str, str, str]:
        return r.backend, r.device, getattr(r, "memory", "ordinary"), r.note

    figure, axes = new_figure(title, subtitle)
    series = group_by(sorted(records, key=x), lambda r: (place(r), r.world_size, r.source))
    backends = list(dict.fromkeys(map(place, records)))
    counts = sorted({r.world_size for r in records})
    for ((backend, device, memory, note), n, source), rows in sorted(series.items()):
        # With one backend, colors show the ranks; with several, colors show backends and markers the ranks.
        index = counts.index(n) if len(backends) == 1 else backends.index((backend, device, memory, note))
        kin = [(d, m) for b, d, m, _ in backends if b == backend]
        where = f" {device}" if len({d for d, _ in kin}) > 1 else ""
        where += f", {memory} memory" if any(m != "ordinary" for _, m in kin) else ""
        kind = source if rows[0].timing.statistic == "median" else f"{source}, {rows[0].timing.statistic}"
        label = f"{backend}{where}, {format_number_of(n, 'rank')} ({kind}{': ' + note if note else ''})"
        times = [(r, (r.time_s, r.timing.p10_s, r.timing.p90_s)) for r in rows]
        points = [(x(r), *(None if time_s is None else y(r, time_s) for time_s in found)) for r, found in times]
        marker = MARKERS[counts.index(n) % len(MARKERS)]
        draw_line(axes, index, points, label, "-" if source == "measured" else "--", marker=marker)
    of_ranks = group_by(sorted(bounds, key=x), lambda r: (r.device, r.world_size))
    for (_, n), passes in sorted(of_ranks.items()):
        label = f"memory bound, {format_number_of(n, 'rank')} ({passes[0].source})"
        points = [(x(r), y(r, r.time_s), None, None) for r in passes]
        draw_line(axes, -1, points, label, ":", marker=MARKERS[counts.index(n) % len(MARKERS)], ms=3.5, lw=1.4)
    place_legend(figure, axes)
    return figure, axes


def plot_time(records: Sequence[CollectiveRecord], subtitle: str, bounds: Sequence[MemoryRecord] = ()) -> Figure:
    title = f"{records[0].collective}: time"
    figure, axes = _plot(title, subtitle, records, lambda _, seconds: seconds * 1e3, bounds)
    times = [r.time_s for r in (*records, *bounds)]
    # Add ticks between the powers of ten if there are few powers of ten.
    axes.set_yscale("log", subs=[2, 5] if max(times) / min(times) < 100 else [])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="size", ylabel="time (ms), median, band p10 to p90")
    label_values(axes, [r.num_bytes for r in records], format_bytes)
    return figure


def plot_bandwidth(records: Sequence[CollectiveRecord], subtitle: str) -> Figure:
    """Plot bus bandwidth against size; for a single rank, which has no bus, plot algorithm bandwidth."""
    alone = all(r.world_size == 1 for r in records)
    name = "algbw" if alone else "busbw"

    def rate(record: CollectiveRecord, seconds: float) -> float:
        bandwidth = record.algbw_bytes_per_s if alone else record.busbw_bytes_per_s
        return bandwidth * record.time_s / seconds / GB

    figure, axes = _plot(f"{records[0].collective}: {name}", subtitle, records, rate)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="size", ylabel=f"{name} (GB/s)")
    label_values(axes, [r.num_bytes for r in records], format_bytes)
    return figure


def plot_chunks(records: Sequence[ChunksRecord], subtitle: str) -> Figure:
    title = f"{format_bytes(records[0].total_bytes)} all-reduced in chunks"
    figure, axes = _plot(title, subtitle, records, lambda _, seconds: seconds * 1e3)
    axes.set(xscale="log", yscale="log", xlabel="elements per all-reduce", ylabel="total time (ms), band p10 to p90")
    return figure
