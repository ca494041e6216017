"""Rules for which CUDA stream waits for which. Every message, codec and schedule follows them; a CPU needs none.

The *caller's stream* is the current stream of the program: forward, backward, the optimizer. Messages run on the
backend's own streams. Computations between the messages of an exchange run on one *side stream*.

1. A message waits for the stream that is current when it is started. NCCL and gloo both ensure this.
2. The result of a message may be used on a stream that has waited for its Work: the stream that is current at
   `Work.wait()`, or the side stream (`SideStream.receive`). A Future, or a finished Work, does not mean that the GPU
   has finished, and neither makes the host wait for it.
3. An exchange starts after everything queued on the caller's stream (`SideStream.follow_caller`). From then on it waits
   only for its own messages, on the side stream, so that it overlaps with backward. Its inputs must not change until it
   has finished, so a schedule computes parameter differences on the caller's stream before the exchange starts.
4. The Future of an exchange completes with a tensor (`SideStream.complete`), because torch records events only for the
   devices of tensors in a Future's value. Waiting for it then makes the waiter's stream wait for the side stream.
5. Memory that a codec keeps between steps is allocated on the side stream, even when a checkpoint is loaded or
   residuals are rescaled (`SideStream.borrowed`). The allocator returns freed memory to the stream that allocated it,
   and would reuse memory of the caller's stream while the side stream still reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """A stream next to the caller's, for computations between messages."""

    def __init__(self, device: torch.device, is_nccl: bool = False) -> None:
        self.device, self._is_nccl = device, is_nccl
        self._stream: Any = None
        self._mark: torch.Tensor | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._mark = torch.empty(1, device=device)

    def follow_caller(self) -> None:
        """Make the side stream wait for everything queued on the caller's stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead_caller(self) -> None:
        """Make the caller's stream wait for everything queued on the side stream so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """A context that computes on the side stream."""
        return torch.cuda.stream(self._stream)

    def receive(self, work: Any) -> None:
        """Make the side stream wait for a message that has arrived, or for an NCCL message. With gloo this must not
        call `wait()`: gloo runs callbacks before it marks a Work as finished. With NCCL, `wait()` only queues."""
        if self._stream is not None and work is not None:
            with self.current():
                work.wait() if self._is_nccl else work.synchronize()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context that computes on the side stream, after the caller's earlier work and before its later work."""
        self.follow_caller()
        with self.current():
            yield
        self.lead_caller()

    def create_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=None if self._stream is None else [self.device])

    def complete(self, future: torch.futures.Future[Any], result: torch.Tensor | None) -> None:
        """Set the result. Waiting for the Future makes the waiter's stream wait for the side stream."""
        with self.current():
            future.set_result(self._mark if result is None else result)


def copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Copy a vector to pinned memory, on the current stream. Read the copy only after the event."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    kept = torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event.record()
    return kept, event


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor without making the host wait. A plain copy to a GPU waits for the current stream, which may be
    blocked by a message that another rank never sends."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
