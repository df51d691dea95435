"""Slots of a peer: used, freed, and booked by lanes that need no credits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.dataplane.slot import Place, SlotCredits, lane_of, pack, pack_alone, stamp
from lamina.dataplane.wire import slot_number
from lamina.transport.device.slots import PLACE_SHIFT


def nothing() -> None:
    pass


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["send", "book", "unbook", "read"]), st.integers(0, 3)), max_size=40))
def test_no_slot_has_two_senders(actions: list[tuple[str, int]]) -> None:
    """A model of a link: messages in slots that their receiver has not read. Lanes send one at a time."""
    credits, held = SlotCredits(2, 7), [0, 0]
    owners: dict[int, int] = {}  # lanes with messages in booked slots
    for action, lane in actions:
        if action == "send" and (slot := credits.find(nothing)) is not None:
            assert held[slot] == 0, "a message would be overwritten"
            credits.used[slot] += 1
            held[slot] += 1
        elif action == "book":
            others = {slot for slot, owner in owners.items() if owner != lane and held[slot]}
            booked = credits.book(lane, 3)
            if booked is not None:
                slot, first = booked
                assert slot not in others and credits.used[slot] == first + 3
                assert held[slot] == 0 or owners.get(slot) == lane, "another message is there"
                held[slot] += 3
                owners[slot] = lane
        elif action == "unbook":
            credits.unbook(lane)
        elif action == "read":
            slot = lane % 2
            held[slot] = max(0, held[slot] - 1)
            credits.record_freed([used - left for used, left in zip(credits.used, held, strict=True)])
    for slot, left in enumerate(held):
        assert (slot in credits.outstanding) == (left > 0)


def test_a_booked_slot_is_the_last_that_others_get() -> None:
    credits = SlotCredits(2, 0)
    assert credits.book(5, 2) == (0, 0)
    assert credits.book(5, 1) == (0, 2), "a lane keeps its slot, before all of its messages were read"
    credits.record_freed([3, 0])
    assert credits.find(nothing) == 1
    credits.used[1] += 1
    assert credits.book(6, 1) is None, "the free slot is another lane's"
    assert credits.find(nothing) == 0, "booked, but free"
    credits.used[0] += 1
    assert credits.book(5, 1) is None


def test_the_first_word_tells_a_message_from_others_of_its_slot() -> None:
    number = slot_number(70_000, 0)
    header = memoryview(bytearray(pack_alone(number, 3, Place.SLOT, 100_001, 64)))
    assert lane_of(header, number) == 3
    assert lane_of(header, slot_number(70_001, 0)) is None, "the next one is being written"
    word = int.from_bytes(header[:8], "little")
    assert word == stamp(3, 100_001) | (number & 0xFFFF) << 48
    fetched = int.from_bytes(pack(number, 3, Place.FETCHED, 100_001, 64, 0, 1, 0, 0, 0)[:8], "little")
    assert fetched != word and fetched & ~(0xFF << PLACE_SHIFT) == word, "a body that is not in the slot"
