"""The sets on the Hugging Face hub: their names there, fetching their files, and what to say without a hub.

The files come as parquet and go through the same readers as files that a user passes; parsing is not here.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError
from paceline.workloads.data.checks import brief
from paceline.workloads.data.files import SPLITS, find_files

__all__ = ["explain_source", "load_from_hub"]

# The hub's data set, the folder in it, and the files as their authors give them out.
_SOURCES = {
    "mnist": ("ylecun/mnist", "mnist", "train-images-idx3-ubyte.gz and its three companions"),
    "fashion-mnist": (
        "zalando-datasets/fashion_mnist", "fashion_mnist", "train-images-idx3-ubyte.gz and its three companions",
    ),
    "cifar10": ("uoft-cs/cifar10", "plain_text", "cifar-10-python.tar.gz"),
    "mrpc": ("nyu-mll/glue", "mrpc", "msr_paraphrase_train.txt and msr_paraphrase_test.txt"),
}  # fmt: skip
_TIMEOUT_S = 5.0


def explain_source(name: str) -> str:
    """Why a set without a path cannot be fetched, and what to do instead; empty where it can be tried."""
    if name not in _SOURCES:
        return f"{name} needs a path: give {name}:PATH, a file or a folder of .txt files"
    lacking = [module for module in ("huggingface_hub", "pyarrow") if find_spec(module) is None]
    if not lacking:
        return ""
    return f"{name} without a path comes from the hub, which needs {' and '.join(lacking)}: {_advise(name)}"


def load_from_hub(name: str) -> Path:
    """The folder with a set's files: the local copy where there is one, else downloaded."""
    if why := explain_source(name):
        raise ConfigError(why)
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT

    repo, folder, _ = _SOURCES[name]
    wanted = {"repo_id": repo, "repo_type": "dataset", "allow_patterns": f"{folder}/*.parquet"}
    try:
        copy = Path(snapshot_download(**wanted, local_files_only=True)) / folder
        for split in SPLITS:
            find_files(name, copy, split)
        return copy
    except (OSError, ValueError):
        pass  # no copy, or the half of one (the library's own errors are both): fetch it
    try:
        _knock(ENDPOINT)
        return Path(snapshot_download(**wanted)) / folder
    except Exception as error:
        raise ConfigError(f"{name} cannot be fetched from the hub ({brief(error)}): {_advise(name)}") from error


def _knock(address: str) -> None:
    """Raise if a server does not answer soon: the hub's own library waits for minutes on one that is silent."""
    troubles: list[Exception] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # whatever it says, it is there
        except Exception as error:
            troubles.append(error)

    # In a thread, for looking up a name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _TIMEOUT_S)
    if thread.is_alive() or troubles:
        raise TimeoutError(str(troubles[0]) if troubles else f"no answer from {address} in {2 * _TIMEOUT_S} s")


def _advise(name: str) -> str:
    repo, folder, files = _SOURCES[name]
    return f"get {files}, or the parquet files of {repo} ({folder}), on this machine and pass {name}:FOLDER"
