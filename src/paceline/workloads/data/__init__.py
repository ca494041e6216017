"""Data sets: what can be asked for, readers of the files as distributed, synthetic sets, and who takes which sample.

Importing this package does not import torch: `requests` is what a command needs to refuse a request early.
"""
