"""Experiments on top of the library: how a job scales and how it handles faults. No lower layer imports them."""
