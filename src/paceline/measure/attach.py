"""Inside the ranks of a user's own program: the times of their steps and a trace of a few, without an edit of it.

`paceline.autoload` calls `attach` where PACELINE_ATTACH names a folder. A step ends with its optimizer. What it is made
of is seen by torch's profiler, which records some steps: nothing is put between torch's wrapper and its messages, so
that every result stays as it is. Each rank writes files of its own, and sends nothing. Needs torch alone.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import json
import multiprocessing.util
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# The range in a trace that says where a step ends: `predict.traced` reads it.
STEP_END = "paceline: step"
# On more ranks the files of traces would be many, and say the same.
_MOST_RECORDED = 16
# How often a program may catch the exit that `--stop` asks for.
_MOST_EXITS = 3


class Settings(NamedTuple):
    """Of `steps` (0: all), `record` are recorded, after `warmup` others. `every` so many steps their times are written,
    not only at the end. `caps` are MiB, instead of the program's own. `race`: from step `first` on, `turns` of `length`
    steps, each the number of one of `plans`, which are caps; no caps are the program's own."""

    folder: Path | None
    steps: int = 48
    warmup: int = 10
    record: int = 8
    every: int = 0
    stops: bool = False
    caps: tuple[float, ...] = ()
    race: dict[str, Any] | None = None


def read_settings(variables: Mapping[str, str]) -> Settings:
    folder = variables.get("PACELINE_ATTACH")
    names = ("steps", "warmup", "record", "every")
    given = {name: variables.get(f"PACELINE_ATTACH_{name.upper()}") for name in names}
    counts: dict[str, Any] = {name: int(text) for name, text in given.items() if text}
    caps = tuple(float(part) for part in variables.get("PACELINE_BUCKET_CAP_MB", "").split(",") if part.strip())
    stops = variables.get("PACELINE_ATTACH_STOP", "0") not in ("", "0")
    race = json.loads(variables.get("PACELINE_ATTACH_RACE") or "null")
    return Settings(None if not folder else Path(folder), stops=stops, caps=caps, race=race, **counts)


_observer: Observer | None = None


def attach() -> None:
    """Observe this process as the variables say; does nothing the second time."""
    global _observer
    if _observer is None:
        _observer = Observer(read_settings(os.environ))
        _observer.install()


class Observer:
    """The steps of this process: of each its number, its seconds, and those of them in data loaders and in optimizers.

    The optimizers that step before one of them steps again belong to one step, and the last of them ends it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._undo: list[Callable[[], Any]] = []
        self._wrapped: list[weakref.ref[Any]] = []
        self._seen: list[int] = []
        self._last = 0  # the optimizer that ends a step
        self._steps: list[tuple[int, float, float, float]] = []
        self._num_steps = self._num_exits = self._pid = self._thread = 0
        self._begun_s = self._end_s = self._data_s = self._optimizer_s = 0.0
        self._profiler: Any = None
        self._first = 0  # the step after which recording began
        self._head: dict[str, Any] = {}
        self._tail: dict[str, Any] = {}
        self._path = Path()

    def install(self) -> None:
        ours = sys.modules.get("paceline.parallel.ddp")  # there where it takes the place of torch's
        for kind in (torch.nn.parallel.DistributedDataParallel, getattr(ours, "DDP", None)):
            if kind is not None:
                self._watch_wrapper(kind)
        if self._settings.folder is None:
            return
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        (self._settings.folder / "seen").touch()
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        self._watch_loaders()

    def _watch_wrapper(self, kind: Any) -> None:
        """Note every wrapper that is made, and give it the caps that were asked for."""
        original, caps = kind.__init__, self._settings.caps
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            if caps:
                bound = signature.bind(wrapper, *args, **kwargs)
                bound.arguments.pop("bucket_cap_mb_list", None)
                bound.arguments["bucket_cap_mb"] = caps[0]
                if len(caps) > 1:
                    bound.arguments["bucket_cap_mb_list"] = list(caps)
                args, kwargs = bound.args[1:], bound.kwargs
            original(wrapper, *args, **kwargs)
            self._wrapped.append(weakref.ref(wrapper))

        kind.__init__ = init
        self._undo.append(lambda: setattr(kind, "__init__", original))

    def _watch_loaders(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        kind: Any = _BaseDataLoaderIter
        original = kind.__next__

        @functools.wraps(original)
        def fetch(iterator: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return original(iterator)
            finally:
                if threading.get_ident() == self._thread:
                    self._data_s += time.perf_counter() - begin_s

        kind.__next__ = fetch
        self._undo.append(lambda: setattr(kind, "__next__", original))

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._tail:
            return
        try:
            # Here, not at the end of a step: there the range of the optimizer is still open.
            if self._profiler is not None and self._num_steps >= self._first + self._settings.record:
                self._stop_recording()
            self._begun_s = time.perf_counter()
        except Exception as error:
            self._give_up(error)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            if not self._tail:
                self._note_optimizer(optimizer, has_closure=len(args) > 1 or kwargs.get("closure") is not None)
            elif "error" in self._tail and id(optimizer) == self._last:
                self._num_steps += 1
        except Exception as error:
            self._give_up(error)
        # What failed here must not keep a program running that is to be stopped.
        if self._settings.stops and self._tail and self._num_steps >= self._settings.steps:
            self._exit()

    def _note_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        now_s = time.perf_counter()
        if not has_closure:  # which runs forward and backward inside of the optimizer
            self._optimizer_s += now_s - self._begun_s
        if not self._num_steps:
            if id(optimizer) not in self._seen:
                self._open(optimizer)
                self._seen.append(id(optimizer))
                self._begin_step()
                return
            self._last, self._num_steps = self._seen[-1], 1
        if id(optimizer) != self._last:
            return
        self._num_steps += 1
        self._steps.append((self._num_steps, now_s - self._end_s, self._data_s, self._optimizer_s))
        self._advance()
        self._begin_step()

    def _begin_step(self) -> None:
        self._end_s, self._data_s, self._optimizer_s = time.perf_counter(), 0.0, 0.0

    def _open(self, optimizer: Optimizer) -> None:
        """This process trains: which rank it is, and where its files are."""
        if self._head:
            return
        is_open = dist.is_available() and dist.is_initialized()
        rank, world_size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        if is_open:
            rank, world_size = dist.get_rank(), dist.get_world_size()
        parameter = next(iter(optimizer.param_groups[0]["params"]), None)
        assert self._settings.folder is not None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._head = {
            "rank": rank, "world_size": world_size, "backend": dist.get_backend() if is_open else "none",
            "host": socket.gethostname(), "device": "cpu" if parameter is None else parameter.device.type,
            "torch": torch.__version__, "threads": torch.get_num_threads(), "optimizer": type(optimizer).__name__,
        }  # fmt: skip
        self._path = self._settings.folder / f"rank-{rank}-{self._pid}.jsonl"
        # A forked process ends without what atexit knows, and one of torch.multiprocessing without the other.
        atexit.register(self._close)
        multiprocessing.util.Finalize(None, self._close, exitpriority=1)

    def _advance(self) -> None:
        """After a step: what is due now."""
        settings, number = self._settings, self._num_steps
        is_due = settings.record > 0 and number == max(2, settings.warmup) and self._head["rank"] < _MOST_RECORDED
        if self._profiler is not None:
            self._mark()
        elif is_due:
            self._start_recording()
        if settings.race is not None:
            self._take_turn(settings.race, number)
        if settings.every and number % settings.every == 0:
            self._write({})
        if settings.steps and number >= settings.steps:
            self._finish()

    def _take_turn(self, race: dict[str, Any], number: int) -> None:
        """Between two turns: note the buckets of the one, and give the wrappers those of the other."""
        turn, place = divmod(number - race["first"], race["length"])
        if number < race["first"] or place or turn > len(race["turns"]):
            return
        for wrapper in [found for one in self._wrapped if (found := one()) is not None]:
            if turn:
                sizes = _describe(wrapper).get("rebuilt_bucket_sizes", "")
                self._head.setdefault("layouts", {})[str(race["turns"][turn - 1])] = sizes
            if turn < len(race["turns"]):
                rebucket(wrapper, race["plans"][race["turns"][turn]])

    def _start_recording(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._head["device"] == "cuda" else [])]
        if torch.autograd._profiler_enabled():  # a second profile would end the first one
            self._head["not_recorded"] = "the program runs torch's profiler itself"
            return
        profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        profiler.start()
        self._profiler, self._first = profiler, self._num_steps
        self._mark()
        kind: Any = profile
        original = kind.start

        @functools.wraps(original)
        def start(other: Any) -> Any:
            if self._profiler is not None:  # the program's own comes first
                self._stop_recording()
            return original(other)

        kind.start = start
        self._undo.append(lambda: setattr(kind, "start", original))

    def _mark(self) -> None:
        with torch.profiler.record_function(STEP_END):
            pass

    def _stop_recording(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._path.with_name(f"trace-{self._head['rank']}-{self._pid}.json")
        profiler.export_chrome_trace(str(path))
        # The step in which it stopped has the time of writing the file.
        self._head |= {"trace": path.name, "recorded": [self._first + 1, self._num_steps + 1]}

    def _write(self, more: dict[str, Any]) -> None:
        lines = [*([] if self._path.exists() else [self._head]), {"steps": self._steps} | more]
        with self._path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._steps = []

    def _finish(self) -> None:
        """Write what there is, once. Hooks stay, and do nothing: torch goes through them at this moment."""
        if self._tail or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            self._tail["wrappers"] = [_describe(wrapper) for one in self._wrapped if (wrapper := one()) is not None]
        self._tail |= {"num_steps": self._num_steps, "is_whole": self._num_steps >= self._settings.steps}
        for undo in self._undo:
            undo()
        if self._profiler is not None:
            self._stop_recording()
        self._write(self._head | self._tail)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # the folder may be gone
            self._finish()

    def _give_up(self, error: Exception) -> None:
        """The program goes on without being observed."""
        self._tail["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        for undo in self._undo:
            undo()
        with contextlib.suppress(Exception):
            self._write(self._head | self._tail)

    def _exit(self) -> None:
        self._num_exits += 1
        if self._num_exits > _MOST_EXITS:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)


def rebucket(wrapper: Any, caps: Sequence[float]) -> None:
    """Give a wrapper other buckets between two steps, as if it had been made with these caps (MiB); without any, those
    it was made with. As after its making, the buckets are final from the second step on."""
    one, several = (None, caps) if len(caps) > 1 else (next(iter(caps), None), None)
    if hasattr(wrapper, "_options"):  # ours
        options = vars(wrapper).setdefault("_own_options", wrapper._options)
        if caps:
            several = None if several is None else tuple(several)
            options = dataclasses.replace(options, plan=None, bucket_cap_mb=one, bucket_cap_mb_list=several)
        wrapper._options = options
        wrapper._set_up()
        return
    if wrapper.mixed_precision is not None:
        raise NotImplementedError("a wrapper with mixed_precision keeps its buckets")
    names = ("_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default")
    own = vars(wrapper).setdefault("_own_buckets", {name: getattr(wrapper, name, None) for name in names})
    for name, value in own.items():
        setattr(wrapper, name, value)
    if caps and own["_bucket_config"] is not None:
        wrapper._bucket_config = type(own["_bucket_config"]).create(one, several, False)
        wrapper.bucket_bytes_cap = wrapper._bucket_config.bucket_bytes_cap
    elif caps:  # torch before 2.13
        wrapper.bucket_bytes_cap, wrapper.bucket_bytes_cap_default = int(caps[0] * 2**20), False
    is_static, wrapper.static_graph = wrapper.static_graph, False
    wrapper._remove_autograd_hooks()
    wrapper.logger = wrapper.reducer = None
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    named = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse, named, is_static)
    wrapper._has_rebuilt_buckets = False
    if is_static:
        wrapper._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


def _describe(wrapper: Any) -> dict[str, Any]:
    """What torch's wrapper says of itself: its buckets, its options."""
    data = {key: value for key, value in wrapper._get_ddp_logging_data().items() if isinstance(value, int | str)}
    return data | {"is_ours": hasattr(wrapper, "_options")}
