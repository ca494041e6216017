"""What gets trained: models and their synthetic batches. How they are trained and timed does not belong here."""
