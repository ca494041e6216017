"""Intervals of time: to whom each instant belongs, and the self time of nested ranges. Meaning does not belong here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "attribute_time", "find_lanes", "self_times", "sum_clipped", "union_time"]

Floats = npt.NDArray[np.float64]


def _segments(edges: Sequence[Floats]) -> Floats:
    return np.unique(np.concatenate(edges)) if edges else np.empty(0)


def _cover(points: Floats, starts: Floats, ends: Floats, weights: Floats | None = None) -> Floats:
    """For each segment between two points, the sum of the weights (1 each) of the intervals that cover it."""
    size = len(points)
    begun = np.bincount(np.searchsorted(points, starts), weights, minlength=size)
    ended = np.bincount(np.searchsorted(points, ends), weights, minlength=size)
    covered: Floats = np.cumsum(begun - ended, dtype=np.float64)[:-1]
    return covered


def _window_of(points: Floats, windows: Floats) -> npt.NDArray[np.intp]:
    """The window that each segment lies in, -1 for none. Windows are rows of begin and end, in order, and apart."""
    middles = (points[1:] + points[:-1]) / 2
    place = np.searchsorted(windows[:, 0], middles, side="right") - 1
    inside = (place >= 0) & (middles < windows[np.maximum(place, 0), 1])
    return np.where(inside, place, -1)


def attribute_time(classes: Sequence[tuple[Floats, Floats]], windows: Floats) -> Floats:
    """Time of each window (row) that belongs to each class (column), and to none (last column).

    A class is the starts and ends of its intervals. Each instant belongs to the first class that has it, so that the
    columns of a row sum to its window.
    """
    points = _segments([windows.ravel(), *(edge for pair in classes for edge in pair)])
    place = _window_of(points, windows)
    owner = np.full(len(points) - 1, len(classes))
    for number in reversed(range(len(classes))):
        owner[_cover(points, *classes[number]) > 0.5] = number
    inside = place >= 0
    times: Floats = np.bincount(
        place[inside] * (len(classes) + 1) + owner[inside],
        np.diff(points)[inside],
        minlength=len(windows) * (len(classes) + 1),
    ).astype(np.float64)
    return times.reshape(len(windows), len(classes) + 1)


def union_time(starts: Floats, ends: Floats, windows: Floats) -> float:
    """Time within the windows in which at least one of the intervals runs."""
    return float(attribute_time([(starts, ends)], windows)[:, 0].sum())


def sum_clipped(starts: Floats, ends: Floats, weights: Floats, windows: Floats) -> float:
    """The integral over the windows of the weights of what runs, at most 1 at each instant."""
    points = _segments([windows.ravel(), starts, ends])
    inside = _window_of(points, windows) >= 0
    return float((np.minimum(_cover(points, starts, ends, weights), 1.0) * np.diff(points))[inside].sum())


def self_times(ranges: Sequence[tuple[float, float, Any]]) -> Iterator[tuple[Any, float, float]]:
    """Of the ranges (start, duration, what) of one thread: what, its duration, and that less its children's."""
    stack: list[list[Any]] = []  # end, what, duration, time of the children

    def close() -> tuple[Any, float, float]:
        _, what, duration, inner = stack.pop()
        return what, duration, max(0.0, duration - inner)

    for start, duration, what in sorted(ranges, key=lambda item: (item[0], -item[1])):
        while stack and stack[-1][0] <= start:
            yield close()
        if stack:
            stack[-1][3] += duration
        stack.append([start + duration, what, duration, 0.0])
    while stack:
        yield close()


def find_lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """A lane for each interval, in the order given, so that none overlaps another in its lane; as few as it takes."""
    free_at: list[float] = []
    lanes = []
    for start, end in intervals:
        lane = next((number for number, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes
