"""Ranks: identity, rendezvous, start and end. Nothing here sends gradients."""
