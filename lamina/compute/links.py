"""A compute worker's slots: to and from every memory worker and every other compute worker, per lane."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.protocol.channel import BULK_SLOTS, Inbox, Outbox
from lamina.protocol.links import Links
from lamina.protocol.messages import Connect
from lamina.transport.base import Arena, Buffer


@dataclass(frozen=True)
class LaneLinks:
    """The slots of one lane.

    Attributes:
        requests, replies: by memory worker. context: what the replica before hands over; None if lanes stay.
        contexts: to every other replica, by its number.
        bulk: where K and V of prompt chunks are laid out for memory workers, by the attention's turn modulo their
            number. landing_nbytes: how much of it is fetched at once.
    """

    requests: Mapping[str, Outbox]
    replies: Mapping[str, Inbox]
    context: Inbox | None
    contexts: Mapping[int, Outbox]
    bulk: tuple[Buffer, ...]
    landing_nbytes: int


def lane_links(own: str, links: Links, arena: Arena, connect: Connect) -> list[LaneLinks]:
    """The slots of every lane, by its number, for compute worker ``own``."""
    layout = connect.layout
    others = {number: name for number, name in enumerate(connect.computes) if layout.context_nbytes and name != own}

    def of_lane(lane: int) -> LaneLinks:
        return LaneLinks(
            {name: links.outbox(name, layout.request(lane)) for name in connect.memories},
            {name: Inbox(arena, layout.reply(lane, number)) for number, name in enumerate(connect.memories)},
            Inbox(arena, layout.context(lane)) if layout.context_nbytes else None,
            {number: links.outbox(name, layout.context(lane)) for number, name in others.items()},
            tuple(arena.view(layout.bulk(lane, turn), layout.bulk_nbytes) for turn in range(BULK_SLOTS)),
            layout.landing_nbytes,
        )

    return [of_lane(lane) for lane in range(layout.lanes)]
