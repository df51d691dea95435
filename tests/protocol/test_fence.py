"""No message of an epoch that has ended is ever seen in the next one, whatever is late and whoever is lost when.

Real fences and links over the ``null`` transport, which delivers what a test lets it: messages on different links
overtake each other at will, those on one link keep their order, and those of a lost worker come whenever they like.
"""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.epochs import Ending
from lamina.errors import PeerLostError
from lamina.pipeline import Pipeline
from lamina.protocol import fence as fences
from lamina.protocol import links as linking
from lamina.protocol.channel import Slot
from lamina.protocol.choice import Offer, Transport
from lamina.protocol.fence import Fence
from lamina.protocol.messages import EpochEnded, PeerLost, Register
from lamina.topology import FIRST, Member, Topology
from lamina.transport.null import Fault, NullArena, NullEndpoint, Operation

NAMES = ["compute0", "compute1", "memory0", "memory1", "memory2"]
ALL = Topology(
    FIRST,
    tuple(Member(name, "compute" if "compute" in name else "memory", "cpu", "") for name in NAMES),
    Pipeline(2, 2),
)
SLOT = 8  # bytes at the start of every arena, shared by all that write there, with doorbell 0: the hardest case
FOREVER = 1 << 30


class Control:
    """A worker's end of the control plane: what it sends arrives at once."""

    def __init__(self) -> None:
        self.sent: list[EpochEnded | PeerLost] = []

    def send(self, message: EpochEnded | PeerLost) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Messages come from the test itself."""


class Own:
    """An arena of the null transport, as ``Links`` owns one."""

    def __init__(self, native: NullArena) -> None:
        self.native = native

    def close(self) -> None:
        """Nothing to give back."""


class Worker:
    """The part of a worker that ends epochs. It writes into the slots of others, over links that hold everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoint = NullEndpoint(name)
        self.arena = self.endpoint.register(64 * (1 + len(NAMES)), 1 + len(NAMES))
        self.control = Control()
        register = Register(self.arena.nbytes, self.arena.doorbells, NAMES, [], 0.0)
        offer = Offer("here", {}, {})
        self.links = linking.Links(name, register, Own(self.arena), {Transport.TCP: self.endpoint}, offer)  # type: ignore[arg-type, dict-item]
        self.fence = Fence(self.control, self.links, FIRST)  # type: ignore[arg-type]

    def connect(self, others: list["Worker"]) -> None:
        for other in others:
            peer = self.endpoint.connect(other.endpoint.descriptor(), 1.0)
            self.links._links[other.name] = linking._Link(self.endpoint, peer)
        self.links.settle()
        for operation in Operation:
            self.endpoint.faults.plan(Fault.HOLD, operation, count=FOREVER)

    def send(self, other: str, number: int) -> None:
        """A message into the slot of another worker, if it may send."""
        if self.fence.open and self.links.has(other):
            slot = Slot(0, SLOT, 0)
            self.links.outbox(other, slot).send([number.to_bytes(SLOT, "little")], number)

    def stand_by(self) -> None:
        if not self.fence.open:
            try:
                self.fence.stand_by(self.endpoint.wait)
            except PeerLostError as error:
                self.fence.lose(error)

    @property
    def seen(self) -> tuple[int, int]:
        """What its slot holds, and what its doorbell says."""
        return int.from_bytes(self.arena.data[:SLOT], "little"), self.arena.sequences[0]


class Network:
    """Messages in flight: each link is a queue, and those of lost workers are in no order at all."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.late: list = []  # of workers that are lost

    def lose(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.late += worker.endpoint.faults.held
        worker.endpoint.close()

    def deliver(self, choice: int) -> None:
        """The next message of one link, or any message of a lost worker."""
        heads = []
        for worker in self.workers.values():
            links: dict[int, int] = {}
            for place, sent in enumerate(worker.endpoint.faults.held):
                links.setdefault(id(sent.arena), place)
            heads += [(worker, place) for place in links.values()]
        if heads or self.late:
            choice %= len(heads) + len(self.late)
            if choice < len(heads):
                worker, place = heads[choice]
                worker.endpoint.faults.release(place)
            else:
                self.late.pop(choice - len(heads)).arrive()

    def deliver_all(self) -> None:
        while self.late or any(worker.endpoint.faults.held for worker in self.workers.values()):
            self.deliver(0)


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """Links take arenas of the null transport, and waits only look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "MappedArena", lambda native: native)
        patch.setattr(fences, "SLICE_S", 0.0)
        yield


actions = st.lists(
    st.tuples(st.sampled_from(["send", "deliver", "deliver", "tell", "stand by", "lose"]), st.integers(0, 99)),
    max_size=120,
)


class Cluster:
    """Workers, the network between them, and an engine that ends the epoch when one is lost."""

    def __init__(self) -> None:
        self.workers = {name: Worker(name) for name in NAMES}
        for name, worker in self.workers.items():
            worker.connect([other for other in self.workers.values() if other.name != name])
        self.network = Network(self.workers)
        self.topology, self._ending = ALL, Ending(ALL, 0.0, 0.0)
        self._numbers = itertools.count(1)

    def lose(self, choice: int) -> None:
        """A worker, unless it is the last of its role."""
        name = list(self.workers)[choice % len(self.workers)]
        if self.topology.lacks([name]) is None:
            self.network.lose(name)
            self.topology = self.topology.without([name])
            self._ending = Ending(self.topology, 0.0, 0.0)

    def act(self, action: str, choice: int) -> None:
        """Something happens, to one worker if it concerns one."""
        worker = list(self.workers.values())[choice % len(self.workers)]
        if (
            action == "send" and worker.fence.epoch == FIRST
        ):  # later, there is nothing to send before the engine says so
            others = [name for name in self.workers if name != worker.name]
            try:
                worker.send(others[choice // len(NAMES) % len(others)], next(self._numbers))
            except PeerLostError as error:
                worker.fence.lose(error)
        elif action == "deliver":
            self.network.deliver(choice)
        elif action == "tell" and worker.fence.epoch < self.topology.epoch:
            worker.fence.begin(self.topology)
        elif action == "stand by":
            worker.stand_by()
        elif action == "lose":
            self.lose(choice)

    @property
    def ended(self) -> bool:
        """The engine has read all that workers have said, and lets the next epoch begin."""
        sent = [(worker.name, message) for worker in self.workers.values() for message in worker.control.sent]
        answers = [(name, message) for name, message in sent if isinstance(message, EpochEnded)]
        return any([self._ending.note(name, message) for name, message in answers])

    def send_to_all(self) -> None:
        """The new epoch begins with one message to everybody, which overtakes all that is late."""
        for name, worker in self.workers.items():
            sender = next(other for other in self.workers.values() if other.name != name)
            sender.endpoint.faults._schedule.clear()
            sender.send(name, number := next(self._numbers))
            for operation in Operation:
                sender.endpoint.faults.plan(Fault.HOLD, operation, count=FOREVER)
            assert worker.seen == (number, number)


@given(actions=actions, lost=st.integers(0, 99), order=st.integers(0, 99))
def test_nothing_of_an_epoch_arrives_after_all_have_ended_it(
    actions: list[tuple[str, int]], lost: int, order: int
) -> None:
    cluster = Cluster()
    for action, choice in actions:
        cluster.act(action, choice)
        if cluster.topology is not ALL and cluster.ended:
            break
    if cluster.topology is ALL:
        cluster.lose(lost)
    for turn in itertools.count():
        if cluster.ended:
            break
        assert turn < 10_000, "the epoch never ends"
        cluster.act(["tell", "deliver", "stand by"][turn % 3], turn * (order + 1) + turn // 7)
    assert all(worker.fence.open for worker in cluster.workers.values())
    cluster.send_to_all()
    before = {name: worker.seen for name, worker in cluster.workers.items()}
    cluster.network.deliver_all()
    assert {name: worker.seen for name, worker in cluster.workers.items()} == before
