"""Training runs: settings, the step, the loop, checkpoints, optimizers and schedules."""
