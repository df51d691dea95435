"""Memory of devices that NICs write into: what a NIC registers, and the reasons why it does not."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.core.errors import TransportError
from lamina.transport.base import DmaBuf
from lamina.transport.rdma.queue import register_memory

NBYTES, OFFSET, ADDRESS = 8192, 4096, 1 << 40


class Memory:
    """Device memory that exports an anonymous file, or says why not."""

    name, address, nbytes = "gpu7", ADDRESS, NBYTES

    def __init__(self, obstacle: str = "") -> None:
        self.obstacle = obstacle
        self.fds: list[int] = []

    def export(self) -> DmaBuf | None:
        if self.obstacle:
            raise TransportError(self.obstacle)
        self.fds.append(os.memfd_create("exported"))
        return DmaBuf(self.fds[-1], OFFSET, NBYTES)


class OnHost(Memory):
    """The host's own."""

    def export(self) -> None:
        return None


class VerbsError(Exception):
    """Like pyverbs' own."""

    def __init__(self, number: int) -> None:
        super().__init__("refused")
        self.error_code = number


def verbs(refusal: int | None = None) -> SimpleNamespace:
    """The part of pyverbs that registers, with its arguments; returns what it was given."""

    def dma_buf(domain: str, length: int, access: int, *, dmabuf: int, offset: int) -> Any:
        os.fstat(dmabuf)  # it is open
        if refusal is not None:
            raise VerbsError(refusal)
        return domain, length, access, offset

    def of_host(domain: str, length: int, access: int, *, address: int) -> Any:
        return domain, length, access, address

    return SimpleNamespace(mr=SimpleNamespace(DmaBufMR=dma_buf, MR=of_host), error=VerbsError)


def check_closed(memory: Memory) -> None:
    for fd in memory.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_nic_that_can_gets_all_of_the_memory_and_no_file_stays_open() -> None:
    memory = Memory()
    assert register_memory(verbs(), "domain", "mlx5_0", memory, 7) == (("domain", NBYTES, 7, OFFSET), OFFSET)
    check_closed(memory)


def test_memory_of_the_host_is_registered_by_its_address() -> None:
    assert register_memory(verbs(), "domain", "rxe0", OnHost(), 3) == (("domain", NBYTES, 3, ADDRESS), ADDRESS)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (errno.EOPNOTSUPP, r"rxe0 rejected memory of gpu7: .* \(errno 95\): its driver does not support dma-bufs; use"),
        (errno.EINVAL, r"\(errno 22\): it cannot map .* PCIe"),
        (errno.ENOMEM, "ulimit -l unlimited"),
        (0, "the kernel's log"),
    ],
)
def test_a_nic_that_cannot_says_why_and_what_helps(refusal: int, words: str) -> None:
    memory = Memory()
    with pytest.raises(TransportError, match=words):
        register_memory(verbs(refusal), "domain", "rxe0", memory, 7)
    check_closed(memory)


def test_the_reason_of_the_device_is_passed_on() -> None:
    with pytest.raises(TransportError, match="too old a driver"):
        register_memory(verbs(), "domain", "mlx5_0", Memory("too old a driver"), 7)
