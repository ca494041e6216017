"""Measurements: each module times one thing and returns records. What is drawn from them belongs to `report`."""
