"""Runs functions whose recursion needs a large stack."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_NBYTES = 512 * 1024 * 1024
"""Address space of the stack. Only what is used takes memory."""

_starting = threading.Lock()

T = TypeVar("T")


def run_deep(function: Callable[[], T]) -> T:
    """Return ``function()``, called in a thread with a stack of ``STACK_NBYTES``. Raises what it raises."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # the caller's thread raises it
            result.set_exception(error)

    with _starting:  # the size is one of the process
        before = threading.stack_size(STACK_NBYTES)
        try:
            threading.Thread(target=run, name="lamina-deep", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()
