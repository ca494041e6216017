"""Frameworks that wrap a model themselves. They need no adapter: `DDP` is a subclass of the class that they ask for.

`swap_wrapper` makes them build ours (Accelerate, transformers' Trainer, Lightning and Fabric).
"""

from paceline.parallel import swap_wrapper

__all__ = ["swap_wrapper"]
