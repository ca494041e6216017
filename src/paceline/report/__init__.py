"""Tables and figures of records. Nothing here measures, and every figure names the source of its numbers."""
