"""Signals that are collected while they must not raise exceptions."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM for now, in the order in which they come. Main thread only.

    Otherwise their handlers raise exceptions wherever this thread is. One that is raised between two steps of a lock
    leaves it locked, and other threads wait for it forever; one that is raised in a finalizer is lost.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda caught, _: received.append(caught))
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
