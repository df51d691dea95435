"""Weights stored as codes of few bits: their formats, and how they are read."""
