"""Models and data, by name. Code that trains or times them does not belong here."""
