"""Groups that a background thread keeps until it has the last reference."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

from paceline.runtime.ranks.world import keep_groups
from tests.conftest import wait_until


class Group:
    _device_types = ()


class Cycle:
    """Keeps a group when it is collected."""

    def __init__(self, group: Group) -> None:
        self.itself = self
        weakref.finalize(self, keep_groups, [group])


def count_keepers() -> int:
    return [thread.name for thread in threading.enumerate()].count("paceline-groups")


def await_keepers(count: int) -> None:
    wait_until(lambda: count_keepers() == count)


def hold_and_release() -> None:
    groups = [Group() for _ in range(3)]
    seen = [weakref.ref(group) for group in groups]
    for group in (*groups, *groups):  # twice, as when the world is closed before the wrapper is destroyed
        keep_groups([group])
    del group
    Cycle(groups[0])
    gc.collect()
    assert count_keepers() == 1
    time.sleep(0.1)  # long enough for several checks
    assert count_keepers() == 1 and all(one() is not None for one in seen)
    groups.clear()
    await_keepers(0)
    assert not any(one() for one in seen)
    keep_groups([Group()])  # the thread starts again
    await_keepers(0)


def test_one_thread_holds_all_groups_until_nobody_else_does():
    # Run in a new process, because an earlier test may have left a group that is still referenced.
    program = f"from {__name__} import hold_and_release; hold_and_release()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
