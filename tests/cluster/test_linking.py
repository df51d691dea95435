"""Rounds of linking: pairs whose test fails get the next transport, the others keep theirs."""

from typing import Any, cast

import pytest

from lamina.cluster.conversations import Gather, converse
from lamina.cluster.linking import SlotSizes, link
from lamina.control.messages import Grant, Granted, Link, Linked, LinkWay
from lamina.control.sockets import ControlServer
from lamina.core.errors import TransportError, UnreachableError
from lamina.dataplane.leases import Lease
from lamina.dataplane.transport_choice import Choice, Offer, Transport

SHM, RDMA, TCP = Transport.SHM, Transport.RDMA, Transport.TCP
PAIRS = [("compute0", "memory0"), ("compute0", "memory1")]
WORKERS = ("compute0", "memory0", "memory1")
OFFERS = {
    name: Offer(name, {transport: f"{name} by {transport}".encode() for transport in Transport}, {}) for name in WORKERS
}


def lease(owner: str, peer: str) -> Lease:
    """What a worker leases a peer: different for every pair."""
    return Lease(offset=WORKERS.index(owner), nbytes=WORKERS.index(peer), doorbell=0)


class FakeWorkers:
    """Control server and gatherer of workers that fail as given: (round, worker) -> failures."""

    def __init__(self, failures: dict[tuple[int, str], dict[str, str]]) -> None:
        self._failures = failures
        self.heard: list[tuple[str, Link]] = []
        self.slots: dict[tuple[str, str], int] = {}

    def send(self, workers: list[str], message: Link | Grant) -> None:
        if isinstance(message, Grant):
            self.slots |= {(worker, peer): nbytes for worker in workers for peer, nbytes in message.slots.items()}
        else:
            self.heard += [(worker, message) for worker in workers]

    def all(self, kind: type, names: list[str], timeout_s: float) -> dict[str, Any]:
        if kind is Granted:
            return {
                name: Granted({peer: lease(name, peer) for owner, peer in self.slots if owner == name})
                for name in names
            }
        round_ = self.heard[-1][1].round
        return {name: Linked(self._failures.get((round_, name), {})) for name in names}

    def link(self, wanted: Any) -> dict[tuple[str, str], Choice]:
        linking = link(cast(ControlServer, self), wanted, OFFERS, dict.fromkeys(PAIRS, SlotSizes(640, 320)))
        return converse(cast(Gather, self), linking)


def test_every_worker_is_told_how_to_reach_its_peers() -> None:
    workers = FakeWorkers({})
    assert workers.link("tcp") == dict.fromkeys(PAIRS, Choice(TCP, "requested by name"))
    assert {name: message.peers for name, message in workers.heard} == {
        name: {peer: LinkWay(TCP, f"{peer} by tcp".encode(), lease(peer, name)) for peer in peers}
        for name, peers in {
            "compute0": ("memory0", "memory1"),
            "memory0": ("compute0",),
            "memory1": ("compute0",),
        }.items()
    }
    assert workers.slots == {
        ("compute0", "memory0"): 640,
        ("compute0", "memory1"): 640,
        ("memory0", "compute0"): 320,
        ("memory1", "compute0"): 320,
    }


def test_answers_are_awaited_of_all_even_if_one_cannot_be_told() -> None:
    """If the linking is given up then, it is known who still answers."""

    class Lost(FakeWorkers):
        def send(self, workers: list[str], message: Link | Grant) -> None:
            super().send(workers, message)
            if workers == ["memory1"]:
                raise UnreachableError({"memory1": "no route"})

    linking = link(cast(ControlServer, Lost({})), "tcp", OFFERS, dict.fromkeys(PAIRS, SlotSizes(640, 320)))
    granted = next(linking)
    assert granted.kind is Granted and set(granted.names) == set(WORKERS)
    leases = {owner: Granted({peer: lease(owner, peer) for peer in WORKERS}) for owner in WORKERS}
    linked = linking.send(leases)
    assert linked.kind is Linked and set(linked.names) == set(WORKERS)


@pytest.mark.parametrize(("side", "peer"), [("memory0", "compute0"), ("compute0", "memory0")])
def test_a_failure_on_either_side_moves_that_pair_alone_to_the_next_transport(side: str, peer: str) -> None:
    workers = FakeWorkers({(1, side): {peer: "nothing arrived"}})
    assert workers.link("auto") == {
        PAIRS[0]: Choice(TCP, "different hosts; no rdma: nothing arrived"),
        PAIRS[1]: Choice(RDMA, "different hosts"),
    }
    again = {name: message for name, message in workers.heard if message.round == 2}
    assert sorted(again) == ["compute0", "memory0"]
    assert list(again["compute0"].peers) == ["memory0"]


def test_a_transport_asked_for_by_name_is_not_replaced() -> None:
    workers = FakeWorkers({(1, "memory1"): {"compute0": "nothing arrived"}})
    with pytest.raises(TransportError, match=r"compute0 and memory1 cannot be linked: .* no rdma: nothing arrived"):
        workers.link("rdma")


class Granting(FakeWorkers):
    """Notes for whose devices and NICs each worker is to make an inbox."""

    def __init__(self) -> None:
        super().__init__({})
        self.inboxes: dict[str, list[str]] = {}
        self.keys: dict[str, list[str]] = {}

    def send(self, workers: list[str], message: Link | Grant) -> None:
        super().send(workers, message)
        if isinstance(message, Grant):
            self.inboxes |= dict.fromkeys(workers, message.inboxes)
            self.keys |= dict.fromkeys(workers, message.inbox_keys)


@pytest.mark.parametrize(
    ("wanted", "hosts", "kinds", "expected"),
    [
        ("auto", "aaa", ["cuda", "cuda", "cuda"], {"memory0", "memory1"}),
        ("shm", "aaa", ["cuda", "", "cuda"], {"memory1"}),
        ("auto", "aab", ["cuda", "cuda", "cuda"], {"memory0"}),
        ("auto", "aaa", ["cuda", "emulated", ""], set()),
        ("auto", "aaa", ["", "", ""], set()),
        ("tcp", "aaa", ["cuda", "cuda", "cuda"], set()),
    ],
)
def test_devices_that_are_alike_and_on_one_machine_get_inboxes(
    wanted: Any, hosts: str, kinds: list[str], expected: set[str]
) -> None:
    descriptors = {transport: b"" for transport in Transport}
    offers = {name: Offer(host, descriptors, {}, kind) for name, host, kind in zip(WORKERS, hosts, kinds, strict=True)}
    workers = Granting()
    slots = {pair: SlotSizes(640, 320, on_devices=True) for pair in PAIRS} | {
        ("memory0", "memory1"): SlotSizes(640, 320)
    }
    converse(cast(Gather, workers), link(cast(ControlServer, workers), wanted, offers, slots))
    assert set(workers.inboxes["compute0"]) == expected
    for name in ("memory0", "memory1"):
        assert workers.inboxes[name] == (["compute0"] if name in expected else [])


@pytest.mark.parametrize(
    ("wanted", "hosts", "kinds", "expected"),
    [
        ("auto", "aab", ["cuda", "cuda", "cuda"], {"compute0": ["memory1"], "memory0": [], "memory1": ["compute0"]}),
        ("auto", "abb", ["", "cuda", ""], {"compute0": [], "memory0": ["compute0"], "memory1": []}),
        ("rdma", "aaa", ["cuda", "", ""], {"compute0": ["memory0", "memory1"], "memory0": [], "memory1": []}),
        ("tcp", "abb", ["cuda", "cuda", "cuda"], {"compute0": [], "memory0": [], "memory1": []}),
    ],
)
def test_nics_of_other_machines_write_into_inboxes_of_devices(
    wanted: Any, hosts: str, kinds: list[str], expected: dict[str, list[str]]
) -> None:
    descriptors = {transport: b"" for transport in Transport}
    offers = {name: Offer(host, descriptors, {}, kind) for name, host, kind in zip(WORKERS, hosts, kinds, strict=True)}
    workers, slots = Granting(), dict.fromkeys(PAIRS, SlotSizes(640, 320, on_devices=True))
    converse(cast(Gather, workers), link(cast(ControlServer, workers), wanted, offers, slots))
    assert workers.keys == expected
