"""Scaling studies as matrices in Markdown: batch sizes against ranks, one matrix for each wrapper and backend.

The same numbers, one line each, are in `scaling_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.records.steps import ScalePoint, StepRecord
from paceline.report.scaling_tables import BandwidthLine, is_split
from paceline.units import format_ms, format_number_of, format_rate

__all__ = ["render_bandwidths", "render_communication", "render_speedups"]


def _samples(record: StepRecord) -> str:
    return f"{record.cell_size} {'per rank' if record.mode == 'weak' else 'over all ranks'}"


def _render(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|--:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines) + "\n"


def _cut(items: Sequence[Any], record_of: Callable[[Any], StepRecord]) -> dict[str, list[Any]]:
    """What belongs in one matrix, by heading: one contestant in one mode, from one source."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        record = record_of(item)
        heading = f"{record.variant}, {record.mode} scaling ({record.source})"
        groups.setdefault(heading, []).append(item)
    return groups


def _ranks_by_size(
    items: Sequence[Any],
    record_of: Callable[[Any], StepRecord],
    columns: Sequence[tuple[str, Callable[[Any], str]]],
) -> str:
    """A row for each number of ranks, and these columns for each batch size; empty where nothing was measured."""
    parts = []
    for heading, group in _cut(items, record_of).items():
        known = {(record_of(i).world_size, record_of(i).cell_size): i for i in group}
        sizes = {size: _samples(record_of(i)) for (_, size), i in sorted(known.items(), key=lambda pair: pair[0][1])}
        rows = [["ranks", *(f"{size}: {name}" for size in sizes.values() for name, _ in columns)]]
        for ranks in sorted({ranks for ranks, _ in known}):
            found = [known.get((ranks, size)) for size in sizes]
            rows.append([str(ranks), *("" if i is None else cell(i) for i in found for _, cell in columns)])
        parts.append(f"{heading}:\n\n{_render(rows)}")
    return "\n".join(parts)


def render_communication(records: Sequence[StepRecord]) -> str:
    """Compute and exposed communication: a row for each number of ranks, a pair of columns for each batch size."""
    return _ranks_by_size(
        [record for record in records if is_split(record)],
        lambda r: r,
        (("compute (ms)", lambda r: format_ms(r.compute_s)), ("exposed (ms)", lambda r: format_ms(r.exposed_s))),
    )


def render_bandwidths(lines: Sequence[BandwidthLine]) -> str:
    """Bus bandwidth and its share of the peak: a row for each number of ranks, two columns for each batch size."""
    return _ranks_by_size(
        lines,
        lambda line: line.record,
        (
            ("busbw (GB/s)", lambda line: format_rate(line.record.busbw_bytes_per_s)),
            ("of peak", lambda line: "" if line.use is None else f"{line.use.share:.1%}"),
        ),
    )


def render_speedups(points: Sequence[ScalePoint]) -> str:
    """Speed-up and efficiency: a row for each batch size with one rank's step, a pair of columns for each number of
    ranks."""
    parts = []
    several = [point for point in points if point.record.world_size > 1]
    for heading, group in _cut(several, lambda point: point.record).items():
        known = {(point.record.cell_size, point.record.world_size): point for point in group}
        counts = sorted({ranks for _, ranks in known})
        names = [f"{format_number_of(n, 'rank')}: {name}" for n in counts for name in ("speed-up", "efficiency")]
        rows = [["samples", "1 rank (ms)", *names]]
        for size in sorted({size for size, _ in known}):
            found = [known.get((size, ranks)) for ranks in counts]
            first = next(point for point in found if point is not None)
            cells = [("", "") if p is None else (f"{p.speedup:.2f}", f"{p.efficiency:.2f}") for p in found]
            step = format_ms(first.alone.timing.median_s)
            rows.append([_samples(first.record), step, *(text for pair in cells for text in pair)])
        parts.append(f"{heading}:\n\n{_render(rows)}")
    return "\n".join(parts)
