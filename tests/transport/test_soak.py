"""A short run of the soak (``make soak``), and that it notices what it is there to notice."""

import struct

import pytest

from lamina.protocol.choice import Transport
from tests.transport import soak


@pytest.mark.parametrize("transport", [Transport.TCP, Transport.SHM])
def test_a_short_soak_finds_nothing(transport: Transport) -> None:
    soak.soak(transport, messages=2000, blocks=70)


class Replay:
    """An endpoint and an arena at once, whose slots hold what a test puts there."""

    def __init__(self, slots: dict[int, bytes]) -> None:
        self._slots = slots

    def wait(self, targets: list[tuple[int, int]], timeout_s: float) -> int:
        return 0

    def ring(self, peer: object, doorbell: int, sequence: int) -> None:
        pass

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._slots.get(offset // nbytes, bytes(nbytes)))


def block(n: int, number: int | None = None) -> bytes:
    return struct.pack("<Q", n if number is None else number) + soak.BLOCKS[n % len(soak.BLOCKS)]


@pytest.mark.parametrize(
    ("bulk", "slots", "bad"),
    [
        (False, {1: soak.small(1), 2: soak.small(2)}, None),
        (False, {1: soak.small(1), 2: soak.small(3)}, 2),
        (False, {1: soak.small(1), 2: soak.small(2)[:-5] + b"?" + soak.small(2)[-4:]}, 2),
        (True, {1: block(1), 2: block(2)}, None),
        (True, {1: block(2), 2: block(2)}, 1),
        (True, {1: block(1), 2: block(2, 10)}, 2),
        (True, {1: block(1), 2: block(2)[:-1] + bytes([block(2)[-1] ^ 1])}, 2),
    ],
)
def test_a_message_that_is_not_the_one_sent_is_named(bulk: bool, slots: dict[int, bytes], bad: int | None) -> None:
    replay = Replay(slots)
    side = soak.Side(replay, replay, replay)  # type: ignore[arg-type]
    nbytes = len(slots[1])
    if bad is None:
        side.receive(1, 2, nbytes, bulk)
    else:
        with pytest.raises(ValueError, match=f"message {bad} of 2 arrived changed"):
            side.receive(1, 2, nbytes, bulk)
