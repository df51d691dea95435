"""Body of every worker process: born from a bootstrap on standard input, gone with its engine."""

import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from lamina.env import LOG_FORMAT, environment
from lamina.errors import UserError
from lamina.protocol.control import Bootstrap, ControlClient
from lamina.protocol.messages import Failed, Hello
from lamina.transport.shm import host


class Worker(Protocol):
    """What a worker process runs."""

    def run(self) -> None:
        """Set up, then serve until the engine says stop."""
        ...

    def close(self) -> None:
        """Leave the data plane; peers notice."""
        ...


def run_worker(make: Callable[[ControlClient], Worker]) -> None:
    """Body of a worker process: read the bootstrap from standard input, serve, and report a failure to the engine.

    The process ends with its engine, however the engine ends.
    """
    logging.basicConfig(level=environment().log_level, format=LOG_FORMAT)
    bootstrap = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Bootstrap)
    exit_with(bootstrap.parent_pid)
    control = ControlClient(bootstrap)
    worker = make(control)
    try:
        control.send(Hello(host()))
        worker.run()
    except Exception as error:
        control.send(Failed(type(error).__name__, str(error), isinstance(error, UserError), traceback.format_exc()))
        raise SystemExit(1) from error
    finally:
        worker.close()  # after Failed is on its way: a peer's complaint must not come first
        control.close()


def exit_with(pid: int) -> None:
    """End this process as soon as process ``pid`` (its engine) has ended, however that happens."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # while this process was importing
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
