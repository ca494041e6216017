"""Every private name of torch that Paceline uses, each with what happens where it is missing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def get_default_store() -> dist.Store:
    """The store on which the ranks of the world met."""
    return distributed_c10d._get_default_store()


def find_counter(group: Any) -> Callable[[], int] | None:
    """The function that counts the collectives that this rank has started in a group. Without it a rank that has
    started one too many on NCCL is not named."""
    return getattr(group, "_get_sequence_number_for_group", None)


def new_local_group(ranks: Sequence[int], backend: str) -> Any:
    """A group of a part of the ranks. Collective: call on every rank of that part, and on no other.

    torch names such a group by its ranks and a count. Until 2.13 it was the number of groups alive in this process,
    which may differ between ranks. Since 2.14 it is the count that names groups of the whole world: it advances on
    these ranks only, and the next group of the world hangs. So this group gets a name of its own.
    """
    digest = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    number = (get_default_store().add(f"paceline-groups/{digest}", 1) - 1) // len(ranks)
    name, thread = f"paceline-{digest}-{number}", threading.get_ident()
    original = distributed_c10d._process_group_name

    def name_group(*args: Any, **kwargs: Any) -> Any:
        return name if threading.get_ident() == thread else original(*args, **kwargs)

    distributed_c10d._process_group_name = name_group
    try:
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = original
