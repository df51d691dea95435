"""Workers forked from a process that has imported what they need: imports take each new process about a second.

A server (``main``) runs for each role and environment of workers that a process of tests starts on CPUs. A forked
worker reads its bootstrap as ever, and becomes a child of the tests' process.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from lamina.cluster import local_workers
from lamina.cluster.local_workers import MODULES, LocalWorkers, worker_environment
from lamina.control.sockets import Bootstrap
from lamina.core.topology import Role

ROOT = Path(__file__).parents[2]
ANSWER_S = 600.0  # the server imports torch first, in the emulated machine of tests/rdma too
SET_CHILD_SUBREAPER = 36  # of prctl
IMPORTS: Mapping[str, str] = {"compute": "lamina.compute.worker", "memory": "lamina.memory.worker"}
ROLES = {tuple(LocalWorkers().command("", module)): role for role, module in MODULES.items()}
"""By command of a worker."""

_start = local_workers.start_process


class Order(msgspec.Struct):
    """A worker to fork. Its standard input and standard error come with it."""

    command: list[str]
    environment: dict[str, str]
    cores: list[int]
    folder: str


class Adopted(subprocess.Popen[bytes]):
    """A child of this process that another process has forked."""

    def __init__(self, command: list[str], pid: int) -> None:
        self.pid, self.args = pid, command
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25


class Server:
    """Forks workers, in a process of its own that ends with this one."""

    def __init__(self, role: Role, environment: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ANSWER_S)
        with theirs:
            command = [sys.executable, "-m", "tests.support.forked_workers", role, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a worker's too: Ctrl-C reaches only the tests
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._line.close()
        self._process.wait(ANSWER_S)

    def fork(self, order: Order, stdin: int) -> int:
        """Fork a worker, a child of this process, and return its process id."""
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._line, [msgspec.msgpack.encode(order)], [stdin, 2])
            if not (answer := self._line.recv(64)):
                raise ChildProcessError(f"the process that forks workers has ended before {order.command} started")
            return int(answer)
        finally:
            prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Servers:
    """Starts a server for the second worker of its role and environment, so that one worker starts as users' do."""

    def __init__(self) -> None:
        self._servers: dict[object, Server] = {}
        self._started = Counter[object]()
        self._lock = threading.Lock()  # an engine's thread starts workers too

    def start_process(
        self, command: list[str], bootstrap: Bootstrap, shared_cores: bool, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a worker as ``local_workers.start_process`` does."""
        role = ROLES.get(tuple(command))
        if role is None or bootstrap.device != "cpu":
            return _start(command, bootstrap, shared_cores, variables)
        environment = worker_environment(shared_cores, variables)
        own = ("LAMINA_", "PYTEST_")  # no library reads them when it is imported
        key = role, frozenset(each for each in environment.items() if not each[0].startswith(own))
        with self._lock:
            self._started[key] += 1
            if self._started[key] == 1:
                return _start(command, bootstrap, shared_cores, variables)
            if key not in self._servers:
                self._servers[key] = Server(role, environment)
            order = Order(command, environment, sorted(os.sched_getaffinity(0)), os.getcwd())
            reading, writing = os.pipe()
            with open(reading, "rb") as stdin:
                pid = self._servers[key].fork(order, stdin.fileno())
        with contextlib.suppress(BrokenPipeError), open(writing, "wb") as ours:
            ours.write(msgspec.msgpack.encode(bootstrap))
        return Adopted(command, pid)


def set_command_line(words: list[str]) -> None:
    """Replace the command line that others see of this process, which must be longer. The first word is padded."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = "".join(f"{word}\0" for word in words).encode()
    ctypes.memmove(begin, b"/" * (end - begin - len(line)) + line, end - begin)


def run_worker(order: Order, stdin: int, stderr: int) -> NoReturn:
    """Become a worker."""
    from lamina.compute.__main__ import end_process
    from lamina.compute.__main__ import main as compute_main
    from lamina.memory.worker import main as memory_main

    for descriptor, target in ((stdin, 0), (os.open(os.devnull, os.O_WRONLY), 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    set_command_line(order.command)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    os.sched_setaffinity(0, order.cores)
    status = 1
    try:
        if ROLES[tuple(order.command)] == "compute":
            compute_main()
        else:
            gc.enable()  # a compute worker does so itself
            memory_main()
        status = 0
    except SystemExit:
        pass  # its reason has been reported
    except BaseException:
        traceback.print_exc()
    end_process(status)


def fork_twice(order: Order, line: socket.socket, stdin: int, stderr: int) -> int:
    """Fork a worker whose parent ends at once, so that the tests' process becomes its parent; return its process id."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (worker := os.fork()) == 0:
            for descriptor in (line.detach(), reading, writing):
                os.close(descriptor)
            run_worker(order, stdin, stderr)
        os.setpgid(worker, worker)
        os.write(writing, str(worker).encode())
        os._exit(0)
    assert len(os.listdir("/proc/self/task")) == 1, "a worker would lack threads"  # OpenBLAS ends its own before a fork
    os.close(writing)
    with open(reading, "rb") as told:
        os.waitpid(between, 0)
        return int(told.read())


def main() -> NoReturn:
    """Import what a worker imports, then fork a worker for each order until the tests' process ends."""
    from lamina.compute.late_imports import before_imports

    before_imports("cpu")
    importlib.import_module(IMPORTS[sys.argv[1]])
    gc.freeze()
    line = socket.socket(fileno=int(sys.argv[2]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not data:
            os._exit(0)
        stdin, stderr = array.array("i", descriptors)
        pid = fork_twice(msgspec.msgpack.decode(data, type=Order), line, stdin, stderr)
        os.close(stdin)
        os.close(stderr)
        line.send(str(pid).encode())


if __name__ == "__main__":
    main()
