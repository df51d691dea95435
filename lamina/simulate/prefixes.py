"""Automatic prefix caching of one baseline engine, as in vLLM: blocks of equal prefixes are shared, idle ones evicted.

Here a unit is a run of a trace's tokens (``lamina.plan.reuse``), in two parts, instead of a block of 16: it takes the
blocks that end in it. Idle units count as free blocks; the least recently used are evicted when blocks are needed.
"""

from collections import OrderedDict
from dataclasses import dataclass

from lamina.plan.reuse import Content

BLOCK = 16  # tokens of KV per block


@dataclass(slots=True)
class _Unit:
    """Blocks of one unit behind all units before it, and the sequences that hold them."""

    blocks: int
    holders: int = 0


class Prefixes:
    """Which runs have their KV in an engine.

    Attributes:
        idle: blocks of units that no sequence holds. queried, hit: tokens of admitted prompts, and those found.
    """

    def __init__(self) -> None:
        self.idle = self.queried = self.hit = 0
        self._units: dict[int, _Unit] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # blocks, least recently used first
        self._keys: dict[tuple[int, tuple[int, int]], int] = {}

    def keys(self, content: Content) -> list[tuple[int, int]]:
        """(key, last block) of every unit: keys are equal where all tokens up to the unit's end are.

        The last token of a run is a unit of its own: that of an answer has no KV when its request ends.
        """
        keys, key, end = [], 0, 0
        for name, tokens in content:
            for part in (tokens - 1, 1):
                key = self._keys.setdefault((key, (name, part)), len(self._keys) + 1)
                end += part
                keys.append((key, end // BLOCK))
        return keys

    def find(self, content: Content, most: int) -> list[int]:
        """Keys of the longest prefix that is kept, of at most ``most`` tokens."""
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
        """Another sequence holds ``keys``. Returns how many blocks were idle until now."""
        woken = 0
        for key in keys:
            unit = self._units[key]
            if not unit.holders:
                woken += self._idle.pop(key)
            unit.holders += 1
        self.idle -= woken
        return woken

    def let_go(self, keys: list[int]) -> int:
        """A sequence no longer holds ``keys``. Returns how many blocks are idle from now on."""
        idle = 0
        for key in reversed(keys):  # the end of a prefix is evicted before what it begins with
            unit = self._units[key]
            unit.holders -= 1
            if not unit.holders:
                self._idle[key] = unit.blocks
                idle += unit.blocks
        self.idle += idle
        return idle

    def publish(self, content: Content, held: list[int], tokens: int) -> list[int]:
        """The first ``tokens`` of ``content`` have KV: what lies behind ``held`` can be found, and is held too.

        Returns all that the sequence holds. What another sequence has published meanwhile stays this one's own.
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
