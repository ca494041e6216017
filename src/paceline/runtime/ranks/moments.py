"""Timestamps of a device: readings of the host's clock or, on a GPU, events in its stream. Needs only torch.

The host launches work and runs ahead of the GPU, so its clock does not show when that work is done. An event does, and
nothing has to wait for it.
"""

from __future__ import annotations

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """The current time; on a GPU, the time when everything launched so far on the current stream is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event


def is_past(moment: Any) -> bool:
    """Whether `between_s` can read this timestamp. Does not wait."""
    return isinstance(moment, float) or bool(moment.query())


def between_s(begin: Any, end: Any) -> float:
    """Seconds between two past timestamps; negative if `end` came first."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3)
