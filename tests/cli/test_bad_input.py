"""Bad input: one line with the problem and the fix, exit code 2 at once, and no partial files."""

from __future__ import annotations

import pytest

ALLREDUCE = ("bench", "allreduce")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def _no_gpu_no_launcher(monkeypatch):
    monkeypatch.setattr("paceline.machine.count_gpus", lambda: 0)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


# One command for each kind of invalid option; the tests of the settings cover all values.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ALLREDUCE, "--backend", "glo"), "--backend 'glo' is unknown: did you mean gloo?"),
        ((*ALLREDUCE, "--backend", ","), "--backend"),
        ((*ALLREDUCE, "--backend", "nccl"), "nccl on CUDA needs a GPU and none is visible here"),
        ((*ALLREDUCE, "--ranks", "two"), "--ranks 'two' is not a whole number"),
        ((*ALLREDUCE, "--ranks", "10000"), "10000 ranks need about"),
        ((*ALLREDUCE, "--sizes", "900TB"), "use smaller sizes"),
        ((*ALLREDUCE, "--sizes", "1MiB", "-b", "1MiB", "-e", "2MiB"), "--sizes with --min-size"),
        ((*ALLREDUCE, "-b", "1MiB"), "needs --min-size (-b) and --max-size (-e)"),
        ((*ALLREDUCE, "--compare", "nowhere.csv"), "nowhere.csv does not exist"),
        (("bench", "chunks", "--total", "240"), "has no unit"),
        (("bench", "wrappers", "--model", "gpt3"), "--model 'gpt3' is unknown: did you mean gpt2?"),
        (("train", "--model", "resnet81"), "model 'resnet81' is unknown: did you mean resnet18"),
        (("train", "--model", "nowhere.py:build"), "model file nowhere.py does not exist"),
        (("train", "--plan", "nowhere.json"), "--plan nowhere.json: No such file"),
        (("train", "--lr-drops", "half"), "--lr-drops 'half' cannot be parsed"),
        (("train", "--batch-growth", "half:2"), "--batch-growth 'half:2' cannot be parsed"),
        (("train", "--optimizer", "adamw", "--momentum", "0.5"), "--momentum 0.5: adamw has its own moments"),
        (("train", "--resume", "nowhere"), "pass the folder of a training run"),
        (("train", "--compare", "a", "b"), "a does not exist"),
        (("train", "--compare", "a", "b", "--lr", "0.1"), "--lr with --compare, which does not train"),
        (("faults", "--ranks", "1,2"), "--ranks 1,2: must be a single number here"),
        (("tune", "--seed", "1.5"), "--seed '1.5' is not a whole number"),
        (("profile", "trace", "--warmup", "1" + "0" * 18), "--warmup 10^18 takes more than a year"),
        (("profile", "trace", "--ranks", "1,2"), "--ranks 1,2: must be a single number here"),
        (("profile", "trace", "--warmup", "0"), "--warmup 0: must be at least 1"),
        (("profile", "comm-table", "--curve", "nowhere"), "nowhere does not exist"),
        (("report", "a", "--format", "md", "--json"), "--json with --format md"),
        (("report", "a", "--format", "md", "--json", "--details"), "--json and --details with --format md"),
        (("report", "a", "--format", "parquet", "--json"), "--json with --format parquet"),
        (("report", "a", "--format", "xls"), "--format xls is unknown: use html, md or parquet"),
        (("report", "--format", "parquet"), "no run is given"),
        (("profile", "--json", "phases"), "--json before phases has no effect"),
        (("profile", "--compare", "a", "b", "phases"), "--compare before phases has no effect"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(command, tmp_path, monkeypatch, arguments, words):
    def start(*_):
        raise AssertionError("a rank was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.runtime.ranks.launch.RankPool.start", start)
    answer = command(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("paceline: error: ") and words in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_incomplete_world_is_one_line_and_exit_2(command, tmp_path, monkeypatch, variables, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = command(*ALLREDUCE)
    assert answer.code == 2 and answer.out == ""
    assert words in answer.err and len(answer.err.strip().splitlines()) == 1
    assert not any((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_unwritable_output_folder_is_found_before_the_work(command, tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    answer = command(*ALLREDUCE, "--out", str(tmp_path / out))
    assert answer.code == 2 and "cannot write results to" in answer.err and "--out" in answer.err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "has the columns a, b"),
        ("backend,world_size,total_elements,total_bytes,average_time,stdev_time\n", "no row"),
        ("backend,world_size,total_elements,total_bytes,average_time,stdev_time\nnccl,8,1,4,fast,0\n", "line 2"),
        ("backend,world_size,total_elements,total_bytes,average_time,stdev_time\nnccl,8,1\n", "line 2: 3 cells"),
    ],
)
def test_a_broken_csv_is_named_with_its_line(command, tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(content)
    answer = command(*ALLREDUCE, "--compare", "table.csv")
    assert answer.code == 2 and "table.csv" in answer.err and words in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize("arguments", [("bench", "nothing"), ("--nonsense",), ("bench", "allreduce", "--nonsense")])
def test_an_unknown_verb_or_flag_exits_2(command, arguments):
    answer = command(*arguments)
    assert answer.code == 2 and answer.out == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["bench", "allreduce", "--sizes", "100"], "has no unit"),
        (["train", "--batch-size", "1" + "0" * 30], "--batch-size 10^30 needs at least"),
    ],
)
def test_a_refusal_does_not_wait_for_torch(start, arguments, reason):
    probe = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        f"sys.argv = ['paceline', *{arguments}]\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    job = start("-c", probe)
    out, err = job.communicate(timeout=100)
    assert (job.returncode, out.strip()) == (2, "False")
    assert reason in err


def test_help_loads_neither_torch_nor_numpy(start):
    probe = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        "sys.argv = ['paceline', 'train', '--help']\n"
        "try:\n    main()\nfinally:\n    print({'torch', 'numpy'} & set(sys.modules))\n"
    )
    job = start("-c", probe)
    out, _ = job.communicate(timeout=100)
    assert job.returncode == 0 and out.splitlines()[-1] == "set()"


def test_debug_shows_the_traceback(command):
    answer = command(*ALLREDUCE, "--sizes", "100", "--debug")
    assert answer.code == 2 and "Traceback (most recent call last)" in answer.err


def test_version(command):
    answer = command("--version")
    assert answer.code == 0 and answer.out.startswith("paceline 0.")
