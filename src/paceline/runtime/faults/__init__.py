"""Faults: the status of ranks, the monitor that names a dead or hung one, and recovery."""
