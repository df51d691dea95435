"""What an epoch leaves to the next one, when steps in flight are dropped. Pure."""

from dataclasses import dataclass

from lamina.types import Admission


@dataclass(frozen=True)
class Remains:
    """What workers keep of the requests.

    Attributes:
        turns: by lane: of its next attention.
        kept: by memory worker and sequence: tokens whose KV steps have completed. All other KV is forgotten.
        admitted: by lane: the requests that its replicas know.
        dropped: requests that have lost their KV. recomputed: tokens of these that are computed again.
    """

    turns: list[int]
    kept: dict[str, dict[int, int]]
    admitted: list[list[Admission]]
    dropped: int = 0
    recomputed: int = 0
