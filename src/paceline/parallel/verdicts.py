"""What a step raises when some rank has found something wrong: one error, with the same text on every rank.

That something is wrong travels in the control words; what it is, is told here, by one more message that only such a
step needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import CollectiveError, ConfigError, PacelineError
from paceline.parallel.replicas import Members

__all__ = ["Finding", "judge", "list_names"]

_LISTED = 8


@dataclass(frozen=True)
class Finding:
    """What one rank has to say: an error in words (and whether of a communication hook), a change, what is missing."""

    error: str = ""
    change: str = ""
    missing: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    in_hook: bool = False


def judge(findings: Sequence[Finding], step: int, members: Members) -> PacelineError:
    """The error that follows from what all ranks have found; equal for equal findings."""
    failed = [f"rank {rank} failed in {finding.error}" for rank, finding in enumerate(findings) if finding.error]
    if failed:
        return CollectiveError(f"step {step}: {'; '.join(failed)}")
    changed = [f"{finding.change} (rank {rank})" for rank, finding in enumerate(findings) if finding.change]
    if changed:
        return ConfigError(f"the model changed after wrapping: {'; '.join(changed)}; call rebuild() on all ranks")
    ranks_of: dict[int, list[int]] = {}
    for rank, finding in enumerate(findings):
        for index in finding.missing:
            ranks_of.setdefault(index, []).append(rank)
    frozen = {index for finding in findings for index in finding.frozen}
    lines = []
    for index, ranks in list(ranks_of.items())[:_LISTED]:
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        where = "any rank" if len(ranks) == len(findings) else where
        after = " (frozen after wrapping: call rebuild())" if index in frozen else ""
        lines.append(f"{members.name(index)} on {where}{after}")
    more = f" and {len(ranks_of) - _LISTED} more" if len(ranks_of) > _LISTED else ""
    return CollectiveError(
        f"step {step}: no gradient for {'; '.join(lines)}{more}. If that is meant, pass find_unused_parameters=True "
        "(such a rank then counts as zeros); else let the loss depend on them"
    )


def list_names(members: Members, indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _LISTED} more" if len(indices) > _LISTED else ""
    return ", ".join(members.name(index) for index in indices[:_LISTED]) + more
