"""Prefix caching of one baseline engine, as in vLLM: blocks of equal prefixes are shared, idle blocks evicted.

To be fast, it keeps books by *unit* instead of by block of 16 tokens: a run of tokens of a trace
(``lamina.planning.plan.reuse``) without its last token, or that token. A unit owns the blocks that end in it. Idle
units count as free blocks; the least recently used are evicted when blocks are needed.
"""

from collections import OrderedDict
from dataclasses import dataclass

from lamina.planning.plan.reuse import Content

BLOCK = 16  # tokens of KV per block


@dataclass(slots=True)
class _Unit:
    """The number of blocks of a unit, and of the sequences that hold them."""

    blocks: int
    holders: int = 0


class Prefixes:
    """The units that have KV in an engine.

    Attributes:
        idle: blocks of units that no sequence holds.
        queried: tokens of admitted prompts.
        hit: how many were found.
    """

    def __init__(self) -> None:
        self.idle = self.queried = self.hit = 0
        self._units: dict[int, _Unit] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # blocks, least recently used first
        self._keys: dict[tuple[int, tuple[int, int]], int] = {}

    def keys(self, content: Content) -> list[tuple[int, int]]:
        """(key, last block) of every unit. Two keys are equal if all tokens up to the ends of their units are.

        The last token of a run is a unit of its own, since the last token of an answer has no KV when its request ends.
        """
        keys, key, end = [], 0, 0
        for name, tokens in content:
            for part in (tokens - 1, 1):
                key = self._keys.setdefault((key, (name, part)), len(self._keys) + 1)
                end += part
                keys.append((key, end // BLOCK))
        return keys

    def find(self, content: Content, most: int) -> list[int]:
        """Keys of the longest cached prefix of at most ``most`` tokens."""
        found = []
        for key, last in self.keys(content):
            if key not in self._units or last * BLOCK > most:
                break
            found.append(key)
        return found

    def held(self, keys: list[int]) -> int:
        """Blocks of ``keys`` that some sequence holds already."""
        return sum(self._units[key].blocks for key in keys if self._units[key].holders)

    def blocks(self, keys: list[int]) -> int:
        """Blocks of ``keys``."""
        return sum(self._units[key].blocks for key in keys)

    def take(self, keys: list[int]) -> int:
        """Let another sequence hold ``keys``. Returns how many blocks were idle until now."""
        woken = 0
        for key in keys:
            unit = self._units[key]
            if not unit.holders:
                woken += self._idle.pop(key)
            unit.holders += 1
        self.idle -= woken
        return woken

    def let_go(self, keys: list[int]) -> int:
        """Let a sequence no longer hold ``keys``. Returns how many blocks become idle."""
        idle = 0
        for key in reversed(keys):  # the end of a prefix is evicted before its beginning
            unit = self._units[key]
            unit.holders -= 1
            if not unit.holders:
                self._idle[key] = unit.blocks
                idle += unit.blocks
        self.idle += idle
        return idle

    def publish(self, content: Content, held: list[int], tokens: int) -> list[int]:
        """Publish the first ``tokens`` of ``content``, which now have KV: units after ``held`` can be found.

        Returns all keys that the sequence holds. Stops at a unit that another sequence has published: this one then
        keeps its own copy of the rest.
        """
        keys = self.keys(content)
        blocks = [last for _, last in keys]
        for place in range(len(held), len(keys)):
            key, last = keys[place]
            if key in self._units or last * BLOCK > tokens:
                break
            self._units[key] = _Unit(last - (blocks[place - 1] if place else 0), holders=1)
            held = [*held, key]
        return held

    def evict(self, most: int) -> None:
        """Keep at most ``most`` idle blocks."""
        while self.idle > most:
            key, blocks = self._idle.popitem(last=False)
            del self._units[key]
            self.idle -= blocks
