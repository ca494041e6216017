"""Bad input: one line that says what and what to do, exit 2, at once, and nothing half-written."""

from __future__ import annotations

import pytest

ALLREDUCE = ("bench", "allreduce")
WRAPPERS = ("bench", "wrappers")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def _no_gpu_no_launcher(monkeypatch):
    monkeypatch.setattr("paceline.machine.count_gpus", lambda: 0)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ALLREDUCE, "--backend", "glo"), "backend 'glo' is unknown: did you mean gloo?"),
        ((*ALLREDUCE, "--backend", "nccl"), "nccl on CUDA needs a GPU and none is visible here"),
        ((*ALLREDUCE, "--backend", "nccl", "--device", "cpu"), "nccl works on GPUs only"),
        ((*ALLREDUCE, "--device", "cuda"), "needs a GPU"),
        ((*ALLREDUCE, "--device", "tpu"), "device 'tpu' is unknown"),
        ((*ALLREDUCE, "--ranks", "0"), "--ranks '0' is not a whole number of at least 1"),
        ((*ALLREDUCE, "--ranks", "two"), "--ranks 'two' is not a whole number"),
        ((*ALLREDUCE, "--ranks", "10000"), "10000 ranks need about"),
        ((*ALLREDUCE, "--sizes", "1000000"), "size '1000000' has no unit"),
        ((*ALLREDUCE, "--sizes", "1MiB,5parsecs"), "unknown unit 'parsecs'"),
        ((*ALLREDUCE, "--sizes", "huge"), "not a number with a unit"),
        ((*ALLREDUCE, "--sizes", "0B"), "at least one element"),
        ((*ALLREDUCE, "--sizes", "6B"), "not a whole number of float32 elements"),
        ((*ALLREDUCE, "--sizes", "900TB"), "use smaller sizes"),
        ((*ALLREDUCE, "--sizes", ","), "no size in"),
        ((*ALLREDUCE, "--sizes", "1MiB", "-b", "1MiB", "-e", "2MiB"), "--sizes with --min-size"),
        ((*ALLREDUCE, "-b", "1MiB"), "needs --min-size (-b) and --max-size (-e)"),
        ((*ALLREDUCE, "-b", "2MiB", "-e", "1MiB"), "is empty"),
        ((*ALLREDUCE, "-b", "1MiB", "-e", "2MiB", "-f", "1"), "must be above 1"),
        ((*ALLREDUCE, "-b", "8B", "-e", "1GiB", "-f", "1.000001"), "more than 1000 sizes"),
        ((*ALLREDUCE, "--backend", ","), "no backend given"),
        ((*ALLREDUCE, "--dtype", "float31"), "dtype 'float31' is unknown: did you mean float32?"),
        ((*ALLREDUCE, "--op", "mean"), "op 'mean' is unknown"),
        ((*ALLREDUCE, "--op", "avg", "--dtype", "int32"), "not defined"),
        ((*ALLREDUCE, "--collective", "all_to_all"), "collective 'all_to_all' is unknown"),
        ((*ALLREDUCE, "--collective", "broadcast", "--op", "max"), "contradicts"),
        ((*ALLREDUCE, "--collective", "all_gather", "--sizes", "4B", "--ranks", "2"), "less than one element for each"),
        ((*ALLREDUCE, "--memory", "shared"), "backend gloo has none, only shm"),
        ((*ALLREDUCE, "--memory", "both", "--backend", "nccl"), "backend nccl has none, only shm"),
        ((*ALLREDUCE, "--memory", "vram"), "memory 'vram' is unknown: known are ordinary, shared"),
        ((*ALLREDUCE, "--memory", "both", "--backend", "paceline", "--collective", "broadcast"), "is for all_reduce"),
        ((*ALLREDUCE, "--limit", "--collective", "broadcast"), "--limit is the bound of an all_reduce"),
        ((*ALLREDUCE, "--iters", "0"), "--iters 0: at least 1"),
        ((*ALLREDUCE, "--warmup", "-1"), "--warmup -1: at least 0"),
        ((*ALLREDUCE, "--compare", "nowhere.csv"), "nowhere.csv does not exist"),
        (("bench", "chunks", "--total", "240"), "has no unit"),
        (("bench", "chunks", "--total", "1MB", "--chunks", "2MB"), "larger than the total"),
        (("bench", "chunks", "--total", "10B"), "not a whole number of float32 elements"),
        ((*WRAPPERS, "--model", "gpt3"), "model 'gpt3' is unknown: did you mean gpt2?"),
        ((*WRAPPERS, "--model", ","), "no model given: known are mlp"),
        ((*WRAPPERS, "--wrapper", "torch-tunned"), "wrapper 'torch-tunned' is unknown: did you mean torch-tuned?"),
        ((*WRAPPERS, "--dtype", "float16"), "wrappers are timed in float32 or bfloat16"),
        ((*WRAPPERS, "--batch-size", "0"), "--batch-size '0' is not a whole number of at least 1"),
        ((*WRAPPERS, "--iters", "0"), "--iters 0: at least 1"),
        ((*WRAPPERS, "--device", "cuda"), "needs a GPU"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
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
def test_half_a_world_is_one_line_and_exit_2(command, tmp_path, monkeypatch, variables, words):
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


def test_a_refusal_does_not_wait_for_torch(start):
    probe = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        "sys.argv = ['paceline', 'bench', 'allreduce', '--sizes', '100']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    job = start("-c", probe)
    out, err = job.communicate(timeout=100)
    assert (job.returncode, out.strip()) == (2, "False")
    assert "has no unit" in err


def test_debug_shows_the_traceback(command):
    answer = command(*ALLREDUCE, "--sizes", "100", "--debug")
    assert answer.code == 2 and "Traceback (most recent call last)" in answer.err


def test_version(command):
    answer = command("--version")
    assert answer.code == 0 and answer.out.startswith("paceline 0.")
