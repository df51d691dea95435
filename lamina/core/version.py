"""The release: processes of one cluster have the same."""

__version__ = "0.2.0"
