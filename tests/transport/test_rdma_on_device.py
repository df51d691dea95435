"""What only an RDMA device can show (``tests/rdma`` makes one): waits that sleep, and memory of another device."""

import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lamina.errors import DeadlineError, PeerLostError
from lamina.transport.base import Buffer
from lamina.transport.device.memory import DmaBuf, Route
from lamina.transport.rdma.devices import choose, inventory
from lamina.transport.rdma.endpoint import RdmaEndpoint, dma_buf_obstacle
from lamina.transport.rdma.events import MESSAGES, Events
from tests.transport.conftest import Pair, open_pair
from tests.transport.far import SECRET, Far

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
    take = Events.take
    monkeypatch.setattr("lamina.transport.rdma.endpoint.SLICE_S", TIMEOUT_S)

    def counted(self: Events) -> None:
        events.append(self)
        take(self)

    monkeypatch.setattr(Events, "take", counted)
    return events


def test_a_wait_sleeps_in_the_kernel(pair: Pair) -> None:
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    with pytest.raises(DeadlineError):
        pair.near.wait([(0, 1)], 2.0)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 500  # naps of 50 us would be 20,000


def test_a_message_wakes_a_wait(pair: Pair, taken: list[Events]) -> None:
    """Whether it comes before, while or after the wait lies down to sleep."""
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    for round_ in range(1, 101):
        rung = pair.far.submit("ring", 0, round_)
        pair.near.wait([(0, round_)], TIMEOUT_S)
        rung.result(TIMEOUT_S)
    assert taken


@pytest.mark.usefixtures("taken")
def test_what_is_fetched_wakes_a_wait(pair: Pair) -> None:
    """Or is there before it sleeps: a read that ends without an event would hold the wait up to its deadline."""
    pair.near.spin_s = 0.0  # type: ignore[attr-defined]
    pair.far.call("fill", 0, b"fetched")
    for round_ in range(1, 51):
        pair.near.fetch(pair.peer, 0, 7, 100, 1, round_)
        pair.near.wait([(1, round_)], TIMEOUT_S)
    assert bytes(pair.arena.view(100, 7)) == b"fetched"


def test_both_sides_may_send_more_than_the_device_receives_for_before_they_wait(pair: Pair) -> None:
    """Each hands receives back while it is held up by the other, which has none left."""
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
    sender._granted = msgspec.structs.replace(sender._granted, data_key=sender._granted.data_key ^ 1)
    pair.near.post(pair.peer, 0, 1, [b"x"], 0, 1)
    with pytest.raises(PeerLostError) as lost:
        pair.near.wait([(0, 1)], TIMEOUT_S)
    assert lost.value.peer == "far"
    assert "far is gone: a write to it failed with verbs status 10" in str(lost.value)
    assert "the peer does not let this process write there: it has closed its arena" in str(lost.value)


class Dumb:
    """A buffer of vgem, the kernel's virtual graphics card: a device whose driver exports real dma-bufs."""

    def __init__(self, nbytes: int) -> None:
        self.name, self.nbytes, self.settled = "vgem", nbytes, 0
        self._card = next(filter(None, map(_open_vgem, sorted(Path("/dev/dri").glob("card*")))), -1)
        if self._card < 0:
            pytest.skip("no vgem: modprobe vgem")
        made = bytearray(struct.pack("IIIIIIQ", 1, nbytes, 8, 0, 0, 0, 0))  # height, width, bits per pixel
        fcntl.ioctl(self._card, CREATE_DUMB, made)
        self._handle = struct.unpack("IIIIIIQ", made)[4]
        exported = self.export()
        self.map = mmap.mmap(exported.fd, nbytes)
        os.close(exported.fd)

    def export(self) -> DmaBuf:
        asked = bytearray(struct.pack("IIi", self._handle, READ_WRITE, -1))
        fcntl.ioctl(self._card, PRIME_HANDLE_TO_FD, asked)
        return DmaBuf(struct.unpack("IIi", asked)[2], 0, self.nbytes)

    def read(self, offset: int, into: Buffer) -> None:
        into[:] = self.map[offset : offset + into.nbytes]

    def write(self, offset: int, data: Buffer) -> None:
        self.map[offset : offset + data.nbytes] = bytes(data)

    def settle(self) -> None:
        self.settled += 1

    def close(self) -> None:
        self.map.close()
        os.close(self._card)


def _open_vgem(card: Path) -> int | None:
    """The card, if it is vgem's."""
    fd, name = os.open(card, os.O_RDWR), mmap.mmap(-1, mmap.PAGESIZE)
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(name))
    fcntl.ioctl(fd, VERSION, bytearray(struct.pack("iiiQQQQQQ", 0, 0, 0, 16, address, 0, 0, 0, 0)))
    if name[:4] == b"vgem":
        return fd
    os.close(fd)
    return None


def test_a_dma_buf_that_the_card_refuses_is_reached_by_way_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """Soft-RoCE registers no dma-buf: the same arena, and the reason in the log."""
    memory, far = Dumb(1 << 20), Far()
    near = RdmaEndpoint("near", secret=SECRET)
    try:
        arena = near.register_on(memory, 4)
        assert "errno 95" in dma_buf_obstacle(choose(inventory()))
        assert arena.decision.route is Route.HOST
        (logged,) = [
            record.getMessage() for record in caplog.records if record.name == "lamina.transport.device.memory"
        ]
        assert "errno 95" in logged and "of vgem" in logged and "by way of the host" in logged
        peer = near.connect(far.open("rdma", 1 << 20, 4), TIMEOUT_S)
        far.connect(near.descriptor())
        far.endpoint.post(far.peer, 5000, 8, [b"to", b" vgem!"], 1, 1)
        near.wait([(1, 1)], TIMEOUT_S)
        arena.take_in(5000, 8)
        assert memory.map[4999:5009] == b"\0to vgem!\0"
        far.fill(70, b"fetched by vgem")
        near.fetch(peer, 70, 15, 6000, 2, 1)
        near.wait([(2, 1)], TIMEOUT_S)
        arena.take_in(6000, 15)
        assert memory.map[5999:6016] == b"\0fetched by vgem\0"
        memory.map[:9] = b"from vgem"
        arena.give_out(0, 9)
        far.endpoint.fetch(far.peer, 0, 9, 0, 3, 1)
        far.wait([(3, 1)], TIMEOUT_S)
        assert far.read(0, 10) == b"from vgem\0"
    finally:
        near.close()
        far.close()
        memory.close()
