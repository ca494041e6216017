"""What data can be asked for, and what is refused before torch is imported."""

import io
import socket
import subprocess
import sys
import threading
import time
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
    ("text", "message"),
    [
        ("cifar-10", "data 'cifar-10' is unknown: did you mean cifar10"),
        ("synthetic:image", "did you mean synthetic:images"),
        ("zzz:x", "data 'zzz' is unknown: known are mnist, fashion-mnist"),
        ("", "data '' is unknown"),
    ],
)
def test_unknown_names_are_told_the_nearest(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_data(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "cifar10", "context": 8}, "cifar10 is not text"),
        ({"name": "mnist", "tokenizer": "bytes"}, "mnist is not text"),
        ({"name": "mrpc", "augment": True}, "mrpc cannot be augmented: that is for mnist"),
        ({"name": "synthetic:images", "augment": True}, "cannot be augmented"),
        ({"name": "synthetic", "path": "x"}, "synthetic data is generated"),
        ({"name": "mnist", "path": "not/there"}, "mnist: not/there does not exist: give the folder with train-images"),
        ({"name": "text"}, "text needs a path: give text:PATH"),
        ({"name": "text", "path": "not/there"}, "text: not/there does not exist"),
        ({"name": "mrpc", "tokenizer": "not/there"}, "tokenizer 'not/there' is not a folder: needed is auto, bytes"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check_request(DataRequest(**fields))


@pytest.mark.parametrize("name", [name for name in DATA_NAMES if name.startswith("synthetic")])
def test_what_can_be_made_is_accepted(name):
    assert parse_data(name) == (name, None)
    check_request(DataRequest(name=name, samples=5))


def test_a_folder_with_other_files_is_told_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(ConfigError, match=r"no train split in .*, which holds notes.md: needed is data_batch_1 and .*"):
        check_request(DataRequest(name="cifar10", path=str(tmp_path)))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"lacks train-labels\[-.\]idx1-ubyte"):
        check_request(DataRequest(name="mnist", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"notes.md is a file: give the folder with"):
        check_request(DataRequest(name="mrpc", path=str(tmp_path / "notes.md")))
    with pytest.raises(ConfigError, match=r"no .txt file in"):
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
    """A hub's library that has no copy, and whose server is `endpoint`."""

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
    assert source in message and files in message and f"pass {name}:FOLDER" in message and "\n" not in message


def test_a_lookup_of_the_hub_that_takes_forever_is_not_waited_for(fake_hub, monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_: done.wait(30))
    fake_hub("http://unused", None)
    begin_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"mnist cannot be fetched from the hub .*Timeout"):
        data.load_from_hub("mnist")
    took_s = time.monotonic() - begin_s
    done.set()
    assert took_s < 10


def test_a_hub_that_does_not_answer_is_not_waited_for(fake_hub):
    asked = []
    with socket.socket() as silent:  # takes calls and says nothing, as behind a firewall
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        fake_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", asked.append)
        with pytest.raises(ConfigError, match=r"mnist cannot be fetched from the hub \(.*\): get train-images"):
            load_data(DataRequest(name="mnist"), "train")
    assert not asked


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


def test_half_a_copy_is_completed(fake_hub, tmp_path, monkeypatch):
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
