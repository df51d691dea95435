"""Pages that a device is told of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import TransportError
from lamina.transport.arena import PAGE, HostMemory, Pages


@given(st.lists(st.tuples(st.integers(1, 20 * PAGE), st.integers(1, 5 * PAGE)), max_size=6))
def test_every_page_of_the_ranges_is_registered_once(ranges: list[tuple[int, int]]) -> None:
    runs: dict[int, int] = {}

    def register(at: int, nbytes: int) -> None:
        assert at % PAGE == nbytes % PAGE == 0 and at not in runs
        runs[at] = nbytes

    def unregister(at: int) -> None:
        del runs[at]

    pages = Pages(register, unregister)
    for at, nbytes in ranges:
        pages.register(at, nbytes)
    for at, nbytes in ranges:
        within = [start for start, size in runs.items() if start <= at and at + nbytes <= start + size]
        assert pages.covers(at, nbytes) == bool(within) and pages.cuts(at, nbytes) == (not within)
    assert not pages.covers(100 * PAGE, 1) and not pages.cuts(100 * PAGE, PAGE)
    registered = [page for at, nbytes in runs.items() for page in range(at // PAGE, (at + nbytes) // PAGE)]
    assert sorted(registered) == sorted({page for at, n in ranges for page in range(at // PAGE, -(-(at + n) // PAGE))})
    pages.clear()
    assert not runs


def test_a_device_that_cannot_be_told_of_all_its_memory_knows_of_none() -> None:
    """As copies must not begin in memory that it knows and end in other memory."""
    memory, runs = memoryview(bytearray(9 * PAGE)), set[int]()

    def register(at: int, nbytes: int) -> None:
        if nbytes > 4 * PAGE:
            raise TransportError("too much")
        runs.add(at)

    host = HostMemory(register, runs.remove)
    at = np.frombuffer(memory, np.uint8).ctypes.data
    host.register_own(memory[: 2 * PAGE])
    assert runs and host.own.covers(at, PAGE) and not host.own.covers(at, 3 * PAGE)
    host.register_own(memory[2 * PAGE :])
    host.register_own(memory[:PAGE])
    assert not runs and not host.own.covers(at, PAGE)
    assert host.register_peer("peer", memory[:PAGE]) and runs
    assert not host.register_peer("peer", memory) and not runs, "what was mapped before is not any more"
