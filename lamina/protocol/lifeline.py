"""Ties a worker process to its engine: it ends when the engine ends, however that happens."""

import os
import select
import threading


def exit_with(pid: int) -> None:
    """Exit this process with status 1 as soon as process ``pid`` has ended; at once if it has already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # it ended while this process was importing
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
