"""`paceline demo`: the program is slow, and the output reports the measurement, regardless of its outcome."""

import json
from pathlib import Path

import pytest

from paceline.predict.race import VERDICTS


@pytest.mark.slow
def test_the_demo_compares_what_it_found_with_the_program(command, tmp_path):
    answer = command("demo", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["verdict"] in VERDICTS and (Path(document["run"]) / "report.html").exists()
    own, other = document["demo"]
    assert own["num_messages"] > 20 > other["num_messages"]
    assert ("Fixed" in document["answer"]) == (document["verdict"] == "use")
