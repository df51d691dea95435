"""Signals that are collected while they must not raise exceptions."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM for now, in the order in which they come. Main thread only.

    Otherwise their handlers raise exceptions wherever this thread is. One that is raised between two steps of a lock
    leaves it locked, and other threads wait for it forever; one that is raised in a finalizer is lost.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
