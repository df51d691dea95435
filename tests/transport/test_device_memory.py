"""Arenas in device memory: a pure function decides the route, and the same calls work on both routes."""

import errno
import logging
import os
import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.errors import TransportError
from lamina.transport.arena import allocate
from lamina.transport.base import Buffer
from lamina.transport.device import memory as device_memory
from lamina.transport.device.memory import ArenaOnDevice, Decision, DmaBuf, Refusal, Route, choose
from lamina.transport.rdma.queue import Region, map_memory

NBYTES, OFFSET = 8192, 4096


class Memory:
    """Device memory simulated in host memory; records the calls it gets."""

    name = "gpu7"
    nbytes = NBYTES

    def __init__(self, obstacle: str = "") -> None:
        self.obstacle = obstacle
        self.content = bytearray(NBYTES)
        self.settled = 0
        self.fds: list[int] = []

    def export(self) -> DmaBuf:
        if self.obstacle:
            raise TransportError(self.obstacle)
        self.fds.append(os.memfd_create("exported"))
        return DmaBuf(self.fds[-1], OFFSET, NBYTES)

    def read(self, offset: int, into: Buffer) -> None:
        into[:] = self.content[offset : offset + into.nbytes]

    def write(self, offset: int, data: Buffer) -> None:
        self.content[offset : offset + data.nbytes] = data

    def settle(self) -> None:
        self.settled += 1


@pytest.mark.parametrize(
    ("obstacle", "refusal", "route", "words"),
    [
        ("", None, Route.DIRECT, "rxe0 registered the dma-buf of gpu7"),
        ("too old a driver", None, Route.HOST, "gpu7 cannot export a dma-buf: too old a driver"),
        (
            "",
            Refusal(errno.EOPNOTSUPP, "no"),
            Route.HOST,
            r"\(errno 95\): its driver does not support dma-bufs; use",
        ),
        ("", Refusal(errno.EINVAL, "no"), Route.HOST, r"\(errno 22\): it cannot map .* PCIe"),
        ("", Refusal(errno.ENOMEM, "no"), Route.HOST, "ulimit -l unlimited"),
        ("", Refusal(0, "strange"), Route.HOST, "strange .*the kernel's log"),
    ],
)
def test_bytes_go_directly_only_if_both_drivers_can(
    obstacle: str, refusal: Refusal | None, route: Route, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    decision = choose("gpu7", "rxe0", obstacle, refusal)
    assert decision.route is route
    with caplog.at_level(logging.INFO):
        device_memory.log("memory0", decision)
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if route is Route.DIRECT else logging.WARNING)
    assert re.search(words, record.getMessage()) and "memory0" in record.getMessage()


@pytest.mark.parametrize("route", Route)
def test_the_same_calls_serve_both_routes(route: Route) -> None:
    own, memory = allocate("near", NBYTES, 1), Memory()
    arena = ArenaOnDevice(own.native, memory, Decision(route, ""))
    reached = memoryview(own.native) if route is Route.HOST else memoryview(memory.content)  # by peers
    reached[100:105] = b"hello"
    arena.take_in(100, 5)
    assert memory.content[99:106] == b"\0hello\0"
    assert memory.settled == (route is Route.DIRECT)
    memory.content[200:205] = b"world"
    arena.give_out(200, 5)
    assert bytes(reached[199:206]) == b"\0world\0"
    for call in (arena.take_in, arena.give_out):
        with pytest.raises(ValueError, match="outside an arena of 8192 bytes"):
            call(NBYTES - 4, 5)
    own.close()


class VerbsError(Exception):
    """Like pyverbs' own."""

    error_code = errno.EOPNOTSUPP


class Registered:
    """A dma-buf registration as a NIC that supports it makes it, with pyverbs' arguments."""

    rkey, lkey = 17, 18
    open = 0

    def __init__(self, domain: str, length: int, access: int, *, dmabuf: int, offset: int) -> None:
        os.fstat(dmabuf)  # it is open
        assert (domain, length, access, offset) == ("domain", NBYTES, 7, OFFSET)
        Registered.open += 1

    def close(self) -> None:
        Registered.open -= 1


def refuse(*_: Any, **__: Any) -> None:
    raise VerbsError("not supported")


def test_a_card_that_can_gets_all_of_the_memory_and_no_file_stays_open() -> None:
    verbs, memory = SimpleNamespace(mr=SimpleNamespace(DmaBufMR=Registered), error=VerbsError), Memory()
    with ExitStack() as stack:
        region, decision = map_memory(verbs, "domain", "mlx5_0", memory, 7, stack)
        assert (region, decision.route, Registered.open) == (Region(17, 18, OFFSET), Route.DIRECT, 1)
    assert Registered.open == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fds[0])


@pytest.mark.parametrize(("obstacle", "words"), [("", "errno 95"), ("there is none", "there is none")])
def test_where_a_driver_cannot_bytes_go_by_way_of_the_host(obstacle: str, words: str) -> None:
    verbs, memory = SimpleNamespace(mr=SimpleNamespace(DmaBufMR=refuse), error=VerbsError), Memory(obstacle)
    with ExitStack() as stack:
        region, decision = map_memory(verbs, "domain", "rxe0", memory, 7, stack)
    assert region is None and decision.route is Route.HOST and words in decision.reason
    for fd in memory.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
