"""Measures devices, links and models, and fits the cost model to the measurements."""
