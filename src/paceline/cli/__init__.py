"""Commands that parse arguments, call a verb and print its result. Only verbs import torch, so that help appears
instantly."""
