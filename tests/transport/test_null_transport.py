"""Faults of the null transport happen exactly as scheduled."""

from collections.abc import Iterator

import pytest

from lamina.core.errors import DeadlineError, TransportError
from tests.support.null_transport import Fault, NullEndpoint, NullPeer, Operation


class Line:
    """A sender with faults and what its receiver sees."""

    def __init__(self) -> None:
        self.sender, self.receiver = NullEndpoint("sender"), NullEndpoint("receiver")
        self.sender.register(64, 1)
        self.arena = self.receiver.register(64, 2)
        self.peer: NullPeer = self.sender.connect(self.receiver.descriptor(), 1.0)
        self.faults = self.sender.faults

    def send(self, n: int, data: bytes) -> None:
        self.sender.post(self.peer, 8 * n, 8, [data], 0, n)

    def arrived(self, n: int) -> bool:
        try:
            self.receiver.wait([(0, n)], 0.0)
        except DeadlineError:
            return False
        return True

    def slot(self, n: int) -> bytes:
        return bytes(self.arena.view(8 * n, 4))


@pytest.fixture
def line() -> Iterator[Line]:
    opened = Line()
    yield opened
    opened.sender.close()
    opened.receiver.close()


def test_a_dropped_ring_is_caught_up_by_the_next(line: Line) -> None:
    line.faults.plan(Fault.DROP, Operation.RING)
    line.send(1, b"1111")
    assert not line.arrived(1)
    assert line.slot(1) == b"1111"
    line.send(2, b"2222")
    assert line.arrived(1)


def test_a_dropped_write_leaves_the_slot_as_it_was(line: Line) -> None:
    line.faults.plan(Fault.DROP, Operation.WRITE)
    line.send(1, b"1111")
    assert line.arrived(1)
    assert line.slot(1) == bytes(4)


def test_a_held_ring_arrives_on_command(line: Line) -> None:
    line.faults.plan(Fault.HOLD, Operation.RING)
    line.send(1, b"1111")
    assert not line.arrived(1)
    line.faults.release()
    assert line.arrived(1)
    assert line.faults.held == []


def test_held_writes_arrive_in_the_order_asked_for(line: Line) -> None:
    line.faults.plan(Fault.HOLD, Operation.WRITE, count=3)
    for data in (b"1111", b"2222", b"3333"):
        line.sender.write(line.peer, 8, data)
    line.faults.release(2, 0)
    assert line.slot(1) == b"1111"
    line.faults.release()
    assert line.slot(1) == b"2222"


def test_a_ring_overtakes_its_data(line: Line) -> None:
    line.faults.plan(Fault.HOLD, Operation.WRITE)
    line.send(1, b"1111")
    assert line.arrived(1)
    assert line.slot(1) == bytes(4)
    line.faults.release()
    assert line.slot(1) == b"1111"


def test_corruption_changes_one_bit(line: Line) -> None:
    line.faults.plan(Fault.CORRUPT, Operation.WRITE)
    line.send(1, b"1111")
    assert line.slot(1) == b"1101"
    line.send(2, b"2222")
    assert line.slot(2) == b"2222"


def test_plans_skip_count_and_queue(line: Line) -> None:
    line.faults.plan(Fault.DROP, Operation.WRITE, skip=1, count=2)
    line.faults.plan(Fault.CORRUPT, Operation.WRITE)
    for n in range(1, 7):
        line.send(n, b"xxxx")
    assert [line.slot(n) for n in range(1, 7)] == [b"xxxx", bytes(4), bytes(4), b"xxyx", b"xxxx", b"xxxx"]


def test_a_ring_cannot_be_corrupted(line: Line) -> None:
    with pytest.raises(ValueError, match="only a WRITE"):
        line.faults.plan(Fault.CORRUPT, Operation.RING)


def test_null_endpoints_stay_in_their_process(line: Line) -> None:
    import msgspec

    name, pid, number = msgspec.msgpack.decode(line.receiver.descriptor())
    with pytest.raises(TransportError, match=f"is in process {pid + 1}"):
        line.sender.connect(msgspec.msgpack.encode((name, pid + 1, number)), 1.0)
