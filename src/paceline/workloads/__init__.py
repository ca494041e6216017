"""Models and data, by name. Does not train or time them."""
