"""What an epoch leaves to the next one, when steps in flight are dropped. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remains:
    """What memory workers keep of the requests. Compute workers keep nothing.

    Attributes:
        kept: by memory worker and sequence: tokens whose KV steps have completed. All other KV is forgotten.
        dropped: requests that have lost their KV. recomputed: tokens of these that are computed again.
    """

    kept: dict[str, dict[int, int]]
    dropped: int = 0
    recomputed: int = 0
