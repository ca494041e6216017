"""The gradient noise scale as table, rows, sentences and a figure; recipes for numeric targets."""

import json
from dataclasses import replace

import pytest

from paceline.records.store import Run
from paceline.records.training import NoiseProbe
from paceline.report.result import build_result
from paceline.report.table import Table
from paceline.studies.large_batches import NOISE, describe_noise

from .made_scaling import make_run
from .made_training import build_known, build_noise

LOST = build_noise(tuple(NoiseProbe((s, s), s * d) for s, d in ((8.0, 0.45), (9.0, 0.5), (7.0, 0.48))), epoch=6.0)


UNSURE = build_noise(tuple(NoiseProbe((8.0, 8.0), big) for big in (3.0, 4.5, 6.0)))


def test_the_table_has_estimates_and_intervals():
    text = Table("noise", "", NOISE, [build_known(840.0), LOST]).markdown()
    assert len({line.count("|") for line in text.splitlines()}) == 1
    known, lost = text.splitlines()[2:]
    assert "| 840 |" in known and "| 1 | 840 |" in known
    low = LOST.estimate.interval[0]
    assert f"| > {low:,.0f} | from {low:,.0f} |" in lost


def test_a_row_has_no_infinite_number():
    table = Table("noise", "", NOISE, [build_known(840.0), LOST])
    rows = table.rows_json()
    assert rows[0]["noise_scale_low"] < rows[0]["noise_scale"] < rows[0]["noise_scale_high"]
    assert rows[1]["noise_scale"] is rows[1]["noise_scale_high"] is None
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert table.csv().count("\n") == 3


def test_a_sentence_states_the_cost_of_a_large_batch():
    first, last = build_known(45.0, step=1, epoch=1.0), build_known(840.0)
    (text,) = describe_noise([last, first], 8192)
    (low, high), (least, most) = last.estimate.interval, first.estimate.interval
    assert text == (
        f"cnn: gradient noise scale 45 (90 %: {least:,.0f} to {most:,.0f}) at epoch 1; "
        f"840 (90 %: {low:,.0f} to {high:,.0f}) at epoch 5. Batches far "
        "above this size save few steps: 8192 needs 10.8 times the minimum samples and 1.1 times the minimum steps."
    )
    (text,) = describe_noise([last], 84)
    least = "84 needs 1.1 times the minimum samples and 11.0 times the minimum steps."
    assert text.endswith(f"cost few extra samples: {least}")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([LOST], ["noise dominates the gradient"]),
        ([UNSURE], ["(90 %: from "]),
        ([build_known(9.0, step=1, epoch=1.0), LOST], ["noise scale 9 (90 %"]),
        (
            [build_known(9.0, step=1, epoch=1.0), LOST],
            ["; > 96 (90 %: from 96) at epoch 6, where noise dominates the gradient. Batches far above this"],
        ),
        ([build_noise(LOST.probes[:1])], ["noise scale unknown at epoch 5"]),
        ([build_noise((NoiseProbe((2.0, 2.0), 2.0),) * 3)], ["noise scale 0 (90 %: 0 to 0) at epoch 5"]),
        ([build_known(9.0, note="a"), build_known(90.0, note="b")], ["cnn, a: gradient", "cnn, b: gradient"]),
    ],
)
def test_each_job_has_one_sentence(records, words):
    found = describe_noise(records, 8192)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


# -- numeric targets, which have no accuracy ---------------------------------------------------------------------------


def _predict_numbers(size, recipe, seed, loss):
    run = make_run(size, recipe, seed, model="mlp", num_classes=0)
    curve = tuple(replace(p, test_accuracy=None, test_loss=loss * (5 - n)) for n, p in enumerate(run.curve, 1))
    return replace(run, curve=curve)


def test_regression_recipes_are_compared_by_test_loss(build_environment):
    losses = {(128, "none"): 0.2, (1024, "none"): 0.9, (1024, "lars"): 0.4, (1024, "linear"): 0.1}
    runs = [_predict_numbers(*cell, seed, loss + 0.01 * seed) for cell, loss in losses.items() for seed in (0, 2)]
    result = build_result(Run("scale large-batch", {}, build_environment(), tuple(runs)))
    assert result.answer == (
        "1024 without a recipe: test loss 0.91 (± 0.01414, 2 seeds), 0.7 above the baseline, after 4 updates in 4 "
        "epochs; the best recipe, linear: 0.1 below the baseline."
    )
    baseline, why = result.findings
    assert "128 without a recipe: test loss 0.21 (" in baseline and "compares test losses" in why
    rows = result.table("recipes").rows_json()
    assert [row["test_accuracy"] for row in rows] == [None] * 4
    assert [row["gap"] for row in rows] == [None, *map(pytest.approx, (0.7, 0.2, -0.1))]
    head, _, _, plain, *_ = result.table("recipes").markdown().splitlines()
    assert "| gap (test loss) |" in head and "accuracy" not in head and "points" not in head and "| 0.7000 |" in plain
    assert list(result.figures()) == ["loss", "curves"]
    (panel,), (curves, _) = result.figure("loss").axes, result.figure("curves").axes
    assert panel.get_ylabel() == "test loss, ± deviation over seeds" and curves.get_ylabel().startswith("test loss,")
    assert list(panel.lines[0].get_ydata()) == pytest.approx([0.21, 0.91])
    assert curves.lines[0].get_ydata()[-1] == pytest.approx(0.21)


def test_one_epoch_is_singular(build_environment):
    cells = ((128, "none", 0.2), (1024, "none", 0.9))
    runs = tuple(replace(_predict_numbers(size, recipe, 0, loss), epochs=1.0) for size, recipe, loss in cells)
    result = build_result(Run("scale large-batch", {}, build_environment(), runs))
    assert "updates in 1 epoch." in result.answer
