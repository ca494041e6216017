"""The one type of finding: what slows a step or casts doubt on a measurement, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence and its cure.

    `kind` names the cause for programs, `evidence` is what was found, with its numbers, and `cure` what to do, both as
    clauses; there may be no cure. `rank` is where it was found, None if that is not one rank. `gain_s` is the possible
    saving per step of `step_s`, with its interval where one is known, and `certainty` says how it was derived:
    `measured`, `computed` from the trace, `at most` (a bound), or `estimated` (under an assumption that the text
    states).
    """

    kind: str
    evidence: str
    cure: str = ""
    gain_s: float = 0.0
    certainty: str = "computed"
    step_s: float = 0.0
    rank: int | None = None
    gain_interval_s: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """The finding as one line."""
        return f"{self.evidence}: {self.cure}" if self.cure else self.evidence

    @property
    def sentences(self) -> str:
        return f"{self.evidence}. To fix it, {self.cure}." if self.cure else f"{self.evidence}."

    @property
    def factor(self) -> float:
        """Speed-up of the step."""
        return self.step_s / max(self.step_s - self.gain_s, 1e-12) if self.gain_s else 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"text": self.text, "factor": self.factor}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Finding:
        """From a document that was saved; in the oldest ones the text is in one piece."""
        given = {"evidence": found["text"]} | {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        # Older documents have the speed-up instead of the step.
        factor = found.get("factor", 1.0)
        if not given.get("step_s") and factor > 1:
            given["step_s"] = found["gain_s"] * factor / (factor - 1)
        return cls(**given)
