"""Authentication between gloo ranks, without real connections: a late proof, and a lost connection."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import LaunchError
from paceline.transport import proof


class Work:
    """A Work that completes right after its first wait has timed out, either with this error or successfully."""

    def __init__(self, error: str) -> None:
        self.error, self.num_waits = error, 0

    def is_completed(self) -> bool:
        return self.num_waits > 0

    def wait(self, limit: object = None) -> None:
        self.num_waits += 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


class Backend:
    def __init__(self, error: str) -> None:
        self.work = Work(error)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def alltoall_base(self, theirs: torch.Tensor, *_: object) -> Work:
        answer = b"".join(proof._prove("group", other, 0) for other in range(2))
        theirs.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
        return self.work


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setattr(proof, "_key", b"secret")
    monkeypatch.setattr(proof, "_store", None)


def test_a_proof_that_arrives_just_after_a_timeout_is_accepted():
    backend = Backend("")
    proof.check_pairs(backend, "group")
    assert backend.work.num_waits == 2


def test_a_lost_connection_keeps_its_own_error():
    with pytest.raises(LaunchError, match="Connection closed by peer") as caught:
        proof.check_pairs(Backend("Connection closed by peer"), "group")
    assert caught.value.code == "peer-lost"
