"""The commands: thin, one module per verb. torch is imported inside a verb, never on the way to it."""
