"""Leases of an arena: never two of the same bytes, none moved by another; and how many bytes arenas need."""

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import TransportError
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.leases import DOORBELLS, ArenaPlan, Lease, Leases, Space, lease_nbytes, messages
from lamina.transport.arena import PAGE

LLAMA_70B = [AttentionSpec(layer, 64, 8, 128, 128, scale=128**-0.5) for layer in range(80)]
ROWS = 2048
CONTEXT_ROW = 8 + 64 * 129 * 4 + 8192 * 2  # id, a chunk's partial and the residual stream


def parts(lease: Lease) -> tuple[set[int], set[int]]:
    """The pages and doorbells of a lease."""
    pages = set(range(lease.offset // PAGE, -(-(lease.offset + lease.nbytes) // PAGE)))
    return pages, set(range(lease.doorbell, lease.doorbell + DOORBELLS))


steps = st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=40)


@given(steps=steps, counts=st.dictionaries(st.integers(0, 5), st.integers(0, 3)))
def test_leases_share_no_page_and_are_given_again_only_once_released(
    steps: list[tuple[bool, int]], counts: dict[int, int]
) -> None:
    """There is room for one more of a size exactly if fewer of this size are held than planned."""
    room = Counter[int]()
    for slot, count in counts.items():
        room[lease_nbytes(slot * PAGE)] += count
    plan = ArenaPlan(landing_nbytes=100, stages=True, pool_nbytes=70, leases=dict(room))
    leases, held = Leases(plan), list[Lease]()
    for releases, number in steps:
        if releases and held:
            leases.end_lease(held.pop(number % len(held)))
            continue
        slot = number % 7 * PAGE
        full = sum(lease.slot_nbytes == slot for lease in held) == room[lease_nbytes(slot)]
        with pytest.raises(TransportError, match="another link") if full else contextlib.nullcontext():
            lease = leases.lease(slot)
        if full:
            continue
        assert lease.offset % PAGE == 0 and lease.slot_nbytes == slot
        assert plan.leased_at <= lease.offset and lease.offset + lease.nbytes <= plan.nbytes
        for other in held:
            assert all(a.isdisjoint(b) for a, b in zip(parts(lease), parts(other), strict=True))
        held.append(lease)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.sampled_from([1, 4]))
def test_a_space_hands_out_every_number_once(steps: list[tuple[bool, int]], alignment: int) -> None:
    space, held = Space(3, 64, alignment), list[tuple[int, int]]()
    for gives, count in steps:
        if gives and held:
            space.deallocate(*held.pop(count % len(held)))
            continue
        start = space.allocate(count)
        if start is None:
            taken = {number for begin, size in held for number in range(begin, begin + size)}
            runs = [all(at + i not in taken for i in range(count)) for at in range(3, 65 - count)]
            assert not any(run and (at + 3) % alignment == 0 and alignment == 1 for at, run in enumerate(runs))
            continue
        assert start >= 3 and start + count <= 64 and start % alignment == 0
        assert all(start + count <= begin or begin + size <= start for begin, size in held)
        held.append((start, count))


def test_what_is_free_cannot_be_given_back() -> None:
    space = Space(0, 10)
    assert space.allocate(4) == 0
    for start, count in ((4, 1), (3, 2), (0, 11)):
        with pytest.raises(ValueError, match="freed twice"):
            space.deallocate(start, count)
    space.deallocate(0, 4)
    with pytest.raises(ValueError, match="freed twice"):
        space.deallocate(0, 4)
    assert space.allocate(10) == 0


def test_a_full_arena_says_what_is_missing() -> None:
    leases = Leases(ArenaPlan(0, False, 0, leases={PAGE: 2}))
    for slot_nbytes in (64, 0):
        leases.lease(slot_nbytes)
    with pytest.raises(TransportError, match="no 8256 free bytes for another link"):
        leases.lease(PAGE)
    with pytest.raises(TransportError, match="no 64 free bytes for another link"):
        leases.lease(0)


def per_lane_arena(lanes: int, memories: int) -> int:
    """Bytes of a compute worker's arena with a slot of all rows for each lane and memory worker, and two bulk slots."""
    reply, context, bulk = ROWS * 64 * 129 * 4, ROWS * CONTEXT_ROW, ROWS * 4096
    return lanes * (memories * reply + context + 2 * bulk)


@pytest.mark.parametrize(("computes", "memories", "most"), [(8, 64, 1e9), (200, 800, 8e9)])
def test_arenas_cost_what_links_carry(computes: int, memories: int, most: float) -> None:
    sizes = messages(LLAMA_70B, DType.BFLOAT16, ROWS, ROWS * CONTEXT_ROW, links=memories + computes - 1)
    compute, memory = sizes.compute_arena(computes, memories), sizes.memory_arena(computes, memories)
    before = per_lane_arena(computes + 1, memories)
    print(
        f"Llama-3-70B, {computes} x {memories}: {compute.nbytes / 1e9:.2f} GB per compute worker (with slots per lane "
        f"{before / 1e9:.0f} GB), {memory.nbytes / 1e9:.2f} GB per memory worker"
    )
    assert compute.nbytes < most and memory.nbytes < most
    assert memories * 2 * 64 * 64 * 129 * 4 < compute.nbytes, "two slots of 64 rows for every memory worker"
    assert compute.doorbells == 4 + DOORBELLS * (memories + computes - 1)


def test_a_lane_that_stays_has_no_slots_for_contexts() -> None:
    sizes = messages(LLAMA_70B, DType.BFLOAT16, 16, 0)
    assert sizes.context == 0
    assert sizes.compute_arena(8, 4).links == 4
