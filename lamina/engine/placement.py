"""Where KV lives: the gManager's map. A pure object: no clock, no sockets."""

from collections.abc import Mapping

from lamina.errors import RequestError


class Placement:
    """Token slots of every memory worker: capacity, and what admitted requests may come to need.

    A request is admitted only with its worst case reserved, so nothing admitted ever runs out of slots.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """``capacities``: token slots by memory worker."""
        self.capacities = dict(capacities)
        self.reserved = dict.fromkeys(capacities, 0)
        self.largest = max(capacities.values())

    def require_possible(self, tokens: int) -> None:
        """Raises RequestError if no worker could hold ``tokens`` even when empty."""
        if tokens > self.largest:
            raise RequestError(
                f"the request may need {tokens} KV tokens; the largest memory worker holds {self.largest}. "
                f"Shorten the prompt, lower max_tokens or n, or give memory workers more room"
            )

    def reserve(self, tokens: int) -> str | None:
        """Reserve ``tokens`` on the worker with the most left and name it; None if they fit nowhere now."""
        worker = max(self.capacities, key=lambda name: self.capacities[name] - self.reserved[name])
        if self.capacities[worker] - self.reserved[worker] < tokens:
            return None
        self.reserved[worker] += tokens
        return worker

    def release(self, worker: str, tokens: int) -> None:
        """Give ``tokens`` of ``worker`` back."""
        if tokens > self.reserved[worker]:
            raise AssertionError(f"{worker}: {tokens} tokens given back, {self.reserved[worker]} reserved")
        self.reserved[worker] -= tokens
