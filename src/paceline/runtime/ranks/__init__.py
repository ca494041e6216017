"""Ranks and their worlds: rendezvous, messages, launching, and the session of every verb."""
