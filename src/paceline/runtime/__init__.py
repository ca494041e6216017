"""Ranks: identity, rendezvous, start and end. Nothing here moves gradients."""
