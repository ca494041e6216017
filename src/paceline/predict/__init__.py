"""Cost curves and, on them, predictions. Nothing here runs or times anything."""
