"""What was turned away at a door: counted by kind, and the first of each kind logged."""

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Refusals:
    """Refusals of one listener. One thread counts a kind; any may read ``by_kind``."""

    def __init__(self, name: str) -> None:
        self.by_kind: Counter[str] = Counter()
        self._name = name

    def add(self, kind: str, reason: str) -> None:
        """Count one more."""
        self.by_kind[kind] += 1
        if self.by_kind[kind] == 1:
            logger.warning("%s turned somebody away: %s (more of this kind are counted only)", self._name, reason)
