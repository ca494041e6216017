"""Ranks that wait for each other through the store instead of messages, and how many requests they make."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from paceline.parallel import channel as module
from paceline.parallel.channel import Channel


class CountingStore:
    """An in-process store that counts requests."""

    def __init__(self) -> None:
        self.values, self.requests, self._lock = dict[str, bytes](), Counter[str](), threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.requests["add"] += 1
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            self.requests["compare_set"] += 1
            return self.values.setdefault(key, desired.encode())


def build_channel(store: CountingStore, rank: int, world_size: int) -> Channel:
    channel = object.__new__(Channel)
    channel.rank, channel.world_size = rank, world_size
    channel._store = lambda what: store  # type: ignore[method-assign,assignment,return-value]
    return channel


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `sleep` advances; `now[0]` is the current time."""
    now = [0.0]

    class Time:
        monotonic = staticmethod(lambda: now[0])
        sleep = staticmethod(lambda seconds: now.__setitem__(0, now[0] + seconds))

    monkeypatch.setattr(module, "time", Time)
    return now


def test_all_ranks_arrive():
    store, found = CountingStore(), dict[int, list[int]]()

    def meet(rank: int) -> None:
        found[rank] = build_channel(store, rank, 3).wait_for_ranks("state", 30.0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: [], 1: [], 2: []}


def test_a_waiting_rank_polls_rarely_and_names_the_absent_ranks(clock):
    store = CountingStore()
    for rank in (7, 500):
        word, bit = divmod(rank, module._WORD_BITS)
        store.add(f"arrived/{word}", 1 << bit)
    assert build_channel(store, 0, 512).wait_for_ranks("state", 10.0) == [
        rank for rank in range(1, 512) if rank not in (7, 500)
    ]
    assert store.requests.total() < 150
    # A rank that arrives later gets the same answer without searching.
    before = store.requests.total()
    assert len(build_channel(store, 3, 512).wait_for_ranks("state", 10.0)) == 509
    assert store.requests.total() < before + 10
