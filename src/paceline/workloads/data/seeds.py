"""Seeds of random streams that must not depend on rank, world size or history. Drawing does not belong here."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed for one purpose: equal for equal numbers, and without relation to that of neighbouring ones.

    torch's generator on the CPU looks at the low 32 bits alone, so that sums such as seed + epoch would collide.
    """
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
