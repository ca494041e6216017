"""Fixtures for tests with real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.forked_ranks import forked

__all__ = ["forked", "job"]


@pytest.fixture
def job(on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`job(num_ranks, fn, *args)`: run a function on this many ranks."""
    return on_ranks
