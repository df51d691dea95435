"""The nouns of Lamina. Imports no other room."""

__version__ = "0.2.0"
"""The release: processes of one cluster have the same."""
