"""Measurements: each module times one thing and returns records. `report` renders them."""
