"""Chooses the transport of each pair of workers, from what both offer and from what has failed. Pure."""

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from lamina.core.errors import TransportError
from lamina.core.types import TransportName


class Transport(enum.StrEnum):
    """A way to reach a peer's arena."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


class Offer(msgspec.Struct, frozen=True):
    """What a worker lets its peers use.

    Attributes:
        host: result of ``transport.shm.host``, equal for workers that can share memory.
        inboxes: kind of inbox that the worker's device has (``transport.device.inboxes.Maker.kind``); empty: none.
        descriptors: by transport: how to connect.
        obstacles: by requested transport that cannot be used: why.
    """

    host: str
    descriptors: dict[Transport, bytes]
    obstacles: dict[Transport, str]
    inboxes: str = ""


@dataclass(frozen=True)
class Choice:
    transport: Transport
    reason: str


def candidates(wanted: TransportName, hosts: Collection[str]) -> tuple[Transport, ...]:
    """Return what workers on these hosts should offer: every transport that some pair of them may use."""
    if wanted != "auto":
        return (Transport(wanted),)
    kinds = (True,) if len(set(hosts)) == 1 else (True, False)  # pairs on one host, and on two
    return tuple(dict.fromkeys(transport for same in kinds for transport in _preferred(same)))


def _preferred(same_host: bool) -> tuple[Transport, ...]:
    return (Transport.SHM, Transport.TCP) if same_host else (Transport.RDMA, Transport.TCP)


def choose(
    wanted: TransportName,
    near: Offer,
    far: Offer,
    failures: Mapping[Transport, str],
    in_use: Collection[Transport] = (),
) -> Choice:
    """Return the transport of a pair, given its offers and its ``failures`` to prove a link over some transports.

    A transport ``in_use`` by both is preferred: a worker that waits on one transport notices a message sooner than a
    worker that waits on several. A transport requested by name has no fallback.

    Raises TransportError, with every obstacle, if no transport is left.
    """
    same = near.host == far.host
    preferred = tuple(dict.fromkeys((*in_use, *_preferred(same))))
    where = "same host" if same else "different hosts"
    obstacles: list[str] = []
    for transport in preferred if wanted == "auto" else (Transport(wanted),):
        obstacle = failures.get(transport) or near.obstacles.get(transport) or far.obstacles.get(transport)
        if obstacle is None:
            known = ["both already use it"] if transport in in_use else []
            reasons = ["requested by name"] if wanted != "auto" else [where, *known, *obstacles]
            return Choice(transport, "; ".join(reasons))
        obstacles.append(f"no {transport}: {obstacle}")
    remedy = "fix one of these" if wanted == "auto" else "fix that, or select another transport"
    raise TransportError(f"no transport is left ({where}); {'; '.join(obstacles)}; {remedy}")


def summary(choices: Mapping[tuple[str, str], Choice]) -> list[str]:
    """Return a line for each transport and reason in use, with the number of pairs of workers it connects."""
    return [
        f"{choice.transport} between {count} pair{'s' * (count > 1)} of workers ({choice.reason})"
        for choice, count in Counter(choices.values()).items()
    ]
