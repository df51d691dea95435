"""Pages that become resident before they are written."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.types import AttentionSpec, Overlap
from lamina.kernels import host_memory
from lamina.kernels.host_memory import HUGE_PAGE_BYTES, PagesAhead, allocate
from tests.support.store_steps import opened, plan


@given(
    row_nbytes=st.lists(st.sampled_from([16, 512, 4096, 65_536]), min_size=1, max_size=6),
    rows=st.integers(1, 20_000),
    steps=st.lists(st.integers(0, 300), max_size=60),
)
def test_pages_are_prepared_before_rows_reach_them_a_few_at_a_time(
    row_nbytes: list[int], rows: int, steps: list[int]
) -> None:
    """With any arrays and steps: no page twice or outside of its array; none that slow steps write is missing."""
    arrays = [allocate(rows * size).reshape(rows, size) for size in row_nbytes]
    prepared: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "make_resident", lambda start, nbytes: prepared.append((start, nbytes)))
        pages, used = PagesAhead(arrays), 0
        for step in steps:
            used, before = min(rows, used + step), len(prepared)
            pages.prepare(used)
            assert len(prepared) - before <= 1 + len(arrays) // 4
        for _ in range(8 * len(arrays) * 2):
            pages.prepare(used)
    assert len(set(prepared)) == len(prepared)
    for array, size in zip(arrays, row_nbytes, strict=True):
        first = array.ctypes.data
        ends = [start - first + nbytes for start, nbytes in prepared if 0 <= start - first < array.nbytes]
        assert max(ends, default=0) <= array.nbytes
        assert min(used * size // HUGE_PAGE_BYTES + 2, -(-array.nbytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES <= (
            -(-max(ends, default=0) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        )


def test_what_is_stored_stays() -> None:
    memory: npt.NDArray[np.uint8] = allocate(3 * HUGE_PAGE_BYTES).reshape(-1, 64)
    memory[:100] = 7
    pages = PagesAhead([memory])
    for _ in range(10):
        pages.prepare(1)
    assert memory[:100].min() == 7 and not memory[100:].any()


def test_a_store_prepares_the_pages_after_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(host_memory, "make_resident", lambda start, nbytes: prepared.append(start))
    store = opened("cpu", [AttentionSpec(0, 8, 8, 4096, 2048, 1.0)], Overlap(), "auto", 1)
    store.apply(plan(1, {0: 0}, [], (0, 40)))
    for number in range(2, 8):
        store.apply(plan(number, {}, [], None))
    (slab,) = store.device._slabs  # type: ignore[attr-defined]
    for array in slab.arrays:
        page = store.slab.reach * array.strides[0] // HUGE_PAGE_BYTES
        assert page > 0 and {array.ctypes.data + each * HUGE_PAGE_BYTES for each in (page, page + 1)} <= {*prepared}
