"""Proofs between ranks on gloo: one that is late, and a connection that is lost, without real connections."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import LaunchError
from paceline.transport import proof


class Work:
    """One that is complete just after its first wait has timed out, with this error or well."""

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


def test_a_proof_that_comes_just_after_a_look_is_in_time():
    backend = Backend("")
    proof.check_pairs(backend, "group")
    assert backend.work.num_waits == 2


def test_a_connection_that_is_lost_says_so_itself():
    with pytest.raises(LaunchError, match="Connection closed by peer") as caught:
        proof.check_pairs(Backend("Connection closed by peer"), "group")
    assert caught.value.code == "peer-lost"
