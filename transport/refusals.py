"""Counts rejected connections by kind, and logs the first of each kind."""

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Refusals:
    """Rejected connections of one listener. Only one thread may add to a kind; any thread may read ``by_kind``."""

    def __init__(self, name: str) -> None:
        self.by_kind: Counter[str] = Counter()
        self._name = name

    def add(self, kind: str, reason: str) -> None:
        """Count a rejected connection."""
        self.by_kind[kind] += 1
        if self.by_kind[kind] == 1:
            logger.warning("%s rejected a connection: %s (more of this kind are only counted)", self._name, reason)
