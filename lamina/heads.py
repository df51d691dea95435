"""Shards of heads: the parts of an attention that may be on different memory workers. Pure.

The query heads of one KV head need no other heads. So the KV heads of every attention, with the query heads that share
them, are cut into the same number of equal *shards*. A slot holds K and V of one shard of one token, a row of a message
is one shard of a row of the step, and page tables are per shard. A single shard has all heads.
"""

import dataclasses
import math
from collections.abc import Sequence

from lamina.errors import ConfigError
from lamina.types import AttentionSpec


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """How the heads of a model are cut.

    Attributes:
        heads: the most KV heads of any attention. Head ranges of segments count these.
        count: number of shards. Divides the KV heads of every attention.
    """

    heads: int = 1
    count: int = 1

    @classmethod
    def over(cls, attentions: Sequence[AttentionSpec], workers: int, ranks: int = 1) -> "HeadShards":
        """The fewest shards for which each rank of a replica has some, and the heads of a sequence can be on
        ``workers`` memory workers, or on as many as possible.

        Raises ConfigError if the KV heads cannot be divided by the ranks.
        """
        most = math.gcd(*(spec.kv_heads for spec in attentions))
        if most % ranks:
            counts = " or ".join(str(count) for count in sorted({spec.kv_heads for spec in attentions}))
            raise ConfigError(
                f"the attentions of this model have {counts} KV heads, which {ranks} ranks cannot share evenly; give a "
                "tensor_parallel that divides them"
            )
        wanted = math.lcm(max(1, min(most, workers)), ranks)
        return cls(max(spec.kv_heads for spec in attentions), wanted if most % wanted == 0 else most)

    def of_rank(self, ranks: int) -> "HeadShards":
        """The shards of one rank of a replica, counted from its first head."""
        return HeadShards(self.heads // ranks, self.count // ranks)

    def range_of_rank(self, rank: int, ranks: int) -> range:
        """The shards of a rank."""
        own = self.count // ranks
        return range(rank * own, (rank + 1) * own)

    @property
    def whole(self) -> tuple[int, int]:
        """The head range of a segment with all heads."""
        return 0, self.heads

    def of(self, heads: tuple[int, int]) -> range:
        """The shards of a head range, which ``allows`` must accept."""
        if self.count == 1:
            return range(1)
        size = self.heads // self.count
        return range(heads[0] // size, heads[1] // size)

    def range_of(self, first: int, stop: int) -> tuple[int, int]:
        """The head range of shards [first, stop)."""
        size = self.heads // self.count
        return first * size, stop * size

    def allows(self, heads: tuple[int, int]) -> bool:
        """True if a segment may have this head range: whole shards, at least one."""
        size, (first, stop) = self.heads // self.count, heads
        return 0 <= first < stop <= self.heads and first % size == stop % size == 0

    def spec(self, spec: AttentionSpec, shard: int = 0) -> AttentionSpec:
        """One shard of an attention. Shards differ only in their ALiBi slopes."""
        if self.count == 1:
            return spec
        queries, slopes = spec.query_heads // self.count, spec.alibi_slopes
        return dataclasses.replace(
            spec,
            query_heads=queries,
            kv_heads=spec.kv_heads // self.count,
            alibi_slopes=None if slopes is None else slopes[shard * queries : (shard + 1) * queries],
        )


WHOLE = HeadShards()
