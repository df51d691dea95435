"""Linear layers and experts whose weights stay codes of few bits."""
