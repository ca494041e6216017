"""`paceline predict --strategy` end to end: each strategy's bytes and step, and one-line errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline.report.strategy_steps import StrategyStepsResult
from tests.cli.test_predict_scaling import files, predict  # noqa: F401  fixtures

FILES = {
    "run.json", "strategies.csv", "strategies.md", "bandwidths.csv", "bandwidths.md", "bandwidths.png",
    "bandwidths.svg",
}  # fmt: skip


def test_strategies_in_one_document_and_in_words(predict):  # noqa: F811
    answer = predict("--network", "1gbe", "--ranks", "2,8", "--strategy", "int8;zero1,topk:0.01", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    names = ["dense", "bf16", "int8", "zero1", "topk:0.01"]
    rows = document["rows"]
    assert [(row["world_size"], row["strategy"]) for row in rows] == [(n, name) for n in (2, 8) for name in names]
    # 160 MiB in four gradients; int8 adds a 4-byte scale per 256 numbers; all-to-all and all-gather move halves.
    total = 160 * 2**20
    assert [row["sent_bytes"] for row in rows[:4]] == [total, total / 2, total / 4 * 260 / 256, total]
    assert [row["update"] for row in rows[:5]] == ["exact", "rounded", "lossy", "exact", "lossy"]
    assert all(row["low_s"] <= row["step_s"] <= row["high_s"] and row["source"] == "simulated" for row in rows)
    assert rows[0]["to_dense"] == 1 and rows[2]["to_bf16"] < 0.7 and rows[2]["is_worth_it"]
    assert {cell["winner"] for cell in document["cells"]} == {"topk:0.01"}
    assert [crossing["above"] for crossing in document["crossings"]][-1] in ("dense", "zero1")
    assert {path.name for path in Path(document["run"]).iterdir()} == FILES
    again = paceline.load_result(document["run"])
    assert isinstance(again, StrategyStepsResult) and again.to_json()["rows"] == rows
    for words in ("not predicted here", "paceline scale strategies", "lower bound", "topk:0.01"):
        assert words in again.text(80, details=True)
    assert max(map(len, again.text(80).splitlines()[1:20])) < 200


def test_two_levels_on_nodes(predict):  # noqa: F811
    texts = "int8,int8+hosts,hosts,topk:0.01+hosts"
    answer = predict("--network", "1gbe", "--ranks", "4,16", "--ranks-per-node", "4", "--strategy", texts, "--json")
    assert answer.code == 0, answer.err
    rows = {(row["world_size"], row["strategy"]): row for row in json.loads(answer.out)["rows"]}
    one_node = [rows[4, name] for name in ("dense", "hosts", "int8+hosts")]
    assert len({(row["step_s"], row["sent_bytes"]) for row in one_node}) == 1
    # Inside a node, 3/4 of 160 MiB each way; between four nodes, 3/4 of a quarter, with one scale per 256 numbers.
    inside, part = 2 * 3 / 4 * 160 * 2**20, 160 * 2**20 / 16 * 260 / 256
    assert rows[16, "int8+hosts"]["sent_bytes"] == inside + 2 * 3 / 4 * part
    assert rows[16, "int8+hosts"]["step_s"] < 0.6 * rows[16, "int8"]["step_s"]
    assert rows[16, "topk:0.01+hosts"]["step_s"] < rows[16, "int8+hosts"]["step_s"]
    assert {row["update"] for (_, name), row in rows.items() if name == "hosts"} == {"exact"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--network", "1gbe", "--strategy", "int9"), "'int9' is unknown"),
        (("--network", "1gbe", "--strategy", "int8", "--gradients", "bf16"), "--gradients bf16 with --strategy"),
        (("--network", "1gbe", "--strategy", "int8", "--ranks", "1"), "one rank"),
        (("--network", "1gbe", "--strategy", "diloco:8+hosts"), "leave out +hosts"),
        (("--network", "a100-hdr", "--strategy", "int8+hosts", "--ranks", "16"), "--ranks-per-node"),
        (("--network", "1gbe", "--strategy", "hosts", "--ranks-per-node", "4", "--ranks", "6"), "do not fill hosts"),
    ],
)
def test_incomparable_strategies_are_refused(predict, words, found):  # noqa: F811
    answer = predict(*words)
    assert answer.code == 2 and found in answer.err and len(answer.err.splitlines()) == 1


def test_tables_and_traces_have_no_strategies(command, tmp_path):
    answer = command("predict", "--csv", str(tmp_path), "--strategy", "all")
    assert answer.code == 2 and "--model-profile" in answer.err
    answer = command("tune", "--wrapper", "torch", "--strategy", "all", "--ranks", "2")
    assert answer.code == 2 and "--wrapper paceline" in answer.err
    answer = command("tune", "--network", "1gbe", "--strategy", "all")
    assert answer.code == 2 and "predict --strategy" in answer.err
