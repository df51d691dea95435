"""Launchers, which start worker processes."""
