"""Models and data, by name. Training and timing them does not belong here."""
