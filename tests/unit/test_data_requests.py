"""Data requests that are refused before torch is imported, and downloads from the hub."""

import io
import socket
import subprocess
import sys
import threading
import types
import urllib.request

import pytest

from paceline.errors import ConfigError
from paceline.workloads import data
from paceline.workloads.data import DATA_NAMES, DataRequest, check_request, parse_data
from paceline.workloads.data.sets import load_data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mnist", ("mnist", None)),
        ("cifar10:some/folder", ("cifar10", "some/folder")),
        ("text:a:b.txt", ("text", "a:b.txt")),
        ("mrpc:", ("mrpc", None)),
        ("synthetic", ("synthetic", None)),
        ("synthetic:pairs", ("synthetic:pairs", None)),
    ],
)
def test_names_and_paths(text, expected):
    assert parse_data(text) == expected


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("cifar-10", "did you mean cifar10"),
        ("synthetic:image", "did you mean synthetic:images"),
        ("zzz:x", ""),
        ("", ""),
    ],
)
def test_unknown_names_suggest_the_nearest(text, near):
    with pytest.raises(ConfigError, match=near or None) as caught:
        parse_data(text)
    assert caught.value.code == "unknown"


@pytest.mark.parametrize(
    ("fields", "code", "option"),
    [
        ({"name": "cifar10", "context": 8}, "unused", "--context"),
        ({"name": "mnist", "tokenizer": "bytes"}, "unused", "--tokenizer"),
        ({"name": "mrpc", "augment": True}, "unused", "--augment"),
        ({"name": "synthetic:images", "augment": True}, "unused", "--augment"),
        ({"name": "mnist", "cutout": 8}, "unused", "--cutout 8"),
        ({"name": "cifar10", "augment": False, "cutout": 8}, "unused", "--cutout 8"),
        ({"name": "synthetic", "path": "x"}, "unused", "generated"),
        ({"name": "mnist", "path": "not/there"}, "no-files", "mnist: not/there does not exist: download train-images"),
        ({"name": "text"}, "no-files", "text:PATH"),
        ({"name": "text", "path": "not/there"}, "no-files", "not/there does not exist"),
        ({"name": "mrpc", "tokenizer": "not/there"}, "tokenizer", "--tokenizer not/there"),
    ],
)
def test_contradictions_are_refused(fields, code, option):
    with pytest.raises(ConfigError, match=option) as caught:
        check_request(DataRequest(**fields))
    assert caught.value.code == code


@pytest.mark.parametrize("name", [name for name in DATA_NAMES if name.startswith("synthetic")])
def test_possible_requests_are_accepted(name):
    assert parse_data(name) == (name, None)
    check_request(DataRequest(name=name, samples=5))


def test_a_folder_without_the_files_lists_its_content(tmp_path):
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(ConfigError, match=r"notes.md.*cifar-10-python"):
        check_request(DataRequest(name="cifar10", path=str(tmp_path)))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"train-labels\[-.\]idx1-ubyte"):
        check_request(DataRequest(name="mnist", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"notes.md .*msr_"):
        check_request(DataRequest(name="mrpc", path=str(tmp_path / "notes.md")))
    with pytest.raises(ConfigError, match=r"notes.md, train-images.*\.txt"):
        check_request(DataRequest(name="text", path=str(tmp_path)))


def test_requests_load_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from paceline.workloads.data import DataRequest, check_request\n"
        "check_request(DataRequest(name='synthetic:pairs'))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def fake_hub(monkeypatch):
    """The hub's library without a local copy and with `endpoint` as its server."""

    def install(endpoint, download):
        def snapshot_download(*, local_files_only=False, **wanted):
            if local_files_only:
                raise FileNotFoundError("no copy")
            return download(wanted)

        module = types.SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", types.SimpleNamespace(ENDPOINT=endpoint))
        monkeypatch.setattr(data, "find_spec", lambda name: name)
        monkeypatch.setattr(data, "_TIMEOUT_S", 0.3)

    return install


@pytest.mark.parametrize(
    ("name", "source", "files"),
    [
        ("mnist", "ylecun/mnist", "train-images-idx3-ubyte.gz"),
        ("fashion-mnist", "zalando-datasets/fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "uoft-cs/cifar10", "cifar-10-python.tar.gz"),
        ("mrpc", "nyu-mll/glue", "msr_paraphrase_train.txt"),
    ],
)
def test_without_a_hub_the_user_is_told_what_to_get(monkeypatch, name, source, files):
    monkeypatch.setattr(data, "find_spec", lambda module: None)
    with pytest.raises(ConfigError) as caught:
        check_request(DataRequest(name=name))
    message = str(caught.value)
    assert source in message and files in message and f"pass {name}:PATH" in message and "\n" not in message


def test_a_lookup_of_the_hub_that_takes_forever_is_not_waited_for(fake_hub, monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_: done.wait(100))
    fake_hub("http://unused", None)
    with pytest.raises(ConfigError, match="Timeout") as caught:
        data.load_from_hub("mnist")
    assert caught.value.code == "hub" and not done.is_set()
    done.set()


def test_a_hub_that_does_not_answer_is_not_waited_for(fake_hub):
    asked = []
    with socket.socket() as silent:  # accepts connections but never answers, like a firewall
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        fake_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", asked.append)
        with pytest.raises(ConfigError) as caught:
            load_data(DataRequest(name="mnist"), "train")
    assert caught.value.code == "hub" and not asked


def test_files_of_the_hub_go_through_the_same_readers(fake_hub, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO())
    asked = []

    def download(wanted):
        asked.append(wanted)
        (tmp_path / "mrpc").mkdir(exist_ok=True)
        for split in ("train", "test"):
            table = pyarrow.table({"sentence1": ["a"], "sentence2": ["b"], "label": [1], "idx": [0]})
            parquet.write_table(table, tmp_path / f"mrpc/{split}-00000-of-00001.parquet")
        return str(tmp_path)

    fake_hub("http://unused", download)
    assert load_data(DataRequest(name="mrpc"), "test").inputs.tolist() == [[97, 257, 98, 258]]
    assert asked == [{"repo_id": "nyu-mll/glue", "repo_type": "dataset", "allow_patterns": "mrpc/*.parquet"}]


def test_a_partial_copy_is_completed(fake_hub, tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist/train-00000-of-00001.parquet").write_bytes(b"")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO())
    monkeypatch.setattr("paceline.workloads.data.find_spec", lambda name: name)
    calls = []
    fake_hub("http://unused", None)

    def snapshot_download(*, local_files_only=False, **wanted):
        calls.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(sys.modules["huggingface_hub"], "snapshot_download", snapshot_download)
    assert data.load_from_hub("mnist") == tmp_path / "mnist" and calls == [True, False]
    (tmp_path / "mnist/test-00000-of-00001.parquet").write_bytes(b"")
    assert data.load_from_hub("mnist") == tmp_path / "mnist" and calls == [True, False, True]
