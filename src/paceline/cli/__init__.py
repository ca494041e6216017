"""The commands: they parse, call a verb and print. torch is imported inside a verb, never on the way to it."""
