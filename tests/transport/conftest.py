"""Fixtures: a pair of connected endpoints of every implementation. The suite covers every entry of PAIRS."""

import contextlib
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lamina.transport.base import Arena, Endpoint, Peer
from lamina.transport.tcp import TcpEndpoint
from tests.support.sweep import sweep
from tests.transport.far import IMPLEMENTATIONS, SECRET, Far
from tests.transport.tcp_tools import DOORBELLS as TCP_DOORBELLS
from tests.transport.tcp_tools import NBYTES as TCP_NBYTES
from tests.transport.tcp_tools import MakeProxy, MakeTcp, Proxy

CONNECT_S = 120.0  # emulated machines are slow
NBYTES = 1 << 20
DOORBELLS = 64


class FarThread:
    """The far side in a thread of this process."""

    @classmethod
    def start(cls) -> "FarThread":
        return cls()

    def __init__(self) -> None:
        self._far = Far()
        self._thread = ThreadPoolExecutor(1)

    def submit(self, action: str, *arguments: Any) -> "Future[Any]":
        return self._thread.submit(getattr(self._far, action), *arguments)

    def call(self, action: str, *arguments: Any) -> Any:
        return self.submit(action, *arguments).result(2 * CONNECT_S)

    def die(self) -> None:
        """Close the far side's endpoint: in this process, it cannot be killed."""
        self._far.endpoint.close()

    def close(self) -> None:
        if hasattr(self._far, "endpoint"):
            self._far.endpoint.close()
        self._thread.shutdown()


class FarProcess:
    """The far side in a process of its own, reused by the next test unless it was killed."""

    _spare: ClassVar[list["FarProcess"]] = []

    @classmethod
    def start(cls) -> "FarProcess":
        return cls._spare.pop() if cls._spare else cls()

    @classmethod
    def end_spare(cls) -> None:
        while cls._spare:
            cls._spare.pop()._end()

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "far.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._thread = ThreadPoolExecutor(1)

    def submit(self, action: str, *arguments: Any) -> "Future[Any]":
        return self._thread.submit(self._talk, action, arguments)

    def call(self, action: str, *arguments: Any) -> Any:
        return self.submit(action, *arguments).result(2 * CONNECT_S)

    def _talk(self, action: str, arguments: tuple[Any, ...]) -> Any:
        assert self.process.stdin and self.process.stdout
        pickle.dump((action, arguments), self.process.stdin)
        self.process.stdin.flush()
        error, result = pickle.load(self.process.stdout)
        if error:
            raise RuntimeError(error)
        return result

    def die(self) -> None:
        """Kill without warning. It is not reaped: peers must also treat a zombie as dead."""
        self.process.kill()

    def close(self) -> None:
        if self in self._spare:
            return  # a test has closed its pair already
        try:
            self.call("close")
        except (RuntimeError, OSError, EOFError, TimeoutError):
            self._end()
        else:
            self._spare.append(self)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.shutdown()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):  # a request that the dead process did not read
                pipe.close()


@dataclass
class Pair:
    """The near endpoint with its arena, the far side, and the near side's view of it."""

    kind: str
    near: Endpoint
    arena: Arena
    peer: Peer
    far: FarThread | FarProcess

    def close(self) -> None:
        self.near.close()
        self.far.close()


PAIRS: dict[str, tuple[str, type[FarThread] | type[FarProcess]]] = {
    "null": ("null", FarThread),
    "shm": ("shm", FarThread),
    "shm-processes": ("shm", FarProcess),
    "tcp": ("tcp", FarThread),
    "tcp-processes": ("tcp", FarProcess),
    "tls": ("tls", FarThread),
    "tls-processes": ("tls", FarProcess),
}
# Those of the ordinary suite: every transport, and processes where the transport is made for them.
ORDINARY = {"null", "shm-processes", "tcp", "tls-processes"}
ORDINARY_PROCESSES = {"shm-processes", "tcp-processes"}
if os.environ.get("LAMINA_TEST_RDMA"):  # this machine has an RDMA device: see tests/rdma
    PAIRS |= {"rdma": ("rdma", FarThread), "rdma-processes": ("rdma", FarProcess)}
    ORDINARY |= {"rdma", "rdma-processes"}
    ORDINARY_PROCESSES |= {"rdma-processes"}


def open_pair(name: str) -> Pair:
    kind, side = PAIRS[name]
    far = side.start()
    near = IMPLEMENTATIONS[kind]("near")
    arena = near.register(NBYTES, DOORBELLS)
    peer = near.connect(far.call("open", kind, NBYTES, DOORBELLS), CONNECT_S)
    far.call("connect", near.descriptor())
    return Pair(kind, near, arena, peer, far)


@contextlib.contextmanager
def files_left(count: int) -> Iterator[None]:
    """This process can open only ``count`` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limits[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for number in [held.pop() for _ in range(count)]:
            os.close(number)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in held:
            os.close(number)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    FarProcess.end_spare()


@pytest.fixture(params=sweep(list(PAIRS), ORDINARY))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = open_pair(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=sweep([name for name, (_, side) in PAIRS.items() if side is FarProcess], ORDINARY_PROCESSES))
def process_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = open_pair(request.param)
    yield opened
    opened.close()


@pytest.fixture
def make_tcp() -> Iterator[MakeTcp]:
    """Makes endpoints with ``NBYTES`` and ``DOORBELLS``, closed with the test."""
    opened: list[TcpEndpoint] = []

    def make_endpoint(name: str, nbytes: int = TCP_NBYTES, **options: Any) -> TcpEndpoint:
        endpoint = TcpEndpoint(name, secret=SECRET, **options)
        opened.append(endpoint)
        endpoint.register(nbytes, TCP_DOORBELLS)
        return endpoint

    yield make_endpoint
    for endpoint in opened:
        endpoint.close()


@pytest.fixture
def proxies() -> Iterator[MakeProxy]:
    opened: list[Proxy] = []

    def open_proxy(port: int, budgets: Iterator[int | None]) -> Proxy:
        opened.append(Proxy(port, budgets))
        return opened[-1]

    yield open_proxy
    for proxy in opened:
        proxy.close()
