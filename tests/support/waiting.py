"""Waits of tests: for something that must become true, with a deadline."""

import time
from collections.abc import Callable

END_S = 120.0  # of what takes a second or two on an idle machine


def wait_until(condition: Callable[[], object], otherwise: str = "", timeout_s: float = END_S) -> None:
    """Return once ``condition`` holds. Raises AssertionError that says ``otherwise`` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
