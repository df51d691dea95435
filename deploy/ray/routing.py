"""Which of several engines gets a request: the one that has computed its beginning before, unless others wait less.

Pure. Engines keep the KV of prompts that have ended (`--prefix-cache`), so a conversation is cheapest where its earlier
turns ran. What an engine still has is not known here: what was sent to it last is.
"""

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = 128  # characters, or token ids, by which prefixes are compared
MOST_BLOCKS = 1 << 16  # that are remembered; the latest ones
WORTH = 4.0  # requests that may be ahead on an engine which has the whole prompt, before another gets it


def blocks(body: bytes) -> list[bytes]:
    """Hashes of the beginnings of a request's prompt, each a block longer than the one before; the last may be shorter.

    ``body``: of a completion or a chat request, as JSON. Empty if it is not one: the engine says what is wrong with it.
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
    """Characters or token ids: of a batch, those of its first prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return "".join(f"<{each.get('role')}>{json.dumps(each.get('content'))}" for each in prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return _units(prompt[0])
    return prompt if isinstance(prompt, str | list) else ""


class Prefixes:
    """Which beginnings of prompts were sent to which engines."""

    def __init__(self) -> None:
        self._engines: collections.OrderedDict[bytes, set[str]] = collections.OrderedDict()
        self._kept: collections.Counter[str] = collections.Counter()  # blocks, by engine

    def note(self, found: Sequence[bytes], engine: str) -> None:
        """A prompt with these ``blocks`` was sent to an engine."""
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
        """Engines, the best first; among equals, the one that was sent least. ``loads``: requests that each has."""

        def cost(engine: str) -> tuple[float, float, int]:
            return loads[engine] - WORTH * self.share(found, engine), loads[engine], self._kept[engine]

        return sorted(loads, key=cost)
