"""Lamina: LLM inference that cuts the model at its attention operators."""

__version__ = "0.1.0"
