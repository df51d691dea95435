"""K and V that move between memory workers, in any order of what happens, against what they were; slots are counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.control.messages import MemorySetup
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, Fork, KvMove, SequenceStep, StepPlan, Switch
from lamina.core.topology import FIRST, Epoch
from lamina.core.types import AttentionSpec, DType, KvCacheDType, Overlap, Segment
from lamina.dataplane.leases import ArenaPlan, lease_nbytes
from lamina.dataplane.slot import Outbox, Slot
from lamina.memory.device import make
from lamina.memory.moving import KvMoves
from lamina.memory.pulls import Puller
from lamina.memory.store import KvStore
from lamina.transport.base import Endpoint
from tests.support.channels import Station, link
from tests.support.null_transport import NullEndpoint

NAMES = ["memory0", "memory1", "memory2"]
SPECS = [
    AttentionSpec(layer=0, query_heads=2, kv_heads=2, qk_dim=4, v_dim=4, scale=1.0),
    AttentionSpec(layer=1, query_heads=2, kv_heads=1, qk_dim=8, v_dim=2, scale=1.0),  # other sizes, as in MLA
]
PLAN = ArenaPlan(landing_nbytes=200, stages=True, pool_nbytes=0, leases={lease_nbytes(0): 2})
CAPACITY = 40


@dataclass
class Worker:
    """A memory worker without messages: its gaps are all there is."""

    store: KvStore
    endpoint: Endpoint
    puller: Puller
    moves: KvMoves
    done: list[int]
    plans: list[StepPlan]

    def gap(self) -> bool:
        """One piece of work at most; False if there was nothing to do."""
        busy = self.puller.can_start
        try:
            self.endpoint.wait([*self.puller.awaited, *self.moves.awaited], 0.0)
            busy = True
        except (DeadlineError, ValueError):  # nothing rung; nothing awaited
            pass
        self.puller.wait(self.endpoint.wait, [], 0.0, self.moves)
        return busy

    def read(self) -> None:
        """Take in the next plan, if there is one."""
        if self.plans:
            plan = self.plans.pop(0)
            self.store.apply(plan)
            self.moves.apply(plan)


class Pool:
    """Three memory workers, linked."""

    def __init__(self, kv_cache_dtype: KvCacheDType = "auto") -> None:
        self.kv_cache_dtype: KvCacheDType = kv_cache_dtype
        stations = {name: Station(name, NullEndpoint(name), PLAN) for name in NAMES}
        link(list(stations.values()), {(owner, peer): 0 for owner in NAMES for peer in NAMES if owner != peer})
        self.workers: dict[str, Worker] = {}
        for station in stations.values():
            self._add(station, stations)
        self.steps = 0

    def _add(self, station: Station, stations: dict[str, Station]) -> None:
        store = KvStore(
            station.name, MemorySetup(SPECS, DType.FLOAT32, CAPACITY, 1, Overlap(), False, self.kv_cache_dtype)
        )
        done: list[int] = []

        def outbox(peer: str, slot: Slot) -> Outbox:
            return Outbox(station.endpoint, station.peers[peer], slot)

        leases = {peer: (station.leases[peer], stations[peer].leases[station.name]) for peer in station.peers}
        puller = Puller(station.fetch, station.arena, PLAN, store)
        moves = KvMoves(
            store, puller, station.arena, PLAN, leases, outbox, lambda move: done.append(move.number), FIRST
        )
        self.workers[station.name] = Worker(store, station.endpoint, puller, moves, done, [])

    def send(self, **deltas: list) -> None:
        """A plan for all workers, which read it when they come to it."""
        self.steps += 1
        nobody = DecodeRows([], [], [])
        fields: dict[str, Any] = {
            "forks": [],
            "released": [],
            "admitted": [],
            "chunks": [],
            "decoding": nobody,
        } | deltas
        for worker in self.workers.values():
            worker.plans.append(StepPlan(self.steps, 0, 0, **fields))

    def begin(self, sequence: int, worker: str, tokens: int) -> None:
        """A sequence with ``tokens`` tokens, whose K and V say which they are."""
        segment = Segment(sequence, worker, (0, 2), (0, None))
        admission = Admission(sequence, 1, tokens, [segment], SamplingParams(), 0)
        self.send(admitted=[admission], chunks=[SequenceStep(sequence, 0, [0] * tokens, [])])
        self.settle()
        self.write(sequence, worker, 0, tokens)

    def write(self, sequence: int, worker: str, start: int, stop: int) -> None:
        store = self.workers[worker].store
        slots = store.slab.slots((sequence, 0))[start:stop]
        for layer in range(len(SPECS)):
            store.device.keep(layer, *self.content(sequence, layer, start, stop), slots)

    @staticmethod
    def content(sequence: int, layer: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        spec = SPECS[layer]
        base = (1000 * sequence + 100 * layer + np.arange(start, stop, dtype=np.float32))[:, None, None]
        heads = np.arange(spec.kv_heads, dtype=np.float32)[None, :, None] / 4
        k = base + heads + np.arange(spec.qk_dim, dtype=np.float32) / 64
        return k, -(base + heads + np.arange(spec.v_dim, dtype=np.float32) / 64)

    def check(self, sequence: int, worker: str, stop: int, start: int = 0, written_as: int | None = None) -> None:
        """Tokens [start, stop) of a sequence are there, in a segment of their own."""
        store = self.workers[worker].store
        slots, tokens = store.slab.slots((sequence, start)), stop - start
        assert len(slots) == tokens
        wanted = make("cpu", SPECS, store.element, tokens, threads=1)
        order = np.arange(tokens, dtype=np.int32)
        for layer, spec in enumerate(SPECS):
            wanted.keep(layer, *self.content(sequence if written_as is None else written_as, layer, start, stop), order)
            held, expected = (bytearray(tokens * spec.slab_bytes_per_token(store.element)) for _ in range(2))
            store.device.read(layer, slots, memoryview(held))
            wanted.read(layer, order, memoryview(expected))
            assert held == expected

    def settle(self) -> None:
        """Until nobody has anything to do."""
        busy = True
        while busy:
            for worker in self.workers.values():
                while worker.plans:
                    worker.read()
            busy = any([worker.gap() for worker in self.workers.values()])

    @property
    def used(self) -> list[int]:
        return [worker.store.slab.used for worker in self.workers.values()]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    yield (made := Pool(getattr(request, "param", "auto")))
    for worker in made.workers.values():
        worker.endpoint.close()


def there(sequence: int, worker: str, start: int, stop: int) -> Segment:
    return Segment(sequence, worker, (0, 2), (start, stop))


@pytest.mark.parametrize("pool", ["auto", "int8", "fp8"], indirect=True)
def test_a_range_moves_while_its_sequence_decodes_and_its_old_slots_are_free(pool: Pool) -> None:
    pool.begin(0, "memory0", 17)
    pool.send(moves=[KvMove(1, 9, "memory0", "memory2", 0, 17, 0, (0, 2))])
    pool.settle()
    assert pool.workers["memory2"].done == [1] and pool.used == [17, 0, 17]
    pool.send(chunks=[SequenceStep(0, 17, [0, 0], [])])  # decoded meanwhile at its old place
    pool.settle()
    pool.write(0, "memory0", 17, 19)
    pool.send(switches=[Switch(9, [there(0, "memory2", 0, 17)])])
    pool.send(released=[9])
    pool.settle()
    assert pool.used == [2, 0, 17]
    pool.check(0, "memory2", 17)
    pool.check(0, "memory0", 19, 17)
    assert [worker.store.sequences for worker in pool.workers.values()] == [1, 0, 1]
    assert not any(worker.moves.active for worker in pool.workers.values())


turns = st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=120)


@given(before=turns, after=turns, second=st.sampled_from(["memory1", "memory2"]), reuses=st.booleans())
def test_a_range_released_while_it_moves_leaves_nothing_and_spoils_nothing(
    before: list, after: list, second: str, reuses: bool
) -> None:
    """Release a sequence at any moment of its move: its slots are reused at once, and another sequence moves there."""
    pool = Pool()
    pool.begin(0, "memory0", 17)
    pool.begin(1, "memory0", 15)
    pool.send(moves=[KvMove(1, 8, "memory0", "memory1", 0, 17, 0, (0, 2))])
    for name, reads in before:
        pool.workers[name].read() if reads else pool.workers[name].gap()
    pool.send(released=[0, 8])
    if reuses:
        segment = Segment(2, "memory1", (0, 2), (0, None))
        admission = Admission(2, 1, 12, [segment], SamplingParams(), 0)
        pool.send(admitted=[admission], chunks=[SequenceStep(2, 0, [0] * 12, [])])
    pool.send(moves=[KvMove(2, 9, "memory0", second, 0, 15, 1, (0, 2))])
    written = False
    for name, reads in after:
        pool.workers[name].read() if reads else pool.workers[name].gap()
        if reuses and not written and (2, 0) in pool.workers["memory1"].store.slab:
            pool.write(2, "memory1", 0, 12)
            written = True
    if not written:
        while pool.workers["memory1"].plans:
            pool.workers["memory1"].read()
        if reuses:
            pool.write(2, "memory1", 0, 12)
    pool.settle()
    pool.send(switches=[Switch(9, [there(1, second, 0, 15)])])
    pool.send(released=[9])
    pool.settle()
    assert pool.workers[second].done[-1] == 2
    pool.check(1, second, 15)
    if reuses:
        pool.check(2, "memory1", 12)
    slots = {name: 15 * (name == second) + 12 * (reuses and name == "memory1") for name in NAMES}
    assert pool.used == list(slots.values())
    pool.send(released=[1, 2])
    pool.settle()
    assert pool.used == [0, 0, 0]
    for worker in pool.workers.values():
        assert worker.puller.is_done(-1, 0) and not worker.moves.active
        worker.endpoint.close()


def test_a_peer_that_dies_ends_what_it_had_a_part_in(pool: Pool) -> None:
    pool.begin(0, "memory0", 17)
    pool.send(moves=[KvMove(1, 9, "memory0", "memory1", 0, 17, 0, (0, 2))])
    for worker in pool.workers.values():
        worker.read()
    for _ in range(3):
        pool.workers["memory0"].gap()
        pool.workers["memory1"].gap()
    pool.workers["memory0"].endpoint.close()
    dead, left = pool.workers["memory0"], pool.workers["memory1"]
    with pytest.raises(PeerLostError, match="memory0"):
        for _ in range(10):
            left.puller.wait(left.endpoint.wait, [], 0.0, left.moves)
    left.puller.forget("memory0")
    left.moves.drop(FIRST.next)
    assert not left.moves.awaited and not left.puller.awaited and not left.puller.can_start
    assert dead.store.slab.used == 17


def test_nothing_is_fetched_from_a_worker_that_leaves_after_its_move_has_ended(pool: Pool) -> None:
    """The move ends with its request, in the middle."""
    pool.begin(0, "memory0", 17)
    pool.send(moves=[KvMove(1, 9, "memory0", "memory1", 0, 17, 0, (0, 2))])
    for worker in pool.workers.values():
        worker.read()
    leaves, left = pool.workers["memory0"], pool.workers["memory1"]
    for _ in range(20):
        leaves.gap()
        left.puller.wait(left.endpoint.wait, [], 0.0, left.moves)
        if left.puller.can_start:
            break
    assert left.puller.can_start and left.moves.awaited
    left.moves.release([9])
    left.puller.drop_queued({"memory2"})
    left.moves.change({})
    assert not left.moves.awaited and not left.puller.can_start and left.puller.is_done(-1, 0)


@given(gaps=turns)
def test_another_engine_that_takes_over_numbers_moves_from_1_again(gaps: list) -> None:
    """Doorbells have rung for every piece of the last engine's moves, whose numbers were higher."""
    pool = Pool()
    for sequence in (0, 1):
        pool.begin(sequence, "memory0", 17)
    moves = [KvMove(number, 7 + number, "memory0", "memory1", 0, 17, number - 1, (0, 2)) for number in (1, 2)]
    pool.send(moves=moves)
    pool.settle()
    for worker in pool.workers.values():
        worker.puller.drop_all()
        worker.moves.drop(Epoch(FIRST.incarnation + 1, FIRST.number + 1))
        worker.store.truncate({})
        worker.done.clear()
    pool.begin(5, "memory0", 15)
    pool.send(moves=[KvMove(1, 9, "memory0", "memory1", 0, 15, 5, (0, 2))])
    for name, reads in gaps:
        pool.workers[name].read() if reads else pool.workers[name].gap()
    pool.settle()
    pool.send(switches=[Switch(9, [there(5, "memory1", 0, 15)])])
    pool.settle()
    assert pool.workers["memory1"].done == [1]
    pool.check(5, "memory1", 15)
    for worker in pool.workers.values():
        worker.endpoint.close()


@given(gaps=turns)
def test_ranges_move_several_at_a_time_and_what_shares_them_shares_them_there(gaps: list) -> None:
    """From one source to two targets, and from another; a fork has some of the tokens that move."""
    pool = Pool()
    for sequence, worker, tokens in ((0, "memory0", 17), (1, "memory0", 15), (2, "memory1", 9)):
        pool.begin(sequence, worker, tokens)
    pool.send(forks=[Fork(0, 3, 10)])
    moves = [
        KvMove(1, 100, "memory0", "memory1", 4, 12, parent=0, heads=(0, 2)),
        KvMove(2, 101, "memory0", "memory2", 0, 15, parent=1, heads=(0, 2)),
        KvMove(3, 102, "memory1", "memory2", 0, 6, parent=2, heads=(0, 2)),
    ]
    pool.send(moves=moves)
    for name, reads in gaps:
        pool.workers[name].read() if reads else pool.workers[name].gap()
    pool.settle()
    assert [worker.done for worker in pool.workers.values()] == [[], [1], [2, 3]] or pool.workers["memory2"].done == [
        3,
        2,
    ]
    assert pool.used == [32, 17, 21]

    switches = [
        Switch(100, [there(0, "memory1", 4, 12), there(3, "memory1", 4, 10)]),
        Switch(101, [there(1, "memory2", 0, 15)]),
        Switch(102, [there(2, "memory2", 0, 6)]),
    ]
    pool.send(switches=switches)
    pool.settle()
    assert pool.used == [32, 17, 21], "steps planned before may still read at the sources"
    pool.send(released=[100, 101, 102])
    pool.settle()
    assert pool.used == [9, 11, 21]  # of 0, 4 tokens before the range and 5 behind it
    where = [
        (0, "memory0", 0, 4), (0, "memory1", 4, 12), (0, "memory0", 12, 17), (3, "memory0", 0, 4),
        (3, "memory1", 4, 10), (1, "memory2", 0, 15), (2, "memory2", 0, 6), (2, "memory1", 6, 9),
    ]  # fmt: skip
    for sequence, worker, start, stop in where:
        pool.check(sequence, worker, stop, start, written_as=0 if sequence == 3 else sequence)
    pool.send(chunks=[SequenceStep(0, 17, [0, 0], []), SequenceStep(1, 15, [0], [])])
    pool.settle()
    assert pool.used == [12, 11, 21], "both go on where they were"
    pool.send(released=[0, 1, 2, 3])
    pool.settle()
    assert pool.used == [0, 0, 0] and not any(worker.moves.active for worker in pool.workers.values())
    for each in pool.workers.values():
        each.endpoint.close()
