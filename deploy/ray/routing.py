"""Chooses an engine for a request: the one that last got a prompt with the same beginning, unless it is busier. Pure.

Engines keep the KV of ended requests (`--prefix-cache`), so a conversation is cheapest where its earlier turns ran. The
router does not know what an engine still has; it goes by the prompts that it sent there last.
"""

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = 128  # characters or token ids; prefixes are compared block by block
MOST_BLOCKS = 1 << 16  # remembered, the latest
WORTH = 4.0  # an engine with the whole prompt is chosen with up to so many more requests than others


def blocks(body: bytes) -> list[bytes]:
    """Hashes of the beginnings of a request's prompt, each one block longer than the last; the last block may be short.

    ``body``: of a completion or a chat request, as JSON. Empty if it is neither: the engine rejects it.
    """
    try:
        content = json.loads(body)
        prompt = content.get("messages") or content.get("prompt") or ""
    except (ValueError, AttributeError):
        return []
    units = _units(prompt)
    found, known = [], hashlib.blake2b(digest_size=12)
    for begin in range(0, len(units), BLOCK):
        known.update(repr(units[begin : begin + BLOCK]).encode())
        found.append(known.digest())
    return found


def _units(prompt: Any) -> Sequence[Any]:
    """The characters or token ids of a prompt; for a batch, of its first prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return "".join(f"<{each.get('role')}>{json.dumps(each.get('content'))}" for each in prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return _units(prompt[0])
    return prompt if isinstance(prompt, str | list) else ""


class Prefixes:
    """Remembers which engines got which beginnings of prompts."""

    def __init__(self) -> None:
        self._engines: collections.OrderedDict[bytes, set[str]] = collections.OrderedDict()
        self._kept: collections.Counter[str] = collections.Counter()  # blocks, by engine

    def note(self, found: Sequence[bytes], engine: str) -> None:
        """Note that a prompt with these ``blocks`` was sent to an engine."""
        for block in found:
            known = self._engines.setdefault(block, set())
            self._kept[engine] += engine not in known
            known.add(engine)
            self._engines.move_to_end(block)
        while len(self._engines) > MOST_BLOCKS:
            self._kept.subtract(self._engines.popitem(last=False)[1])

    def share(self, found: Sequence[bytes], engine: str) -> float:
        """How much of a prompt with these blocks was sent to the engine before, from 0 to 1."""
        known = 0
        while known < len(found) and engine in self._engines.get(found[known], ()):
            known += 1
        return known / len(found) if found else 0.0

    def order(self, found: Sequence[bytes], loads: Mapping[str, float]) -> list[str]:
        """Engines, the best first; among equals, the one with fewest blocks. ``loads``: open requests of each."""

        def cost(engine: str) -> tuple[float, float, int]:
            return loads[engine] - WORTH * self.share(found, engine), loads[engine], self._kept[engine]

        return sorted(loads, key=cost)
