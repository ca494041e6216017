"""Experiments on top of the library: how a job scales, and what faults do to it. Nothing below imports them."""
