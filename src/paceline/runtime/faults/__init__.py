"""Faults: the status of ranks, the monitor that detects dead and hung ranks, and recovery."""
