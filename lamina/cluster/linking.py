"""Links workers: selects a transport for every pair, which the two test before the cluster relies on it."""

import contextlib
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lamina.cluster.conversations import Ask, Conversation
from lamina.control.messages import Grant, Granted, Link, Linked, LinkWay, ToWorker
from lamina.control.sockets import ControlServer
from lamina.core.errors import TransportError, UnreachableError
from lamina.core.types import TransportName
from lamina.dataplane.leases import Lease
from lamina.dataplane.transport_choice import Choice, Offer, Transport, choose

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 60.0  # time for each worker: one may fail to reach every other, and wait for others that do so

Pair = tuple[str, str]


class SlotSizes(NamedTuple):
    """Bytes of the slots that each worker of a pair has for the other's messages.

    ``on_devices``: whether the messages have rows, which devices may write and read themselves.
    """

    near: int
    far: int
    on_devices: bool = False


def link(
    control: ControlServer,
    wanted: TransportName,
    offers: Mapping[str, Offer],
    slots: Mapping[Pair, SlotSizes],
    linked_before: Mapping[Pair, Choice] | None = None,
) -> Conversation[dict[Pair, Choice]]:
    """Link pairs of workers, and return the transport of each.

    A pair whose test fails tries the next transport, if ``wanted`` permits several.

    Args:
        control: Connection to the workers.
        wanted: Transport to use, or auto.
        offers: By worker, what it reports of its transports.
        slots: By pair to link, the sizes of its slots.
        linked_before: Links that exist; a pair prefers transports that both of its workers already use in them.

    Raises:
        TransportError: No transport is left for a pair. The error names the pair and every obstacle.
    """
    if not slots:
        return {}
    writers = _writers(wanted, offers, slots)
    leases = yield from _leases(control, slots, writers)
    used = _used(linked_before or {})
    chosen: dict[Pair, Choice] = {}
    failures: dict[Pair, dict[Transport, str]] = {pair: {} for pair in slots}
    pending, round_ = set(slots), 0
    while pending:
        round_ += 1
        for pair in pending:
            both = [transport for transport in used.get(pair[0], ()) if transport in used.get(pair[1], ())]
            chosen[pair] = _choose(wanted, offers, pair, failures[pair], both)
        workers = sorted({name for pair in pending for name in pair})
        for name in workers:
            ways = _ways(name, {pair: chosen[pair] for pair in pending}, offers, leases)
            _send(control, name, Link(round_, ways, len(workers)))
        linked = yield Ask(Linked, workers, LINK_TIMEOUT_S * len(workers))
        failed = {pair: reason for pair in pending if (reason := _failure(pair, linked))}
        for pair, reason in failed.items():
            failures[pair][chosen[pair].transport] = reason
            log.warning("%s and %s cannot be linked by %s: %s", *pair, chosen[pair].transport, reason)
        pending = set(failed)
    for pair, choice in chosen.items():
        log.info("%s and %s are linked by %s: %s", *pair, choice.transport, choice.reason)
    return chosen


def _send(control: ControlServer, name: str, message: ToWorker) -> None:
    """Send to a worker that may be lost; its loss is detected while its reply is awaited."""
    with contextlib.suppress(UnreachableError):
        control.send([name], message)


def _writers(
    wanted: TransportName, offers: Mapping[str, Offer], slots: Mapping[Pair, SlotSizes]
) -> tuple[set[Pair], set[Pair]]:
    """Return the pairs (owner, peer) for which the owner may offer an inbox: to the peer's device, of the same kind and
    on the same machine; and to the peer's NIC, on another machine or if rdma is requested by name."""
    by_device, by_nic = set[Pair](), set[Pair]()
    on_devices = [pair for pair, sizes in slots.items() if sizes.on_devices]
    for owner, peer in (*on_devices, *(pair[::-1] for pair in on_devices)):
        here, there = offers[owner], offers[peer]
        if not here.inboxes:
            continue
        same = here.host == there.host
        if same and wanted in ("auto", "shm") and here.inboxes == there.inboxes:
            by_device.add((owner, peer))
        elif (wanted == "rdma" or (wanted == "auto" and not same)) and all(
            Transport.RDMA in one.descriptors for one in (here, there)
        ):
            by_nic.add((owner, peer))
    return by_device, by_nic


def _leases(
    control: ControlServer, slots: Mapping[Pair, SlotSizes], writers: tuple[set[Pair], set[Pair]]
) -> Conversation[dict[tuple[str, str], Lease]]:
    """Return the leases by (owner of the arena, peer). Raises TransportError if an arena is too small."""
    wanted: dict[str, dict[str, int]] = {}
    for (near, far), sizes in slots.items():
        wanted.setdefault(near, {})[far] = sizes.near
        wanted.setdefault(far, {})[near] = sizes.far
    for name, peers in wanted.items():
        by_device, by_nic = ([peer for peer in peers if (name, peer) in pairs] for pairs in writers)
        _send(control, name, Grant(peers, by_device, by_nic))
    granted: dict[str, Granted] = yield Ask(Granted, list(wanted), LINK_TIMEOUT_S)
    if obstacles := [one.obstacle for one in granted.values() if one.obstacle]:
        raise TransportError("; ".join(obstacles))
    return {(owner, peer): lease for owner, each in granted.items() for peer, lease in each.leases.items()}


def _used(links: Mapping[Pair, Choice]) -> dict[str, list[Transport]]:
    """Return the transports that each worker already uses, in order of ``links``."""
    used: dict[str, list[Transport]] = {}
    for pair, choice in links.items():
        for name in pair:
            used.setdefault(name, []).append(choice.transport)
    return used


def _choose(
    wanted: TransportName,
    offers: Mapping[str, Offer],
    pair: Pair,
    failures: Mapping[Transport, str],
    in_use: Collection[Transport],
) -> Choice:
    try:
        return choose(wanted, offers[pair[0]], offers[pair[1]], failures, in_use)
    except TransportError as error:
        raise TransportError(f"{pair[0]} and {pair[1]} cannot be linked: {error}") from error


def _ways(
    name: str,
    chosen: Mapping[Pair, Choice],
    offers: Mapping[str, Offer],
    leases: Mapping[tuple[str, str], Lease],
) -> dict[str, LinkWay]:
    peers = {pair[pair[0] == name]: choice.transport for pair, choice in chosen.items() if name in pair}
    return {
        peer: LinkWay(transport, offers[peer].descriptors[transport], leases[peer, name])
        for peer, transport in peers.items()
    }


def _failure(pair: Pair, linked: Mapping[str, Linked]) -> str | None:
    near, far = pair
    return linked[near].failures.get(far) or linked[far].failures.get(near)
