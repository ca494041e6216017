"""Experiments on top of the library: how a job scales, and how it handles faults. Nothing below imports them."""
