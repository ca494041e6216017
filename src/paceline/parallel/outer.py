"""Strategies that average parameter differences every few steps: local SGD, SlowMo, DiLoCo, and streaming DiLoCo.

`Outer` is the state of one replica. It does not communicate itself but yields its codec's messages, so replicas in one
process can also run it (`run_together`). `OuterState` runs it between ranks, after the optimizers have stepped.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.channel import Channel
from paceline.parallel.codecs import Codec, Exchange
from paceline.parallel.graph import WeakHook
from paceline.parallel.hooks import Failure, HookCalls
from paceline.parallel.replicas import Options, Replica, digest_replica, list_some
from paceline.parallel.strategies import Exchanges, StrategyState
from paceline.parallel.streams import copy_to_device
from paceline.strategy import Strategy

# How often a rank checks, between two syncs, whether another rank has failed.
_CHECK_S = 1.0
# Keys in a strategy's state: all but the last are prefixes of parameter or buffer names.
_START, _MOMENTUM, _MEAN, _PARAM, _BUFFER, _LRS = "start ", "momentum ", "mean ", "param ", "buffer ", "lrs"
_COUNTS = ("base", "is_fresh", "has_drifted", "begun", "to_apply", "to_begin")


class Outer:
    """The outer optimizer of one replica. `start` holds the parameters with which all replicas began the round, in
    float32 or better, so that small steps are not lost. A fragment is every F-th parameter.

    Call `begin_round` before each step of the replica, `count` after it, and then `advance`, which runs whatever is
    due. If `is_local` is False (in the first steps of post-local SGD), gradients must be averaged instead.
    """

    def __init__(self, strategy: Strategy, names: Sequence[str], params: Sequence[torch.Tensor], codec: Codec) -> None:
        self.strategy, self.names, self.params = strategy, list(names), list(params)
        # One codec per fragment: several exchanges may be in flight, and a codec tracks one step at a time.
        self.codecs = [codec, *(copy.deepcopy(codec) for _ in range(strategy.fragments - 1))]
        self.step = 0
        self.base = strategy.after  # the step of the last full sync
        self.start = [v.to(torch.promote_types(v.dtype, torch.float32), copy=True) for v in self.values]
        self.momentum: dict[str, torch.Tensor] = {}
        self.is_fresh = True  # `start` must be refreshed before the next step
        self.has_drifted = False  # replicas may hold different parameters
        self.means: dict[int, list[torch.Tensor]] = {}  # by fragment: averaged differences not applied yet
        self.begun: dict[int, int] = {}  # by fragment with an average in flight: the step that applies it
        self.to_apply: list[int] = []
        self.to_begin: list[int] = []

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters as real tensors without autograd."""
        return [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in self.params]

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """The residuals: differences not sent yet, by parameter."""
        own = [(codec, self.names[i]) for n, codec in enumerate(self.codecs) for i in self.fragment(n)]
        return {name: codec.errors[name] for codec, name in own if name in codec.errors}

    @errors.setter
    def errors(self, errors: Mapping[str, torch.Tensor]) -> None:
        for codec in self.codecs:
            codec.errors = dict(errors)

    @property
    def is_local(self) -> bool:
        return self.step >= self.strategy.after

    def fragment(self, number: int) -> range:
        return range(number, len(self.params), self.strategy.fragments)

    def begin_round(self) -> None:
        """Before the first step after a sync, set `start` to the current parameters, which may have been loaded."""
        if self.is_fresh and self.is_local:
            self.is_fresh = False
            self.read_start()

    def read_start(self) -> None:
        for start, value in zip(self.start, self.values, strict=True):
            if start.dtype == value.dtype:
                start.copy_(value)
            else:  # keep the bits that rounding lost
                start.copy_(torch.where(start.to(value.dtype) == value, start, value.to(start.dtype)))

    def count(self) -> bool:
        """Count one step. Returns whether something is due after its optimizer step."""
        self.step += 1
        if self.step <= self.strategy.after:
            return False
        self.has_drifted = True
        period, num = self.strategy.period, self.strategy.fragments
        position = (self.step - self.base) % period
        due = [f for f in range(num) if f * period // num == position and self.fragment(f) and f not in self.to_begin]
        ready = [f for f, at in self.begun.items() if (at <= self.step or f in due) and f not in self.to_apply]
        self.to_apply += ready
        self.to_begin += due
        return bool(self.to_apply or self.to_begin)

    def advance(self, lrs: Sequence[float] = ()) -> Exchange:
        """Run everything that is due, for replicas in one process. `lrs`: learning rate of each parameter (SlowMo)."""
        while self.to_apply:
            self._finish(self.to_apply.pop(0), lrs, self.strategy.mixing)
        while self.to_begin:
            number = self.to_begin.pop(0)
            yield from self.average(number)
            if self.strategy.delay:
                self.begun[number] = self.step + self.strategy.delay
            else:
                self._finish(number, lrs)

    def complete(self, lrs: Sequence[float] = ()) -> Exchange:
        """End the round now, so that all replicas hold the same parameters."""
        if self.has_drifted:
            self.to_apply, self.to_begin = list(self.begun), []
            yield from self.advance(lrs)
            for number in range(self.strategy.fragments):
                yield from self.average(number)
                self._finish(number, lrs)
            self.end_round()

    def _finish(self, number: int, lrs: Sequence[float], mixing: float = 0.0) -> None:
        if not self.is_finite(number):
            raise CollectiveError("the average of the parameters is not finite", code="not-finite")
        self.apply(number, lrs, mixing)

    def end_round(self) -> None:
        self.base, self.is_fresh, self.has_drifted = self.step, True, False

    def restart(self) -> None:
        """Restart the count from the last sync, after an error that left ranks at different steps."""
        self.step, self.has_drifted, self.to_apply, self.to_begin = self.base, True, [], []
        self.begun = dict.fromkeys(self.begun, self.base + self.strategy.delay)

    def state(self) -> dict[str, Any]:
        """`common` is the state after the last sync, equal on all replicas; `rank` is this replica's own part. Not
        copied."""
        if self.is_fresh:
            self.read_start()
        common = {_START + name: start for name, start in zip(self.names, self.start, strict=True)}
        common |= {_MOMENTUM + name: value for name, value in self.momentum.items()}
        for number, mean in self.means.items():
            common |= {_MEAN + self.names[i]: value for i, value in zip(self.fragment(number), mean, strict=True)}
        own = self.errors
        if self.has_drifted:
            own |= {_PARAM + name: value for name, value in zip(self.names, self.values, strict=True)}
        counts = {name: copy.copy(getattr(self, name)) for name in _COUNTS}
        return {"step": self.step, "outer": counts, "common": common, "rank": own}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Continue from the state that `state` returned. `own` is this replica's part."""
        kept, shapes = state["common"], {name: start.shape for name, start in zip(self.names, self.start, strict=True)}
        found = {name.removeprefix(_START): tensor.shape for name, tensor in kept.items() if name.startswith(_START)}
        if shapes != found:
            odd = [name for name in {**shapes, **found} if shapes.get(name) != found.get(name)]
            text = f"the state of strategy {self.strategy.text!r} is for another model: {list_some(odd, ', ')} differ"
            raise ConfigError(text, code="strategy")
        vars(self).update(copy.deepcopy({name: state["outer"][name] for name in _COUNTS}))
        self.step, self.momentum, self.means = state["step"], {}, {}
        self.errors = {name: own[name].clone() for name in self.names if name in own}
        for index, (name, start, value) in enumerate(zip(self.names, self.start, self.values, strict=True)):
            start.copy_(kept[_START + name])
            value.copy_(own.get(_PARAM + name, start))
            if (moving := kept.get(_MOMENTUM + name)) is not None:
                self.momentum[name] = moving.to(start, copy=True)
            if (mean := kept.get(_MEAN + name)) is not None:
                self.means.setdefault(index % self.strategy.fragments, []).append(mean.to(start.device, copy=True))

    def average(self, number: int) -> Exchange:
        """Average the parameter differences of all replicas into `means`. The differences are computed immediately, so
        the replica may continue while the exchange is in flight."""
        is_dense = self.strategy.codec == "dense"
        values, gone = self.values, []
        for index in self.fragment(number):
            start, value = self.start[index], values[index]
            # Relative to this replica's actual starting point, which is `start` after rounding.
            begin = start.to(value.dtype)
            gone.append(begin - value if is_dense else begin.to(start.dtype) - value.to(start.dtype))
        return self._exchange(number, gone)

    def _exchange(self, number: int, gone: list[torch.Tensor]) -> Exchange:
        if gone:
            names = [self.names[index] for index in self.fragment(number)]
            yield from self.codecs[number].average(names, gone, self.step)
        self.means[number] = gone

    def is_finite(self, number: int) -> bool:
        return _are_finite(self.means[number])

    def apply(self, number: int, lrs: Sequence[float] = (), mixing: float = 0.0) -> None:
        """Take the outer step with finite averages. A replica that has taken steps in the meantime keeps the fraction
        `mixing` of its own parameters."""
        self.begun.pop(number, None)
        strategy, values = self.strategy, self.values
        b, gone = strategy.momentum, self.means.pop(number)
        for index, mean in zip(self.fragment(number), gone, strict=True):
            start, name, update = self.start[index], self.names[index], mean.to(self.start[index].dtype)
            lr = 1.0 if strategy.outer != "slowmo" or not b else lrs[index]
            # With a learning rate of 0 the difference contains no gradients, so momentum stays unchanged.
            if b and lr:
                before = self.momentum.get(name)
                # SlowMo's momentum is stored on the scale of gradients, because the learning rate may change between
                # rounds.
                moving = update / lr if before is None else before.mul_(b).add_(update, alpha=1 / lr)
                self.momentum[name] = moving
                update = update.add(moving, alpha=b) if strategy.outer == "diloco" else moving * lr
            start.sub_(update, alpha=strategy.lr)
            value = values[index]
            value.copy_(start if not mixing else value.to(start.dtype).lerp(start, 1 - mixing))
        if strategy.fragments == 1 and not strategy.delay:
            self.end_round()


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    norms = torch._foreach_norm([t for t in tensors if t.numel() and not t.is_sparse] or [torch.zeros(1)], torch.inf)
    return bool(torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all())


def _start(exchanges: Exchanges, make: Callable[[], Exchange]) -> torch.futures.Future[Any]:
    """Open the groups and start the exchange. Runs as a hook, so that an error in `make` is reported to all ranks. The
    groups are opened first: a rank that fails must not leave the others waiting there."""
    exchanges.open()
    return exchanges.start(make())


class OuterState(StrategyState):
    """Runs the schedule between ranks. A sync becomes due at the end of its step's backward, when ranks agree through
    control words. It runs once all parameters have been stepped; if that does not happen (a skipped step, or a
    parameter without an optimizer), at the next forward. Ranks count backward passes, since all run the same number.

    In a step that sends no gradients, it replaces the reducer (`collect`, `exchange`, `learn`).
    """

    def __init__(
        self,
        options: Options,
        module: nn.Module,
        replica: Replica,
        channel: Channel,
        num_words: int,
        before: StrategyState | None,
    ) -> None:
        strategy = options.strategy
        super().__init__(strategy, replica, channel, before)
        self.replica, self._channel, self._module = replica, channel, module
        self._words = torch.zeros(num_words, device=channel.device)
        self._allows_missing = options.allow_missing
        self._missing: set[int] = set()  # parameters without a gradient in some step since the last control words
        # The codec's messages get a group separate from the control words, because an error may leave some unfinished.
        self._moving = Channel(channel.group, channel.device)
        self.exchanges = Exchanges(self._moving, kinds=self.codec.kinds)
        self._calls = HookCalls((self.exchanges, _start), channel)
        self._futures: dict[int, Any] = {}
        self.is_due = self.defers = self.is_overdue = False
        self._stepped: set[int] = set()  # parameters that were stepped since a sync became due
        self._lrs: dict[int, float] = {}
        self._num_controls, self._looked_s = 0, time.monotonic()
        self._compared: int | None = None  # the step of the last comparison between ranks
        self._compares = self._has_warned = False
        self.unusable = ""  # why the ranks are permanently out of sync, if they are
        self.outer = Outer(strategy, list(self._names.values()), replica.params, self.codec)
        if isinstance(before, OuterState):
            self._follow_outer(before)
        self._index = {id(param): index for index, param in enumerate(replica.params)}
        self._handle = register_optimizer_step_post_hook(WeakHook(self._on_optimizer_step))

    def _follow_outer(self, before: OuterState) -> None:
        """Continue from the state before the model was rescanned."""
        old, new = before.outer, self.outer
        self.is_due, self.defers, self._lrs = before.is_due, before.defers, dict(before._lrs)
        if [(name, start.shape) for name, start in zip(old.names, old.start, strict=True)] == [
            (name, start.shape) for name, start in zip(new.names, new.start, strict=True)
        ]:
            before.wait()
            errors = old.errors if before._world_size == self._world_size else {}
            vars(new).update({**vars(old), "params": new.params, "codecs": new.codecs})
            new.errors = errors
            new.start = [a.to(b.device) for a, b in zip(old.start, new.params, strict=True)]
        else:
            new.step, new.base = old.step, old.step
        places = dict(zip(new.names, new.start, strict=True))
        new.momentum = {
            name: value.to(places[name].device)
            for name, value in old.momentum.items()
            if name in places and places[name].shape == value.shape
        }

    @property
    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers that differ between ranks until a sync, such as running statistics."""
        return [(name, b) for name, b in self._module.named_buffers() if name in self.replica.buffers]

    @property
    def memory_bytes(self) -> int:
        outer = self.outer
        held = [*outer.start, *outer.momentum.values(), *(value for mean in outer.means.values() for value in mean)]
        return sum(codec.memory_bytes for codec in outer.codecs) + sum(tensor.nbytes for tensor in held)

    def stop(self) -> None:
        super().stop()
        self._handle.remove()

    def open_groups(self) -> None:
        """Open dedicated groups, because a sync may run before or after the user's own messages. Collective."""
        if self._channel.world_size > 1:
            self._channel.use_own_group()
            self._moving.use_own_group()
            self.exchanges = Exchanges(self._moving, kinds=self.codec.kinds)
            self._calls = HookCalls((self.exchanges, _start), self._channel)

    def warn_of_drift(self) -> None:
        """Warn once, in an evaluation, if the ranks hold different models."""
        if self.outer.has_drifted and not self._has_warned:
            self._has_warned = True
            text = "evaluating unsynchronized local parameters: call sync_parameters() on all ranks first"
            warnings.warn(f"strategy {self.strategy.text!r}: {text}", stacklevel=4)

    @property
    def position(self) -> int:
        """The number of steps since the last full sync."""
        return self.outer.step - self.outer.base

    def digest(self, every: int) -> int:
        """A digest of the state after the last sync, which must be equal on all ranks; 0 if no comparison is due."""
        self._compares = bool(every) and (self._compared is None or self.outer.step - self._compared >= every)
        return digest_replica(self.as_replica()) if self._compares else 0

    def as_replica(self) -> Replica:
        return replace(self.replica, params=tuple(self.outer.start))  # type: ignore[arg-type]

    def report_failure(self) -> None:
        """Signal a failure to ranks that are between two syncs; they then exchange control words immediately."""
        if self._channel.has_own_group:
            self._channel.report_failure(f"control {self._num_controls}")

    def must_exchange_control(self) -> bool:
        """Count a finished backward. Returns whether the ranks exchange control words now."""
        if self.is_overdue:
            self.run()
        self.outer.begin_round()
        self._missing |= self._find_missing()
        is_due = self.outer.count()
        self.step = self.outer.step
        if is_due:
            return True
        now_s = time.monotonic()
        if now_s - self._looked_s < _CHECK_S or not self._channel.has_own_group:
            return False
        self._looked_s = now_s
        return self._channel.has_failure(f"control {self._num_controls}")

    def _find_missing(self) -> set[int]:
        return {index for index, param in enumerate(self.replica.params) if param.grad is None}

    def collect(self, factor: float, take_part: bool) -> tuple[torch.Tensor, list[int], Failure | None]:
        """The control words to fill, and the parameters without a gradient: in this step or, if a missing gradient is
        an error, in any step since the last control words."""
        missing = self._find_missing() if self._allows_missing else self._missing
        self._missing = set()
        return self._words, sorted(missing), None

    def exchange(self) -> None:
        """Sum the control words. Collective."""
        self._channel.wait(self._channel.start_sum(self._words), "the control words")

    def learn(self) -> None:
        """Nothing to plan."""

    def agree(self, skips: bool) -> None:
        """Called after control words were exchanged. `skips`: some rank's optimizer may skip this step, so all ranks
        wait."""
        self._num_controls += 1
        self._compared = self.outer.step if self._compares else self._compared
        self.is_due = bool(self.outer.to_apply or self.outer.to_begin)
        self.defers = skips
        self._stepped = set()

    def restart(self) -> None:
        self._num_controls += 1
        self.is_due = False
        self.outer.restart()

    def has_finite_gradients(self) -> bool:
        return _are_finite([param.grad for param in self.replica.params if param.grad is not None])

    def _on_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self.is_due:
            return
        for group in optimizer.param_groups:
            found = [self._index[id(param)] for param in group["params"] if id(param) in self._index]
            self._stepped.update(found)
            self._lrs.update(dict.fromkeys(found, float(group.get("lr", 0.0))))
        if len(self._stepped) == len(self._index) and not self.defers:
            self.run()

    @torch.no_grad()
    def run(self) -> None:
        """Run whatever is due now. Collective."""
        if not self.is_due:
            return
        outer = self.outer
        self.is_due = self.is_overdue = False
        outer.to_apply, ready = [], outer.to_apply
        outer.to_begin, due = [], outer.to_begin
        self._finish(ready, self.strategy.mixing)
        self._begin(due)
        if self.strategy.delay:
            outer.begun |= dict.fromkeys(due, outer.step + self.strategy.delay)
        else:
            self._finish(due)

    @torch.no_grad()
    def complete(self) -> None:
        """End the round now, so that all ranks hold the same parameters. Collective."""
        outer = self.outer
        self._finish(list(outer.begun), self.strategy.mixing)
        every = list(range(self.strategy.fragments))
        self._begin(every)
        self._finish(every)
        outer.end_round()

    def _begin(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._futures[number] = self._calls.start(functools.partial(self.outer.average, number))

    def wait(self) -> None:
        while self._futures:
            self._calls.finish(self._futures.popitem()[1], None)

    def _finish(self, numbers: Sequence[int], mixing: float = 0.0) -> None:
        """Wait for the averages and apply them if no rank has failed."""
        if not numbers:
            return
        for number in numbers:
            self._calls.finish(self._futures.pop(number, None), None)
        failure, channel = self._calls.failure, self._channel
        size = len(self._index) if self.strategy.outer == "slowmo" and self.strategy.momentum else 0
        words = torch.zeros(1 + 2 * size, dtype=torch.float64)
        words[0] = self._calls.is_over
        for index, lr in self._lrs.items() if size else ():
            words[1 + index], words[1 + size + index] = lr, 1.0
        words = copy_to_device(words, channel.device)
        # One message for failures and SlowMo's learning rates.
        channel.wait(channel.start_sum(words), "the end of the sync")
        has_failed, *rest = self._calls.read(words)
        if has_failed:
            text = "" if failure is None else f"{type(failure.error).__name__}: {failure.error}".partition("\n\n")[0]
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(channel.share(text)) if text]
            self.unusable = f"the parameters cannot be averaged: {'; '.join(failed)}"
            raise CollectiveError(self.unusable, code="hook-failed")
        if size and not any(rest[size:]):
            text = "slowmo needs the learning rate, but no torch.optim.Optimizer has stepped this model's parameters"
            raise ConfigError(f"{text}: use localsgd or diloco", code="strategy")
        lrs = [lr / max(1.0, known) for lr, known in zip(rest[:size], rest[size:], strict=True)]
        if not all(map(self.outer.is_finite, numbers)):
            self.outer.means = {n: mean for n, mean in self.outer.means.items() if n not in numbers}
            self._raise_not_finite()
        with self.exchanges.side.borrowed():
            for number in numbers:
                self.outer.apply(number, lrs, mixing)

    def _raise_not_finite(self) -> None:
        values = zip(self.outer.names, self.outer.values, strict=True)
        mine = next((name for name, value in values if not bool(torch.isfinite(value).all())), "")
        self.outer.begun.clear()
        self.outer.restart()
        found = [f"{name} on rank {rank}" for rank, name in enumerate(self._channel.share(mine)) if name]
        advice = "nothing was averaged; lower the learning rate, clip gradients, or resume from a checkpoint"
        text = f"parameters are not finite: {list_some(found or ['their average'])}; {advice}"
        raise CollectiveError(text, code="not-finite")

    def state(self) -> dict[str, Any]:
        """The common part is the state after the last sync. Between two syncs, this rank's part includes its model."""
        self.wait()
        with self.exchanges.side.borrowed():
            found = self.outer.state()
        rank = found["rank"]
        if self.outer.has_drifted:
            rank |= {_BUFFER + name: buffer for name, buffer in self._buffers}
        if self._lrs:
            known = [[self._lrs.get(i, 0.0), i in self._lrs] for i in range(len(self.outer.names))]
            rank[_LRS] = torch.tensor(known, dtype=torch.float64)
        copies = {part: {name: value.clone() for name, value in found[part].items()} for part in ("common", "rank")}
        counts = found["outer"] | {"due": (self.is_due, self.defers)}
        return {**found, **copies, "strategy": self.strategy.text, "rates": {}, "outer": counts}

    @torch.no_grad()
    def _take(self, common: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        """If the number of ranks has changed, this rank gets the mean of the parameters, so that the average at the
        next sync is unchanged."""
        own = {name for name in errors if name == _LRS or name.startswith((_PARAM, _BUFFER))}
        super()._take({**common, "common": {}}, {name: e for name, e in errors.items() if name not in own})
        with self.exchanges.side.borrowed():
            self.outer.load(common, errors)
        self.is_due, self.defers = common["outer"]["due"]
        self._futures = {}
        for name, buffer in self._buffers:
            buffer.copy_(errors.get(_BUFFER + name, buffer))
        lrs = errors.get(_LRS)
        self._lrs = {} if lrs is None else {i: float(lr) for i, (lr, is_known) in enumerate(lrs.tolist()) if is_known}
