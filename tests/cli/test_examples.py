"""Every example runs, and says what its own words promise."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(start, name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    job = start(*prefix, str(EXAMPLES / name), *arguments)
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    return out


def test_every_example_has_a_test():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("prefix", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_allreduce_by_hand(start, prefix):
    assert run_example(start, "allreduce_by_hand.py", prefix=prefix) == "the sum over 2 ranks is 3\n"


def test_who_am_i(start):
    lines = run_example(start, "who_am_i.py").splitlines()
    assert lines == [f"global rank {r} of 4 is rank {r % 2} of 2 on its row" for r in range(4)]


def test_read_a_run(start, command, tmp_path):
    command("bench", "allreduce", "--sizes", "64KiB,4MiB", "--iters", "5", "--out", str(tmp_path / "runs"))
    (folder,) = (tmp_path / "runs").iterdir()
    out = run_example(start, "read_a_run.py", str(folder))
    assert "bench allreduce on" in out and "65536 bytes: 5 repetitions" in out
    assert "gloo, 2 ranks: a message of 2 MiB takes about" in out
