#!/usr/bin/env python
"""Score predictions for networks that were not measured here against published tables, holding out sources.

    python benchmarks/validate_networks.py [allreduce_public.csv] [--runs results/*/allreduce*]

The CSV has the columns source, backend, world_size, nodes, hardware, interconnect, bytes, time_s. Only the interconnect
determines the network for a row (`STANDS_FOR`); rows with an unknown interconnect are counted separately. A row is
dropped as a cold start if a larger message of its sweep took less than half as long.

1. Named networks: predicts each table without its own source. If no other source has measured that network, uses its
   data sheet, with a correction fitted to the other sources. Also prints in-sample numbers.
2. Data sheets only: predicts in the same way, as for networks without published measurements.
3. Other rank counts: predicts each rank count of a sweep from smaller ones, and twice the ranks apart.
4. From one node to several: predicts from the sweep on one node, without the number of ranks per node, with it, and
   with the data sheet of the links between nodes.
5. Below a table's range: predicts sizes from 4 KiB to 1 and 10 MiB from larger ones.

Coverage always refers to the 90 % interval, and is printed with its width.
"""

import argparse
import csv
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.predict import curves, networks
from paceline.predict.networks import PUBLISHED as TABLES
from paceline.predict.networks import AssumedFabric, Correction, Network, find_network
from paceline.records import CollectiveRecord
from paceline.records.samples import Summary, group_by
from paceline.records.store import load_run
from paceline.units import MIB

CLASSES = {"below 1 MiB": (0, MIB), "1 to 32 MiB": (MIB, 32 * MIB + 1), "above 32 MiB": (32 * MIB + 1, 1 << 60)}
INSIDE_90 = 1.645  # standard deviations to each side
# For each text in the interconnect column: the published network, and the data sheets (between nodes, inside a node).
STANDS_FOR = {
    "Slingshot": ("mi250x-slingshot", ("100GB/s,2us", "100GB/s,2us")),
    "multi-node RDMA": ("h100-rdma", None),  # no data sheet, because the links are unknown
    "NVLink-like": ("a100-nvlink", ("nvlink", "nvlink")),
    "NVLink": ("h100-nvlink", ("nvlink4", "nvlink4")),
    "PCIe": ("pcie3-host", ("pcie3", "pcie3")),
}
# Other measurements of the same kind of network, for rows with a held-out source.
SAME_KIND = {"mi250x-slingshot": TABLES["gh200"], "h100-rdma": TABLES["h100-half"]}
# Data sheets for the tables bundled with Paceline.
PUBLISHED = {"a100-nvlink": TABLES["a100"], "h100-nvlink": TABLES["h100"], "h200-roce": TABLES["h200-roce"],
             "pcie4-4090": TABLES["pcie4"]}  # fmt: skip
SHEETS = (
    (TABLES["a100"], ("nvlink", "nvlink")), (TABLES["a100-nodes"], ("100GB/s,2us", "nvlink")),
    (TABLES["v100"], ("150GB/s,2us", "150GB/s,2us")), (TABLES["v100-nodes"], ("25GB/s,2us", "150GB/s,2us")),
    (TABLES["h100"], ("nvlink4", "nvlink4")), (TABLES["h100-half"] + TABLES["h100-tcpxo"], ("200GB/s,2us", "nvlink4")),
    (TABLES["h200-roce"], ("50GB/s,2us", "50GB/s,2us")), (TABLES["gh200"], ("100GB/s,2us", "nvlink4")),
    (TABLES["mi250x"], ("100GB/s,2us", "100GB/s,2us")), (TABLES["pcie4"], ("pcie4", "pcie4")),
    (TABLES["pcie3"], ("pcie3", "pcie3")), (TABLES["a100-roce"], ("200GB/s,2us", "nvlink")),
    (TABLES["b200-roce"], ("400GB/s,2us", "900GB/s,2us")),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One published table: its points and the names of its networks."""

    source: str
    ranks: int
    nodes: int
    points: tuple[tuple[int, float], ...]
    named: str = ""
    sheets: tuple[str, str] | None = None

    @property
    def ranks_per_node(self) -> int:
        return math.ceil(self.ranks / self.nodes)


@dataclass(frozen=True)
class Judged:
    """One scored point: measured and predicted times, and the prediction's standard deviation."""

    source: str
    num_bytes: int
    measured_s: float
    predicted_s: float
    sd: float

    @property
    def log_error(self) -> float:
        return math.log(self.predicted_s / self.measured_s)

    @property
    def is_covered(self) -> bool:
        return abs(self.log_error) <= INSIDE_90 * self.sd


def drop_disturbed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [p for p in points if not any(size > p[0] and time_s < p[1] / 2 for size, time_s in points)]


def load_cases(path: Path) -> tuple[list[Case], dict[str, int]]:
    """Load a CSV's sweeps and count dropped rows (unknown networks and cold starts)."""
    sweeps: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            word = next((word for word in STANDS_FOR if word in row["interconnect"]), "")
            named = "" if row["backend"].startswith("gloo") else word
            key = row["source"], row["backend"], row["interconnect"], row["world_size"], row["nodes"], named
            sweeps[key].append((int(row["bytes"]), float(row["time_s"])))
    cases, apart = [], defaultdict(int)
    for (source, backend, interconnect, ranks, nodes, named), points in sweeps.items():
        kept = drop_disturbed(points)
        apart[f"{source}, {backend}: disturbed"] += len(points) - len(kept)
        if named:
            cases.append(Case(source, int(ranks), int(nodes), tuple(kept), *STANDS_FOR[named]))
        else:
            apart[f"{source}, {backend}: interconnect {interconnect or 'not stated'}"] += len(kept)
    return cases, {name: count for name, count in apart.items() if count}


def list_bundled() -> list[Case]:
    """List the bundled tables with their data sheets, from 4 KiB, the minimum bucket size."""
    names = {sweep: name for name, sweeps in PUBLISHED.items() for sweep in sweeps}
    return [
        Case(s.source, s.ranks, s.nodes, tuple((x, t) for x, t in drop_disturbed(s.points) if x >= 4096),
             names.get(s, ""), sheets)
        for sweeps, sheets in SHEETS for s in sweeps
    ]  # fmt: skip


def build_sheet(case: Case, correction: Correction) -> AssumedFabric:
    between, inside = (replace(find_network(name), correction=correction) for name in case.sheets or ("", ""))
    return AssumedFabric(inside if case.nodes == 1 else between, inside, case.ranks_per_node if case.nodes > 1 else 1)


def estimate(case: Case, correction: Correction) -> list[float]:
    curve = build_sheet(case, correction).build_curve(case.ranks)
    return [curve.estimate_s(size) for size, _ in case.points]


def fit_correction(cases: Sequence[Case]) -> Correction:
    """Fit the correction with the least mean squared log error, weighting all tables equally."""
    used = [case for case in cases if case.sheets and case.points]

    def loss(correction: Correction) -> float:
        squares = (
            [math.log(p / t) ** 2 for p, (_, t) in zip(estimate(case, correction), case.points, strict=True)]
            for case in used
        )
        return statistics.fmean(map(statistics.fmean, squares))

    best = min(
        (
            Correction(o * 1e-6, k, e, r)
            for o, k, e, r in itertools.product((4, 8, 16), (1, 2, 4), (0.6, 0.8), (0, 0.5))
        ),
        key=loss,
    )
    step = 1.4
    while step > 1.02:  # coordinate descent
        moves = [
            replace(best, **{name: min(1.0, value * factor) if name in ("efficiency", "ramp") else value * factor})
            for name in ("overhead_s", "latency", "efficiency", "ramp")
            for value in (getattr(best, name) or 0.1,) for factor in (step, 1 / step)
        ]  # fmt: skip
        found = min(moves, key=loss)
        if loss(found) < loss(best) * (1 - 1e-6):
            best = found
        else:
            step = math.sqrt(step)
    return best


def judge_sheets(cases: Sequence[Case], corrections: Callable[[str], Correction]) -> list[Judged]:
    judged = []
    for case in (case for case in cases if case.sheets):
        times = estimate(case, corrections(case.source))
        for (size, time_s), predicted_s in zip(case.points, times, strict=True):
            sd = curves.interpolate_sizes(networks.SHEET_ERRORS, size)
            judged.append(Judged(case.source, size, time_s, predicted_s, sd))
    return judged


def is_of(source: str, sweep_source: str) -> bool:
    """Whether a source in the CSV, such as `ROCm/rccl issue #1490`, is also a bundled table's source."""
    first = source.split()[0]
    return source == sweep_source or ("/" in first and first in sweep_source)


def without(network: Network, source: str) -> Network | None:
    """Remove one of a published network's sources; None if nothing is left."""
    mine = (*network.sweeps, *SAME_KIND.get(network.name, ()))
    left = tuple(sweep for sweep in mine if not is_of(source, sweep.source))
    several = {math.ceil(sweep.ranks / sweep.nodes) for sweep in left if sweep.nodes > 1}
    per_node = max(several, default=network.ranks_per_node)
    left = tuple(s for s in left if math.ceil(s.ranks / per_node) == s.nodes)
    return replace(network, sweeps=left, ranks_per_node=per_node) if left else None


def judge_named(cases: Sequence[Case], corrections: Callable[[str], Correction], holds_out: bool) -> list[Judged]:
    judged = []
    for case in cases:
        named = find_network(case.named)
        found = (without(named, case.source) if holds_out else named) if named.sweeps else None
        if found is None:
            judged += judge_sheets([case], corrections)
            continue
        plain, shifted = (
            AssumedFabric(found, found, shift=shift).build_curve(case.ranks) for shift in (0.0, 1.0)
        )  # fmt: skip
        for size, time_s in case.points:
            predicted_s = plain.estimate_s(size)
            judged.append(
                Judged(case.source, size, time_s, predicted_s, math.log(shifted.estimate_s(size) / predicted_s))
            )
    return judged


def print_table(title: str, groups: Iterable[tuple[str, Sequence[Judged]]]) -> None:
    print(f"\n**{title}**\n\n| what | points | median error | median of \\|error\\| | in the 90 % | width (x/÷) |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, points in groups:
        if points:
            errors = [math.exp(p.log_error) - 1 for p in points]
            covered = statistics.fmean(p.is_covered for p in points)
            width = math.exp(INSIDE_90 * statistics.median(p.sd for p in points))
            off, size = statistics.median(errors), statistics.median(map(abs, errors))
            print(f"| {name} | {len(points)} | {off:+.0%} | {size:.0%} | {covered:.0%} | {width:.2f} |")


def split(points: Sequence[Judged]) -> list[tuple[str, list[Judged]]]:
    by_size = [(name, [p for p in points if low <= p.num_bytes < high]) for name, (low, high) in CLASSES.items()]
    sources = dict.fromkeys(p.source for p in points)
    return [("all", list(points)), *by_size, *((s, [p for p in points if p.source == s]) for s in sources)]


def calibrate(points: Sequence[Judged]) -> list[str]:
    """Find the standard deviations that cover 90 % of the held-out points, by class."""
    lines = []
    for name, found in split(points)[1:4]:
        sizes = sorted(abs(p.log_error) for p in found)
        lines.append(f"{name}: {sizes[int(0.9 * (len(sizes) - 1))] / INSIDE_90:.2f}" if sizes else f"{name}: none")
    return lines


@dataclass(frozen=True)
class Sweep:
    """One machine's all-reduce times by rank count and size, on `nodes[ranks]` nodes; `cores` is set for CPU hosts."""

    name: str
    backend: str
    times: dict[int, dict[int, float]]
    nodes: dict[int, int]
    cores: int = 0
    memory: str = "ordinary"
    origin: str = "imported"


def list_public_sweeps() -> list[Sweep]:
    """List all published tables, one sweep per source, each with several rank counts."""
    found = []
    for name, tables in (
        ("A100, HDR", TABLES["a100"][:2] + TABLES["a100-nodes"]), ("V100, EDR", TABLES["v100"] + TABLES["v100-nodes"]),
        ("H100, NVLink", (TABLES["h100"][0], TABLES["h100"][2])),
        ("A100, RoCE", TABLES["a100-roce"]), ("B200, RoCE", TABLES["b200-roce"]),
    ):  # fmt: skip
        times = {t.ranks: {x: s for x, s in drop_disturbed(t.points) if x >= 4096} for t in tables}
        found.append(Sweep(name, "nccl", times, {t.ranks: t.nodes for t in tables}))
    return found


def list_csv_sweeps(path: Path) -> list[Sweep]:
    """List the CSV's single-host sweeps with several rank counts, regardless of their interconnect."""
    tables: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["nodes"] == "1":
                points = tables[row["source"], row["backend"]][int(row["world_size"])]
                points.append((int(row["bytes"]), float(row["time_s"])))
    found = []
    for (source, backend), by_ranks in tables.items():
        times = {ranks: dict(drop_disturbed(points)) for ranks, points in by_ranks.items()}
        if len(times) > 1:
            name = "gloo" if backend.startswith("gloo") else backend
            found.append(Sweep(f"{source}, {backend}", name, times, dict.fromkeys(times, 1)))
    return found


def list_own_sweeps(paths: Sequence[Path]) -> list[Sweep]:
    found = []
    for path in paths:
        run = load_run(path)
        records = [r for r in run.records if isinstance(r, CollectiveRecord)]
        records = [r for r in records if r.collective == "all_reduce" and r.world_size > 1]
        for (backend, device, dtype, memory), kind in group_by(
            records, lambda r: (r.backend, r.device, r.dtype, r.memory)
        ).items():
            times: dict[int, dict[int, float]] = defaultdict(dict)
            for r in kind:
                times[r.world_size][r.num_bytes] = statistics.median(networks.list_seconds(r))
            what = f"{path.parent.name}/{path.name}, {backend}{' in shared memory' if memory == 'shared' else ''}"
            cores = run.environment.cores if device == "cpu" else 0
            name = f"{what}, {device}, {dtype}"
            found.append(Sweep(name, backend, dict(times), dict.fromkeys(times, 1), cores, memory, "measured"))
    return found


def build_fabric(sweep: Sweep, counts: Sequence[int], **options: int) -> networks.MeasuredFabric:
    records = [
        CollectiveRecord(
            collective="all_reduce", backend=sweep.backend, device="cpu", world_size=n, num_bytes=x, dtype="float32",
            op="sum", timing=Summary(mean_s=s), nodes=sweep.nodes[n], memory=sweep.memory, source=sweep.origin,
        )
        for n in counts for x, s in sweep.times[n].items()
    ]  # fmt: skip
    return networks.build_measured_fabric(records, None, memory=sweep.memory, **options)


@dataclass(frozen=True)
class Scaled:
    """A point on more ranks than were known. `before_s` is its time on half as many, None if these were not measured in
    the same place (inside a node, or on several)."""

    where: str
    judged: Judged
    before_s: float | None = None


def judge_ranks(sweeps: Sequence[Sweep]) -> list[Scaled]:
    """Predict each rank count from smaller ones: inside a node, on the first nodes, or beyond."""
    found = []
    for sweep in sweeps:
        counts = sorted(n for n in sweep.times if len(sweep.times[n]) > 1)
        per_node = max(n for n in counts if sweep.nodes[n] == 1)
        for place, target in enumerate(counts[1:], 1):
            known = counts[:place]
            fabric = build_fabric(sweep, known, cores=sweep.cores, ranks_per_node=per_node)
            plain, shifted = (replace(fabric, shift=shift).build_curve(target) for shift in (0.0, 1.0))
            is_first = sweep.nodes[target] > 1 and sweep.nodes[known[-1]] == 1
            where = "inside a node" if sweep.nodes[target] == 1 else "the first nodes" if is_first else "beyond"
            half = {} if is_first or 2 * known[-1] != target else sweep.times[known[-1]]
            for x, s in sweep.times[target].items():
                predicted_s = plain.estimate_s(x)
                sd = math.log(shifted.estimate_s(x) / predicted_s)
                found.append(Scaled(where, Judged(sweep.name, x, s, predicted_s, sd), half.get(x)))
    return found


def print_doubled(scaled: Sequence[Scaled]) -> None:
    """Print the errors on twice the ranks, next to those of assuming that nothing changes."""
    doubled = [point for point in scaled if point.before_s]
    groups = group_by(doubled, lambda point: point.where) | group_by(doubled, lambda point: point.judged.source)
    print("\n**twice the ranks**\n\n| what | points | mean error | bias | within 10 % | mean error of no change |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, points in groups.items():
        errors = [point.judged.predicted_s / point.judged.measured_s - 1 for point in points]
        same = [abs((point.before_s or 0.0) / point.judged.measured_s - 1) for point in points]
        off, bias = statistics.fmean(map(abs, errors)), statistics.fmean(errors)
        close = f"{sum(abs(error) <= 0.1 for error in errors)} of {len(errors)}"
        print(f"| {name} | {len(errors)} | {off:.0%} | {bias:+.0%} | {close} | {statistics.fmean(same):.0%} |")


def print_growth(scaled: Sequence[Scaled]) -> None:
    """Print the power of the family's ratio that suits each NCCL table of two and four ranks, and its error with the
    one in use."""
    print("\n| from two NCCL ranks | points | best power | mean error with it | in use |\n|---|--:|--:|--:|--:|")
    doubled = [point for point in scaled if point.before_s and ", nccl" in point.judged.source]
    for name, points in group_by(doubled, lambda point: point.judged.source).items():
        errors = {}
        for power in (place / 20 for place in range(31)):
            times = [(point.before_s or 0.0, point.judged.predicted_s, point.judged.measured_s) for point in points]
            grown = [before_s * (here_s / before_s) ** (power / networks._FROM_TWO) for before_s, here_s, _ in times]
            errors[power] = statistics.fmean(abs(a / s - 1) for a, (_, _, s) in zip(grown, times, strict=True))
        best = min(errors, key=errors.__getitem__)
        used = errors[networks._FROM_TWO]
        print(f"| {name} | {len(points)} | {best:g} | {errors[best]:.0%} | {used:.0%} |")


LINKS = {"A100, HDR": "100GB/s,2us", "V100, EDR": "25GB/s,2us", "A100, RoCE": "200GB/s,2us",
         "B200, RoCE": "400GB/s,2us"}  # fmt: skip


def judge_crossing(sweeps: Sequence[Sweep]) -> dict[str, list[Judged]]:
    """Predict several nodes from one node's sweeps: without and with the ranks per node, and with a data sheet."""
    found: dict[str, list[Judged]] = defaultdict(list)
    for sweep in (sweep for sweep in sweeps if sweep.name in LINKS):
        inside = [n for n in sweep.times if sweep.nodes[n] == 1]
        alone = replace(sweep, nodes=dict.fromkeys(sweep.nodes, 0))  # a table without the number of nodes
        given = build_fabric(sweep, inside, ranks_per_node=max(inside))
        links = AssumedFabric(find_network(LINKS[sweep.name]), given, max(inside))
        fabrics = {"not given": build_fabric(alone, inside), "given": given, "given, with the links": links}
        for target in (n for n in sweep.times if sweep.nodes[n] > 1):
            for how, fabric in fabrics.items():
                plain, shifted = (replace(fabric, shift=shift).build_curve(target) for shift in (0.0, 1.0))
                for size, time_s in sweep.times[target].items():
                    predicted_s = plain.estimate_s(size)
                    sd = math.log(shifted.estimate_s(size) / predicted_s)
                    found[how].append(Judged(sweep.name, size, time_s, predicted_s, sd))
                    if fabric is links:
                        levels = [level.estimate_s(size) for level in links.build_levels(target)]
                        for rule, joined_s in (("sum", sum(levels)), ("longer", max(levels))):
                            judged = Judged(sweep.name, size, time_s, joined_s, sd)
                            found[f"{how}, the {rule} of both levels"].append(judged)
    return found


EXPONENTS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 50.0)


def print_exponents(sweeps: Sequence[Sweep]) -> None:
    """Print how well each exponent p joins the transfers of two levels, (inside^p + between^p)^(1/p), where 1 is their
    sum and a large one the longer of both; and the error of each cluster with the exponent that suits the others."""
    errors: dict[str, dict[float, list[float]]] = {}
    for sweep in (sweep for sweep in sweeps if sweep.name in LINKS):
        inside = [n for n in sweep.times if sweep.nodes[n] == 1]
        given = build_fabric(sweep, inside, ranks_per_node=max(inside))
        links = AssumedFabric(find_network(LINKS[sweep.name]), given, max(inside))
        found: dict[float, list[float]] = {exponent: [] for exponent in EXPONENTS}
        for target in (n for n in sweep.times if sweep.nodes[n] > 1):
            levels = links.build_levels(target)
            for size, time_s in sweep.times[target].items():
                latencies_s = [level.estimate_s(1) for level in levels]
                moving_s = [level.estimate_s(size) - late for level, late in zip(levels, latencies_s, strict=True)]
                for p, judged in found.items():
                    joined_s = sum(latencies_s) + sum(max(0.0, one) ** p for one in moving_s) ** (1 / p)
                    judged.append(abs(joined_s / time_s - 1))
        errors[sweep.name] = found
    off = {name: {p: statistics.median(values) for p, values in found.items()} for name, found in errors.items()}
    print("\n**exponents that join two levels: median of \\|error\\|**\n")
    print(f"| cluster | {' | '.join(f'{p:g}' for p in EXPONENTS)} | with that of the others |")
    print(f"|---|{'--:|' * (len(EXPONENTS) + 1)}")
    for name, by_exponent in off.items():
        best = min(EXPONENTS, key=lambda p: statistics.fmean(off[other][p] for other in off if other != name))
        cells = [f"{value:.0%}" for value in by_exponent.values()]
        print(f"| {name} | {' | '.join(cells)} | {by_exponent[best]:.0%} ({best:g}) |")


def judge_below(tables: Iterable[tuple[str, Sequence[tuple[int, float]]]]) -> dict[str, list[Judged]]:
    """Predict sizes below 1 and 10 MiB from larger ones in the same table."""
    found: dict[str, list[Judged]] = defaultdict(list)
    for name, points in tables:
        for least in (MIB, 10 * MIB):
            known = [(size, time_s) for size, time_s in points if size >= least]
            if len(known) > 1:
                curve = curves.fit_curve(known)
                for size, time_s in (point for point in points if 4096 <= point[0] < least):
                    sd = networks.estimate_error_below(curve, size)
                    where = f"below {least // MIB} MiB"
                    found[where].append(Judged(name, size, time_s, curve.estimate_s(size), sd))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?")
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    bundled = list_bundled()
    cases, apart = load_cases(arguments.csv) if arguments.csv else ([], {})
    known = [case for case in bundled if not any(is_of(other.source, case.source) for other in cases)]
    everything = [*known, *(case for case in cases if case.sheets)]
    whole = fit_correction(everything)
    print(f"correction fitted to all tables: {whole}\nin use: {networks.CORRECTION}")
    held = {
        source: fit_correction([case for case in everything if case.source != source])
        for source in dict.fromkeys(case.source for case in [*everything, *cases])
    }
    exact = judge_sheets(everything, lambda source: Correction())
    print_table("data sheets at face value", split(exact))
    print_table(
        "data sheets, corrected, in sample", split(judge_sheets(everything, lambda source: networks.CORRECTION))
    )
    sheets = judge_sheets(everything, held.__getitem__)
    print_table("data sheets, corrected, source held out", split(sheets))
    print_table("of these, rows of the CSV", split(judge_sheets(cases, held.__getitem__)))
    print("\nfor 90 %, sd of held-out data sheets:", "; ".join(calibrate(sheets)))
    published = [case for case in known if case.named]
    others = judge_named(published, held.__getitem__, True)
    print_table("published networks, each table from the others", split(others))
    print("\nfor 90 %, sd of another site:", "; ".join(calibrate(others)))
    if cases:
        print_table("named networks, in sample", split(judge_named(cases, lambda source: networks.CORRECTION, False)))
        named = judge_named(cases, held.__getitem__, True)
        print_table("named networks, source held out", split(named))
        print("\nfor 90 %, sd of held-out named networks:", "; ".join(calibrate([*named, *others])))
        print("\nnot scored:", *(f"- {count} rows of {name}" for name, count in apart.items()), sep="\n")
    public = list_public_sweeps()
    own = list_own_sweeps(arguments.runs)
    ranks = judge_ranks([*public, *(list_csv_sweeps(arguments.csv) if arguments.csv else []), *own])
    places = group_by(ranks, lambda point: point.where) | group_by(ranks, lambda point: point.judged.source)
    groups = ((name, [point.judged for point in found]) for name, found in places.items())
    print_table("other rank counts, each from the smaller ones", groups)
    print_doubled(ranks)
    print_growth(ranks)
    crossing = judge_crossing(public)
    by_source = {
        f"{how}: {source}": group
        for how, points in crossing.items()
        for source, group in group_by(points, lambda point: point.source).items()
    }
    print_table("several nodes from one, by what is known about the nodes", (crossing | by_source).items())
    print_exponents(public)
    swept = [("published", [p for p in sweep.points if p[0] >= 4096]) for table in TABLES.values() for sweep in table]
    swept += [("own", sorted(times.items())) for sweep in own for times in sweep.times.values()]
    print_table("sizes below a table's range", judge_below(swept).items())


if __name__ == "__main__":
    main()
