"""A GPU's memory exported to NICs as a dma-buf, or the reason why it cannot be; and copies through host memory."""

import os

import pytest

from lamina.errors import TransportError
from lamina.transport.device.ipc import BLOCK
from lamina.transport.device.peer_memory import PeerMemory, ability

pytestmark = pytest.mark.gpu
NBYTES = 100_000


def test_the_memory_is_exported_or_the_driver_says_why_not() -> None:
    memory = PeerMemory(NBYTES)
    if obstacle := ability(0).obstacle:
        with pytest.raises(TransportError) as refused:
            memory.export()
        assert str(refused.value) == obstacle
        pytest.skip(f"this GPU's memory cannot be exported: {obstacle}")
    exported = memory.export()
    try:
        assert (exported.offset, exported.nbytes) == (0, BLOCK)
        assert os.readlink(f"/proc/self/fd/{exported.fd}").startswith("/dmabuf")
        assert os.lseek(exported.fd, 0, os.SEEK_END) == BLOCK  # what the kernel says of a dma-buf's size
    finally:
        os.close(exported.fd)


def test_what_the_host_writes_is_what_kernels_and_the_host_read() -> None:
    memory = PeerMemory(NBYTES)
    memory.write(5, memoryview(b"to the GPU"))
    memory.settle()
    assert bytes(memory.bytes[4:16].get()) == b"\0to the GPU\0"
    into = bytearray(12)
    memory.read(4, memoryview(into))
    assert into == b"\0to the GPU\0"
    with pytest.raises(ValueError, match="outside an arena of 100000"):
        memory.write(NBYTES - 1, memoryview(b"12"))
