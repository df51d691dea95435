"""Body of every worker process: started with a bootstrap on standard input, ends with its engine."""

import contextlib
import platform
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from lamina.errors import UserError
from lamina.output import start_logging
from lamina.protocol.control import Bootstrap, ControlClient
from lamina.protocol.lifeline import exit_with
from lamina.protocol.machine import greeting, inspection
from lamina.protocol.messages import Failed


class Worker(Protocol):
    """What a worker process runs."""

    def run(self) -> None:
        """Serve until the engine says stop."""
        ...


Build = Callable[[ControlClient, contextlib.ExitStack], Worker]
"""Goes through set-up with the engine and returns the worker, complete.

What the worker has to give back at its end goes onto the stack, which is closed after a failure has been reported.
"""


def read_bootstrap() -> Bootstrap:
    """What this process was started with, from its standard input. Once."""
    return msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Bootstrap)


def run_worker(
    build: Build,
    gpu_memory: Callable[[str], tuple[int, int]] = lambda device: (0, 0),
    bootstrap: Bootstrap | None = None,
) -> None:
    """Body of a worker process: build the worker that the bootstrap (None: on standard input) describes, and serve.

    ``gpu_memory``: bytes free on a device and in all, 0 unless it is a GPU.
    A failure is reported to the engine. The process ends with its engine, however the engine ends.
    """
    start_logging()
    bootstrap = bootstrap or read_bootstrap()
    exit_with(bootstrap.parent_pid)
    with contextlib.ExitStack() as resources:
        control = ControlClient(bootstrap, inspection(bootstrap.device, gpu_memory))
        resources.callback(control.close)
        try:
            control.send(greeting())
            build(control, resources).run()
        except Exception as error:
            # Sent before the links close, so that a peer's complaint about that cannot arrive first.
            trace, by_user = traceback.format_exc(), isinstance(error, UserError)
            control.send(Failed(type(error).__name__, str(error), by_user, trace, platform.node()))
            raise SystemExit(1) from error
