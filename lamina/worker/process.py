"""Runs a worker process: bootstrap, connection to the engine, and exit, at the latest when its parent exits."""

import contextlib
import gc
import os
import platform
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from lamina.control.messages import Failed, Hello, Resources
from lamina.control.sockets import Bootstrap, ControlClient, Inspection
from lamina.core import __version__
from lamina.core.errors import UserError
from lamina.output import start_logging
from lamina.transport.shm import host
from lamina.worker.loop import WorkerLoop


def exit_with(pid: int) -> None:
    """Exit this process with status 1 once process ``pid`` has ended; immediately if it has ended already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # it ended while this process was importing
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def no_old_garbage() -> Iterator[None]:
    """Collect no garbage among the objects that exist now: a scan stops a server's process for a third of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # otherwise the exiting interpreter reports frozen objects as leaks


RDMA_DEVICES = Path("/sys/class/infiniband")
CGROUP = Path("/sys/fs/cgroup")  # inside a container, its own control group


def free_memory() -> int:
    """Return the bytes available for allocation: free memory of the machine or, if less, of this control group.

    A control group counts cached files, such as a checkpoint that has been read, as used, although they can be
    reclaimed. Inactive ones count as free here, as in Kubernetes' working set.
    """
    free = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.is_file() and (bound := limit.read_text().strip()) != "max":
        used = int((CGROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, int(bound) - used + int(kinds["inactive_file"]))
    return max(0, free)


def greeting(device: str) -> Hello:
    """Return the first message to the engine of this process, a worker on ``device``."""
    rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    return Hello(host(), __version__, platform.node(), sorted(os.sched_getaffinity(0)), rdma, device)


def inspection(device: str, gpu_memory: Callable[[str], tuple[int, int]]) -> Inspection:
    """Return the function that answers ``Inspect`` in a worker on ``device``. ``gpu_memory``: see ``run_worker``."""

    def inspect(sent_ns: int, now_ns: int) -> Resources:
        machine = psutil.virtual_memory().available
        return Resources(sent_ns, now_ns, free_memory(), machine, *gpu_memory(device), device == "cpu")

    return inspect


Build = Callable[[ControlClient, contextlib.ExitStack], WorkerLoop]
"""Sets up the worker with the engine and returns the worker.

Resources to release at the end are pushed onto the stack, which is closed after a failure has been reported.
"""


def read_bootstrap() -> Bootstrap:
    """Read this process's bootstrap from standard input. May be called once."""
    return msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Bootstrap)


def run_worker(
    build: Build,
    gpu_memory: Callable[[str], tuple[int, int]] = lambda device: (0, 0),
    bootstrap: Bootstrap | None = None,
) -> None:
    """Build a worker and run it until the engine stops it.

    A failure is reported to the engine. The process ends with its engine, however the engine ends.

    Args:
        build: See ``Build``.
        gpu_memory: Returns free and total bytes of a device; 0 and 0 unless it is a GPU.
        bootstrap: From ``read_bootstrap``; None: read it now.
    """
    start_logging()
    bootstrap = bootstrap or read_bootstrap()
    exit_with(bootstrap.parent_pid)
    control = ControlClient(bootstrap, inspection(bootstrap.device, gpu_memory))
    with contextlib.closing(control):
        serve(control, build)


def serve(control: ControlClient, build: Build) -> None:
    """Greet the engine, build the worker and run it. Reports a failure to the engine, then raises SystemExit."""
    with contextlib.ExitStack() as resources:
        try:
            control.send(greeting(control.device))
            build(control, resources).serve_until_closed()
        except Exception as error:
            # Sent before the links close, so that the engine gets this error before a peer reports a lost link.
            trace, by_user = traceback.format_exc(), isinstance(error, UserError)
            control.send(Failed(type(error).__name__, str(error), by_user, trace, platform.node()))
            raise SystemExit(1) from error
