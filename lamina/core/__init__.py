"""The nouns of Lamina. Imports no other room."""

__version__ = "0.2.0"
"""The release. All processes of a cluster must have the same."""
