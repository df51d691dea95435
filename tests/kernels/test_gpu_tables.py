"""Page tables on the device, held against the host's after any sequence of operations."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import CapacityError
from lamina.kernels.gpu.tables import FIRST_REGION, PageTables, Regions
from lamina.memory.slab import Slab

operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "truncate", "fork", "free"]),
        st.integers(0, 3),
        st.integers(0, 200),
        st.booleans(),
    ),
    max_size=40,
)

SEQUENCES = (*range(4), *range(10, 14))  # and their forks


def apply(slab: Slab, operation: str, sequence: int, amount: int) -> None:
    if operation == "free" and sequence in slab:
        slab.free(sequence)
    elif operation == "truncate" and sequence in slab:
        slab.truncate(sequence, min(amount, len(slab.slots(sequence))))
    elif operation == "fork" and sequence in slab and sequence + 10 not in slab:
        slab.fork(sequence, sequence + 10, min(amount, len(slab.slots(sequence))))
    elif operation == "append":
        if sequence not in slab:
            slab.open(sequence)
        slab.append(sequence, min(amount, slab.free_slots))


@given(operations)
def test_the_device_holds_the_hosts_tables(steps):
    """Whenever changes are sent, after one operation or after many."""
    slab, tables, device = Slab[int](1000), PageTables(8192), np.full(8192, -1, np.int32)
    known: set[int] = set()
    for operation, sequence, amount, sends in steps:
        apply(slab, operation, sequence, amount)
        still = {each for each in SEQUENCES if each in slab}
        for gone in known - still:
            tables.free(gone)
        for present in still:
            tables.update(present, slab.slots(present))
        known = still
        if sends:
            words, values = tables.changes()
            assert len(np.unique(words)) == len(words), "two writes to a word at once have no order"
            device[words] = values
            for present in still:
                start, slots = tables.start(present), slab.slots(present)
                np.testing.assert_array_equal(device[start : start + len(slots)], slots)


@given(operations, st.integers(0, 99))
def test_words_last_as_long_as_somebody_reads_them(steps, seed):
    """Steps read their tables while later ones change them, and end in any order."""
    slab, tables, device = Slab[int](1000), PageTables(1 << 16), np.full(1 << 16, -1, np.int32)
    rng = np.random.default_rng(seed)
    readers: list[tuple[int, list[tuple[int, np.ndarray]]]] = []
    for operation, sequence, amount, begins in steps:
        apply(slab, operation, sequence, amount)
        for shortened in slab.take_shortened():
            tables.free(shortened)
        known = slab.segments
        for segment in known:
            tables.update(segment, slab.slots(segment))
        words, values = tables.changes()
        device[words] = values
        if begins:
            readers.append((tables.pin_tables(), [(tables.start(each), slab.slots(each).copy()) for each in known]))
        for _, read in readers:
            for start, slots in read:
                np.testing.assert_array_equal(device[start : start + len(slots)], slots)
        if readers and rng.random() < 0.3:
            tables.unpin_tables(readers.pop(int(rng.integers(len(readers))))[0])
    for reader, _ in readers:
        tables.unpin_tables(reader)
    for segment in slab.segments:
        tables.free(segment)
    assert tables._regions.free_words == tables.words


def test_a_decode_step_sends_one_word_per_sequence():
    tables = PageTables(4096)
    slots = np.arange(500, dtype=np.int32)
    for sequence in range(3):
        tables.update(sequence, slots[:300])
    assert tables.changes().shape == (2, 900)
    for sequence in range(3):
        tables.update(sequence, slots[:301])
    assert tables.changes().tolist() == [[tables.start(sequence) + 300 for sequence in range(3)], [300] * 3]
    assert tables.changes().shape == (2, 0)


def test_a_truncated_table_is_sent_again_from_there():
    tables = PageTables(256)
    tables.update(7, np.array([1, 2, 3], np.int32))
    tables.update(7, np.array([1], np.int32))
    tables.changes()
    tables.update(7, np.array([1, 9], np.int32))
    assert tables.changes().tolist() == [[tables.start(7) + 1], [9]]


def test_all_words_come_back():
    regions = Regions(1024)
    taken = [(regions.allocate_words(size), size) for size in (64, 256, 64, 128, 512)]
    spans = sorted((start, start + size) for start, size in taken)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert regions.free_words == 0
    for start, size in taken:
        regions.free(start, size)
    assert regions.allocate_words(1024) == 0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="1000 words of page tables are not a power of two; give 1024"):
        Regions(1000)
    tables = PageTables(FIRST_REGION)
    tables.update(0, np.arange(FIRST_REGION, dtype=np.int32))
    with pytest.raises(CapacityError, match="128 token slots are needed and 0 of 64"):
        tables.update(0, np.arange(FIRST_REGION + 1, dtype=np.int32))
    assert tables.changes().shape == (2, FIRST_REGION)
