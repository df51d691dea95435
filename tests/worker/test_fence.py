"""No message of an epoch that has ended is ever seen in the next one, whatever is late and whoever is lost when.

Real fences, leases and channels over the ``null`` transport, which delivers what a test lets it: messages on different
links overtake each other at will, and those on one link keep their order, also after their sender was lost.
"""

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.control.messages import EpochEnded, Grant, PeerLost, Register
from lamina.core.errors import PeerLostError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import Epoch, Member, Topology
from lamina.dataplane.channel import Channel
from lamina.dataplane.leases import DOORBELLS, SLOTS, ArenaPlan, Lease, lease_nbytes
from lamina.dataplane.transport_choice import Offer, Transport
from lamina.engine.losses import Ending
from lamina.worker import links as linking
from lamina.worker import loop as fences
from lamina.worker.loop import Fence
from tests.support.null_transport import Fault, NullArena, NullEndpoint, Operation

NAMES = ["compute0", "compute1", "memory0", "memory1", "memory2"]
FIRST = Epoch(2_000_000_000, 1)  # an incarnation is the time when the engine started
ALL = Topology(
    FIRST,
    tuple(Member(name, "compute" if "compute" in name else "memory", "cpu", "") for name in NAMES),
    Pipeline(2, 2),
)
SLOT = 128
SMALL, LARGE = 8, 128  # bytes of messages, in a slot and to be fetched
LINKS = len(NAMES) - 1  # an arena has room for no more: another worker gets the lease of a lost one
PLAN = ArenaPlan(0, stages=False, pool_nbytes=512, leases={lease_nbytes(SLOT): LINKS})
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
    """The part of a worker that exchanges messages and ends epochs, over links that hold everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoint = NullEndpoint(name)
        self.arena = self.endpoint.register(PLAN.nbytes, PLAN.doorbells)
        self.control = Control()
        offer = Offer("here", {}, {})
        register = Register(PLAN, [], 0.0)
        self.links = linking.Links(name, register, Own(self.arena), {Transport.TCP: self.endpoint}, offer)  # type: ignore[arg-type, dict-item]
        self.leases = self.links.grant(Grant({other: SLOT for other in NAMES if other != name})).leases
        self.fence = Fence(self.control, self.links, FIRST)  # type: ignore[arg-type]
        self.channels: dict[str, Channel] = {}

    def connect(self, others: list["Worker"]) -> None:
        for other in others:
            peer = self.endpoint.connect(other.endpoint.descriptor(), 1.0)
            self.links._links[other.name] = linking._Link(self.endpoint, peer, other.leases[self.name])
            self.channels[other.name] = self.links.channel(other.name)
        self.links.close_unused_endpoints()
        self.hold()

    def hold(self) -> None:
        """Everything sent from now on is late."""
        for operation in Operation:
            self.endpoint.faults.plan(Fault.HOLD, operation, count=FOREVER)

    def pass_at_once(self) -> None:
        """Everything sent from now on overtakes what is late."""
        self.endpoint.faults._schedule.clear()

    def send(self, other: str, number: int) -> None:
        """A message, if this worker may send: it says in which epoch it was sent."""
        if self.fence.open and self.links.has(other):
            nbytes = LARGE if number % 3 == 0 else SMALL
            message = self.channels[other].begin(0, self.fence.epoch.number, nbytes)
            message.send_piece([number.to_bytes(nbytes, "little")])

    def read(self) -> list[tuple[str, int]]:
        """The messages that have arrived, by sender; their slots are freed."""
        return [
            (name, self._read(channel, slot))
            for name, channel in self.channels.items()
            if self.fence.open and self.links.has(name)
            for slot, (doorbell, number) in list(channel.awaited.items())
            if self.arena.sequence(doorbell) >= number
        ]

    def _read(self, channel: Channel, slot: int) -> int:
        channel.close_slot(slot)
        arrival = channel.read(slot)
        assert arrival.turn == self.fence.epoch.number
        content = arrival.body
        if content is None:
            peer = self.links._links[channel.name].peer
            content = peer.arena.view(arrival.fetched_at, arrival.nbytes)  # type: ignore[attr-defined]
            channel.fetched(arrival.number)
        number = int.from_bytes(content, "little")
        channel.free(slot)
        return number

    def serve(self) -> None:
        """Read what has arrived, send what was kept, and send the credits of freed slots."""
        if self.fence.open:
            self.read()
            self.links.hub.send_kept()
            self.links.hub.flush()

    def end_epoch(self, topology: Topology) -> None:
        """As workers do."""
        self.links.hub.restart(topology)
        self.channels = {name: channel for name, channel in self.channels.items() if name in topology.names}
        self.fence.begin_epoch(topology)

    def stand_by(self) -> None:
        if not self.fence.open:
            try:
                self.fence.stand_by(self.endpoint.wait)
            except PeerLostError as error:
                self.fence.on_peer_lost(error)

    @property
    def memory(self) -> tuple[bytes, list[int]]:
        """Everything that peers may write."""
        return bytes(self.arena.data), list(self.arena.sequences)

    def lease_to_another(self) -> Lease:
        """The part of the arena that the next worker gets."""
        return self.links.grant(Grant({"joiner": SLOT})).leases["joiner"]


def first_of_links(sent: list) -> list[int]:
    """Where the next message of each link is, among those of one sender."""
    links: dict[int, int] = {}
    for place, one in enumerate(sent):
        links.setdefault(id(one.arena), place)
    return list(links.values())


class Network:
    """Messages in flight: each link is a queue."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.late: list[list] = []  # of each worker that is lost

    def lose(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.late.append(list(worker.endpoint.faults.held))
        worker.endpoint.close()

    def deliver(self, choice: int) -> None:
        """The next message of one link, perhaps of a lost worker."""
        heads = [
            (worker, place) for worker in self.workers.values() for place in first_of_links(worker.endpoint.faults.held)
        ]
        late = [(sent, place) for sent in self.late for place in first_of_links(sent)]
        if heads or late:
            choice %= len(heads) + len(late)
            if choice < len(heads):
                worker, place = heads[choice]
                worker.endpoint.faults.release(place)
            else:
                sent, place = late[choice - len(heads)]
                sent.pop(place).arrive()

    def deliver_all(self) -> None:
        while any(self.late) or any(worker.endpoint.faults.held for worker in self.workers.values()):
            self.deliver(0)


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """Links take arenas of the null transport, and waits only look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "MappedArena", lambda native: native)
        patch.setattr(fences, "SLICE_S", 0.0)
        yield


actions = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "deliver", "deliver", "serve", "tell", "stand by", "lose"]),
        st.integers(0, 99),
    ),
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
        if action in ("send", "serve") and worker.fence.epoch == FIRST:  # the engine says when the next one begins
            others = [name for name in self.workers if name != worker.name]
            try:
                if action == "send":
                    worker.send(others[choice // len(NAMES) % len(others)], next(self._numbers))
                else:
                    worker.serve()
            except PeerLostError as error:
                worker.fence.on_peer_lost(error)
        elif action == "deliver":
            self.network.deliver(choice)
        elif action == "tell" and worker.fence.epoch < self.topology.epoch:
            worker.end_epoch(self.topology)
        elif action == "stand by":
            worker.stand_by()
        elif action == "lose":
            self.lose(choice)

    @property
    def ended(self) -> bool:
        """The engine has read all that workers have said, and lets the next epoch begin."""
        sent = [(worker.name, message) for worker in self.workers.values() for message in worker.control.sent]
        answers = [(name, message) for name, message in sent if isinstance(message, EpochEnded)]
        return any([self._ending.on_epoch_ended(name, message) for name, message in answers])

    def send_to_all(self) -> dict[str, list[tuple[str, int]]]:
        """The new epoch begins with messages to everybody in all slots, and one more that is kept; they overtake what
        is late. Returns what each worker is to read, with the sender."""
        expected: dict[str, list[tuple[str, int]]] = {name: [] for name in self.workers}
        for sender in self.workers.values():
            sender.pass_at_once()
            for other in self.workers.keys() - {sender.name}:
                for _ in range(SLOTS + 1):
                    sender.send(other, number := next(self._numbers))
                    expected[other].append((sender.name, number))
        return expected

    def read_all(self) -> dict[str, list[tuple[str, int]]]:
        """What each worker reads, until nothing is left to read."""
        read: dict[str, list[tuple[str, int]]] = {name: [] for name in self.workers}
        while found := {name: each for name, worker in self.workers.items() if (each := worker.read())}:
            for name, each in found.items():
                read[name] += each
            for worker in self.workers.values():
                worker.links.hub.flush()
            for worker in self.workers.values():
                worker.links.hub.send_kept()
        return read


@example(actions=[("send", 0), ("send", 1), ("send", 92), ("lose", 77), ("deliver", 3), ("serve", 2)], lost=0, order=0)
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
    workers = cluster.workers.values()
    assert all(worker.fence.open for worker in workers)
    assert all(not worker.read() for worker in workers), "what an earlier epoch left is not taken for a message"
    for worker in workers:
        lease = worker.lease_to_another()
        assert not any(worker.arena.sequences[lease.doorbell : lease.doorbell + DOORBELLS])
    expected = cluster.send_to_all()
    before = [worker.memory for worker in workers]
    cluster.network.deliver_all()
    assert [worker.memory for worker in workers] == before
    assert {name: sorted(read) for name, read in cluster.read_all().items()} == {
        name: sorted(each) for name, each in expected.items()
    }


@pytest.mark.parametrize("incarnations", [0, 1])
def test_another_engine_ends_the_leases_of_those_that_left(incarnations: int) -> None:
    """Free a leaver's lease at the first epoch of another engine, which has ended all processes but its members'.

    An epoch of the same engine frees no lease: that engine reports each leaver that has ended.
    """
    worker, rest = Cluster().workers["compute0"], ALL.left(["memory2"], ALL.pipeline)
    worker.links.change_members(rest)
    following = Epoch(FIRST.incarnation + incarnations, FIRST.number + 1)
    worker.end_epoch(msgspec.structs.replace(rest, epoch=following))
    assert len(worker.links.grant(Grant({"joiner": SLOT})).leases) == incarnations


@pytest.mark.parametrize("joining", [False, True])
def test_an_epoch_does_not_begin_without_a_peer_whose_link_was_cut_before_a_change(joining: bool) -> None:
    """The cut peer, perhaps one that has just joined, is still a member, and plans still send it messages."""
    worker, cut = Cluster().workers["compute0"], "memory0"
    if joining:
        worker.links.change_members(ALL.left(cut, ALL.pipeline))
        worker.links.remove_peers([cut])
        worker.links.grant(Grant({cut: SLOT}))
    worker.fence.on_peer_lost(PeerLostError(cut, "nothing has come from it"))
    changed = ALL.left("memory2", ALL.pipeline)
    worker.links.change_members(changed)
    worker.end_epoch(changed.without(["memory1"]))
    for _ in NAMES:
        worker.stand_by()
    ended = worker.control.sent[-1]
    assert isinstance(ended, EpochEnded)
    assert cut in ended.missing
    assert not worker.fence.open


@pytest.mark.parametrize("lost", NAMES[1:])
def test_a_worker_of_any_role_that_was_lost_before_it_became_a_member_stops_steps(lost: str) -> None:
    workers = Cluster().workers
    own = workers["compute0"]
    own.links.change_members(ALL.left([lost], ALL.pipeline))
    assert own.links.drop_newcomer(lost)
    own.links.change_members(ALL)
    own.fence.check_links()
    assert [one.peer for one in own.control.sent if isinstance(one, PeerLost)] == [lost] and not own.fence.open
    own.end_epoch(ALL.without([lost]))
    assert lost not in own.links.peers
