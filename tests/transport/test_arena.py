"""Pages that a device is told of."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.transport.arena import PAGE, Pages


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
        pages.add(at, nbytes)
    registered = [page for at, nbytes in runs.items() for page in range(at // PAGE, (at + nbytes) // PAGE)]
    assert sorted(registered) == sorted({page for at, n in ranges for page in range(at // PAGE, -(-(at + n) // PAGE))})
    pages.clear()
    assert not runs
