"""Measuring devices, links and models, and fitting the cost model to what was measured."""
