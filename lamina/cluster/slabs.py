"""How many bytes a slab takes, and how many token slots so many bytes have room for. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.kernels.gpu.tables import MOST_BYTES
from lamina.memory.device.windows import most_rows
from lamina.schedule.limits import Limits
from lamina.types import AttentionSpec, KvElement


@dataclass(frozen=True)
class SlabSize:
    """Bytes of the slab of a memory worker, by its token slots.

    Attributes:
        slot: of all layers that keep every token. rows: of each layer that forgets: the bytes of a row, and how many it
            uses at most (``lamina.memory.device.windows``).
    """

    slot: int
    rows: tuple[tuple[int, int], ...] = ()

    def nbytes(self, slots: int) -> int:
        """Bytes of so many slots."""
        return self.slot * slots + sum(each * min(most, slots) for each, most in self.rows)

    def slots(self, nbytes: int, most: int) -> int:
        """The slots for which so many bytes suffice, ``most`` of them at most."""
        return bisect.bisect_right(range(most + 1), nbytes, key=self.nbytes) - 1

    @property
    def whole(self) -> "SlabSize":
        """The same if all layers keep every token."""
        return SlabSize(self.nbytes(1))

    def with_pages(self, shards: int) -> "SlabSize":
        """The same on a GPU, which holds page tables: so many slots for each token."""
        return SlabSize(self.slot + MOST_BYTES * shards, self.rows)


def slab_size(
    attentions: Sequence[AttentionSpec], element: KvElement, forgets: bool, limits: Limits, lanes: int
) -> SlabSize:
    """The slab of a CPU with these layers, which are those of a whole token. ``forgets``: as for ``KvStore``."""
    slot, rows = 0, list[tuple[int, int]]()
    for spec in attentions:
        each = spec.slab_bytes_per_token(element)
        if forgets and spec.window:
            rows.append((each, most_rows(spec.window, limits.max_sequences, lanes * limits.max_num_batched_tokens)))
        else:
            slot += each
    return SlabSize(slot, tuple(rows))
