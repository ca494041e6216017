"""What gets trained: models and data, by name. Training and timing them does not belong here."""
