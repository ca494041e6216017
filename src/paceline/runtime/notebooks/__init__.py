"""Ranks behind a notebook and the cells that they run."""
