"""The release: processes of one cluster have the same."""

__version__ = "0.1.0"
