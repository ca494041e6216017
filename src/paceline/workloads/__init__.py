"""What gets trained: models and their synthetic batches. Training and timing them does not belong here."""
