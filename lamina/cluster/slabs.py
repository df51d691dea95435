"""Sizes of slabs: the bytes of so many token slots, and the slots that fit so many bytes. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.tables import MOST_BYTES
from lamina.kv import prefix_tree
from lamina.memory.device.windows import most_rows, with_spare
from lamina.schedule.limits import Limits

LEAST_GAIN = 1.2
"""Token slots with layers that forget over those without, for which requests go on from checkpoints of cached prefixes
alone."""


@dataclass(frozen=True)
class Rows:
    """The rows of a layer that forgets the tokens before its window.

    Attributes:
        nbytes: bytes of a row.
        running: rows for running sequences (``lamina.memory.device.windows``).
        prompts: rows for the checkpoints of their prompts; None without a prefix cache.
    """

    nbytes: int
    running: int
    prompts: int | None = None

    def most(self, slots: int) -> int:
        """Most rows in use at once if other layers have so many slots."""
        cached = 0 if self.prompts is None else max(self.prompts, prefix_tree.most_rows(slots))
        return min(self.running + with_spare(cached), slots)


@dataclass(frozen=True)
class SlabSize:
    """The size of a memory worker's slab: of layers that keep every token, and of layers that forget."""

    slot: int
    rows: tuple[Rows, ...] = ()

    def nbytes(self, slots: int) -> int:
        """Bytes of so many slots."""
        return self.slot * slots + sum(each.nbytes * each.most(slots) for each in self.rows)

    def slots(self, nbytes: int, most: int) -> int:
        """Return the slots that fit so many bytes, at most ``most``."""
        return bisect.bisect_right(range(most + 1), nbytes, key=self.nbytes) - 1

    @property
    def whole(self) -> "SlabSize":
        """Sizes of a slab whose layers all keep every token."""
        return SlabSize(self.nbytes(1))

    def with_pages(self, shards: int) -> "SlabSize":
        """Return the sizes on a GPU, which also holds page tables with a slot for each token."""
        return SlabSize(self.slot + MOST_BYTES * shards, self.rows)


def slab_size(
    attentions: Sequence[AttentionSpec],
    element: KvElement,
    forgets: bool,
    limits: Limits,
    lanes: int,
    prefix_cache: bool = False,
) -> SlabSize:
    """Return the slab of a CPU with these layers, which are those of a whole token. ``forgets``: as for ``KvStore``."""
    slot, rows = 0, list[Rows]()
    sequences, tokens = limits.max_sequences, lanes * limits.max_num_batched_tokens
    for spec in attentions:
        each = spec.slab_bytes_per_token(element)
        if forgets and spec.window:
            running = most_rows(spec.window, sequences, tokens)
            rows.append(Rows(each, running, sequences * spec.window if prefix_cache else None))
        else:
            slot += each
    return SlabSize(slot, tuple(rows))
