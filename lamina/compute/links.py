"""A compute worker's slots: to and from every memory worker and every other compute worker, per lane."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.protocol.channel import BULK_SLOTS, Inbox, Outbox
from lamina.protocol.links import Links
from lamina.protocol.messages import Connect
from lamina.transport.base import Buffer


@dataclass(frozen=True)
class LaneLinks:
    """The slots of one lane.

    Attributes:
        requests, replies: by memory worker.
        context: from the replica that runs the slice before; empty and never written if lanes stay on one replica.
        contexts: to every other replica, by its number; empty if lanes stay.
        bulk: K and V of prompt chunks for memory workers to fetch, by the attention's turn modulo ``len(bulk)``.
        landing_nbytes: how much of it is fetched at once.
    """

    requests: Mapping[str, Outbox]
    replies: Mapping[str, Inbox]
    context: Inbox
    contexts: Mapping[int, Outbox]
    bulk: tuple[Buffer, ...]
    landing_nbytes: int


def lane_links(links: Links, connect: Connect) -> list[LaneLinks]:
    """The slots of every lane, by its number, for the compute worker with these links."""
    layout, arena = connect.layout, links.arena
    replicas = list(enumerate(connect.computes)) if layout.context_nbytes else []
    others = {number: name for number, name in replicas if name != links.name}

    def of_lane(lane: int) -> LaneLinks:
        return LaneLinks(
            {name: links.outbox(name, layout.request(lane)) for name in connect.memories},
            {name: Inbox(arena, layout.reply(lane, number)) for number, name in enumerate(connect.memories)},
            Inbox(arena, layout.context(lane)),
            {number: links.outbox(name, layout.context(lane)) for number, name in others.items()},
            tuple(arena.view(layout.bulk(lane, turn), layout.bulk_nbytes) for turn in range(BULK_SLOTS)),
            layout.landing_nbytes,
        )

    return [of_lane(lane) for lane in range(layout.lanes)]
