"""A job described by tables of layers and all-reduce times, and its calibration to measured steps. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from paceline.predict.curves import MeasuredCurve, Resample, draw, fit_line, smooth_curve
from paceline.predict.job import build_job_from_tables
from paceline.predict.predictor import Calibration, Draw, Predictor, calibrate
from paceline.predict.simulate import MODEL_ERROR, Contention, MachineCosts, simulate
from paceline.records import CapTimeRecord, CollectiveRecord, LayerSizeRecord, LayerTimeRecord
from paceline.records.samples import Summary

# Bounds of the factor that is fitted to measured times.
_FACTORS = (0.5, 4.0)
# Standard deviation of a step relative to tables that were measured in another process, besides the model's own error.
# `benchmarks/validate_public.py` fits it to published sweeps, holding out one source at a time.
TABLE_ERROR = 0.02


class TabledJob:
    """The job with its costs: `costs` from the tables alone, and `slowed` with the contention assumed for NCCL.
    `calibration` fits one rate, that of mutual slowdown by messages and compute, to the `measured` times; None without
    measured times."""

    def __init__(
        self, sizes: Sequence[LayerSizeRecord], times: Sequence[LayerTimeRecord], sweep: Sequence[CollectiveRecord],
        measured: Sequence[CapTimeRecord] = (), untied: bool = False,
    ) -> None:  # fmt: skip
        self.job = build_job_from_tables(sizes, times, untied)
        self.measured = sorted(measured, key=lambda record: record.cap_bytes)
        self._sweep = sweep
        points = [(record.num_bytes, record.time_s) for record in sweep]
        self.curve = smooth_curve(points)
        self.line = fit_line(points)
        self.costs = MachineCosts(curve=self.curve)
        self.is_on_gpu = "nccl" in sweep[0].backend or sweep[0].device == "cuda"  # layer tables do not name a device
        self._device = "cuda" if self.is_on_gpu else sweep[0].device
        self.contention = Contention.assume(self._device, is_on_host=False)
        self.slowed = replace(self.costs, contention=self.contention.spread_over(self.curve))
        self.calibration: Calibration | None = None
        if self.measured:
            steps = [(self.job.cut(one.cap_bytes), one.timing.center_s + self.around_s(one)) for one in self.measured]
            self.calibration = calibrate(self.job, self.scale, steps, _FACTORS)

    def around_s(self, record: CapTimeRecord) -> float:
        """Seconds of a step that the record does not contain."""
        return 0.0 if record.of == "step" else self.job.before_s + self.job.after_s

    @property
    def unexplained(self) -> float:
        """The largest fraction of a measured time that no rate explains."""
        rests_s = self.calibration.rests_s if self.calibration else ()
        pairs = zip(rests_s, self.measured, strict=True)
        return max((abs(rest_s) / record.timing.center_s for rest_s, record in pairs), default=0.0)

    def scale(self, factor: float) -> MachineCosts:
        """The costs if messages and compute take `factor` times as long while they overlap. Below 1, neither slows the
        other, and messages are faster than in the table."""
        rate, seconds = 1 / max(1.0, factor), tuple(min(1.0, factor) * one for one in self.curve.seconds)
        contention = Contention((1,), (rate,), (rate,), "fitted to the measured times")
        return MachineCosts(MeasuredCurve(self.curve.sizes, seconds), contention=contention)

    def build_predictor(self) -> Predictor:
        """The predictor of steps, with draws of the uncertain inputs."""
        known_s = 0.0
        if self.calibration is not None:
            costs = self.calibration.draw()
            steps = (simulate(self.job, self.job.cut(one.cap_bytes), costs) for one in self.measured)
            known_s = statistics.fmean(step.exposed_s for step in steps)

        def build(resample: Resample) -> Draw:
            error, noise = MODEL_ERROR * resample.error, TABLE_ERROR * resample.noise
            if self.calibration is not None:
                drawn = self.calibration.draw(resample.shift)
                # A fitted step includes the model's error, so only a different exposed time adds to it.
                return Draw(self.job, drawn, error, noise, offset_s=-error * known_s)
            curve, assumed = self._draw_curve(resample.source), (self._device, False, 0.0, resample.source)
            drawn = replace(self.costs, curve=curve, contention=Contention.assume(*assumed).spread_over(curve))
            return Draw(self.job, drawn, error, noise)

        return Predictor(*draw(build))

    def _draw_curve(self, source: random.Random | None) -> MeasuredCurve:
        """The line through the table or, with a random source, a draw of it within the table's standard deviations."""
        if source is None:
            return self.curve
        points = []
        for record in self._sweep:
            stdev_s = record.timing.stdev_s if isinstance(record.timing, Summary) else None
            noise = source.gauss(0.0, (stdev_s or 0.0) / record.time_s)
            points.append((record.num_bytes, record.time_s * math.exp(noise)))
        return smooth_curve(points)
