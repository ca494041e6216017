"""All-reduces over several hosts while their group closes: every one of them ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.transport import native
from paceline.transport.hierarchy import TwoLevels


class Inside:
    """A host's shared memory in which nothing arrives until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def run(self, operation: Any, timeout_s: float) -> None:
        assert self._closed.wait(100)
        raise native.TransportError("closed", code="closed")

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def levels():
    store = dist.HashStore()
    found = TwoLevels(store, Inside(), ["a"], 0, [0], timedelta(seconds=30))
    yield found
    found.close()


def build_operation(tensor: Any) -> tuple[Any, ...]:
    return native.ALL_REDUCE, 0, native.SUM, 0, tensor, 0, 4


def check_closed(levels: TwoLevels, submit: Any) -> None:
    with pytest.raises(native.TransportError) as caught:
        levels.wait(submit(), 20.0)
    assert caught.value.code == "closed"


def test_work_submitted_before_closing_fails(levels):
    works = [levels.submit(build_operation(torch.ones(4)), 30.0) for _ in range(3)]
    levels.close()
    for work in works:
        check_closed(levels, lambda work=work: work)
    check_closed(levels, lambda: levels.submit(build_operation(torch.ones(4)), 30.0))


def test_work_submitted_while_the_group_closes_fails(levels):
    closer, put = threading.Thread(target=levels.close), levels._works.put

    class Works:
        """Lets another thread close the group between the check and the submission."""

        def put(self, work: Any) -> None:
            if work is not None:
                closer.start()
                closer.join(0.5)
            put(work)

        get, empty = levels._works.get, levels._works.empty

    levels._works = Works()
    check_closed(levels, lambda: levels.submit(build_operation(torch.ones(4)), 30.0))
    closer.join(100)
    assert not closer.is_alive()
