"""Shards of heads: the parts of an attention that may be on different memory workers. Pure.

The query heads of one KV head need no other heads. So the KV heads of every attention, with the query heads that share
them, are cut into the same number of equal *shards*. A slot holds K and V of one shard of one token, a row of a message
is one shard of a row of the step, and page tables are per shard. A single shard has all heads.

Each rank of a tensor-parallel replica has some shards. With more ranks than KV heads, several ranks share each shard:
all of them compute its K and V, and each has an equal part of its query heads.
"""

import dataclasses
import math
from collections.abc import Sequence

from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """How the heads of a model are cut.

    Attributes:
        heads: KV heads of the attention that has the most. Head ranges of segments are in this unit.
        count: number of shards. It divides the KV heads of every attention.
    """

    heads: int = 1
    count: int = 1

    @classmethod
    def for_model(cls, attentions: Sequence[AttentionSpec], workers: int, *degrees: int) -> "HeadShards":
        """Return how the heads of a model with these attentions are cut: see ``for_counts``."""
        return cls.for_counts(sorted({spec.kv_heads for spec in attentions}), workers, *degrees)

    @classmethod
    def for_counts(cls, counts: Sequence[int], workers: int, *degrees: int) -> "HeadShards":
        """Return the fewest shards with which every rank of every replica has whole shards, and a sequence can be
        spread by heads over ``workers`` memory workers, or over as many as possible. With more ranks than KV heads,
        each KV head is a shard.

        Args:
            counts: Different numbers of KV heads that attentions have, in ascending order.
            workers: Number of memory workers.
            degrees: Ranks of a replica, by pool.

        Raises ConfigError: see ``require_shared_heads``.
        """
        require_shared_heads(counts, degrees)
        most = math.gcd(*counts)
        if max(degrees, default=1) > most:
            return cls(most, most)
        wanted = math.lcm(max(1, min(most, workers)), *degrees)
        return cls(max(counts), wanted if most % wanted == 0 else most)

    def sharers(self, ranks: int) -> int:
        """Return how many ranks share each shard. They have consecutive numbers; the first stores K and V."""
        return max(1, ranks // self.count)

    def of_rank(self, ranks: int) -> "HeadShards":
        """Return the cut of the heads that one rank has; its first head is number 0."""
        groups = ranks // self.sharers(ranks)
        return HeadShards(self.heads // groups, self.count // groups)

    def range_of_rank(self, rank: int, ranks: int) -> range:
        """Return the numbers of the shards that a rank has."""
        sharers = self.sharers(ranks)
        own, first = self.count * sharers // ranks, rank // sharers
        return range(first * own, (first + 1) * own)

    @property
    def whole(self) -> tuple[int, int]:
        """The head range of a segment with all heads."""
        return 0, self.heads

    def shards_of(self, heads: tuple[int, int]) -> range:
        """Return the shards of a head range, which ``allows`` must accept."""
        if self.count == 1:
            return range(1)
        size = self.heads // self.count
        return range(heads[0] // size, heads[1] // size)

    def range_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return the head range of shards [first, stop)."""
        size = self.heads // self.count
        return first * size, stop * size

    def allows(self, heads: tuple[int, int]) -> bool:
        """True if a segment may have this head range: whole shards, at least one."""
        size, (first, stop) = self.heads // self.count, heads
        return 0 <= first < stop <= self.heads and first % size == stop % size == 0

    def spec(self, spec: AttentionSpec, part: int = 0, sharers: int = 1) -> AttentionSpec:
        """Return the spec of one shard of an attention, or of the query heads that one of ``sharers`` ranks has of it.

        ``part`` numbers these parts over all shards; parts differ only in their ALiBi slopes.
        """
        parts = self.count * sharers
        if parts == 1:
            return spec
        queries, slopes = spec.query_heads // parts, spec.alibi_slopes
        return dataclasses.replace(
            spec,
            query_heads=queries,
            kv_heads=spec.kv_heads // self.count,
            alibi_slopes=None if slopes is None else slopes[part * queries : (part + 1) * queries],
        )


def require_shared_heads(counts: Sequence[int], degrees: Sequence[int]) -> None:
    """Raise ConfigError if ranks cannot share the KV heads of a model.

    The number of ranks must divide them, or be a multiple of them. Only if all replicas have equal ranks can it be a
    multiple: the query heads that share a KV head are divided among its ranks, and memory workers divide them in one
    way.

    Args:
        counts: Different numbers of KV heads that attentions have.
        degrees: Ranks of a replica, by pool.
    """
    most, heads = math.gcd(*counts), " or ".join(map(str, counts))
    for ranks in degrees:
        if most % ranks and not (len(counts) == 1 and ranks % most == 0):
            raise ConfigError(
                f"the attentions of this model have {heads} KV heads, which {ranks} ranks "
                "cannot share evenly; give a tensor_parallel that divides them"
                + (" or is a multiple of them" if len(counts) == 1 else "")
            )
    if len({*degrees}) > 1 and max(degrees) > most:
        raise ConfigError(
            f"the attentions of this model have {heads} KV heads, which {max(degrees)} ranks share by parts of their "
            f"query heads, and replicas of {min(degrees)} ranks do not; give both pools the same tensor_parallel, or "
            f"{most} at most"
        )


WHOLE = HeadShards()
