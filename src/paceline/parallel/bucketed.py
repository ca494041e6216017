"""The bucketed reducer, in the order in which a backward pass happens: begin, triggers, launches, finish, plan.

Gradients are gathered into the ranges of a flat buffer and each bucket leaves, in plan order, while backward goes on.
In the steady state only one hook per bucket runs: on the parameter that the recorded order says arrives last. Whether
the others really are there is checked when it fires, and that nothing came later, at the end.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat

import torch

from paceline.errors import ConfigError
from paceline.parallel.arrivals import Arrivals
from paceline.parallel.bucket import LiveBucket
from paceline.parallel.channel import Channel
from paceline.parallel.comm_hooks import CommHook, Hooking, agree_on_hook, show_to_hook
from paceline.parallel.flat import FlatGradients
from paceline.parallel.ladder import Reducer, WriteTail, on_gradient
from paceline.parallel.replicas import Members
from paceline.parallel.timeline import Timeline
from paceline.plan import Gradient, Plan, plan_torch_start

__all__ = ["Bucketed"]

_get_grad = operator.attrgetter("grad")
MakePlan = Callable[[Sequence[Gradient], Sequence[int]], Plan]

# From this size on a gradient is handled by itself when it arrives, while it is in the cache: copied into its view,
# which frees its memory for the next one, or on NCCL, which takes many tensors in one message, not copied at all.
_ALONE_BYTES = 256 << 10
# How often the order of arrival is recorded in all; a graph that changes at every step is not worth more.
_MAX_RECORDS = 5


class Bucketed(Reducer):
    """The default rung. `make_plan(gradients, ready_order)` makes the plan once the order is known."""

    def __init__(
        self, members: Members, channel: Channel, num_words: int, make_plan: MakePlan, comm_hook: CommHook | None = None
    ) -> None:
        super().__init__(members, channel, num_words)
        self._make_plan = make_plan
        self._hooking = None if comm_hook is None else Hooking(comm_hook, channel, self._on_hook_failure)
        self._active, self._next, self._factor = False, 0, 1.0
        self._before: dict[int, int] = {}  # loose gradients that were there before backward: their versions
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}  # placed and loose gradients, and their versions then
        self._arrivals, self._records_left = Arrivals(members.params), _MAX_RECORDS
        self._is_recording = True
        # Nothing is known of the order yet: one bucket per dtype, as torch has it, sent at the end of backward.
        self.is_planned = False
        make_plan(members.gradients, list(range(len(members.params))))  # a plan that does not fit is refused now
        self._lay_out(plan_torch_start(members.gradients))

    @property
    def ready_order(self) -> list[int]:
        """All parameters in the order of their gradients' arrival, when it was last recorded."""
        return self._arrivals.ready_order()

    # -- backward begins ----------------------------------------------------------------------------------------------

    def begin(self, factor: float) -> None:
        self._active, self._next, self.failure, self.failed_in = True, 0, None, "backward"
        # A communication hook divides by the number of ranks itself, as torch's do.
        self._factor = factor
        if self._hooking is not None:
            self._factor *= self.channel.world_size
            self._hooking.begin()
        self._taken.clear()
        self._look_before()
        if self._is_recording:
            self._arrivals.start()
        for bucket in self._buckets:
            bucket.version, bucket.work, bucket.seen = bucket.range._version, None, []
        self.timeline.begin()

    # -- a gradient is ready ------------------------------------------------------------------------------------------

    def _on_large(self, index: int, param: torch.Tensor) -> None:
        """A large gradient: put it into its view now."""
        if self._active and self.failure is None and index not in self._taken:
            try:
                with torch.no_grad():
                    self._place(index, self._factor)
            except Exception as error:  # raised after `finish`, when the other ranks can be told
                self.failure = self._diagnose(error)

    def _on_trigger(self, param: torch.Tensor) -> None:
        """The parameter that should be the last of its bucket: send all buckets that are complete, in plan order."""
        if not self._active or self.failure is not None:
            return
        # The last bucket waits for the end of backward, when the words that ride behind it are known.
        while self._next < len(self._buckets) - 1 and self._is_complete(self._buckets[self._next]):
            self._send(self._buckets[self._next])

    def _is_complete(self, bucket: LiveBucket) -> bool:
        if bucket.in_parts or not all(map(self._has_arrived, bucket.alone)):
            return False
        grads = bucket.look()
        if any(map(operator.is_, grads, repeat(None))):
            return False
        # A gradient that was a view before backward is accumulated in place, and each such write counts one.
        in_place = sum(map(operator.is_, grads, bucket.views))
        return in_place == 0 or bucket.range._version - bucket.version == in_place

    def _has_arrived(self, index: int) -> bool:
        if index in self._flat.views:
            return index in self._taken
        grad = self.members.params[index].grad
        return grad is not None and (index not in self._before or grad._version != self._before[index])

    # -- a bucket leaves ----------------------------------------------------------------------------------------------

    def _send(
        self, bucket: LiveBucket, zeros: FlatGradients | None = None, write_tail: WriteTail | None = None
    ) -> None:
        """Gather one bucket and start its message; or send from `zeros`, where `.grad` is to be left alone."""
        self._next = bucket.number + 1
        self.timeline.ready(bucket.number)
        is_last = self._next == len(self._buckets)
        flat, take_part = zeros or self._flat, zeros is None
        span, rider_bytes = flat.ranges[bucket.number], flat.rider_bytes[bucket.number]
        message = flat.last if is_last and self._hooking is None else span
        # NCCL averages as it reduces; the words must stay whole numbers, so the last bucket is scaled beforehand.
        can_fold = self.channel.is_nccl and not is_last and not bucket.placed
        folded = can_fold and self._factor == 1 / self.channel.world_size
        factor = 1.0 if folded else self._factor
        with torch.no_grad():
            try:
                if take_part and self.failure is None:
                    self._gather(bucket, factor)
                    loose = self._take_loose(bucket, factor)
            except Exception as error:  # raised after `finish`, when the other ranks have been told
                self.failure = self._diagnose(error)
            if not take_part or self.failure is not None:
                span.zero_()
                loose = [self.members.zeros(index) for index in bucket.loose]
            if write_tail is not None:
                write_tail(flat.words)
        bucket.version = bucket.range._version
        average = folded and self.channel.world_size > 1
        self.timeline.leaving(bucket.number)
        if self._hooking is not None:
            bucket.work = self._hooking.start(show_to_hook(bucket.number, flat, self.plan, self.members.params))
        elif loose:
            tensors = [message, *loose] if message.numel() else loose
            bucket.work = self.channel.start_sums(tensors, average, rider_bytes)
        elif message.numel():
            bucket.work = self.channel.start_sum(message, average, rider_bytes)
        self.timeline.launched(bucket.number, bucket.work)

    def _gather(self, bucket: LiveBucket, factor: float) -> None:
        """Copy what autograd left elsewhere into the range, multiply by the factor, and make `.grad` the view."""
        for index in bucket.placed:
            if index not in self._taken:  # it never arrived in this backward, or in parts
                self._place(index, factor)
        if not bucket.gathered:
            return
        grads, bucket.seen = bucket.seen or bucket.look(), []
        if any(map(operator.is_, grads, repeat(None))):
            grads = [view.zero_() if grad is None else grad for grad, view in zip(grads, bucket.views, strict=True)]
        # Where a gradient already is the view, the copy is of itself, and no more than a check.
        if factor != 1.0 and bucket.is_large:
            for grad, view in zip(grads, bucket.views, strict=True):
                torch.mul(grad, factor, out=view)
        else:
            torch._foreach_copy_(bucket.views, grads)
            if factor != 1.0:
                # One by one: for many at once torch rounds the factor to bfloat16 first, if that is their type.
                for part in bucket.views if bucket.placed else [bucket.range]:
                    part.mul_(factor)
        for param, view in zip(bucket.params, bucket.views, strict=True):
            param.grad = view

    def _diagnose(self, error: Exception) -> Exception:
        """The reason in words, where it is one that can be named."""
        try:
            self.members.check_all()
        except ConfigError as reason:
            return reason
        return error

    def _place(self, index: int, factor: float) -> None:
        param, view = self.members.params[index], self._flat.views[index]
        if param.grad is None:
            view.zero_()
        else:
            torch.mul(param.grad, factor, out=view)
        param.grad = view
        self._taken[index] = view, view._version

    def _take_loose(self, bucket: LiveBucket, factor: float) -> list[torch.Tensor]:
        """The gradients as they are, after making sure that nothing else shares their memory."""
        taken = []
        for index in bucket.loose:
            if index not in self._taken:
                grad = self._own(index)
                if factor != 1.0:
                    grad.mul_(factor)
                self._taken[index] = grad, grad._version
            taken.append(self._taken[index][0])
        return taken

    def _own(self, index: int) -> torch.Tensor:
        """The gradient of a parameter, in memory that is its own and in the order that all ranks use."""
        param = self.members.params[index]
        grad = param.grad
        if grad is None:
            grad = param.grad = self.members.zeros(index)
            return grad
        self.members.check(index, grad)
        if grad.requires_grad or grad.stride() != self._loose_strides[index] or _is_shared(grad):
            grad = param.grad = self.members.zeros(index).copy_(grad)
        return grad

    # -- backward is over ---------------------------------------------------------------------------------------------

    def find_late(self) -> list[int]:
        if not self._active:
            return []
        params = self.members.params
        late = []
        for bucket in self._buckets[: self._next]:
            replaced = any(map(operator.is_not, map(_get_grad, bucket.params), bucket.views))
            if replaced or bucket.range._version != bucket.version:
                late += bucket.gathered
        return late + [
            index
            for index, (grad, version) in self._taken.items()
            if grad._version != version or params[index].grad is not grad
        ]

    def find_missing(self) -> list[int]:
        if not self._active:
            return super().find_missing()
        missing: list[int] = []  # a bucket that has left was complete
        for bucket in self._buckets[self._next :]:
            if any(map(operator.is_, bucket.look(), repeat(None))):
                missing += [index for index in bucket.gathered if self.members.params[index].grad is None]
            missing += [index for index in bucket.alone if self.members.params[index].grad is None]
        return sorted(set(missing))

    def finish(self, write_tail: WriteTail, factor: float, take_part: bool) -> torch.Tensor:
        if not self.is_planned:
            agree_on_hook(self._hooking is not None, self.channel)
        if not self._active:
            self.begin(factor)
        self.timeline.backward_over()
        self._was_late = self._next < len(self._buckets) - 1
        zeros = None if take_part else FlatGradients(self.members, self.plan, self.num_words, *self._kinds)
        for bucket in self._buckets[self._next : -1]:
            self._send(bucket, zeros)
        words = (zeros or self._flat).words
        self._send(self._buckets[-1], zeros, write_tail if self._hooking is None else None)
        self._active = False
        for bucket in self._buckets:
            self.timeline.waiting(bucket.number)
            self._wait(bucket, take_part)
            self.timeline.done(bucket.number)
        if self._hooking is not None:
            # A hook may compress or keep what it is given, and send more when it likes: the words go by themselves.
            with torch.no_grad():
                write_tail(words)
            self.channel.wait(self.channel.start_sum(words, rider_bytes=words.nbytes), "the tail")
        self._taken.clear()  # so that `zero_grad` can free them
        self.timeline.over()
        return words

    def _wait(self, bucket: LiveBucket, take_part: bool) -> None:
        work, bucket.work = bucket.work, None
        if self._hooking is not None:
            self._hooking.finish(work, bucket.range if take_part else None)
        elif work is not None:
            self.channel.wait(work, f"bucket {bucket.number} of {len(self._buckets)}")

    def _on_hook_failure(self, error: Exception) -> None:
        if self.failure is None:
            self.failure, self.failed_in = error, "its communication hook"

    def multiply(self, factor: float) -> None:
        self._flat.multiply(factor)
        for index in self._loose_strides:
            grad = self.members.params[index].grad
            if grad is not None:
                grad.mul_(factor)

    def _look_before(self) -> None:
        """Note what is there before backward: views count their writes from here on, others are known by version.

        A gradient that should be in a view and is elsewhere is moved there first.
        """
        self._before.clear()
        params, views = self.members.params, self._flat.views
        if all(map(operator.is_, map(_get_grad, params), repeat(None))):
            return  # as after `zero_grad`
        try:
            with torch.no_grad():
                for index, param in enumerate(params):
                    grad, view = param.grad, views.get(index)
                    if grad is not None and view is not None and grad is not view:
                        view.copy_(grad)
                        param.grad = grad = view
                    if grad is not None and index in self._loose_strides:
                        self._before[index] = grad._version
        except Exception as error:
            self.failure = self._diagnose(error)

    # -- the order becomes known, and the plan ------------------------------------------------------------------------

    def settle(self) -> None:
        """After a step in which all went well: learn from it. Collective in the first step, when the plan is made."""
        if self._is_recording:
            self._is_recording = False
            self._arrivals.stop()
            if not self.is_planned:
                self._agree_on_plan()
            self._set_triggers()
        elif self._was_late and self._records_left and not any(bucket.in_parts for bucket in self._buckets):
            self._records_left -= 1
            self._is_recording = True

    def _agree_on_plan(self) -> None:
        """Everyone takes rank 0's plan, made from the order of arrival there."""
        gradients = self.members.gradients
        mine = self._make_plan(gradients, self.ready_order).to_json() if self.channel.rank == 0 else ""
        plan = Plan.from_json(self.channel.share(mine)[0])
        self.is_planned = True
        self._lay_out(Plan(gradients, plan.buckets, plan.rule))
        self._look_before()  # and let go of the memory of the first step

    def _lay_out(self, plan: Plan) -> None:
        self.plan = plan
        pieces = Counter(piece.gradient for bucket in plan.buckets for piece in bucket.pieces)
        split = {index for index, count in pieces.items() if count > 1}
        alone = {index for index, g in enumerate(plan.gradients) if g.num_bytes >= _ALONE_BYTES} | split
        # A communication hook wants a vector of everything, and a split gradient must be in one piece of memory.
        takes_loose = self.channel.is_nccl and self._hooking is None
        loose = alone - split if takes_loose else set()
        self._kinds = loose, alone
        allocate = self.channel.allocate if self.is_planned else None  # shared memory is made for what lasts
        self._flat = FlatGradients(self.members, plan, self.num_words, loose, alone, allocate)
        self._loose_strides = {index: torch.empty_like(self.members.params[index]).stride() for index in loose}
        self._buckets: list[LiveBucket] = []
        for number, planned in enumerate(plan.buckets):
            bucket = LiveBucket(number, self._flat.ranges[number])
            for piece in planned.pieces:
                into = bucket.placed if piece.gradient in alone else bucket.gathered
                (bucket.loose if piece.gradient in loose else into).append(piece.gradient)
            bucket.close(self.members.params, self._flat.views)
            self._buckets.append(bucket)
        self.timeline = Timeline(plan.bucket_bytes, self.channel.device)

    def _set_triggers(self) -> None:
        """Hook the large parameters, and the one that arrived last in each bucket, by this rank's own record."""
        self.stop()
        params, in_parts = self.members.params, self._arrivals.in_parts()
        for index in sorted({index for bucket in self._buckets for index in bucket.placed} - in_parts):
            self._handles.append(on_gradient(params[index], functools.partial(self._on_large, index)))
        for bucket in self._buckets[:-1]:
            indices = [*bucket.gathered, *bucket.alone]
            bucket.in_parts = not in_parts.isdisjoint(indices)
            last = self._arrivals.find_last(indices)
            if last is not None:  # after the hook that places it, if there is one
                self._handles.append(on_gradient(params[last], self._on_trigger))


def _is_shared(grad: torch.Tensor) -> bool:
    """Whether anything but this gradient uses its memory; the two known users are the tensor and the storage asked."""
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > 2
