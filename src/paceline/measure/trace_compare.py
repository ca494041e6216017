"""Overviews on disk and beside each other: JSON there and back, and two runs row by row. Building is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import RecordError
from paceline.measure.trace_overview import CATEGORIES, GpuUse, KernelRow, OperatorRow, Overview, StepShares

__all__ = ["ComparedRow", "compare_overviews", "overview_from_json", "overview_to_json"]

FORMAT, VERSION = "paceline-overview", 1


def overview_to_json(overview: Overview) -> dict[str, Any]:
    """The overview as a document of a versioned format."""
    return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(overview)}


def overview_from_json(document: Mapping[str, Any]) -> Overview:
    """The overview that `overview_to_json` wrote; RecordError says what is wrong with another document."""
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise RecordError(
            f"format {document.get('format')!r}, version {document.get('version')!r} is not an overview that this "
            f"Paceline reads: it needs {FORMAT!r}, version {VERSION}"
        )
    fields = {key: value for key, value in document.items() if key not in ("format", "version")}
    try:
        fields["steps"] = tuple(StepShares(**step) for step in fields["steps"])
        fields["operators"] = tuple(OperatorRow(**row) for row in fields["operators"])
        fields["kernels"] = tuple(KernelRow(**row) for row in fields["kernels"])
        fields["gpu"] = None if fields["gpu"] is None else GpuUse(**fields["gpu"])
        return Overview(**fields)
    except (KeyError, TypeError) as error:
        raise RecordError(f"the overview is damaged: {error}; write it again from its trace") from None


@dataclass(frozen=True)
class ComparedRow:
    """One quantity of two runs; `unit` is `s`, `share`, `bytes` or `count`, and None means that a run lacks it."""

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """Second over first."""
        return self.second / self.first if self.first and self.second is not None else None


def _quantities(overview: Overview) -> dict[str, tuple[str, float | None]]:
    found: dict[str, tuple[str, float | None]] = {"step": ("s", overview.step_s)}
    found |= {name: ("s", overview.seconds(name)) for name in CATEGORIES}
    found |= {f"{name} share": ("share", overview.share(name)) for name in CATEGORIES}
    found |= {f"phase {name}": ("s", seconds) for name, seconds in overview.phases_s.items()}
    found["messages, hidden or not"] = ("s", overview.message_s)
    found["host at work"] = ("s", overview.host_s)
    found["peak memory"] = ("bytes", overview.peak_bytes)
    if overview.gpu is not None:
        gpu = overview.gpu
        found |= {
            "GPU busy": ("share", gpu.busy),
            "SM efficiency (est.)": ("share", gpu.sm_efficiency),
            "occupancy (est.)": ("share", gpu.occupancy),
            "tensor cores": ("share", gpu.tensor_core_share),
            "messages of kernel time": ("share", gpu.communication_share),
            "kernel time": ("s", gpu.kernel_s),
            "kernels": ("count", gpu.num_kernels),
        }
    return found


def compare_overviews(first: Overview, second: Overview) -> list[ComparedRow]:
    """What both or either of two runs show, in one order; what neither shows, or is 0 in both, is left out."""
    one, two = _quantities(first), _quantities(second)
    rows = []
    for name in dict.fromkeys([*one, *two]):
        unit = (one.get(name) or two[name])[0]
        row = ComparedRow(name, unit, one.get(name, (unit, None))[1], two.get(name, (unit, None))[1])
        if row.first or row.second:
            rows.append(row)
    return rows
