"""`paceline.doctor`: is this machine ready to train?"""

from __future__ import annotations

from paceline.measure.health import check_health
from paceline.records.environment import capture_environment
from paceline.records.kinds import CheckRecord
from paceline.records.store import Run
from paceline.report.result import DoctorResult
from paceline.runtime.session import Progress, ProgressDisplay


def doctor(*, progress: bool | None = None) -> DoctorResult:
    """Check everything that ranks need, then run a real all-reduce on two of them.

    `result.failure` names what failed, and is empty on a machine that is ready.
    """
    # Without a session: a set-up in which none can be opened must still be reported. There are about 15 checks.
    environment, checks = capture_environment(), list[CheckRecord]()
    with ProgressDisplay("doctor", progress) as display:
        for check in check_health(environment):
            checks.append(check)
            display.hear("", Progress(min(len(checks), 15), 15, f"{check.name}: {check.status}"))
    return DoctorResult(Run("doctor", {}, environment, tuple(checks)))
