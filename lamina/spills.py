"""Transfers between the slots of a memory worker and its disk, as step plans describe them."""

import msgspec

BLOCK = 64
"""Consecutive tokens that are on a disk together."""


def blocks_of(capacity: int, overcommit: float) -> int:
    """Blocks on the disk of a memory worker with ``capacity`` slots, so that both hold ``overcommit`` times as many."""
    return int(capacity * (overcommit - 1)) // BLOCK


class Spill(msgspec.Struct, array_like=True, frozen=True):
    """Memory worker ``worker`` copies blocks of a cached sequence to its disk, and answers with ``Stored``.

    Tokens [``BLOCK`` * place, ``BLOCK`` * (place + 1)) go to the block of the same index. If the sequence is released
    before all are copied, the others are not.
    """

    number: int
    worker: str
    sequence: int
    places: list[int]
    blocks: list[int]


class Fetch(msgspec.Struct, array_like=True, frozen=True):
    """Memory worker ``worker`` reads blocks from its disk into new slots of ``child``, from token ``start`` on, and
    answers with ``Stored``.

    ``child`` is a cached sequence of these heads; if ``start`` is not 0, the same plan has forked it.
    """

    number: int
    worker: str
    child: int
    start: int
    blocks: list[int]
    heads: tuple[int, int]
