"""Decides which prompts keep K and V in scratch memory of their replica (``lamina.compute.local_memory``). Pure.

A prompt may if no other replica has computed its first chunk, it needs more than one step, and its replica has room for
the tokens that it computes. A cached prefix is not copied: memory workers attend to it. The prompt's chunks then run on
that replica, in the prompt's own lane. A prompt that runs elsewhere, or after the end of an epoch, continues without
scratch memory: memory workers have all of its K and V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lamina.core.requests import Completion, Group

NOWHERE = -1  # stands for the end of a prompt's tokens in scratch memory that must not be used any more


@dataclass(eq=False)
class Room:
    """The scratch memory of one replica.

    Attributes:
        tokens: how many tokens it holds.
        kept: by prompt: the position after its last token in scratch memory, once planned steps have run.
    """

    tokens: int = 0
    kept: dict[Group, int] = field(default_factory=dict)
    _reserved: dict[Group, range] = field(default_factory=dict)  # positions of the tokens

    @property
    def used(self) -> int:
        """Tokens reserved for prompts."""
        return sum(map(len, self._reserved.values()))

    def holds(self, group: Group, completion: Completion) -> bool:
        """True if the next chunk of a prompt will attend to scratch memory."""
        return not group.forked and self.kept.get(group) == completion.cached

    def add_chunk(self, group: Group, completion: Completion, start: int) -> int | None:
        """Reserve room for a prompt that begins. Return the first token in scratch memory if its chunk [start, cached)
        uses it, else None."""
        if not self.tokens or group.forked:
            return None
        computed = range(group.hit, completion.goal)
        begins = start == group.hit and completion.left > 0 and len(computed) <= self.tokens - self.used
        if group not in self.kept and begins:
            self.kept[group], self._reserved[group] = start, computed
        if self.kept.get(group) != start:
            return None
        self.kept[group] = completion.cached
        return self._reserved[group].start

    def end(self, group: Group) -> None:
        """Free what is reserved for a prompt, if anything is: its last chunk has run, or it is released."""
        if group in self.kept:
            del self.kept[group], self._reserved[group]


class Rooms:
    """The scratch memory of all replicas."""

    def __init__(self, scratch: Sequence[tuple[str, int]] = ()) -> None:
        """Begin without prompts. ``scratch``: see ``Topology.scratch``."""
        self._rooms: list[tuple[str, Room]] = []
        self.follow(scratch)

    def follow(self, scratch: Sequence[tuple[str, int]]) -> None:
        """Adapt to other replicas; those that stay keep their prompts. ``scratch``: see ``Topology.scratch``."""
        known = dict(self._rooms)
        self._rooms = [(name, known.get(name) or Room(tokens)) for name, tokens in scratch]

    def of_lane(self, lane: int, rotates: bool) -> Room:
        """Return the scratch memory of the replica that runs a lane; none if the lane rotates over several replicas."""
        if not self._rooms or (rotates and len(self._rooms) > 1):
            return Room()
        return self._rooms[lane % len(self._rooms)][1]

    def on_dealt(self, room_of: Callable[[Group], Room]) -> None:
        """Let prompts that were dealt to other replicas continue without scratch memory.

        Their tokens stay reserved until they are released, since no plan tells the first replica to forget them.
        """
        for _, room in self._rooms:
            room.kept |= {group: NOWHERE for group in room.kept if room_of(group) is not room}

    @property
    def most(self) -> int:
        """Tokens of the largest scratch memory."""
        return max((room.tokens for _, room in self._rooms), default=0)

    @property
    def used(self) -> int:
        """Tokens reserved for prompts on all replicas."""
        return sum(room.used for _, room in self._rooms)

    def end(self, group: Group) -> None:
        """Free what is reserved for a request, which is released."""
        for _, room in self._rooms:
            room.end(group)
