"""What scaling records say, in sentences: each is filled in from records, and says when it is inside the noise.

Tables are in `scaling_tables`, the page that holds both in `scaling_report`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.predict.scaling import PredictedPoint
from paceline.records.steps import ScalePoint, StepRecord, Straggler, find_straggler
from paceline.records.training import BatchRecord, LargeBatchRecord, RecipeSummary, Spread, find_knee
from paceline.report.predicted_tables import PredictedLine
from paceline.report.scaling_tables import BandwidthLine, ScaleLine, is_split, pick_run
from paceline.units import format_ms, format_number_of, format_rate, format_speed

__all__ = [
    "describe_bandwidths",
    "describe_batches",
    "describe_contests",
    "describe_errors",
    "describe_limits",
    "describe_points",
    "describe_predictions",
    "describe_recipes",
    "describe_stragglers",
    "pick_leaders",
]

_NEAR = 0.1  # a prediction that is called good
_MOST_RANKS = 4  # numbers of ranks that one sentence about a prediction tells


def describe_batches(records: Sequence[BatchRecord]) -> list[str]:
    """Up to where samples/s grow, and which batch sizes did not fit."""
    knee, timed = find_knee(records), [record for record in records if record.samples_per_s]
    lines = []
    if knee is not None:
        rates = {record.batch_size: record.samples_per_s or 0.0 for record in timed}
        best, here = max(rates, key=lambda size: rates[size]), knee.batch_size
        reached = f"{rates[here] / rates[best]:.0%} of the best {format_speed(rates[best])} (at {best}) are reached"
        if len(rates) == 1:
            lines.append(f"batch size {here}, the only one that was measured: {format_speed(rates[here])} samples/s")
        elif here == min(rates):
            lines.append(f"samples/s hardly depend on the batch size: {reached} already at {here}, the smallest")
        elif here == max(rates):
            lines.append(f"samples/s grow up to batch size {here}, the largest that was measured: more may be better")
        else:
            lines.append(f"samples/s grow up to batch size {here} (the knee), where {reached}")
    return lines + [f"batch size {r.batch_size} does not fit: {r.failure}" for r in records if r.failure]


def _cell(record: StepRecord | PredictedPoint) -> str:
    return f"batch size {record.cell_size} {'per rank' if record.mode == 'weak' else 'over all ranks'}"


def _place(record: StepRecord) -> str:
    source = "" if record.source == "measured" else f" ({record.source})"
    return f"{format_number_of(record.world_size, 'rank')} at {_cell(record)}{source}"


def _efficiency(point: ScalePoint) -> str:
    noise = point.efficiency_noise
    return f"efficiency {point.efficiency:.2f}" + (" (one repetition)" if noise is None else f" ± {noise:.2f}")


def _cause(point: ScalePoint) -> str:
    """The larger of the two reasons for an efficiency below 1; empty where nobody can tell."""
    record = point.record
    if 1 - point.efficiency <= (point.efficiency_noise or 0.0):
        return ", no loss beyond the noise"
    if not is_split(record):
        return ""
    share = 1 if record.mode == "weak" else record.world_size
    slowed_s = record.compute_s - point.alone.timing.median_s / share
    exposed = f"exposed communication is {record.overhead:.0%} of the step"
    if record.exposed_s >= slowed_s:
        return f", because {exposed}" if record.exposed_s > 0 else ""
    if record.mode == "weak":
        why = f"ranks slow each other's computing: it takes {point.slowdown:.2f} times that of one rank by itself"
    else:
        why = f"computing a rank's share of the batch takes {point.slowdown:.2f} times its share of one rank's time"
    return f", because {why} ({exposed})"


def describe_points(points: Sequence[ScalePoint]) -> list[str]:
    """How well each number of ranks does, and the larger cause of what is lost."""
    lines = []
    for point in points:
        if point.record.world_size == 1:
            continue
        found = _efficiency(point)
        if point.record.mode == "strong":
            found = f"speed-up {point.speedup:.2f} of {point.record.world_size}, {found}"
        lines.append(f"{_place(point.record)} in {point.record.variant}: {found}{_cause(point)}")
    return lines


def pick_leaders(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The best contestant of each cell on the most ranks, and the worst point of all, so that findings stay few."""
    several = [point for point in points if point.record.world_size > 1]
    chosen = []
    for cell in dict.fromkeys(point.record.cell for point in several):
        here = [point for point in several if point.record.cell == cell]
        most = max(point.record.world_size for point in here)
        chosen.append(max((p for p in here if p.record.world_size == most), key=lambda point: point.efficiency))
    worst = min(several, key=lambda point: point.efficiency, default=None)
    return chosen if worst is None or worst in chosen else [*chosen, worst]


def describe_stragglers(records: Sequence[StepRecord]) -> list[str]:
    """Cells that one rank spoilt, once for each number of ranks."""
    worst: dict[tuple[str, int], Straggler] = {}
    for found in filter(None, map(find_straggler, records)):
        place = _place(found.record), found.rank
        worst[place] = max(found, worst.get(place, found), key=lambda straggler: straggler.excess)
    return [
        f"{place}: not to be believed, for rank {rank} was the slowest in {straggler.share:.0%} of the steps, "
        f"{straggler.excess:.0%} behind the others even without communication: something else had its core; measure "
        "again"
        for (place, rank), straggler in worst.items()
    ]


def _where(record: StepRecord) -> tuple[object, ...]:
    """Records that were timed in turns on the same ranks."""
    return record.cell, record.job, record.world_size, record.source


def describe_contests(lines: Sequence[ScaleLine]) -> list[str]:
    """Each contestant beside torch's wrapper over all cells that no rank spoilt: how often it is better, worse, or
    neither."""
    spoilt = {_where(line.point.record) for line in lines if find_straggler(line.point.record)}
    found: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for line in lines:
        record = line.point.record
        if record.world_size == 1 or record.wrapper == "torch" or _where(record) in spoilt:
            continue
        on_same = line.to_torch if record.backend != "gloo" else None
        for ratio, backend in ((on_same, record.backend), (line.to_torch_on_gloo, "gloo")):
            if ratio is not None:
                pair = (record.variant, f"torch on {backend}")
                found.setdefault(pair, []).append((ratio.value, ratio.is_clear))
    texts = []
    for (mine, theirs), ratios in found.items():
        better, worse = (sum(clear and (r > 1) is side for r, clear in ratios) for side in (True, False))
        values = [value for value, _ in ratios]
        texts.append(
            f"{mine} beside {theirs}, by efficiency: better in {better} of {format_number_of(len(ratios), 'cell')}, "
            f"worse in {worse}, inside the noise in {len(ratios) - better - worse}; "
            f"ratios from {min(values):.2f} to {max(values):.2f}"
            + (f" ({len(spoilt)} not to be believed left out)" if spoilt else "")
        )
    return texts


def describe_limits(points: Sequence[ScalePoint]) -> list[str]:
    """Where strong scaling ends: the number of ranks with the largest speed-up, and what messages alone allow."""
    groups: dict[tuple[object, ...], list[ScalePoint]] = {}
    for point in points:
        record = point.record
        if record.mode == "strong" and record.world_size > 1:
            groups.setdefault((record.variant, record.cell, record.job, record.source), []).append(point)
    lines = []
    for group in groups.values():
        group.sort(key=lambda point: point.record.world_size)
        best, last = max(group, key=lambda point: point.speedup), group[-1]
        record = best.record
        text = f"strong scaling at {_cell(record)} in {record.variant}: "
        if best.speedup <= 1:
            text += f"no number of ranks is faster than one; best {best.speedup:.2f} on {record.world_size}"
        elif best is last:
            text += f"the speed-up grows up to {record.world_size} ranks, the most measured: {best.speedup:.2f}"
        else:
            text += f"the speed-up ends at {best.speedup:.2f} on {record.world_size} ranks; "
            text += f"{last.record.world_size} ranks reach {last.speedup:.2f}"
        if record.busy_s:
            limit = best.alone.timing.median_s / record.busy_s
            text += f"; while messages take {format_ms(record.busy_s)} ms of a step, it stays below about {limit:.1f}"
        lines.append(text)
    return lines


def describe_bandwidths(lines: Sequence[BandwidthLine]) -> list[str]:
    """Of each contestant, the step that comes closest to the peak."""
    best: dict[str, tuple[float, str]] = {}
    for line in lines:
        if line.use is None:
            continue
        rate, peak = format_rate(line.use.busbw_bytes_per_s), format_rate(line.use.peak_bytes_per_s)
        text = f"messages come closest to their peak with {rate} GB/s, {line.use.share:.0%} of the measured {peak} GB/s"
        name = line.record.variant
        best[name] = max(best.get(name, (0.0, "")), (line.use.share, f"{name}: {text} ({_place(line.record)})"))
    return [text for _, text in best.values()]


def _accuracy(summary: RecipeSummary) -> str:
    spread = summary.accuracy
    if spread is None:
        return f"no seed finished ({summary.first.failure})"
    count = len(summary.finished)
    sure = "one seed" if spread.deviation is None else f"± {100 * spread.deviation:.1f}, {count} seeds"
    failed = f", {summary.num_failed} of {len(summary.runs)} seeds failed" if summary.num_failed else ""
    return f"{100 * spread.mean:.1f} % ({sure}{failed})"


def _name(summary: RecipeSummary) -> str:
    recipe = summary.first.recipe
    return f"{summary.first.global_batch_size} {'without a recipe' if recipe == 'none' else f'with {recipe}'}"


def _epochs(run: LargeBatchRecord) -> str:
    return f"{round(run.epochs, 2):g} epoch{'' if run.epochs == 1 else 's'}"


def _updates(run: LargeBatchRecord) -> str:
    return format_number_of(run.num_updates, "update")


def _points(gap: float) -> str:
    return f"{100 * abs(gap):.1f} points {'below' if gap >= 0 else 'above'}"


def _is_inside(summary: RecipeSummary) -> bool:
    """Whether the gap is less than the spread over seeds here or at the baseline."""
    spreads: list[Spread | None] = [summary.accuracy, summary.baseline.accuracy if summary.baseline else None]
    known = [spread.deviation for spread in spreads if spread and spread.deviation is not None]
    return bool(known) and summary.gap is not None and abs(summary.gap) <= max(known)


def _against_baseline(summary: RecipeSummary) -> str:
    base = summary.baseline
    if base is None or summary.gap is None:
        return ""
    here, there = pick_run(summary), pick_run(base)
    same, first, second = (
        (_epochs(here), _updates(here), f"{there.num_updates:,}")
        if here.budget == "epochs"
        else (_updates(here), _epochs(here), f"{round(there.epochs, 2):g}")
    )
    inside = " (less than the spread over seeds)" if _is_inside(summary) else ""
    text = f", {_points(summary.gap)} the baseline at {there.global_batch_size}{inside} in the same {same}"
    is_alike = (here.epochs, here.num_updates) == (there.epochs, there.num_updates)
    return text if is_alike else f"{text}, with {first} instead of {second}"


def _repair(plain: RecipeSummary, others: Sequence[RecipeSummary]) -> str:
    """What the best recipe makes of a batch size that has lost accuracy; empty where nothing was lost or tried."""
    tried = sorted(((s.gap, s) for s in others if s.gap is not None), key=lambda pair: pair[0])
    is_lost = plain.gap is None or (plain.gap > 0 and not _is_inside(plain))
    if not tried or not is_lost:
        return ""
    (gap, best), *_ = tried
    recipe = best.first.recipe
    if pick_run(best).num_updates != pick_run(plain).num_updates:  # a batch that grows
        recipe += f", with {_updates(pick_run(best))},"
    if plain.gap is not None and gap >= plain.gap:
        return f"; no recipe repairs it, the best is {recipe}: {_points(gap)} the baseline"
    inside = ", less than the spread over seeds" if _is_inside(best) else ""
    if gap <= 0:
        return f"; {recipe} repairs it ({_points(gap)} the baseline{inside})"
    if plain.gap is not None and gap > plain.gap / 2:
        return f"; {recipe} helps a little, to {_points(gap)} the baseline"
    return f"; {recipe} repairs it to within {100 * gap:.1f} points{inside}"


def describe_recipes(summaries: Sequence[RecipeSummary]) -> list[str]:
    """What each batch size costs in test accuracy without a recipe, and what the best recipe makes of it."""
    lines = []
    for key in dict.fromkeys((s.first.budget, s.first.global_batch_size) for s in summaries):
        group = [s for s in summaries if (s.first.budget, s.first.global_batch_size) == key]
        plain = [s for s in group if s.first.recipe == "none"]
        others = [s for s in group if s.first.recipe != "none"]
        for summary in plain:
            run = pick_run(summary)
            text = f"{_name(summary)}: {_accuracy(summary)}"
            if summary.baseline is None:
                lines.append(f"baseline (the same {run.budget}): {text} after {_epochs(run)}, {_updates(run)}")
            else:
                lines.append(text + _against_baseline(summary) + _repair(summary, others))
        if not plain or all(s.baseline is None for s in plain):
            lines += [f"{_name(s)}: {_accuracy(s)}{_against_baseline(s)}" for s in others]
    return lines


def _thin(lines: Sequence[PredictedLine]) -> list[PredictedLine]:
    """At most a few, the first and the last among them."""
    last = len(lines) - 1
    if last < _MOST_RANKS:
        return list(lines)
    return [lines[round(i * last / (_MOST_RANKS - 1))] for i in range(_MOST_RANKS)]


def describe_errors(lines: Sequence[PredictedLine]) -> list[str]:
    """How right predictions were where steps were measured that they had not seen."""
    known = [(abs(line.error), line) for line in lines if line.error is not None]
    if not known:
        return []
    worst, line = max(known, key=lambda pair: pair[0])
    mean, inside = sum(error for error, _ in known) / len(known), sum(bool(line.is_covered) for _, line in known)
    near = sum(error <= _NEAR for error, _ in known)
    ranks = ", ".join(str(n) for n in sorted({line.predicted.world_size for _, line in known}))
    return [
        f"predicted from half as many ranks, {format_number_of(len(known), 'step')} on {ranks} ranks are off by "
        f"{mean:.1%} on average and by {worst:.1%} at most ({line.predicted.variant} at {_cell(line.predicted)}); "
        f"{near} by at most {_NEAR:.0%}, and {inside} lie in the 90 % of their predictions"
    ]


def describe_predictions(lines: Sequence[PredictedLine]) -> list[str]:
    """What predictions say of ranks that were not measured."""
    groups: dict[tuple[str, str, int, str], list[PredictedLine]] = {}
    for line in lines:
        p = line.predicted
        groups.setdefault((p.variant, p.mode, p.cell_size, p.network), []).append(line)
    texts = []
    for group in groups.values():
        group.sort(key=lambda line: line.predicted.world_size)
        p = group[0].predicted
        place = f"{p.variant} at {_cell(p)}" + (f" ({p.network})" if p.network else "")
        beyond = [line for line in group if line.point is None]
        if not beyond:
            continue
        found = []
        for line in _thin(beyond):
            band, value, word = line.efficiency_band, line.predicted.efficiency, "efficiency"
            if p.mode == "strong":
                band, value, word = line.speedup_band, line.predicted.speedup, "speed-up"
            found.append(f"{word} {value:.2f} ({band[0]:.2f} to {band[1]:.2f}) on {line.predicted.world_size:,} ranks")
        doubt = beyond[0].predicted.doubt or beyond[-1].predicted.doubt  # of more ranks there is no less of it
        doubtful = f"; doubtful: {doubt}" if doubt else ""
        texts.append(f"beyond the ranks at hand ({p.source}), {place}: {', '.join(found)}{doubtful}")
    return texts
