"""What a wrapper tells of its own steps: the plan in use, what communication cost, a report. Sends no message.

How the times are taken is in `timeline`; what is made of them in `report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.parallel.bucketed import Bucketed
from paceline.parallel.channel import Sent
from paceline.parallel.options import Options
from paceline.parallel.report import Report, build_report
from paceline.plan import Plan

if TYPE_CHECKING:
    from paceline.parallel.steps import Steps

__all__ = ["Insight"]


class Insight:
    """A part of `DataParallel`, which has the steps."""

    _options: Options

    @property
    def _ready(self) -> Steps:
        raise NotImplementedError

    @property
    def _planned(self) -> Bucketed | None:
        """The reducer, if it has buckets and has settled on them."""
        reducer = self._ready.reducer
        return reducer if isinstance(reducer, Bucketed) and reducer.is_planned else None

    @property
    def plan(self) -> Plan | None:
        """The buckets in use; None before the first synchronised step, and for the rungs without buckets."""
        return None if self._planned is None else self._planned.plan

    @property
    def exposed_s(self) -> float | None:
        """Seconds by which communication outlasted this rank's backward, in a recent step; None where nobody noted."""
        return None if self._planned is None else self._planned.timeline.exposed_s

    def time_next_step(self) -> None:
        """Note in the next synchronised step when each bucket was done, which is else done in few steps only."""
        if self._planned is not None:
            self._planned.timeline.is_asked = True

    def count_sent(self) -> Sent:
        """All messages of gradients since the wrapper was made or rebuilt, but those of a communication hook."""
        return self._ready.channel.sent

    def report(self) -> Report:
        """Where the time of a recent step went, on this rank. Cheap, and never a message."""
        steps = self._ready
        if not isinstance(steps.reducer, Bucketed):
            raise ConfigError(f"reducer={self._options.reducer!r} keeps no times: only 'bucketed' does")
        channel, reducer = steps.channel, steps.reducer
        times = reducer.timeline.read() if reducer.is_planned else None
        return build_report(channel.rank, channel.world_size, channel.backend, steps.num_steps, reducer.plan, times)
