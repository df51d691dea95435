"""Packs the log-probabilities of one position into bytes, which travel from the sampler to the frontend.

Layout: the rank of the drawn token (int32), the token ids (int32; the drawn token, then the most likely ones in order),
their log-probabilities (float32). Objects took thirty times the memory, and as long to make as the rest of a step.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lamina.core.outputs import Logprob


def pack(entries: Sequence[Logprob]) -> bytes:
    """Pack the entries of one position: the drawn token, then the most likely ones."""
    count = len(entries)
    ids, values = [entry.token_id for entry in entries], [entry.logprob for entry in entries]
    return struct.pack(f"<i{count}i{count}f", entries[0].rank if entries else 0, *ids, *values)


def pack_rows(
    ranks: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
) -> list[bytes]:
    """Pack R positions with E entries each: ``ranks`` [R] of the drawn tokens, ``ids`` and ``logprobs`` [R, E]."""
    values = logprobs.astype("<f4").view("<i4")
    rows = np.concatenate([ranks[:, None].astype("<i4"), ids.astype("<i4"), values], axis=1)
    return [row.tobytes() for row in rows]


def unpack(packed: bytes, name: Callable[[int], tuple[str, tuple[int, ...]]] = lambda token: ("", ())) -> list[Logprob]:
    """Return the entries of a position. ``name`` gives the text and the bytes of a token."""
    count = (len(packed) - 4) // 8
    rank, *numbers = struct.unpack(f"<i{count}i{count}f", packed)
    ids, values = numbers[:count], numbers[count:]
    # The first is the drawn token; the others are in the order of their ranks.
    return [
        Logprob(token, value, place or rank, *name(token))
        for place, (token, value) in enumerate(zip(ids, values, strict=True))
    ]


def cut(packed: bytes, most: int) -> bytes:
    """Keep the drawn token and at most ``most`` of the most likely ones, still packed."""
    count = (len(packed) - 4) // 8
    kept = min(count, 1 + most)
    return packed if kept == count else packed[: 4 + 4 * kept] + packed[4 + 4 * count :][: 4 * kept]


def drawn_logprob(packed: bytes) -> float:
    """Return the log-probability of the drawn token."""
    value: float = struct.unpack_from("<f", packed, 4 + (len(packed) - 4) // 2)[0]
    return value


def drawn_token(packed: bytes) -> int:
    token: int = struct.unpack_from("<i", packed, 4)[0]
    return token
