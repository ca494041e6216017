#!/usr/bin/env python
"""Write docs/scoreboard.md from raw runs: `render.py [FOLDER]`, by default results/scoreboard."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from score import (  # noqa: E402
    MOST_STOLEN,
    PACELINE,
    TOOLS,
    Score,
    count,
    find_gain,
    find_mean,
    find_reason,
    is_healthy,
    score_answer,
)

PAGE = ROOT / "docs" / "scoreboard.md"
INTRODUCTION = """# The scoreboard

Small programs, each with one planted problem, and healthy ones, all run under the same tools.
Each program is a file in `benchmarks/scoreboard/programs/`: it declares the cause and the rank that a tool should name,
and `--cured` runs it without its problem.
Two ranks train in each, on the CPU with gloo or on a GPU with NCCL.

- **Cause**: the first finding names the planted cause.
- **Inconclusive**: the answer says that the machine was too busy, names what stands out and claims no gain.
  It counts as correct if it names the cause, and does not count as a false finding in a healthy program.
- **Rank**: the rank is also correct, if one rank causes the problem.
- **Gain**: the predicted gain is within 5 points of the time that the cure saves, measured by applying it.
- **Overhead**: the mean step with the tool relative to the one without it, over 200 steps, recording included.
- **Disturbed**: other guests of the host took more than 5 % of the CPU time of a run that counts, in each of three
  trials.

Paceline runs as `paceline profile -- torchrun ...`, TraceML as `traceml run` with its two lines in the program.
torch.profiler and HTA produce tables, which `benchmarks/scoreboard/peers.py` reads by rules without knowledge of the
planted problem.
A verdict of another tool counts as correct if its documentation lists the cause for that verdict.

```sh
python benchmarks/scoreboard/run.py --out runs/scoreboard         # resumes; 50 minutes on a quiet machine
python benchmarks/scoreboard/run.py --tools plain,Paceline,cured --rounds 2 --out runs/scoreboard  # more rounds
python benchmarks/scoreboard/run.py --busy --out runs/scoreboard  # with one busy core beside it
python benchmarks/scoreboard/render.py runs/scoreboard            # writes this page
```
"""
NO_RUNS = "No run is published yet: the commands above make the table.\n"


def load(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def format_share(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}".replace("%", " %")


def is_disturbed(document: Mapping[str, Any]) -> bool:
    """Whether too much CPU time was stolen in a run that Paceline's row rests on."""
    runs = [run for name in ("plain", "cured", PACELINE) for run in document["runs"].get(name, ())]
    return any(run.get("stolen", 0.0) > MOST_STOLEN for run in runs)


def has_answer(document: Mapping[str, Any], tool: str) -> bool:
    return bool(document["answers"][tool]["causes"])


def describe_noise(documents: Sequence[Mapping[str, Any]]) -> str:
    """How far two runs of the same plain program are apart, which limits what gains and overheads can show."""
    pairs = [map(find_mean, one["runs"]["plain"][:2]) for one in documents if len(one["runs"].get("plain", ())) > 1]
    apart = [abs(second / first - 1) for first, second in pairs]
    if not apart:
        once = "Each program ran once per tool, so gains and overheads also contain the difference between two runs."
        is_apart = any(tool != "HTA" and tool not in one["runs"] for one in documents for tool in one["answers"])
        lines = [once, *(["The other tools ran at another time."] if is_apart else [])]
        return "\n".join(lines) + "\n"
    return f"Two runs of the same program without a tool are {statistics.median(apart):.1%} apart (median).\n"


def format_count(values: Sequence[bool | None]) -> str:
    right, total = count(values)
    return f"{right} of {total}" if total else ""


def format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(format_row, [header, ["---"] * len(header), *rows])) + "\n"


def summarise(documents: Sequence[Mapping[str, Any]], gains: Mapping[str, float | None]) -> str:
    """List one row per tool."""
    rows = []
    for tool in TOOLS:
        found = [(one, score_answer(one, tool, gains.get(one["name"]))) for one in documents]
        scored = [(one, score) for one, score in found if score is not None]
        if not scored:
            continue
        ailing: list[Score] = [score for one, score in scored if not is_healthy(one)]
        overheads = [score.overhead for _, score in scored if score.overhead is not None]
        rows.append([
            tool,
            format_count([score.is_cause for score in ailing]),
            format_count([score.is_rank for score in ailing]),
            format_count([not score.is_cause for one, score in scored if is_healthy(one) and has_answer(one, tool)]),
            str(sum(not score.is_conclusive for _, score in scored)),
            format_count([score.is_gain for score in ailing]),
            format_share(statistics.median(overheads)) if overheads else "",
        ])  # fmt: skip
    return format_table(["tool", "cause", "rank", "false findings", "inconclusive", "gain", "overhead (median)"], rows)


def list_programs(documents: Sequence[Mapping[str, Any]], gains: Mapping[str, float | None]) -> str:
    """List one row per program, with Paceline's errors in bold."""
    rows = []
    for one in documents:
        answer, score = one["answers"].get(PACELINE), score_answer(one, PACELINE, gains.get(one["name"]))
        if answer is None or score is None:
            rows.append([one["title"], "**failed**", *[""] * 6])
            continue
        said = ", ".join(answer["causes"]) + ("" if answer["rank"] is None else f", rank {answer['rank']}")
        if not score.is_conclusive:
            said += " (inconclusive)"
        is_right = score.is_cause and score.is_rank is not False
        peers = [tool for tool in TOOLS[1:] if (their := score_answer(one, tool)) is not None and their.is_cause]
        expected = one["causes"][0] + ("" if one["culprit"] is None else f", rank {one['culprit']}")
        predicted = format_share(answer["gain"])
        rows.append([
            one["title"],
            expected,
            said if is_right else f"**{said}**",
            format_share(gains.get(one["name"])),
            predicted if score.is_gain is not False else f"**{predicted or 'none'}**",
            format_share(score.overhead),
            "yes" if is_disturbed(one) else "",
            ", ".join(peers),
        ])  # fmt: skip
    header = [
        "program",
        "planted",
        "Paceline",
        "cure saves",
        "predicted",
        "overhead",
        "disturbed",
        "peers that are right",
    ]
    return format_table(header, rows)


def render(folder: Path) -> str:
    quiet, busy = load(folder / "quiet"), load(folder / "busy")
    if not quiet:
        return f"{INTRODUCTION}\n{NO_RUNS}"
    gains = {one["name"]: find_gain(one) for one in quiet}
    left_out = {one["name"]: reason for one in quiet if (reason := find_reason(one))}
    kept = [one for one in quiet if one["name"] not in left_out]
    where = quiet[0]["environment"]
    machine = f"{where['cores']} cores ({where['machine']}){', ' + where['gpu'] if where['gpu'] else ''}"
    parts = [INTRODUCTION, f"## On a quiet machine\n\n{machine}, torch {where['torch']}.\n", summarise(kept, gains)]
    parts += [*filter(None, [describe_noise(kept)]), "Errors of Paceline are bold.\n", list_programs(kept, gains)]
    if left_out:
        titles = {one["name"]: one["title"] for one in quiet}
        lines = [f"- {titles[name]}: {reason}." for name, reason in left_out.items()]
        parts.append("Not scored:\n\n" + "\n".join(lines) + "\n")
    if busy:
        kept = [one for one in busy if one["name"] not in left_out]
        parts += ["## With one busy core beside it\n", summarise(kept, gains), list_programs(kept, gains)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "scoreboard"))
    print(PAGE.relative_to(ROOT))
