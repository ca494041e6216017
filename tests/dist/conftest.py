"""What the tests with real ranks share."""

from tests.dist.forked_ranks import forked

__all__ = ["forked"]
