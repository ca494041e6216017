"""Checkpoints of a run: saved in the background, whole or not at all, and loaded only where every bit is right.

One process saves (rank 0); the state of other ranks is handed to it. What a state holds does not belong here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.errors import ConfigError, RecordError
from paceline.training.packing import pack_state, unpack_state
from paceline.training.sealing import remove_folder, remove_leftovers, save_folder, verify_folder
from paceline.training.tensorfiles import TensorBuffer, load_tensors
from paceline.training.weights import check_fingerprint, fingerprint, plain_names, split_tied
from paceline.units import format_bytes

__all__ = ["CheckpointStore", "Loaded", "load_checkpoint", "verify_checkpoint"]

MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "state.safetensors", "state.json"
_FILES = (MODEL_FILE, TENSORS_FILE, STATE_FILE)
_NAME = re.compile(r"step-(\d{8,})")
# Nice, not the nicest: at 19 a save on busy cores took longer than the time to the next one, which then waited for it.
_PRIORITY = 10
_MANIFEST_BYTES = 4096  # more than it has; and a file system rounds up


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, on the CPU. `refused` says why newer ones were passed over, newest first."""

    step: int
    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]
    path: Path
    fingerprint: dict[str, str]
    refused: list[str] = field(default_factory=list)


class CheckpointStore:
    """The checkpoints of one run: `folder/step-00000120/` and so on, of which the newest `keep` stay.

    `save` copies the state to host memory and returns; a thread of low priority writes. Only one store may save into
    a folder; any number may load. Leaving the `with` block waits for the last save.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: at least 1 checkpoint must stay")
        self.folder = Path(folder)
        self.keep = keep
        self._model_buffer, self._state_buffer = TensorBuffer(), TensorBuffer()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._current: int | None = None  # the step that this store loaded or saved last
        self._refused: set[int] = set()  # steps that this store found damaged
        self._is_clean = False

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._writer is not None:  # the error that is under way matters more than one of the writer
            self._writer.join()

    def find(self) -> list[int]:
        """The steps of the checkpoints that are there, newest first."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def remove_leftovers(self) -> None:
        """Remove what an interrupted save left. For the process that saves; the first `save` does it as well."""
        self.wait()
        remove_leftovers(self.folder)
        self._is_clean = True

    def save(
        self, step: int, model_state: Mapping[str, torch.Tensor], state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint of this step; returns when the tensors are copied, or their copies are queued on the GPU.

        Waits for the save before it, and raises its error. `state` and `meta` are nested as `pack_state` takes them,
        `meta` without tensors: the position in the data, the world size and what else a person may want to read.
        """
        self.wait()
        if step == self._current:
            return  # one step has one state
        self._check_order(step)
        kept, aliases = split_tied(plain_names(model_state))
        tensors, structure = pack_state(dict(state))
        meta_tensors, meta_structure = pack_state(dict(meta))
        if meta_tensors:
            raise ConfigError(f"meta holds the tensor {next(iter(meta_tensors))!r}: put tensors into the state")
        document = {
            "step": step, "meta": meta_structure, "model": fingerprint(model_state), "aliases": aliases,
            "state": structure,
        }  # fmt: skip
        files: dict[str, bytes | memoryview] = {
            STATE_FILE: json.dumps(document, allow_nan=False).encode(),
            MODEL_FILE: self._model_buffer.fill(kept, {**aliases, "format": "pt"}),
            TENSORS_FILE: self._state_buffer.fill(tensors, {}),
        }
        needed_bytes = sum(len(data) for data in files.values()) + _MANIFEST_BYTES
        with _explained(self.path(step), needed_bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < needed_bytes:
                raise OSError(None, "the disk is too full")
        if not self._is_clean:
            self.remove_leftovers()
        # Not a daemon: a program that ends, even by an error, ends after the checkpoint is there.
        self._writer = threading.Thread(target=self._write, args=(step, files, needed_bytes), name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Wait until the last save is on disk; raises its error, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load_latest(self, expected: Mapping[str, str] | None = None) -> Loaded | None:
        """The newest checkpoint that is whole; None where there are none.

        `expected` is the `fingerprint` of the model that shall take the weights. RecordError where all are damaged: a
        run must not start anew by itself then.
        """
        self.wait()
        refused: list[str] = []
        for step in (steps := self.find()):
            try:
                loaded = load_checkpoint(self.path(step))
                if loaded.step != step:
                    raise RecordError(f"checkpoint {loaded.path.name} is damaged: it is of step {loaded.step}")
            except RecordError as error:
                refused.append(f"{error}; the one before it is used")
                self._refused.add(step)
                continue
            if expected is not None:
                check_fingerprint(loaded.fingerprint, expected, f"checkpoint {loaded.path}")
            self._current = step
            loaded.refused.extend(refused)
            return loaded
        if steps:
            first = refused[0].removesuffix("; the one before it is used")
            raise RecordError(
                f"no checkpoint in {self.folder} is whole, {len(steps)} are there ({first}): "
                "restore one, or remove them to start anew"
            )
        return None

    def _check_order(self, step: int) -> None:
        """A run goes forward: what is there of this step or a later one belongs to a run that did not resume here."""
        if step < 0:
            raise ConfigError(f"step is {step}: steps count from 0")
        later = [there for there in self.find() if there >= step and there not in self._refused]
        if later:
            raise ConfigError(
                f"{self.folder} holds step {later[0]} and step {step} is to be saved: "
                "resume from what is there, remove it, or choose another folder"
            )

    def _write(self, step: int, files: Mapping[str, bytes | memoryview], needed_bytes: int) -> None:
        try:
            if sys.platform == "linux":  # elsewhere a priority belongs to the process
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
            self._model_buffer.synchronize()
            self._state_buffer.synchronize()
            with _explained(self.path(step), needed_bytes):
                save_folder(self.path(step), files)
                self._current = step
                self._refused.discard(step)
                stay = [there for there in self.find() if there not in self._refused][: self.keep]
                for there in self.find():
                    if there not in stay:
                        remove_folder(self.path(there))
        except Exception as error:
            self._error = error
            if self._current != step:
                self._refused.add(step)  # whatever is there of it is not to be relied on


@contextlib.contextmanager
def _explained(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turn an OSError of saving into one line that says what to do."""
    try:
        yield
    except OSError as error:
        try:
            free = format_bytes(shutil.disk_usage(path.parent).free)
        except OSError:
            free = "an unknown amount"
        raise RecordError(
            f"cannot save checkpoint {path}: {error.strerror}; it needs {format_bytes(needed_bytes)} and {free} is "
            "free: make room, keep fewer, or choose another folder"
        ) from None


def verify_checkpoint(path: str | Path) -> None:
    """Compare all bytes of a checkpoint with its manifest; RecordError says what differs."""
    path = Path(path)
    with _damaged(path):
        verify_folder(path, _FILES)


def load_checkpoint(path: str | Path) -> Loaded:
    """Verify a checkpoint and read it; RecordError where anything is wrong with it."""
    path = Path(path)
    verify_checkpoint(path)
    with _damaged(path):
        try:
            document = json.loads((path / STATE_FILE).read_bytes())
            model = load_tensors(path / MODEL_FILE)
            tensors = load_tensors(path / TENSORS_FILE)
            model = {name: model[document["aliases"].get(name, name)] for name in document["model"]}
            if fingerprint(model) != document["model"]:
                raise RecordError(f"{MODEL_FILE} holds other tensors than {STATE_FILE} says")
            return Loaded(
                step=document["step"],
                model=model,
                state=unpack_state(tensors, document["state"]),
                meta=unpack_state({}, document["meta"]),
                path=path,
                fingerprint=document["model"],
            )
        except OSError as error:
            raise RecordError(f"{STATE_FILE} cannot be read: {error.strerror}") from None
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecordError(f"{STATE_FILE} is not the state of a run: {type(error).__name__} {error}") from None


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except RecordError as error:
        raise RecordError(f"checkpoint {path.name} is damaged: {error}") from None
