"""Thin adapters to other programs: notebooks."""
