"""Training runs: checkpoints and what a run writes of itself. Models, data and the wrapper do not belong here."""
