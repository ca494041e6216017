"""Observes the ranks of a user's unmodified program: times all steps and traces a few.

`paceline.autoload` calls `attach` if PACELINE_ATTACH is set. A step ends with its optimizer step (on a GPU, when the
GPU has finished that). torch's profiler records a few steps in detail. The program's messages pass through no extra
hook, so the program's results do not change. Each rank writes its own files, sends nothing, and never makes the program
wait for its GPU. This module needs only torch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import multiprocessing.util
import os
import platform
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.runtime.ranks.moments import between_s, is_past, mark
from paceline.torch_internals import DataLoaderIterator, is_delivered, is_profiling, register_comm_hook

_MOST_RECORDED = 16  # maximum number of traced ranks
_FINAL_BUCKETS_STEP = 4  # step after which wrappers have their final buckets
_WRITE_EVERY_S = 0.25
_STOP_S = 60.0  # timeout for the GPU's last steps when stopping the program
_CLOSE_S = 5.0  # the same timeout when the program exits by itself
_POLL_S = 1e-3
_MOST_EXITS = 3  # number of times that a program may catch the SystemExit raised for `--stop`
_LEAST_TOKENS = 8  # minimum length of integer rows to count as sequences
_MOST_BUFFER_BYTES = 64 * 2**20  # larger buffers are not checked for changes
_OLDEST = 2  # garbage collector generation to time; collections of younger ones are short
# Steps between the end of the first recording and a second one, in case another process disturbs one of them.
_APART = 12
# Steps are recorded again if two blocks of steps in a row take this many times as long as the first block after the
# last recording, or as short; at most so often. All ranks see the same change, because they wait for each other. They
# start some steps later, in case a GPU has finished more steps on one rank than on another.
_CHANGE, _BLOCK, _MOST_WINDOWS, _LATER = 1.25, 16, 5, 4
_LEAST_AGAIN = 4  # fewest steps of a later recording
# DataLoader options to report, and their names in the loader's iterators.
_LOADER = {"num_workers": "num_workers", "are_workers_persistent": "persistent_workers"}
# Attributes for bucket sizes: in our wrapper, and in several versions of torch's.
_BUCKET_ATTRIBUTES = ("_options", "_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_default")


class Settings(NamedTuple):
    """What to observe: at least `steps` steps (0: all) and `least_s` seconds, tracing `record` of the steps.

    With `every`, times are written every `every` steps and four times a second, not only at the end. `race` compares
    plans: from step `first` onward, the program runs `turns` of `length` steps each. A turn is an index into `plans`,
    a list of caps in MiB, or None for the program's own buckets.
    """

    folder: str
    steps: int
    least_s: float = 0.0
    warmup: int = 0
    record: int = 0
    every: int = 0
    stop: bool = False
    race: dict[str, Any] | None = None


def attach() -> None:
    """Observe this process with the settings in PACELINE_ATTACH."""
    Observer(Settings(**json.loads(os.environ["PACELINE_ATTACH"]))).install()


class _LaunchedStep(NamedTuple):
    """A step that the host has launched, with device timestamps. `spans` cover data loaders, evaluation and
    `torch.save`, `collected_s` is host time in garbage collection, and `elements` the size of its batches."""

    number: int
    begin: Any
    end: Any
    spans: list[tuple[str, Any, Any]]
    host_s: float
    collected_s: float
    elements: int


class Observer:
    """Observes the steps of this process: their number, duration, data-loading time and host time.

    On a GPU, duration and data loading time are measured on the GPU: data loading time is GPU idle time while the host
    is in a data loader, so loading that overlaps GPU work does not count. All optimizers that step before one of them
    steps again belong to one step, and the last of them ends it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patches = contextlib.ExitStack()
        self._wrapped: list[weakref.ref[Any]] = []
        self._seen: list[int] = []
        self._last = 0  # ID of the optimizer that ends a step
        self._launched: deque[_LaunchedStep] = deque()  # steps that the device may not have finished
        self._steps: list[tuple[float, ...]] = []
        self._num_steps = 0
        self._num_exits = 0
        self._pid = 0
        self._thread = 0
        self._device = torch.device("cpu")
        self._begin: Any = 0.0
        self._spans: list[tuple[str, Any, Any]] = []
        self._inside = ""  # kind of the open span; `_opened` is its start
        self._opened: Any = 0.0
        self._collected_s = self._collecting_s = 0.0
        self._elements = 0  # size of this step's batches
        self._padded: list[float] = []
        self._roots: set[int] = set()  # IDs of wrappers and their modules
        self._buffers: list[tuple[Any, Any]] = []  # buffers and their early values
        self._used: dict[str, float] = {}
        self._loader: dict[str, Any] = {}
        self._fetched_s = [0.0, 0.0]  # seconds of fetches that waited for a worker, and of those with a batch ready
        self._opened_s = self._end_s = 0.0
        self._written_s = 0.0
        self._profiler: Any = None
        self._range: Any = None  # profiler range of the current step
        self._first = 0  # step after which recording began
        self._usual_s = 0.0  # median step of the first block after the last recording
        self._block_s: list[float] = []  # steps since the last full block
        self._blocks_s: deque[list[float]] = deque(maxlen=3)  # the last blocks since the last recording
        self._again = 0  # step after which to record again
        self._since = 0  # first step after a lasting change
        self._head: dict[str, Any] = {}
        self._tail: dict[str, Any] = {}
        self._path = Path(settings.folder)

    def install(self) -> None:
        (self._path / "seen").touch()
        ours = sys.modules.get("paceline.parallel.ddp")  # loaded if the program uses our wrapper instead of torch's
        for kind in (torch.nn.parallel.DistributedDataParallel, getattr(ours, "DDP", None)):
            if kind is not None:
                self._patch(kind, "__init__", self._note_wrapper)
        self._patch(DataLoaderIterator, "__next__", self._time_data)
        self._patch(torch.nn.Module, "train", self._time_evaluation)
        self._patch(torch, "save", self._time_saving)
        gc.callbacks.append(self._time_collection)
        self._patches.callback(gc.callbacks.remove, self._time_collection)
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)

    def _patch(self, kind: Any, name: str, build: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a method by `build(original)` until observation ends."""
        original = getattr(kind, name)
        setattr(kind, name, functools.wraps(original)(build(original)))
        self._patches.callback(setattr, kind, name, original)

    def _note_wrapper(self, original: Any) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            wrapper = args[0] if args else kwargs["self"]
            self._wrapped.append(weakref.ref(wrapper))
            self._roots.update((id(wrapper), id(getattr(wrapper, "module", None))))

        return call

    def _time_data(self, original: Any) -> Callable[[Any], Any]:
        def call(iterator: Any) -> Any:
            if not self._open_span("data"):
                return original(iterator)
            is_ready, begin_s = is_delivered(iterator), time.perf_counter()
            try:
                batch = original(iterator)
            finally:
                self._fetched_s[is_ready] += time.perf_counter() - begin_s
                self._close_span()
            # Read now: the iterator may not exist at the end of the program.
            self._loader = {name: vars(iterator).get(f"_{key}", 0) for name, key in _LOADER.items()}
            with contextlib.suppress(Exception):  # a batch may be of any type
                self._note_batch(batch)
            return batch

        return call

    def _note_batch(self, batch: Any) -> None:
        tensors = list(itertools.islice(_list_tensors(batch), 8))
        self._elements += max((one.numel() for one in tensors), default=0)
        if self._range is not None:  # only in recorded steps: their time does not count
            self._padded += itertools.islice(filter(None, map(_find_padding, tensors)), 1)

    def _time_evaluation(self, original: Any) -> Callable[..., Any]:
        """Time the span from `model.eval()` to `model.train()`."""

        def call(module: Any, mode: bool = True) -> Any:
            if id(module) in self._roots:
                if not mode:
                    self._open_span("evaluation")
                elif self._inside == "evaluation":
                    self._close_span()
            return original(module, mode)

        return call

    def _time_saving(self, original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_evaluating = self._inside == "evaluation" and self._is_own_thread()
            if is_evaluating:
                self._close_span()
            is_open = self._open_span("checkpoint")
            try:
                return original(*args, **kwargs)
            finally:
                if is_open:
                    self._close_span()
                if is_evaluating:
                    self._open_span("evaluation")

        return call

    def _time_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < _OLDEST or self._inside:
            return
        now_s = time.perf_counter()
        if phase == "start":
            self._collecting_s = now_s
        elif self._collecting_s:
            self._collected_s += now_s - self._collecting_s
            self._collecting_s = 0.0

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _open_span(self, name: str) -> bool:
        """Open a span and return True, unless another is open (spans do not overlap) or this is a side thread, which
        does not delay the step."""
        if self._inside or not self._is_own_thread() or _is_captured():
            return False
        self._inside, self._opened = name, mark(self._device)
        return True

    def _close_span(self) -> None:
        self._spans.append((self._inside, self._opened, mark(self._device)))
        self._inside = ""

    def _before_optimizer(self, *_: Any) -> None:
        # Stop here, not at the end of a step, where the optimizer's range is still open.
        if self._profiler is not None and self._range is None and not self._tail and not _is_captured():
            try:
                self._stop_recording()
            except Exception as error:
                self._abort(error)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        try:
            if not self._tail:
                self._note_optimizer(optimizer)
            elif "error" in self._tail and id(optimizer) == self._last:
                self._num_steps += 1
        except Exception as error:
            self._abort(error)
        # Stop a program after `--stop` steps even if the observer has failed.
        if self._settings.stop and self._tail and self._num_steps >= self._settings.steps:
            self._exit()

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if _is_captured():
            return
        end = mark(self._device)
        now_s = time.perf_counter()
        self._inside = ""  # a program may train in evaluation mode
        if not self._num_steps and id(optimizer) not in self._seen:
            self._open(optimizer)
            self._seen.append(id(optimizer))
        else:
            self._last = self._last or self._seen[-1]
            if id(optimizer) != self._last:
                return
            if self._are_all_taken():
                self._finish()
                return
            self._num_steps = max(1, self._num_steps) + 1
            host_s, collected_s, elements = now_s - self._end_s, self._collected_s, self._elements
            step = _LaunchedStep(self._num_steps, self._begin, end, self._spans, host_s, collected_s, elements)
            self._launched.append(step)
            self._advance()
        # The observer's own work after a step, such as starting a profile, is not part of any step.
        self._begin = mark(self._device)
        self._end_s = time.perf_counter()
        self._spans = []
        self._collected_s = 0.0
        self._elements = 0

    def _open(self, optimizer: Optimizer) -> None:
        """Determine the rank and its file at the first optimizer step, which shows that this process trains."""
        if self._head:
            return
        is_open = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_open else int(os.environ.get("RANK") or 0)
        devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
        self._device = next((one for one in devices if one.type == "cuda"), (devices or [self._device])[0])
        self._opened_s = time.perf_counter()
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._head = {
            "rank": rank,
            "world_size": dist.get_world_size() if is_open else int(os.environ.get("WORLD_SIZE") or 1),
            "backend": dist.get_backend() if is_open else "none",
            "device": self._device.type,
            "threads": torch.get_num_threads(),
            "host": platform.node(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "optimizer": _describe_optimizer(optimizer),
        }
        self._path /= f"rank-{rank}-{self._pid}.jsonl"
        # Forked processes do not run atexit handlers, and torch.multiprocessing's only run multiprocessing finalizers.
        atexit.register(self._close)
        multiprocessing.util.Finalize(None, self._close, exitpriority=1)

    def _advance(self) -> None:
        """Do the observer's work after a step."""
        settings = self._settings
        number = self._num_steps
        self._read_finished()
        if number == _FINAL_BUCKETS_STEP:  # read now: the wrappers may not exist at the end of the program
            wrappers = self._list_wrappers()
            self._head["wrappers"] = list(map(_describe, wrappers))
            self._head["options"] = _describe_options(wrappers[0]) if wrappers else {}
            self._buffers = _copy_buffers(wrappers)
            self._used, self._fetched_s = _read_usage(), [0.0, 0.0]
        if self._profiler is not None:
            self._open_range()
        elif number == max(2, settings.warmup) or 0 < self._again <= number:
            self._start_recording()
        if settings.race is not None:
            self._take_turn(**settings.race)
        if settings.every and (number % settings.every == 0 or time.perf_counter() > self._written_s + _WRITE_EVERY_S):
            self._write({})
        if self._are_all_taken():
            self._finish(_STOP_S if settings.stop else 0.0)

    def _are_all_taken(self) -> bool:
        is_long = self._settings.least_s <= 0 or time.perf_counter() - self._opened_s >= self._settings.least_s
        return 0 < self._settings.steps <= self._num_steps and is_long

    def _read_finished(self, wait_s: float = 0.0) -> None:
        """Read the times of steps that the device has finished, waiting at most `wait_s` for the others."""
        until_s = time.monotonic() + wait_s
        while self._launched:
            step = self._launched[0]
            # Check all timestamps: a program may change streams within a step.
            moments = [step.begin, step.end, *(moment for _, *ends in step.spans for moment in ends)]
            while not all(map(is_past, moments)):
                if time.monotonic() >= until_s:
                    return
                time.sleep(_POLL_S)
            spent = dict.fromkeys(("data", "evaluation", "checkpoint"), 0.0)
            for name, *ends in step.spans:
                spent[name] += between_s(*ends)
            data_s, *paused = spent.values()
            times = between_s(step.begin, step.end), data_s, step.host_s, *paused, step.collected_s, step.elements
            self._steps.append((step.number, *times))
            self._launched.popleft()
            if self._head.get("windows"):
                self._find_change(step.number, times[0])

    def _find_change(self, number: int, step_s: float) -> None:
        """Look for a lasting change of the step time since the last recording. If there is one, record again."""
        windows = self._head["windows"]
        if number <= windows[-1][2] or self._again or len(windows) >= _MOST_WINDOWS:
            return
        self._block_s.append(step_s)
        if len(self._block_s) < _BLOCK:
            return
        self._blocks_s.append(self._block_s)
        self._block_s = []
        self._usual_s = self._usual_s or statistics.median(self._blocks_s[0])
        usual_s, last = self._usual_s, [statistics.median(block_s) for block_s in self._blocks_s]
        if len(last) == 3 and (min(last[1:]) > _CHANGE * usual_s or max(last[1:]) < usual_s / _CHANGE):
            steps_s = list(itertools.chain.from_iterable(self._blocks_s))
            between_s = math.sqrt(usual_s * last[2])
            # The split with the most usual steps before it and the most changed ones after it.
            sides = (1 if (step_s > between_s) == (usual_s > between_s) else -1 for step_s in steps_s)
            agreement = list(itertools.accumulate(sides, initial=0))
            self._since = number + 1 - len(steps_s) + agreement.index(max(agreement))
            self._again = number + _LATER

    def _take_turn(self, plans: Sequence[float | None], turns: Sequence[int], first: int, length: int) -> None:
        """Between two turns, record the buckets of the last turn and build those of the next."""
        turn, place = divmod(self._num_steps - first, length)
        if place or not 0 <= turn <= len(turns):
            return
        for wrapper in self._list_wrappers():
            if turn:
                self._head.setdefault("layouts", {})[str(turns[turn - 1])] = list_bucket_bytes(wrapper)
            if turn < len(turns):
                rebucket(wrapper, plans[turns[turn]])

    def _list_wrappers(self) -> list[Any]:
        return [wrapper for one in self._wrapped if (wrapper := one()) is not None]

    def _start_recording(self) -> None:
        self._again = 0
        if not self._settings.record or self._head["rank"] >= _MOST_RECORDED:
            return
        if is_profiling():  # a second profiler would stop the program's
            self._head["not_recorded"] = "the program runs torch's profiler itself"
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._head["device"] == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        profiler.start()
        self._profiler = profiler
        self._first = self._head["recording"] = self._num_steps
        self._open_range()
        if "windows" not in self._head:
            self._patch(profile, "start", self._yield_profiler)

    def _yield_profiler(self, original: Any) -> Callable[..., Any]:
        """Stop our recording when the program starts its own profiler."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._profiler is not None:
                self._stop_recording()
            return original(*args, **kwargs)

        return call

    def _open_range(self) -> None:
        """Close the profiler range of the last step; open one for the next step if it is recorded."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None
        if self._num_steps < self._first + self._settings.record:
            self._range = record_function(f"ProfilerStep#{self._num_steps}")
            self._range.__enter__()

    def _stop_recording(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._head["recording"] = 0
        windows = self._head.setdefault("windows", [])
        self._usual_s = 0.0
        self._block_s = []
        self._blocks_s.clear()
        if windows and self._num_steps - self._first < _LEAST_AGAIN:
            return  # the program ended: keep the earlier trace
        path = self._path.with_name(f"trace-{self._head['rank']}-{self._pid}-{len(windows)}.json")
        profiler.export_chrome_trace(str(path))
        # The last of these steps includes the time to write the file.
        windows.append([path.name, self._first + 1, self._num_steps + 1, self._since])
        if len(windows) == 1:
            self._again = self._num_steps + _APART

    def _write(self, more: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._head | more | {"steps": self._steps}) + "\n")
        self._steps = []
        self._written_s = time.perf_counter()

    def _finish(self, wait_s: float = 0.0) -> None:
        """Write the results once. If the GPU has not finished and `wait_s` is 0, a later step writes them.

        Hooks stay in place as no-ops, because torch is iterating over them right now.
        """
        if self._tail or os.getpid() != self._pid:
            return
        self._read_finished(wait_s)
        if self._launched and not wait_s:
            return
        self._tail["num_steps"] = self._num_steps
        if self._used:
            self._tail["used"] = {name: value - self._used[name] for name, value in _read_usage().items()}
            self._tail["padded"] = self._padded
            if self._loader:
                share = self._fetched_s[1] / max(1e-12, sum(self._fetched_s))
                self._tail["loader"] = self._loader | {"delivered_share": share}
            with contextlib.suppress(RuntimeError):  # the GPU may have failed
                self._tail["are_buffers_constant"] = all(torch.equal(one, early) for one, early in self._buffers)
            self._buffers = []
        if self._profiler is not None:
            self._stop_recording()
        self._end()

    def _close(self) -> None:
        try:
            self._finish(_CLOSE_S)
        except Exception as error:  # a failed GPU or a missing folder
            self._abort(error)

    def _abort(self, error: Exception) -> None:
        """Stop observing; the program continues."""
        self._tail["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        self._patches.close()
        self._write(self._tail)

    def _exit(self) -> None:
        self._num_exits += 1
        if self._num_exits > _MOST_EXITS:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)


def _is_captured() -> bool:
    """Whether a CUDA graph is being captured: a capture is not a step, and GPU events must not be queried during it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def rebucket(wrapper: Any, cap_mib: float | None) -> None:
    """Rebuild a wrapper's buckets between two steps with this cap; None restores the original cap.

    As in a new wrapper, the buckets are final from the second step onward.
    """
    known = vars(wrapper)
    own = known.setdefault("_own_buckets", {name: known[name] for name in _BUCKET_ATTRIBUTES if name in known})
    known.update(own)
    if "_options" in own:  # Paceline's wrapper
        if cap_mib is not None:
            caps = {"plan": None, "bucket_cap_mb": cap_mib, "bucket_cap_mb_list": None}
            wrapper._options = dataclasses.replace(own["_options"], **caps)
        wrapper._set_up()
        return
    if wrapper.mixed_precision is not None:
        raise NotImplementedError("the buckets of a wrapper with mixed_precision cannot be changed")
    if cap_mib is not None and "_bucket_config" in own:
        wrapper._bucket_config = type(own["_bucket_config"]).create(cap_mib, None, False)
        wrapper.bucket_bytes_cap = wrapper._bucket_config.bucket_bytes_cap
    elif cap_mib is not None:  # torch before 2.13
        wrapper.bucket_bytes_cap = int(cap_mib * 2**20)
        wrapper.bucket_bytes_cap_default = False
    is_static = wrapper.static_graph
    wrapper.static_graph = False
    wrapper._remove_autograd_hooks()
    wrapper.logger = wrapper.reducer = None
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    named = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse, named, is_static)
    wrapper._has_rebuilt_buckets = False
    if is_static:
        wrapper._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        register_comm_hook(wrapper.reducer, state, hook)


def _describe(wrapper: Any) -> dict[str, Any]:
    """A wrapper's properties, with the field names of a step record."""
    data = wrapper._get_ddp_logging_data()
    return {
        "model": data["module_name"],
        "wrapper": "paceline" if hasattr(wrapper, "_options") else "torch",
        "cap_bytes": max(0, data["bucket_cap_bytes"]),
        "bucket_bytes": list_bucket_bytes(wrapper),
    }


def list_bucket_bytes(wrapper: Any) -> list[int]:
    """The bytes of each bucket of torch's or Paceline's wrapper in launch order."""
    data = wrapper._get_ddp_logging_data()
    # torch does not rebuild its buckets if parameters may be unused.
    listed = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    return [int(size) for size in listed.split(",") if size.strip()]


def _describe_options(wrapper: Any) -> dict[str, Any]:
    """The wrapper options that may cost time needlessly."""
    data = wrapper._get_ddp_logging_data()
    return {
        "find_unused": bool(data.get("find_unused_parameters")),
        "num_unused_bytes": int(data.get("unused_parameter_size") or 0),
        "is_static": bool(wrapper.static_graph),
        "buffer_bytes": sum(one.nbytes for one in wrapper.module.buffers()) if wrapper.broadcast_buffers else 0,
    }


def _copy_buffers(wrappers: Sequence[Any]) -> list[tuple[Any, Any]]:
    found = [one for wrapper in wrappers for one in wrapper.module.buffers()]
    with torch.no_grad():
        return [(one, one.clone()) for one in found] if sum(one.nbytes for one in found) <= _MOST_BUFFER_BYTES else []


def _describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    chosen = optimizer.param_groups[0]
    return {"name": type(optimizer).__name__, "is_fused": bool(chosen.get("fused")), "can_fuse": "fused" in chosen}


def _read_usage() -> dict[str, float]:
    """Cumulative seconds of wall time, this process's CPU time, this thread's wait for a core, and the container's
    throttling; 0 for values that the system does not report."""
    found = {"wall_s": time.perf_counter(), "cpu_s": sum(os.times()[:2]), "queued_s": 0.0, "throttled_s": 0.0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran_ns, queued_ns, *_ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        found["queued_s"] = queued_ns / 1e9 if ran_ns else 0.0
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        found["throttled_s"] = next((int(value) / 1e6 for name, value in lines if name == "throttled_usec"), 0.0)
    return found


def _list_tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from itertools.chain.from_iterable(map(_list_tensors, batch.values()))
    elif isinstance(batch, list | tuple):
        yield from itertools.chain.from_iterable(map(_list_tensors, batch))


def _find_padding(batch: torch.Tensor) -> float:
    """The padded fraction of a batch of sequences, from equal elements at one end of the rows, or zeros in a mask."""
    if batch.ndim != 2 or batch.is_floating_point() or batch.device.type != "cpu" or batch.shape[1] < _LEAST_TOKENS:
        return 0.0
    is_mask = bool(batch.dtype == torch.bool or ((batch == 0) | (batch == 1)).all())
    shares = []
    for rows in (batch.long(), batch.long().flip(1)):
        padding = 0 if is_mask else rows[:, -1].mode().values
        run = (rows == padding).flip(1).long().cumprod(1).sum(1)
        if is_mask and int(rows.sum()) + int(run.sum()) != rows.numel():  # zeros elsewhere: not a mask
            continue
        shares.append(float((run - (run > 0).long() * (not is_mask)).sum()) / rows.numel())
    return max(shares, default=0.0)
