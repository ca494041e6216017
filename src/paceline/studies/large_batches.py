"""`paceline scale large-batch`: how much accuracy does a large global batch lose, and which recipe recovers it?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, cast

from paceline.errors import ConfigError, refuse
from paceline.options import check_counts, option
from paceline.records import NoiseRecord
from paceline.records.samples import group_by
from paceline.report.plots import Drawings
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.studies import training_grid as grid
from paceline.studies.study import refuse_unused, run_study
from paceline.studies.training_grid import SeedSummary, TrainingCell
from paceline.training.schedules import Growths
from paceline.training.train_settings import TrainSettings
from paceline.units import format_number_of
from paceline.verbs.jobs import Counts, Names, Place, brings_data, choose_world, list_counts, list_names

NO_RECIPE = "none"
_RECIPES = ("none", "sqrt", "linear", "linear+warmup", "linear+warmup+smoothing", "lars+warmup", "lamb+warmup", "grow")


def large_batch(
    model: str | None = None, base_batch_size: int = 16, global_batch_size: Counts | None = None, *,
    recipes: Names | None = None, seeds: int = 3, epochs: int = 6, updates: int | None = None, lr: float = 0.005,
    schedule: str | None = None, batch_size: int = 512, evaluations: int = 6, ranks: int | None = None,
    at_once: int | None = None, out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> LargeBatchResult:  # fmt: skip
    """How much accuracy does a large global batch lose, and which recipe recovers it? Trains each with several seeds.

    For regression, compares test losses. The other arguments are those of `batch`.
    Inside a launched world this is collective: every rank must call it.

    Args:
        model: By default a cnn small enough for the study to take minutes.
        base_batch_size: Global batch size of the baseline, with a tuned learning rate.
        global_batch_size: By default 16 times as large.
        recipes: none, or switches joined by +, each with an optional number: lars:0.2+warmup. Default: all common ones
            that fit the job.
        seeds: Number of runs of each batch size and recipe.
        updates: Length of additional runs with equal numbers of updates. By default twice that of the largest batch;
            0 for none.
        lr: The learning rate of the baseline.
        schedule: By default cosine, or piecewise with `lr_drops`.
        batch_size: Maximum micro-batch per rank.
        evaluations: Number of evaluations per run.
        at_once: Number of concurrent runs. By default 1, or as in the resumed study.
    """
    return cast("LargeBatchResult", run_study(LargeBatchSettings, locals()))


@dataclass(frozen=True, kw_only=True)
class LargeBatchSettings(grid.GridSettings):
    """The job at its base batch, and at larger batches with each recipe.

    `job` has settings tuned for `base_batch_size`. `updates` is the length of the additional runs with equal numbers of
    updates: None means twice that of the largest batch, 0 skips these runs. `most_at_once` limits the micro-batch per
    rank; larger batches accumulate.
    """

    verb = staticmethod(large_batch)

    base_batch_size: int
    global_batch_sizes: tuple[int, ...]
    recipes: tuple[str, ...]
    updates: int | None = option(None, least=0, each_s=1e-6)
    most_at_once: int = option(512, least=1, each_s=1e-6)

    @classmethod
    def build(
        cls, *, model: str | None, base_batch_size: int, global_batch_size: Counts | None, recipes: Names | None,
        seeds: int, updates: int | None, batch_size: int, evaluations: int, ranks: int | None, **job: Any,
    ) -> Self:  # fmt: skip
        refuse_unused(job, ("accumulate",), "the study derives it; batch_size is the maximum micro-batch")
        refuse_unused(job, ("steps",), "the study compares batches after equal epochs and after equal --updates")
        check_counts(base_batch_size=base_batch_size, seeds=seeds)
        job = grid.choose_small_job(model, job)
        whole = f"model {model}: its step would set learning rates and batches; return a module, and name the data"
        refuse((brings_data(model or "", job.get("data")) and not job.get("data"), whole), code="own-type")
        if job.get("data", "synthetic") == "synthetic":
            job.setdefault("samples", 1024)
        job.setdefault("global_batch_size", base_batch_size)
        train = TrainSettings(model=model or "cnn", ranks=choose_world(ranks, 1), **job)
        # By default all recipes that fit this job; those for BatchNorm only if the model certainly has it.
        for_norms = ("linear+warmup+ghost", *(["linear+warmup+sync"] if train.ranks > 1 else []))
        usual = [*_RECIPES, *(for_norms if train.model.startswith("resnet") else ())]
        usual = [text for text in usual if not (train.predicts_numbers and Recipe.parse(text).is_for_classes)]
        chosen = list_names(usual if recipes is None else recipes)
        names = tuple(dict.fromkeys(Recipe.parse(text).text for text in chosen))
        larger = 16 * base_batch_size if global_batch_size is None else global_batch_size
        return cls(
            job=train, base_batch_size=base_batch_size, global_batch_sizes=list_counts(larger, "global_batch_size"),
            recipes=names if NO_RECIPE in names else (NO_RECIPE, *names),  # always include the baseline
            seeds=tuple(train.seed + number for number in range(seeds)),
            updates=updates, most_at_once=batch_size, evaluations=evaluations,
        )  # fmt: skip

    def check(self) -> None:
        base, sizes, shown = self.base_batch_size, self.global_batch_sizes, ",".join(map(str, self.global_batch_sizes))
        super().check()
        refuse((min(sizes) <= base, f"--global-batch-size {shown}: must be above the base of {base}"))
        odd = next((size for size in sizes if size % base), 0)
        for text in self.recipes:
            recipe, alone = Recipe.parse(text), "sync needs several ranks; use ghost, or --ranks"
            without = "smoothing needs classes, and this job is a regression; leave it out"
            refuse(
                ("sync" in recipe.names and self.job.ranks == 1, f"recipe {text!r}: {alone}"),
                ("grow" in recipe.names and odd, f"recipe {text!r}: {odd} is not a multiple of the base {base}"),
                (recipe.is_for_classes and self.job.predicts_numbers, f"recipe {text!r}: {without}"),
            )

    def check_model(self, has_norm: bool) -> None:
        odd = [text for text in self.recipes if Recipe.parse(text).is_for_norms]
        if odd and not has_norm:
            raise ConfigError(f"recipe {odd[0]!r}: {self.job.model} has no BatchNorm to change; leave it out")

    def count_updates(self, global_batch_size: int, num_samples: int) -> int:
        """Number of updates in the job's epochs at a constant batch size."""
        per_epoch = num_samples / global_batch_size
        return self.job.epochs * (math.floor(per_epoch) if self.job.tail == "drop" else math.ceil(per_epoch))

    def list_configurations(self, num_samples: int) -> list[TrainingCell]:
        """List all configurations, the baseline first. The baseline's first seed also probes gradient noise."""
        base, larger, found = self.base_batch_size, self.global_batch_sizes, list[TrainingCell]()
        for size, text in [(base, NO_RECIPE), *((size, recipe) for size in larger for recipe in self.recipes)]:
            if size > num_samples:  # a smaller batch must not be trained under this name
                raise ConfigError(f"{num_samples} samples are fewer than a batch of {size}: leave it out")
            settings = Recipe.parse(text).apply(self.job, size, base, self.count_updates(size, num_samples))
            found.append(TrainingCell(share_batch(settings, self.most_at_once), "epochs", text, size, size == base))
        updates = 2 * self.count_updates(max(larger), num_samples) if self.updates is None else self.updates
        for size in (base, *larger) if updates else ():
            settings = share_batch(replace(self.job, global_batch_size=size), self.most_at_once)
            found.append(TrainingCell(replace(settings, epochs=1, steps=updates), "updates", NO_RECIPE, size))
        for cell in found:
            _check_length(cell, num_samples)
        return found


def _check_length(cell: TrainingCell, num_samples: int) -> None:
    """Before any training, reject a warm-up or batch growth that is too long for the run."""
    cell.settings.check()
    try:
        cell.settings.build_schedules(num_samples)
    except ConfigError as error:
        raise ConfigError(f"recipe {cell.recipe!r} at {cell.global_batch_size}: {error}") from None


def _list_growths(start: float, growth: float) -> Growths:
    """Grow the batch from the fraction `start` onward, by factors of up to four, until it is `growth` times larger."""
    factors = []
    factor = 1
    while factor < growth:
        factor = min(4 * factor, int(growth))
        factors.append(factor)
    spacing = (1 - start) / (len(factors) + 1)
    return tuple((round(start + spacing * number, 4), factor) for number, factor in enumerate(factors))


class Switch(NamedTuple):
    """A switch in a recipe. `default` is its default number; None means the base batch size."""

    default: float | None
    excludes: tuple[str, ...] = ()
    is_share: bool = False


SWITCHES: Mapping[str, Switch] = {
    "linear": Switch(1.0, ("sqrt", "lars", "lamb")),
    "sqrt": Switch(1.0, ("linear", "lars", "lamb")),
    "lars": Switch(0.15, ("lamb",)),
    "lamb": Switch(0.004, ("lars",)),
    "warmup": Switch(0.2, is_share=True),
    # Unlike the other switches, this one starts with the small batch and its learning rate.
    "grow": Switch(0.4, ("linear", "sqrt", "lars", "lamb", "warmup"), is_share=True),
    "ghost": Switch(None, ("sync",)),
    "sync": Switch(1.0, ("ghost",)),
    "smoothing": Switch(0.1, is_share=True),
}


@dataclass(frozen=True)
class Recipe:
    """A combination of switches with their values, such as `linear+warmup:0.1`; `none` has no switches."""

    text: str
    switches: tuple[tuple[str, float | None], ...]

    @classmethod
    def parse(cls, text: str) -> Recipe:
        text = "".join(text.split())  # ignore spaces
        if text == NO_RECIPE:
            return cls(text, ())
        found: list[tuple[str, float | None]] = []
        for part in text.split("+"):
            name, colon, number = part.partition(":")
            if name not in SWITCHES:
                raise ConfigError(f"recipe {text!r}: {name!r} is unknown; use none, {', '.join(SWITCHES)}")
            found.append((name, cls._parse_number(text, name, number) if colon else SWITCHES[name].default))
        names = [name for name, _ in found]
        for name in names:
            clash = next((other for other in SWITCHES[name].excludes if other in names), None)
            if clash is not None or names.count(name) > 1:
                raise ConfigError(f"recipe {text!r}: {name} and {clash or name} exclude each other; leave one out")
        return cls(text, tuple(found))

    @staticmethod
    def _parse_number(text: str, name: str, number: str) -> float:
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"recipe {text!r}: {number!r} after {name} is not a number") from None
        typed = f"recipe {text!r}: {number} after {name}"
        refuse(
            (not 0 < value < math.inf, f"{typed}: must be a number above 0"),
            (SWITCHES[name].is_share and value >= 1, f"{typed} is a fraction: must be below 1"),
            (name == "ghost" and (value < 2 or value % 1), f"{typed}: must be an integer of at least 2"),
            (name == "sync", f"{typed}, which does not take a number"),
        )
        return value

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.switches)

    @property
    def is_for_norms(self) -> bool:
        """Whether the recipe changes BatchNorm and therefore requires it in the model."""
        return not {"ghost", "sync"}.isdisjoint(self.names)

    @property
    def is_for_classes(self) -> bool:
        """Whether the recipe changes labels and therefore requires a classification job."""
        return "smoothing" in self.names

    def apply(
        self, base: TrainSettings, global_batch_size: int, base_batch_size: int, num_updates: int
    ) -> TrainSettings:
        """Apply all switches to the base settings at this global batch."""
        growth = global_batch_size / base_batch_size
        changes: dict[str, Any] = {"global_batch_size": global_batch_size}
        for name, number in self.switches:
            value = base_batch_size if number is None else number
            if name == "linear":  # preserves the progress per epoch while gradients change little (Goyal 2017)
                changes["lr"] = base.lr * growth * value
            elif name == "sqrt":  # preserves the noise of a step (Krizhevsky 2014)
                changes["lr"] = base.lr * math.sqrt(growth) * value
            elif name in ("lars", "lamb"):  # the number is their learning rate at the base batch
                changes |= {"optimizer": name, "lr": value * math.sqrt(growth)}
                if name == "lars":
                    # LARS applies the rate to biases and norms without a trust ratio. A larger coefficient than the
                    # paper's and a smaller rate keep their steps close to those of SGD.
                    changes["trust_coefficient"] = 0.02
            elif name == "warmup":
                changes["lr_warmup"] = max(1, round(value * num_updates))
            elif name == "grow":  # replaces the decay of the learning rate
                changes |= {"global_batch_size": base_batch_size, "batch_growth": _list_growths(value, growth)}
                changes |= {"schedule": "constant", "lr_drops": ()}
            elif name == "ghost":
                changes["ghost_batchnorm"] = int(value)
            elif name == "sync":
                changes["sync_batchnorm"] = True
            else:
                changes["label_smoothing"] = value
        return replace(base, **changes)


def share_batch(settings: TrainSettings, most_at_once: int) -> TrainSettings:
    """Split the global batch into equal micro-batches of at most `most_at_once` samples per rank.

    A growing batch first makes micro-batches larger, up to the limit, and then adds more of them.
    """
    size, ranks = settings.global_batch_size, settings.ranks
    assert size is not None
    if size % ranks:
        text = f"a global batch of {size} cannot be divided evenly among {ranks} ranks"
        raise ConfigError(f"{text}: use a multiple of {ranks}")
    share = size // ranks
    accumulate = next(count for count in range(-(-share // most_at_once), share + 1) if share % count == 0)
    largest = share * max((factor for _, factor in settings.batch_growth), default=1)
    grow = "batch-size" if settings.batch_growth and largest <= most_at_once else "accumulate"
    return replace(settings, batch_size=share // accumulate, accumulate=accumulate, grow=grow)


RECIPES = (
    *grid.JOB_COLUMNS,
    *raw_columns("first.batch_size", "first.largest_batch_size", "first.configuration"),
    *raw_columns(baseline_batch_size="baseline.first.global_batch_size"),
    *text_columns("first.budget", is_key=True),
    Column("global batch", "first.global_batch_size", "number", "global_batch_size", is_key=True),
    *text_columns("first.recipe", is_key=True),
    Column("updates", "first.num_updates", "number", "num_updates", priority=2),
    Column("epochs", "first.epochs", lambda v: f"{round(v, 2):g}", "epochs", priority=-1),
    Column("lr", "first.lr", "{:g}".format, "lr", priority=-2),
    *grid.SCORE_COLUMNS,
    *grid.spread_columns("test loss", "test_loss", "test_loss", "{:.4f}".format, -2),
    *grid.spread_columns("train loss", "train_loss", "train_loss", "{:.4f}".format, -2),
    *grid.RUN_COLUMNS,
    Column(None, lambda s: statistics.fmean(r.seconds for r in s.finished) if s.finished else None, key="run_s"),
)


def _describe(summary: SeedSummary) -> str:
    first = summary.first
    what = f"{first.global_batch_size} {'without a recipe' if first.recipe == 'none' else f'with {first.recipe}'}"
    text = f"{what}: {grid.describe_score(summary)}"
    if summary.score is None:
        return text
    epochs = round(first.epochs, 2)
    length = f"{format_number_of(first.num_updates, 'update')} in {epochs:g} epoch{'' if epochs == 1 else 's'}"
    return f"{text}, after {length}"


def describe_recipes(summaries: Sequence[SeedSummary]) -> list[str]:
    """Describe the accuracy lost at each batch size without a recipe, and the best recipe."""
    lines = []
    groups = group_by(summaries, lambda summary: (summary.first.budget, summary.first.global_batch_size))
    for (budget, _), group in groups.items():
        plain = [s for s in group if s.first.recipe == "none"]
        tried = [(s.gap, s) for s in group if s not in plain and s.gap is not None]
        if not plain or plain[0].baseline is None:
            lines += [f"{f'Baseline (the same {budget}): ' if s in plain else ''}{_describe(s)}." for s in group]
            continue
        text, lost = _describe(plain[0]), plain[0].gap
        if tried and (lost is None or lost > 0):
            gap, best = min(tried, key=lambda pair: pair[0])
            text += "; the best recipe" if lost is None or gap < lost else "; no recipe helps; the best"
            text += f", {best.first.recipe}: {grid.describe_gap(best)}"
            if (num_updates := best.first.num_updates) != plain[0].first.num_updates:
                text += f", after {format_number_of(num_updates, 'update')}"
        lines.append(f"{text}.")
    return lines


def _format_number(value: float) -> str:
    """Format a number of samples as an integer or, below 10, with two significant digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _format_scale(record: NoiseRecord) -> str:
    interval = record.estimate.interval
    if record.noise_scale is not None:
        return _format_number(record.noise_scale)
    return "" if interval is None else f"> {_format_number(interval[0])}"


def _format_interval(record: NoiseRecord) -> str:
    if record.estimate.interval is None:
        return ""
    low, high = record.estimate.interval
    return f"{_format_number(low)} to {_format_number(high)}" if high < math.inf else f"from {_format_number(low)}"


# The noise scale is null if only a lower bound is known; the interval's upper end is null if it is infinite.
NOISE = (
    *text_columns("model", "data"),
    Column("recipe", "note", key="note"),
    *text_columns("device", "precision"),
    *raw_columns("seed", "small_batch_size", "big_batch_size", "noise_scale"),
    Column("ranks", "world_size", "number", "world_size", priority=-1),
    Column("step", "step", "number", "step", is_key=True),
    Column("epoch", "epoch", "{:.3g}".format, "epoch", is_key=True),
    Column("batches", lambda r: f"{r.small_batch_size}, {r.big_batch_size}", str, priority=-2),
    Column("probes", lambda r: len(r.probes), "number", "num_probes", priority=-2),
    Column("norm(G)^2", "estimate.gradient_square", "{:.3g}".format, "gradient_square", priority=0),
    Column("tr(Sigma)", "estimate.noise_trace", "{:.3g}".format, "noise_trace", priority=0),
    Column("noise scale", _format_scale, str, priority=2),
    Column("90 %", _format_interval, str, priority=1),
    Column(None, lambda r: (r.estimate.interval or (None, None))[0], key="noise_scale_low"),
    Column(None, lambda r: (r.estimate.interval or (None, None))[1], key="noise_scale_high"),
    *text_columns("source"),
)


def describe_noise(records: Sequence[NoiseRecord], size: int) -> list[str]:
    """Describe each job's first and last noise scale, and the cost of a global batch of this size."""
    lines = []
    ordered = sorted(records, key=lambda r: r.step)
    for series in group_by(ordered, lambda r: (r.model, r.data, r.note, r.precision, r.seed)).values():
        last = [record for record in series if record.noise_scale is not None or record is series[0]][-1]
        found = []
        for record in (record for record in series if record in (series[0], last, series[-1])):
            sure = f" (90 %: {_format_interval(record)})" if record.estimate.interval else ""
            lost = "" if record.noise_scale is not None else ", where noise dominates the gradient"
            found.append(f"{_format_scale(record) or 'unknown'}{sure} at epoch {record.epoch:.3g}{lost}")
        text = f"{', '.join(filter(None, (last.model, last.note)))}: gradient noise scale {'; '.join(found)}."
        scale, interval = last.noise_scale, last.estimate.interval
        if scale and (interval is None or interval[1] < math.inf):
            why = (
                "far above this size save few steps" if size >= 2 * scale else "up to this size cost few extra samples"
            )
            samples, steps = 1 + size / scale, 1 + scale / size
            cost = f"{samples:.1f} times the minimum samples and {steps:.1f} times the minimum steps"
            text += f" Batches {why}: {size} needs {cost}."
        lines.append(text)
    return lines


class LargeBatchResult(grid.GridResult):
    """`scale large-batch`: test accuracy, or loss, by global batch size and recipe, and the gradient noise scale."""

    topic = "Large batches"
    baseline = NO_RECIPE

    def _derive(self) -> None:
        super()._derive()
        self.noise_records = self.only(NoiseRecord)

    def name_line(self, recipe: str) -> str:
        return "no recipe" if recipe == NO_RECIPE else f"recipe {recipe}"

    def tables(self) -> list[Table]:
        noise = Table("noise", "gradient noise of the baseline", NOISE, self.noise_records)
        return [Table("recipes", "large batches", RECIPES, self.summaries), *([noise] if self.noise_records else [])]

    def figures(self) -> Drawings:
        sizes = {record.global_batch_size for record in self.runs}
        ends = [record for record in self.runs if record.global_batch_size in (min(sizes), max(sizes))]
        drawn: Drawings = {}
        if any(summary.score for summary in self.summaries):
            drawn["loss" if self.has_losses else "accuracy"] = partial(
                self._plot_scores,
                lambda s: s.first.global_batch_size,
                "global batch size",
                lambda run: f"the same {run.budget}",
            )
        return drawn | self.draw_curves(ends)

    @cached_property
    def sentences(self) -> list[str]:  # type: ignore[override]
        """The answer comes first: the largest batch after the same number of epochs."""
        epochs = [summary for summary in self.summaries if summary.first.budget == "epochs"]
        lines = describe_recipes(sorted(epochs, key=lambda summary: summary.first.global_batch_size))
        others = describe_recipes([s for s in self.summaries if s.first.budget != "epochs"])
        largest = max((record.global_batch_size for record in self.runs), default=1)
        why = "This is a regression: the study compares test losses and skips label smoothing."
        noise = describe_noise(self.noise_records, largest)
        return [*lines[-1:], *lines[:-1], *others, *([why] if self.has_losses else []), *noise]
