"""Ranks: who they are, how they meet, how they are started and ended. Nothing here moves gradients."""
