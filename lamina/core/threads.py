"""Ends of threads."""

import logging
import threading

log = logging.getLogger(__name__)

END_S = 5.0


def join_thread(thread: threading.Thread, seconds: float = END_S) -> bool:
    """Wait for a thread that was told to end, and return whether it has ended; log a warning if not.

    The caller must not close what a thread that has not ended uses.
    """
    thread.join(seconds)
    if thread.is_alive():
        log.warning("thread %s was told to end, but still runs after %g s", thread.name, seconds)
    return not thread.is_alive()
