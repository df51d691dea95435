"""Tests that need an RDMA device (``tests/rdma`` makes one): waits that sleep, and memory of devices."""

import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lamina.core.errors import DeadlineError, PeerLostError, TransportError
from lamina.transport.base import DmaBuf, Fetch, Part
from lamina.transport.device.inboxes import SharedMaker
from lamina.transport.rdma.endpoint import RdmaEndpoint, dma_buf_obstacle
from lamina.transport.rdma.events import MESSAGES, Events
from lamina.transport.rdma.ports import choose, inventory
from tests.transport.conftest import Pair, open_pair
from tests.transport.far import SECRET

pytestmark = pytest.mark.skipif("LAMINA_TEST_RDMA" not in os.environ, reason="no RDMA devices: see tests/rdma")
TIMEOUT_S = 60.0

# https://docs.kernel.org/gpu/drm-uapi.html: dumb buffers, and their files.
CREATE_DUMB, PRIME_HANDLE_TO_FD, VERSION = 0xC02064B2, 0xC00C642D, 0xC0406400
READ_WRITE = os.O_CLOEXEC | os.O_RDWR


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened = open_pair("rdma-processes")
    yield opened
    opened.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Events]:
    """Events that have woken waits; nothing else wakes them."""
    events: list[Events] = []
    take = Events.acknowledge
    monkeypatch.setattr("lamina.transport.rdma.endpoint.SLICE_S", TIMEOUT_S)

    def counted(self: Events) -> None:
        events.append(self)
        take(self)

    monkeypatch.setattr(Events, "acknowledge", counted)
    return events


def test_a_wait_sleeps_in_the_kernel(pair: Pair) -> None:
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    with pytest.raises(DeadlineError):
        pair.near.wait([(0, 1)], 2.0)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 500  # naps of 50 us would be 20,000


def test_a_message_wakes_a_wait(pair: Pair, taken: list[Events]) -> None:
    """Whether the message arrives before, while or after the wait goes to sleep."""
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    for round_ in range(1, 101):
        rung = pair.far.submit("ring", 0, round_)
        pair.near.wait([(0, round_)], TIMEOUT_S)
        rung.result(TIMEOUT_S)
    assert taken


@pytest.mark.usefixtures("taken")
def test_what_is_fetched_wakes_a_wait(pair: Pair) -> None:
    """A read that completes before the wait sleeps must not be missed until its deadline."""
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    pair.far.call("fill", 0, b"fetched")
    for round_ in range(1, 51):
        pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=7, to=100, doorbell=1, sequence=round_))
        pair.near.wait([(1, round_)], TIMEOUT_S)
    assert bytes(pair.arena.view(100, 7)) == b"fetched"


def test_both_sides_may_send_more_than_the_device_receives_for_before_they_wait(pair: Pair) -> None:
    """Each refills its receive queue while it is blocked by the other, whose queue is empty."""
    rings = 2 * MESSAGES
    sent = pair.far.submit("ring_up_to", 0, rings)
    far = pair.far.submit("wait", [(1, rings)], TIMEOUT_S)
    for number in range(1, rings + 1):
        pair.near.ring(pair.peer, 1, number)
    assert pair.near.wait([(0, rings)], TIMEOUT_S) == 0
    sent.result(TIMEOUT_S)
    assert far.result(TIMEOUT_S) == 0


def test_a_write_that_the_peer_refuses_names_status_peer_and_remedy(pair: Pair) -> None:
    sender = pair.peer.sender  # type: ignore[attr-defined]
    sender._arena = msgspec.structs.replace(sender._arena, key=sender._arena.key ^ 1)
    pair.near.post(pair.peer, 0, 1, [b"x"], 0, 1)
    with pytest.raises(PeerLostError) as lost:
        pair.near.wait([(0, 1)], TIMEOUT_S)
    assert lost.value.peer == "far"
    assert "lost peer far: a write to it failed with verbs status 10" in str(lost.value)
    assert "the peer no longer allows access to its arena: it has closed it" in str(lost.value)


class Dumb:
    """A buffer of vgem, the kernel's virtual graphics card: a device whose driver exports real dma-bufs."""

    def __init__(self, nbytes: int) -> None:
        self.name, self.address, self.nbytes = "vgem", 0, nbytes
        self._card = next(filter(None, map(_open_vgem, sorted(Path("/dev/dri").glob("card*")))), -1)
        if self._card < 0:
            pytest.skip("no vgem: modprobe vgem")
        made = bytearray(struct.pack("IIIIIIQ", 1, nbytes, 8, 0, 0, 0, 0))  # height, width, bits per pixel
        fcntl.ioctl(self._card, CREATE_DUMB, made)
        self._handle = struct.unpack("IIIIIIQ", made)[4]

    def export(self) -> DmaBuf:
        asked = bytearray(struct.pack("IIi", self._handle, READ_WRITE, -1))
        fcntl.ioctl(self._card, PRIME_HANDLE_TO_FD, asked)
        return DmaBuf(struct.unpack("IIi", asked)[2], 0, self.nbytes)

    def close(self) -> None:
        os.close(self._card)


def _open_vgem(card: Path) -> int | None:
    """The device file, if it is vgem's."""
    fd, name = os.open(card, os.O_RDWR), mmap.mmap(-1, mmap.PAGESIZE)
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(name))
    fcntl.ioctl(fd, VERSION, bytearray(struct.pack("iiiQQQQQQ", 0, 0, 0, 16, address, 0, 0, 0, 0)))
    if name[:4] == b"vgem":
        return fd
    os.close(fd)
    return None


def test_a_dma_buf_that_the_card_refuses_is_an_error_that_says_why() -> None:
    """Soft-RoCE cannot register dma-bufs."""
    memory, near = Dumb(1 << 20), RdmaEndpoint("near", secret=SECRET)
    try:
        near.register(4096, 1)
        assert "errno 95" in dma_buf_obstacle(choose(inventory()))
        with pytest.raises(TransportError, match=r"rejected memory of vgem: .*errno 95"):
            near.share(memory)
    finally:
        near.close()
        memory.close()


def test_a_peer_writes_bodies_into_memory_apart_and_headers_into_the_arena() -> None:
    """In place of a device's memory, that of an emulated one; with a body that takes several writes."""
    held = SharedMaker().make(8 << 20)
    near, far = RdmaEndpoint("near", secret=SECRET), RdmaEndpoint("far", secret=SECRET)
    try:
        arena = near.register(4096, 4)
        far.register(4096, 4)
        key, peer = near.share(held.memory), far.connect(near.descriptor(), TIMEOUT_S)
        near.connect(far.descriptor(), TIMEOUT_S)
        long = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
        sent: list[tuple[int, list[Part]]] = [(100, [b"first ", b"body"]), (1 << 20, [long[:1000], long[1000:]])]
        for sequence, (at, body) in enumerate(sent, 1):
            far.post_apart(peer, key, at, body, 64 * sequence, b"header %d" % sequence, 1, sequence)
            near.wait([(1, sequence)], TIMEOUT_S)
            assert bytes(arena.view(64 * sequence, 8)) == b"header %d" % sequence
        assert bytes(held.inbox.array[99:111]) == b"\0first body\0"
        assert np.array_equal(held.inbox.array[1 << 20 : 4 << 20], long) and not held.inbox.array[4 << 20 :].any()
        near.unshare(key)
        far.post_apart(peer, key, 0, [b"late"], 0, b"header", 1, 3)
        with pytest.raises(PeerLostError, match="no longer allows access"):
            far.wait([(0, 1)], TIMEOUT_S)
    finally:
        near.close()
        far.close()
        held.close()
