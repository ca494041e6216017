"""The magics in a real Jupyter kernel; skipped without one (`pip install -e '.[notebook]'`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import descendants, find_ranks, wait_until

manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
import nbformat  # noqa: E402

SOURCES = str(Path(__file__).parents[2] / "src")


class Answer:
    """The messages that one cell sent to the notebook."""

    def __init__(self, reply: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        self.status = reply["content"]["status"]
        sent = [(message["header"]["msg_type"], message["content"]) for message in messages]
        self.text = "".join(content["text"] for kind, content in sent if kind == "stream")
        self.errors = [content for kind, content in sent if kind == "error"]
        self.shown = [content["data"] for kind, content in sent if kind in ("display_data", "execute_result")]


class Kernel:
    def __init__(self, folder: Path) -> None:
        variables = os.environ | {"JUPYTER_RUNTIME_DIR": str(folder), "PYTHONPATH": SOURCES, "IPYTHONDIR": str(folder)}
        self.manager, self.client = manager.start_new_kernel(env=variables, startup_timeout=60)
        self.pid = self.manager.provisioner.pid

    def run(self, source: str, timeout_s: float = 60.0) -> Answer:
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(source, timeout=timeout_s, output_hook=messages.append)
        return Answer(reply, messages)

    def begin(self, source: str) -> str:
        return str(self.client.execute(source))

    def end(self, message: str, timeout_s: float = 60.0) -> Answer:
        deadline, messages = time.monotonic() + timeout_s, []
        while True:
            sent = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if sent["parent_header"].get("msg_id") == message:
                messages.append(sent)
                if sent["header"]["msg_type"] == "status" and sent["content"]["execution_state"] == "idle":
                    break
        while (reply := self.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message:
            pass
        return Answer(reply, messages)

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jupyter")


@pytest.fixture(scope="module")
def kernel(runtime: Path) -> Iterator[Kernel]:
    """A kernel with two ranks that run its cells."""
    kernel = Kernel(runtime)
    try:
        assert kernel.run("%load_ext paceline").status == "ok"
        started = kernel.run("%dist_init -n 2 --device cpu")
        assert started.status == "ok" and "2 ranks on" in started.text, started.text
        yield kernel
    finally:
        kernel.close()


def test_cells_run_on_all_ranks_and_on_some(kernel):
    assert kernel.run("x = torch.ones(1) * rank\ndist.all_reduce(x)\nprint(x.item())").text.count("1.0") == 2
    for first in ("%%rank 0", "%%rank[0]", "%%rank [0]"):
        assert kernel.run(f"{first}\nprint(get('ws'))").text == "[0] 2\n"
    assert sorted(kernel.run("%%distributed\nrank").text.splitlines()) == ["[0] 0", "[1] 1"]
    assert kernel.run("%%local\nprint('rank' in globals())").text == "False\n"


def test_an_error_appears_once_and_fails_the_cell(kernel):
    answer = kernel.run("def f():\n    if rank:\n        raise ValueError(f'planted on {rank}')\nf()")
    assert answer.status == "error" and len(answer.errors) == 1
    (error,) = answer.errors
    shown = "\n".join(error["traceback"])
    assert error["ename"] == "CellError" and "rank 1 of 2 failed: ValueError: planted on 1" in error["evalue"]
    assert shown.count("planted on 1") == 1 and "(on rank 1 of 2)" in shown
    assert shown.count("Traceback") == 1 and "in f\n" in shown and "cell_ranks.py" not in shown
    assert "planted" not in answer.text
    assert kernel.run("rank").status == "ok"


def test_rich_results_and_figures_come_back(kernel):
    answer = kernel.run("class Bold:\n    def _repr_html_(self): return f'<b>{rank}</b>'\nBold()")
    assert sorted(data["text/html"] for data in answer.shown) == ["<b>0</b>", "<b>1</b>"]
    answer = kernel.run("%%rank 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert [set(data) for data in answer.shown] == [{"image/png", "text/plain"}] and "[1]" in answer.text
    answer = kernel.run("%%rank 0\nfrom IPython.display import HTML, display\ndisplay(HTML('<i>x</i>'))")
    assert [data["text/html"] for data in answer.shown] == ["<i>x</i>"]


def test_an_interrupt_of_the_kernel_reaches_all_ranks(kernel):
    kernel.run("kept = 3")
    message = kernel.begin("import time\nif rank: dist.barrier()\ntime.sleep(600)")
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    answer = kernel.end(message)
    assert answer.status == "error" and len(answer.errors) == 1
    shown = "\n".join(answer.errors[0]["traceback"])
    assert "rank 0 was at In[" in shown and "rank 1 was at In[" in shown and "dist.barrier()" in shown
    assert sorted(kernel.run("kept").text.splitlines()) == ["[0] 3", "[1] 3"]


def test_magics_report_errors_in_one_line(kernel):
    for source, words in (
        ("%dist_init -n two", "invalid int value"), ("%%rank 5\n1", "rank 5 does not exist"),
        ("%%rank x\n1", "not a rank"), ("%dist_mode sometimes", "use on or off"),
        ("%dist_init -g a", "not a GPU number"),
    ):  # fmt: skip
        answer = kernel.run(source)
        said = answer.text + "".join("\n".join(error["traceback"]) for error in answer.errors)
        assert answer.status == "error" and words in said and "Traceback" not in said, said


def test_status_sync_and_mode(kernel):
    assert "all 2 ranks have reached this point" in kernel.run("%sync").text
    (status,) = kernel.run("%dist_status").shown
    assert status["text/html"].count("<tr>") == 3 and "idle" in status["text/plain"]
    assert "running already" in kernel.run("%dist_init -n 2 --device cpu").text
    kernel.run("%dist_mode off")
    assert kernel.run("'world' in globals()").shown == [{"text/plain": "False"}]
    kernel.run("%dist_mode on")


def test_a_notebook_sends_its_functions_and_classes_to_ranks(kernel):
    kernel.run("%%local\nimport paceline, torch\nclass Net(torch.nn.Linear):\n    pass\nscale = 3\n")
    kernel.run(
        "%%local\ndef job(net, k):\n    with paceline.init(device='cpu', announce=None) as world:\n"
        "        return world.rank * scale + k, type(net)(2, 1)\n"
    )
    answer = kernel.run(
        "%%local\nvalues = paceline.run_ranks(job, 2, (Net(1, 1), 10), timeout_s=60)\n"
        "print([value for value, _ in values], type(values[0][1]) is Net)"
    )
    assert answer.text == "[10, 13] True\n", answer.text


SEED = [
    "%load_ext paceline",
    "%dist_init --num-processes 2 --device cpu",
    "rank, world_size, gpu_id, device",
    'get("ws"), get("rank"), get("grank"), get("lrank")',
    "class SimpleDistributedDataParallelism:\n"
    "    def __init__(self, model: torch.nn.Module):\n"
    "        self.model = model\n"
    "        for param in model.parameters():\n"
    "            rank0_param = param.data.clone()\n"
    "            dist.broadcast(rank0_param, src=0)\n"
    "            if not torch.equal(param.data, rank0_param):\n"
    "                raise ValueError(\n"
    '                    "Expected model parameters to be identical during `__init__`, but this is not true. "\n'
    '                    "Make sure to set the seeds before creating your model"\n'
    "                )\n"
    "    def sync_gradients(self):\n"
    "        for param in self.model.parameters():\n"
    "            if param.grad is not None:\n"
    "                dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)\n"
    "                param.grad /= dist.get_world_size()\n"
    "    def __call__(self, *args, **kwargs):\n"
    "        return self.model(*args, **kwargs)\n"
    "    def train(self):\n"
    "        self.model.train()\n"
    "    def eval(self):\n"
    "        self.model.eval()\n",
    "from torch import nn\ndef make_model():\n"
    "    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)",
    "%%rank [0]\nset_seed(43)",
    "%%rank [1]\nset_seed(44)",
    "FAILS:model = SimpleDistributedDataParallelism(make_model())",
    "set_seed(43)\nmodel = make_model()\nddp_model = SimpleDistributedDataParallelism(model)",
    "dataset = [(torch.randn(1, 8), torch.tensor([i % 2])) for i in range(8)]\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    'x, y = dataset[get("rank")]\n'
    "torch.nn.functional.cross_entropy(ddp_model(x), y).backward()\nddp_model.sync_gradients()\noptimizer.step()\n"
    "optimizer.zero_grad()",
    "SimpleDistributedDataParallelism(model)\nprint('identical')",
    "ds_length_per_rank = len(dataset) // world_size\nrank = get('rank')\nstart = rank * ds_length_per_rank\n"
    "train_shard = dataset[start : start + ds_length_per_rank]\nlen(train_shard)",
    "%sync",
    "%dist_shutdown",
]


@pytest.mark.slow
def test_the_notebook_of_document_001_runs(runtime, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("IPYTHONDIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    cells = [nbformat.v4.new_code_cell(source.removeprefix("FAILS:")) for source in SEED]
    for cell, source in zip(cells, SEED, strict=True):
        if source.startswith("FAILS:"):
            cell.metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    said = ["".join(out.get("text", "") for out in cell.outputs) for cell in cells]
    assert sorted(said[2].splitlines()) == [
        "[0] (0, 2, None, device(type='cpu'))",
        "[1] (1, 2, None, device(type='cpu'))",
    ]
    assert sorted(said[3].splitlines()) == ["[0] (2, 0, 0, 0)", "[1] (2, 1, 1, 1)"]
    failed = SEED.index(next(source for source in SEED if source.startswith("FAILS:")))
    errors = [out for out in cells[failed].outputs if out.output_type == "error"]
    assert len(errors) == 1 and "rank 1 of 2 failed: ValueError: Expected model parameters" in errors[0].evalue
    assert sorted(said[-4].splitlines()) == ["[0] identical", "[1] identical"]


def check_death(folder: Path, reset: bool = False) -> None:
    kernel = Kernel(folder)
    try:
        kernel.run("%load_ext paceline")
        kernel.run("%dist_init -n 2 --device cpu")
        if reset:
            kernel.run("gone = 1")
            assert kernel.run("%dist_reset").status == "ok"
            assert "NameError" in kernel.run("gone").errors[0]["evalue"]
        message = kernel.begin("import time\nprint('now')\nwhile True: time.sleep(0.01)")
        while "now" not in str(kernel.client.get_iopub_msg(timeout=60)["content"]) and message:
            pass
        left = [kernel.pid, *(process.pid for process in descendants(kernel.pid))]
        assert len(find_ranks(kernel.pid)) == 2 and len(left) >= 4
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not any(_lives(pid) for pid in left))
    finally:
        kernel.close()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_killed_kernel_leaves_no_process_also_after_a_reset(runtime):
    check_death(runtime, reset=True)


@pytest.mark.slow
def test_no_kernel_leaves_a_process(runtime):
    for _ in range(19):
        check_death(runtime)
