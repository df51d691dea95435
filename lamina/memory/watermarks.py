"""Tracks which K and V of prompt chunks are stored, for sequences whose chunks run in several lanes. Pure.

The watermark of a sequence at a layer is the end of its contiguous stored prefix on this worker. A chunk may attend
once the watermark has reached the chunk's first token. Chunks are planned in the order of their tokens, so the
watermark is the first token of the earliest planned chunk whose K and V of the layer are not all stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.steps import StepPlan
from lamina.dataplane.wire import MessageRows

Shard = tuple[int, int]
"""A sequence, and one shard of its heads."""


@dataclass(eq=False)
class Storing:
    """The tokens of prompt chunks that one message brings for every layer.

    Attributes:
        door: ``Pipeline.door`` of the message.
        turn: turn of its first attention.
        shards: sequences and shards of the tokens.
        inline: whether the request itself has some of the tokens, those of chunks of a single token.
        lacking: by layer, how many parts are not stored; parts are the tokens in the request and the fetched tokens.
    """

    door: int
    turn: int
    shards: frozenset[Shard]
    inline: bool
    lacking: list[int]


@dataclass(frozen=True)
class ChunkOrder:
    """The chunks that the prompt chunks of a step wait for, and the tokens that they store themselves.

    Attributes:
        stores: the tokens that the chunks bring; None if they bring none.
        after: earlier chunks of their sequences in other lanes whose K and V were not all stored when the step was
            planned. The step's attention at a layer begins once the K and V of all of them are stored at that layer.
    """

    stores: Storing | None = None
    after: tuple[Storing, ...] = ()

    def missing(self, layer: int) -> list[Storing]:
        """Return the earlier chunks whose K and V of ``layer`` are not stored; empty once attention may begin."""
        return [earlier for earlier in self.after if earlier.lacking[layer]]


ALONE = ChunkOrder()
"""The order of a step that only decodes: it stores no chunk and waits for none."""


@dataclass
class Watermarks:
    """The chunks of one memory worker whose K and V are not all stored. One thread owns it.

    ``layers``: how many attentions store K and V; none on a stage without attention.
    """

    layers: int
    shards: int
    _storing: dict[Shard, list[Storing]] = field(default_factory=dict)

    def plan_chunks(self, plan: StepPlan, messages: Sequence[tuple[int, MessageRows]]) -> list[ChunkOrder]:
        """Register a step's chunks.

        Args:
            messages: by rank of the replica, the door and the rows of its message.

        Returns:
            The order of each message's chunks.
        """
        chunks = {chunk.sequence for chunk in plan.chunks}
        earlier = [self._earlier(door, rows, chunks) for door, rows in messages]
        return [
            ChunkOrder(self._register(door, plan.turn, rows, chunks), after)
            for (door, rows), after in zip(messages, earlier, strict=True)
        ]

    def _earlier(self, door: int, rows: MessageRows, chunks: set[int]) -> tuple[Storing, ...]:
        attended = (*rows.attends, *(segment for _, segment in rows.further))
        shards = dict.fromkeys((one.sequence, one.shard) for one in attended if one.sequence in chunks)
        found = dict.fromkeys(one for shard in shards for one in self._storing.get(shard, ()) if one.door != door)
        return tuple(found)

    def _register(self, door: int, turn: int, rows: MessageRows, chunks: set[int]) -> Storing | None:
        inline = {(key[0], key[1] % self.shards) for key, _ in rows.kept if key[0] in chunks}
        shards = frozenset({*inline, *((one.sequence, one.shard) for one in rows.pulled)})
        if not shards or not self.layers:
            return None
        parts = bool(inline) + bool(rows.pulled)
        storing = Storing(door, turn, shards, bool(inline), [parts] * self.layers)
        for shard in shards:
            self._storing.setdefault(shard, []).append(storing)
        return storing

    def on_fetched(self, order: ChunkOrder, layer: int) -> None:
        """Record that the fetched K and V of a message are stored at ``layer``."""
        if order.stores is not None:
            self._store(order.stores, layer, 1)

    def on_attended(self, order: ChunkOrder, layer: int) -> None:
        """Record that a message's attention at ``layer`` has ended, so that K and V in its request are stored."""
        if order.stores is not None and order.stores.inline:
            self._store(order.stores, layer, 1)

    def on_stored(self, order: ChunkOrder, layer: int) -> None:
        """Record that all K and V of a message are stored at ``layer``."""
        if order.stores is not None:
            self._store(order.stores, layer, order.stores.lacking[layer])

    def _store(self, storing: Storing, layer: int, parts: int) -> None:
        storing.lacking[layer] -= parts
        if not any(storing.lacking):
            self._forget(storing)

    def _forget(self, storing: Storing) -> None:
        for shard in storing.shards:
            self._storing[shard].remove(storing)
            if not self._storing[shard]:
                del self._storing[shard]

    def clear(self) -> None:
        """Forget all chunks, once no step is in flight."""
        self._storing.clear()
