"""Workers' links: proved both ways, over several transports at once, replaced when one fails."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from msgspec.structs import replace

from lamina.control.messages import Grant, Link, Linked, Register
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.dataplane.channel import Channel
from lamina.dataplane.slot import Slot
from lamina.dataplane.transport_choice import Transport
from lamina.transport.endpoint import SPIN_S, WaitInTurns
from lamina.transport.listener import SocketDescriptor, decode
from lamina.transport.shm import ShmEndpoint
from lamina.transport.tcp import TcpEndpoint
from lamina.worker import links as module
from lamina.worker.links import Links, Member, open_links
from tests.support.linked_workers import LONG_SPIN_S, PLAN, SECRET, SHM, TCP, TIMEOUT_S, Cluster

SLOT = Slot(64, 64, 1)  # of the part that is nobody's lease


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    opened: list[Cluster] = []

    def make(*names: str) -> Cluster:
        opened.append(Cluster(list(names)))
        return opened[-1]

    yield make
    for each in opened:
        for links in each.links.values():
            links.close()


@pytest.mark.parametrize("transport", [SHM, TCP])
def test_a_pair_is_linked_and_waits_on_its_one_endpoint(cluster: Callable[..., Cluster], transport: Transport) -> None:
    pair = cluster("a", "b")
    assert pair.link({("a", "b"): transport}) == {"a": Linked({}), "b": Linked({})}
    waits = {name: links.close_unused_endpoints() for name, links in pair.links.items()}
    for wait in waits.values():
        endpoint = getattr(wait, "__self__", None)
        assert isinstance(endpoint, ShmEndpoint | TcpEndpoint)
        assert endpoint.spin_s == LONG_SPIN_S
    for sequence, (name, peer) in enumerate([("a", "b"), ("b", "a")], 1):
        pair.links[name].outbox(peer, SLOT).write_and_ring([name.encode()], sequence)
        assert waits[peer]([(1, sequence)], TIMEOUT_S) == 0
        assert bytes(pair.arenas[peer].view(64, 1)) == name.encode()


def test_one_worker_hears_peers_over_different_transports(cluster: Callable[..., Cluster]) -> None:
    three = cluster("a", "b", "c")
    three.link({("a", "b"): SHM, ("a", "c"): TCP})
    waits = {name: links.close_unused_endpoints() for name, links in three.links.items()}
    assert isinstance(waits["a"], WaitInTurns)
    for sequence in range(1, 20):
        for peer, doorbell in (("b", 0), ("c", 1)):
            three.links[peer].outbox("a", Slot(64, 64, doorbell)).write_and_ring([peer.encode()], sequence)
            assert waits["a"]([(doorbell, sequence)], TIMEOUT_S) == 0
            assert bytes(three.arenas["a"].view(64, 1)) == peer.encode()
            three.links["a"].outbox(peer, SLOT).write_and_ring([b"answer"], sequence)
            assert waits[peer]([(1, sequence)], TIMEOUT_S) == 0
    with pytest.raises(DeadlineError, match=r"a waited 0\.02 s .* 0 is at 19 of 20, 1 is at 19 of 20"):
        waits["a"]([(0, 20), (1, 20)], 0.02)
    with pytest.raises(DeadlineError):
        waits["a"]([(0, 20)], 0.0)


@pytest.mark.parametrize("gone", ["b", "c"])
def test_a_peer_over_either_transport_that_ends_is_noticed(cluster: Callable[..., Cluster], gone: str) -> None:
    three = cluster("a", "b", "c")
    three.link({("a", "b"): SHM, ("a", "c"): TCP})
    wait = three.links["a"].close_unused_endpoints()
    threading.Timer(0.05, three.links[gone].close).start()
    with pytest.raises(PeerLostError) as lost:
        wait([(0, 1)], TIMEOUT_S)
    assert lost.value.peer == gone
    three.links["a"].disconnect(gone)
    with pytest.raises(DeadlineError):
        wait([(0, 1)], 0.02)


def test_a_write_that_does_not_arrive_proves_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer can be connected to, but does not write: as over a network that lets only one way pass."""
    pair = cluster("a", "b")
    pair.way("b", "a", TCP)
    with monkeypatch.context() as impatient:
        impatient.setattr(module, "PROOF_TIMEOUT_S", 0.2)
        answer = pair.links["a"].link(Link(1, {"b": pair.way("a", "b", TCP)}))
    assert answer.failures["b"] == "b connected, but a did not see its write within 0.2 s"
    assert pair.link({("a", "b"): SHM}, round_=2) == {"a": Linked({}), "b": Linked({})}
    wait = pair.links["a"].close_unused_endpoints()
    pair.links["b"].outbox("a", SLOT).write_and_ring([b"by memory"], 1)
    assert wait([(1, 1)], TIMEOUT_S) == 0


def test_a_peer_that_ends_before_its_proof_fails_alone(cluster: Callable[..., Cluster]) -> None:
    three = cluster("a", "b", "c")
    for peer in ("b", "c"):
        three.way(peer, "a", SHM)
    ways = {peer: three.way("a", peer, SHM) for peer in ("b", "c")}
    three.links["a"].connect(Link(1, ways, 2))
    three.links["b"].close()
    three.links["c"].connect(Link(1, {"a": three.way("c", "a", SHM)}, 2))
    answer = three.links["a"].linked(TIMEOUT_S)
    assert answer is not None and list(answer.failures) == ["b"]
    assert "has exited or closed its endpoint" in answer.failures["b"]


def test_who_tries_another_in_vain_first_still_proves_its_link(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "a" tries the silent one before it turns to "b", which has long connected to it by then."""
    monkeypatch.setattr(module, "PROOF_TIMEOUT_S", 2.0)
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 3.0)
    three = cluster("a", "b", "silent")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = decode(three.offers["silent"].descriptors[TCP], "tcp", SocketDescriptor)
        nowhere = msgspec.msgpack.encode(replace(where, port=silent.getsockname()[1]))
        three.offers["silent"].descriptors[TCP] = nowhere
        answers = three.link({("a", "silent"): TCP, ("a", "b"): TCP})
    assert list(answers["a"].failures) == ["silent"]
    assert answers["b"] == Linked({})


def test_a_write_that_arrives_as_something_else_proves_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = cluster("a", "b")
    monkeypatch.setattr(module, "_proof", lambda *_: os.urandom(8))
    for answer in pair.link({("a", "b"): SHM}).values():
        assert [reason.partition(" reached ")[2][1:] for reason in answer.failures.values()] == [" with other bytes"]


def test_a_transport_that_cannot_be_opened_is_an_obstacle_not_an_error() -> None:
    # An address of another machine.
    links = open_links(Member("a", SECRET, "192.0.2.1"), Register(PLAN, [SHM, TCP], SPIN_S))
    offer = links.offer
    assert list(offer.descriptors) == [SHM]
    assert "a: a cannot listen on 192.0.2.1" in offer.obstacles[TCP]
    links.close()
    links.close()


def test_where_encryption_is_asked_for_rdma_is_an_obstacle() -> None:
    links = open_links(Member("a", SECRET, "127.0.0.1"), Register(PLAN, [Transport.RDMA, TCP], SPIN_S, tls=True))
    offer = links.offer
    assert list(offer.descriptors) == [TCP]
    assert offer.obstacles == {Transport.RDMA: "a: rdma cannot be encrypted, which --tls requires"}
    links.close()


def read(links: Links, channel: Channel, timeout_s: float = TIMEOUT_S) -> bytes:
    """The next message, whose slot is freed."""
    awaited = list(channel.awaited.items())
    slot = awaited[links.close_unused_endpoints()([target for _, target in awaited], timeout_s)][0]
    channel.close_slot(slot)
    content = bytes(channel.read(slot).body or b"")
    channel.free(slot)
    return content


@pytest.mark.parametrize("transport", [SHM, TCP])
def test_a_third_worker_is_linked_while_two_exchange_messages(
    cluster: Callable[..., Cluster], transport: Transport
) -> None:
    """Its leases move nobody's; once a lease has been released, and no sooner, another worker gets it."""
    four = cluster("a", "b", "c", "d")
    assert four.link({("a", "b"): transport}) == {"a": Linked({}), "b": Linked({})}
    before = dict(four.leases)
    a, b = four.links["a"].channel("b"), four.links["b"].channel("a")
    for turn in range(20):
        for lane in range(3):  # two are in slots, one is kept
            a.begin(lane, turn, 9).send_piece([f"{turn:4} {lane:4}".encode()])
        if turn == 10:
            joined = four.link({("a", "c"): transport, ("b", "c"): transport})
            assert joined == dict.fromkeys(("a", "b", "c"), Linked({}))
            c, at = four.links["a"].channel("c"), four.links["c"].channel("a")
        arrived = set[bytes]()
        while len(arrived) < 3:
            with contextlib.suppress(DeadlineError):
                arrived.add(read(four.links["b"], b, 0.01))
            four.links["b"].hub.flush()
            if credits := four.links["a"].hub.credits:
                with contextlib.suppress(DeadlineError):
                    four.links["a"].close_unused_endpoints()(credits, 0.01)
                four.links["a"].hub.send_kept()
        if turn >= 10:
            c.begin(0, turn, 64).send_piece([bytes(64)])
        b.begin(0, turn, 6).send_piece([b"answer"])
        assert read(four.links["a"], a) == b"answer"
        assert arrived == {f"{turn:4} {lane:4}".encode() for lane in range(3)}
        four.links["a"].hub.flush()
        if turn >= 10:
            assert read(four.links["c"], at) == bytes(64)
            four.links["c"].hub.flush()
    assert {pair: four.leases[pair] for pair in before} == before
    former = four.leases["a", "c"]
    four.links["c"].close()
    four.links["a"].disconnect("c")
    assert four.way("d", "a", transport).lease.offset != former.offset, "its peer may still write there"
    four.links["a"].end_lease("c")
    assert four.links["a"].grant(Grant({"e": 128})).leases["e"] == former
