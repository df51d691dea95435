"""Quantised weights: the formats of checkpoints, and reading and making codes."""
