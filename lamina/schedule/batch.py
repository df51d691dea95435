"""The sequences of a lane that draw a token in every step. Pure."""

from collections.abc import Mapping

from lamina.groups import Completion, Group, Owner
from lamina.types import LAST_DRAWN, DecodeRows


class DecodeBatch:
    """Who decodes, and at which position.

    All of them go on by one token a step, so it is enough to count steps: sequences are looked at one by one when one
    has joined or left. A sequence leaves by itself when its last token is being drawn.

    Attributes:
        steps: of the lane so far, those without a decoding sequence too.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._owners: dict[int, Owner] = {}
        self._joined: dict[int, int] = {}  # by sequence: its position less the steps before it joined
        self._leaving: dict[int, list[int]] = {}  # by number of steps: sequences that then have no more to run
        self._members: dict[int, Owner] | None = {}  # None: someone has joined or left
        self._sequences: list[int] = []
        self._offsets: list[int] = []
        self._resumed: set[int] = set()  # since the last step: their last token was drawn some steps ago

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._owners

    @property
    def members(self) -> Mapping[int, Owner]:
        """Who decodes, by sequence, in the order of joining: the same object until someone joins or leaves."""
        if self._members is None:
            self._members = self._owners.copy()
            self._sequences, self._offsets = list(self._joined), list(self._joined.values())
        return self._members

    def join(self, group: Group, completion: Completion, position: int) -> None:
        """A completion decodes from now on, if it has a token to draw; its next row is at ``position``."""
        rows = group.prompt_length + group.own_tokens - position
        if rows > 0:
            self._owners[completion.sequence] = group, completion
            self._joined[completion.sequence] = position - self.steps
            self._leaving.setdefault(self.steps + rows, []).append(completion.sequence)
            self._members = None

    def leave(self, sequence: int) -> None:
        """A sequence decodes no more; nothing happens if it does not."""
        if sequence in self._owners:
            _, completion = self._owners.pop(sequence)
            completion.until = self.steps
            del self._joined[sequence]
            self._members = None

    def pause(self, sequence: int) -> int:
        """A sequence decodes no more for a while; the position of the row that it is to go on with."""
        group, _ = self._owners[sequence]
        position = self.position(sequence)
        self._leaving[self.steps + group.prompt_length + group.own_tokens - position].remove(sequence)
        self.leave(sequence)
        return position

    def resume(self, group: Group, completion: Completion, position: int) -> None:
        """A completion that has paused goes on at this position."""
        self.join(group, completion, position)
        self._resumed.add(completion.sequence)

    def position(self, sequence: int) -> int:
        """Of the next row of a sequence that decodes."""
        return self._joined[sequence] + self.steps

    def rows(self, still_drawn: bool) -> DecodeRows:
        """What the lane's next step runs. ``still_drawn``: the lane's last step is in flight, and so are its tokens."""
        for sequence in self._leaving.pop(self.steps, ()):
            self.leave(sequence)
        members, steps = self.members, self.steps
        resumed, self._resumed = self._resumed, set()
        tokens = [
            completion.generated[-1] if not still_drawn or sequence in resumed else LAST_DRAWN
            for sequence, (_, completion) in (members.items() if resumed or not still_drawn else ())
        ]
        return DecodeRows(self._sequences, [offset + steps for offset in self._offsets], tokens)
