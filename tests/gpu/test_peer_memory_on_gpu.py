"""A GPU's memory exported to NICs as a dma-buf, or the reason why it cannot be; and written by other processes."""

import os
import subprocess
import sys

import pytest

from lamina.core.errors import TransportError
from lamina.transport.device.cuda import CudaMaker
from lamina.transport.device.inboxes import Inboxes
from lamina.transport.device.peer_memory import BLOCK, PeerMemory, ability

pytestmark = pytest.mark.gpu
NBYTES = 100_000

WRITER = """
import sys
import cupy
from lamina.transport.device.cuda import CudaMaker
from lamina.transport.device.inboxes import Inboxes
inboxes = Inboxes(CudaMaker(0))
inboxes.open("reader", bytes.fromhex(sys.argv[1]), int(sys.argv[2]), b"proof")
inboxes.theirs("reader").array[100:104] = cupy.array(list(b"body"), "u1")
cupy.cuda.get_current_stream().synchronize()
inboxes.close_outgoing("reader")
"""


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


def test_another_process_writes_into_an_inbox() -> None:
    """By CUDA IPC, as a compute worker writes into that of a memory worker on the same GPU or another one."""
    inboxes = Inboxes(CudaMaker(0))
    held = inboxes.make("writer", NBYTES)
    assert held is not None
    subprocess.run([sys.executable, "-c", WRITER, held.handle.hex(), str(NBYTES)], check=True, timeout=120)
    inbox = inboxes.own("writer")
    assert inbox is not None
    inbox.settle()
    assert bytes(inbox.array[99:104].get()) == b"\0body" and inboxes.proof_arrived("writer", b"proof")
    inboxes.close_all()
