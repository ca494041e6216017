"""Commands parse arguments, call a verb and print its result. Only verbs import torch, so help appears instantly."""
