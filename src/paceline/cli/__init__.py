"""The commands: they parse, call a verb and print. Only verbs import torch, so that help starts at once."""
