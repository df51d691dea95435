"""The slab's bookkeeping against a model made of plain lists."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.core.errors import CapacityError
from lamina.memory.slab import Slab

CAPACITY = 400


class SlabMachine(RuleBasedStateMachine):
    """Random operations, legal or not; ``self.model`` maps each sequence to the slots it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab[int](CAPACITY)
        self.model: dict[int, list[int]] = {}
        self.next_sequence = 0
        self.seen = 0  # the highest slot given so far, and 1

    def owned(self) -> set[int]:
        return {slot for slots in self.model.values() for slot in slots}

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    def new(self) -> int:
        self.next_sequence += 1
        return self.next_sequence

    @rule()
    def open(self) -> None:
        sequence = self.new()
        self.slab.open(sequence)
        self.model[sequence] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=4))
        counts = [data.draw(st.integers(0, 120) | st.just(1)) for _ in sequences]
        owned = self.owned()
        if sum(counts) > CAPACITY - len(owned):
            with pytest.raises(CapacityError) as error:
                self.slab.extend(sequences, counts)
            assert (error.value.needed, error.value.free) == (sum(counts), CAPACITY - len(owned))
            return
        slots = self.slab.extend(sequences, counts)
        assert slots.dtype == np.int32
        given = slots.tolist()
        assert len(set(given)) == len(given) == sum(counts)
        assert owned.isdisjoint(given), "a slot in use was given out again"
        for sequence, count in zip(sequences, counts, strict=True):
            self.model[sequence] += given[:count]
            given = given[count:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data), self.new()
        tokens = data.draw(st.integers(0, len(self.model[parent])))
        self.slab.fork(parent, child, tokens)
        self.model[child] = self.model[parent][:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rearrange(self, data: st.DataObject) -> None:
        """Parts of two segments become new ones; one of the two may go, or be one of the new."""
        first, second = self.pick(data), self.pick(data)
        parts = []
        for segment in dict.fromkeys((first, second)):
            stop = data.draw(st.integers(0, len(self.model[segment])))
            parts.append((segment, data.draw(st.integers(0, stop)), stop))
        own = [set(self.model[segment][start:stop]) for segment, start, stop in parts]
        if len(own) == 2 and own[0] & own[1]:  # a segment has a slot once
            parts.pop()
        old = data.draw(st.sampled_from([[], [first], list(dict.fromkeys((first, second)))]))
        new = data.draw(st.sampled_from([*old, self.new()]))
        other = self.new()
        slots = {new: parts, other: parts[:1]}
        expected = {
            segment: [slot for source, start, stop in taken for slot in self.model[source][start:stop]]
            for segment, taken in slots.items()
        }
        self.slab.rearrange(old, slots)
        for segment in old:
            del self.model[segment]
        self.model |= expected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        tokens = data.draw(st.integers(0, len(self.model[sequence])))
        self.slab.truncate(sequence, tokens)
        del self.model[sequence][tokens:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.slab.free(sequence)
        del self.model[sequence]

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Calls that must raise; the invariants then see that nothing has changed."""
        unknown = -1
        calls = [
            lambda: self.slab.append(unknown, 1),
            lambda: self.slab.fork(unknown, self.new(), 0),
            lambda: self.slab.truncate(unknown, 0),
            lambda: self.slab.free(unknown),
            lambda: self.slab.slots(unknown),
        ]
        if self.model:
            known = self.pick(data)
            calls += [
                lambda: self.slab.open(known),
                lambda: self.slab.fork(known, known, 0),
                lambda: self.slab.fork(known, self.new(), len(self.model[known]) + 1),
                lambda: self.slab.fork(known, self.new(), -1),
                lambda: self.slab.truncate(known, len(self.model[known]) + 1),
                lambda: self.slab.truncate(known, -1),
                lambda: self.slab.rearrange([], {known: []}),
                lambda: self.slab.rearrange([known], {known: [(known, 0, len(self.model[known]) + 1)]}),
                lambda: self.slab.rearrange([known], {known: [(unknown, 0, 0)]}),
                lambda: self.slab.append(known, -1),
                lambda: self.slab.extend([known, unknown], [1, 1]),
                lambda: self.slab.extend([known], [1, 1]),
            ]
        with pytest.raises(ValueError, match=r"segment|give"):
            data.draw(st.sampled_from(calls))()

    @invariant()
    def agrees_with_model(self) -> None:
        assert self.slab._tables.keys() == self.model.keys()
        for sequence, slots in self.model.items():
            assert self.slab.slots(sequence).tolist() == slots
            assert sequence in self.slab
            assert len(set(slots)) == len(slots)
        assert self.slab.used == len(self.owned())
        assert self.slab.free_slots == CAPACITY - len(self.owned())
        self.seen = max(self.seen, 1 + max(self.owned(), default=-1))
        assert self.seen <= self.slab.reach <= CAPACITY

    @invariant()
    def references_and_free_list_are_exact(self) -> None:
        owners = Counter(slot for slots in self.model.values() for slot in slots)
        assert self.slab._references.tolist() == [owners[slot] for slot in range(CAPACITY)]
        free = self.slab._free[: self.slab._free_count].tolist()
        for table in self.slab._tables.values():
            free += table.slots[table.length : table.held].tolist()
        assert sorted(free) == sorted(set(range(CAPACITY)) - self.owned())

    def teardown(self) -> None:
        for sequence in list(self.model):
            self.slab.free(sequence)
        assert self.slab.used == 0


SlabMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlabMachine = SlabMachine.TestCase


def test_a_sequence_grows_in_runs_while_others_grow_beside_it_until_slots_are_scarce() -> None:
    slab = Slab[int](400)
    slab.open(1)
    slab.open(2)
    assert slab.append(1, 5).tolist() == [0, 1, 2, 3, 4]
    for slot in range(80):
        assert slab.extend([1, 2], [1, 1]).tolist() == [slot + 5 + 64 * (slot > 58), slot + 64 + 64 * (slot > 63)]
    assert (slab.used, slab.free_slots) == (165, 235)
    assert sorted(slab.append(2, 235).tolist()) == [*range(149, 192), *range(208, 400)], "what others set aside is free"


def test_freed_slots_come_back_first_and_in_order() -> None:
    slab = Slab[int](400)
    slab.open(1)
    slab.open(2)
    slab.append(1, 5)
    slab.append(2, 3)
    slab.free(1)
    slab.open(3)
    assert slab.append(3, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_fork_shares_without_using_slots_until_the_last_owner_goes() -> None:
    slab = Slab[int](10)
    slab.open(1)
    prompt = slab.append(1, 6).tolist()
    slab.fork(1, 2, 4)
    assert slab.used == 6
    slab.free(1)
    assert slab.used == 4
    assert slab.slots(2).tolist() == prompt[:4]
    assert slab.append(2, 6).tolist()[:2] == prompt[4:]
    slab.free(2)
    assert slab.used == 0


def test_fork_shares_slots_but_not_the_page_table() -> None:
    slab = Slab[int](10)
    slab.open(1)
    slab.append(1, 4)
    slab.fork(1, 2, 4)
    slab.truncate(2, 2)
    slab.append(2, 2)
    assert slab.slots(1).tolist() == [0, 1, 2, 3]
    assert slab.slots(2).tolist() == [0, 1, 4, 5]


def test_capacity_error_names_the_numbers() -> None:
    slab = Slab[int](10)
    slab.open(1)
    slab.append(1, 7)
    with pytest.raises(CapacityError, match=r"4 token slots are needed and 3 of 10 are free"):
        slab.append(1, 4)


def test_page_table_is_a_read_only_view() -> None:
    slab = Slab[int](10)
    slab.open(1)
    slab.append(1, 2)
    view = slab.slots(1)
    assert np.shares_memory(view, slab.slots(1))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    slab.append(1, 1)
    assert slab.slots(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_capacity_must_be_a_slot_count(capacity: int) -> None:
    with pytest.raises(ValueError, match="give 1 to"):
        Slab(capacity)
