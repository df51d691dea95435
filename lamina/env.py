"""Every environment variable Lamina reads, in one place."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """Values of the ``LAMINA_*`` variables.

    Attributes:
        log_level: ``LAMINA_LOG_LEVEL``, the level of all processes' log lines (default WARNING).
    """

    log_level: str = "WARNING"


def environment() -> Environment:
    """Read the variables now."""
    return Environment(log_level=os.environ.get("LAMINA_LOG_LEVEL", "WARNING").upper())
