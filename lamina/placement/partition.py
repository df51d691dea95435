"""The part of a request's KV that one memory worker gets (``--partition``). Pure.

request: all of it, so a request must fit one worker. token: a run of its tokens, an equal part for every worker. head:
some of its heads, with all tokens (``lamina.placement.stripes``). auto: all of it, or runs of tokens if a request is
too long for one worker. Except with request, a request that outgrows its workers continues on others.
"""

from collections.abc import Collection, Mapping

from lamina.heads import HeadShards
from lamina.placement.map import Placement
from lamina.placement.stripes import StripedPlacement
from lamina.types import Partition

FEWEST = 2  # workers that heads are cut for, also if there is only one at first


def head_workers(partition: Partition, workers: int) -> int:
    """The number of a pool's memory workers among which the heads of a request may be divided."""
    return max(workers, FEWEST) if partition == "head" else 1


def placement(
    partition: Partition,
    capacities: Mapping[str, int],
    shards: HeadShards,
    longest: int | None,
    local: Collection[str] = (),
    ranks: int = 1,
) -> Placement:
    """Places requests as ``partition`` says, on memory workers that hold so many tokens each, in runs of ``longest``
    tokens at most. ``local``: see ``Placement``. ``ranks``: of each replica. With several, KV never moves: one of them
    may still attend to what another has finished with."""
    if shards.count > 1 or ranks > 1:
        return StripedPlacement(capacities, shards, longest)
    return Placement(capacities, longest, partition, local)
