"""Enumerates ways to serve a model on given devices: layouts of pools, parallelism and lanes.

A ``Way`` is a layout of Lamina: attention offloaded to a memory pool; one pool with KV beside each copy of the weights
(local memory); prefill apart from decode, with local memory or a memory pool. A copy of the weights has ranks, stages,
or both. ``baselines`` are layouts of another system with one pool, for comparison.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lamina.core.pipeline import ONE, Shape
from lamina.planning.plan.cost import MEMORY_SHARE_USABLE
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.stages import STAGES, fewest_stages
from lamina.planning.plan.workload import Workload

TENSOR_PARALLEL = (1, 2, 4, 8)
DEFAULT_CHUNK = 2048
"""The runtime's default max_num_batched_tokens."""

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
"""Rows of a step (max_num_batched_tokens) to try: more prompts at once, or shorter steps."""

SEGMENT = 8192
"""Tokens of one sequence on a memory worker (kv_tokens_per_worker) to try where requests are several times as long:
memory workers then share the attention of a long sequence."""

LONG = 4
"""How many times as long as ``SEGMENT`` requests are then, at least."""

APART_LANES = (1, 2)
"""Lanes of each stage to try with prefill apart and a memory pool."""

SHORTLISTED = 10
"""Most ways that are simulated, unless there are more systems."""

UNDERRATED = 0.1
"""The simulator found requests at most this share cheaper than the closed form, in the tables of docs/cost-model.md."""

RIVAL = 1.5
"""Ways whose requests cost over so many times those of the cheapest are no rivals, and their load is not searched."""


class Kind(enum.Enum):
    """Lamina's three systems, and another one on one pool."""

    OFFLOADED = "lamina"
    LOCAL = "local"
    PREFILL = "prefill-apart"
    ONE_POOL = "chunked-prefill"

    @property
    def system(self) -> str:
        """The simulator's name of the system."""
        return Kind.OFFLOADED.value if self.is_lamina else self.value

    @property
    def divides_roles(self) -> bool:
        """Whether some workers only prefill, and the others only decode."""
        return self is Kind.PREFILL

    @property
    def is_lamina(self) -> bool:
        """Whether Lamina's runtime serves this way, or another engine."""
        return self is not Kind.ONE_POOL


def _degrees_of(shape: Shape) -> str:
    return f"TP{shape.ranks}" + (f" x {shape.stages} stages" if shape.stages > 1 else "")


class Partition(enum.Enum):
    """How attention is divided over the memory workers (Lamina, section 5.2)."""

    REQUEST = "request"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One layout of one system.

    Attributes:
        kind: The system.
        chunk: Most rows of a step (max_num_batched_tokens).
        compute: Hardware of the pool with weights; if roles are divided, of the pool that decodes.
        compute_workers: Workers of that pool.
        memory: Hardware of the memory workers; None without any.
        memory_workers: Their number.
        prefill: Hardware of the pool that only runs prompts; None unless roles are divided.
        prefill_workers: Workers of that pool.
        shape: Ranks and stages of each copy of the weights in the pool of ``compute``.
        prefill_shape: Ranks and stages of each copy in the pool that only runs prompts; None: ``shape``.
        lanes: Lanes with memory workers, else 1.
        segment: With ``OFFLOADED``, most tokens of a sequence on one memory worker if others have free KV; None: any.
        partition: With ``OFFLOADED``, how memory workers divide attention.
        scratch: With ``OFFLOADED`` and ``PREFILL``, whether a prompt's chunks attend to earlier chunks on the replica
            that runs them (``--prompt-attention compute``, the default with ``PREFILL``).
    """

    kind: Kind = Kind.OFFLOADED
    chunk: int = DEFAULT_CHUNK
    compute: Hardware
    compute_workers: int
    memory: Hardware | None = None
    memory_workers: int = 0
    prefill: Hardware | None = None
    prefill_workers: int = 0
    shape: Shape = ONE
    prefill_shape: Shape | None = None
    lanes: int = 1
    segment: int | None = None
    partition: Partition = Partition.REQUEST
    scratch: bool = False

    @property
    def second(self) -> Hardware:
        """Hardware of the memory workers, which must exist."""
        assert self.memory is not None
        return self.memory

    @property
    def prompts(self) -> Hardware:
        """Hardware on which prompts run."""
        return self.prefill or self.compute

    @property
    def pools(self) -> list[tuple[Hardware, int]]:
        """Hardware and workers of each pool: the one that prefills, the one with weights, the memory workers."""
        prefill, memory = (self.prefill, self.prefill_workers), (self.memory, self.memory_workers)
        return [(kind, count) for kind, count in (prefill, (self.compute, self.compute_workers), memory) if kind]

    @property
    def kinds(self) -> list[str]:
        """The different kinds of hardware."""
        return list(dict.fromkeys(kind.kind for kind, _ in self.pools))

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of copies on which prompts run, and of those in the pool of ``compute``."""
        return self.prefill_shape or self.shape, self.shape

    @property
    def most_ranks(self) -> int:
        """Ranks of the copies that have most."""
        return max(each.ranks for each in self.shapes)

    @property
    def replicas(self) -> int:
        """Copies of the weights in the compute pool."""
        return self.compute_workers // self.shape.workers

    @property
    def prefill_replicas(self) -> int:
        """Copies of the weights in the pool that prefills."""
        return self.prefill_workers // self.shapes[0].workers

    @property
    def has_local(self) -> bool:
        """Whether replicas hold KV beside the weights (``--memory local``)."""
        return self.kind.is_lamina and self.memory is None

    @property
    def lanes_each(self) -> int:
        """Lanes of each replica in fixed order."""
        return self.lanes // (self.replicas + self.prefill_replicas)

    @property
    def decoding(self) -> "Way":
        """The way to offload attention that the replicas which decode and the memory workers are."""
        return replace(
            self,
            kind=Kind.OFFLOADED,
            prefill=None,
            prefill_workers=0,
            prefill_shape=None,
            lanes=self.lanes_each * self.replicas,
            scratch=False,
        )

    @property
    def rotates(self) -> bool:
        """Whether lanes rotate over replicas."""
        return self.kind is Kind.OFFLOADED and self.shape.stages == 1 and self.lanes == self.replicas + 1

    def usd_per_hour(self, prices: Prices) -> tuple[float, float]:
        """Return the hourly cost of the pool that runs prompts, and of all others; several pools have a network."""
        usd = [prices.usd_per_hour(kind, networked=len(self.pools) > 1) * count for kind, count in self.pools]
        return usd[0], sum(usd[1:])

    def describe(self) -> str:
        """Return the pools in words."""
        early, degrees = map(_degrees_of, self.shapes)
        copies, compute = f"{self.replicas} x {degrees}", f"{self.compute.kind}:{self.compute_workers}"
        if self.kind is Kind.LOCAL:
            return f"{compute} with local memory, {copies}"
        if self.kind is Kind.ONE_POOL:
            return f"{compute} alone, {copies}"
        if self.kind is Kind.PREFILL:
            pools = [f"{self.prompts.kind}:{self.prefill_workers} prefill", f"{compute} decode"]
            if early != degrees:
                pools = [f"{pool} in {each}" for pool, each in zip(pools, (early, degrees), strict=True)]
            if self.memory is not None:
                pools.append(f"{self.memory.kind}:{self.memory_workers} memory")
            lanes = [f"{self.lanes} fixed lanes"] if self.memory else []
            return ", ".join([*pools, *([degrees] if early == degrees else []), *lanes])
        order = "rotating" if self.rotates else "fixed"
        parts = f", KV in parts of {self.segment}" if self.segment else ""
        parts += ", prompts attend on compute" if self.scratch else ""
        return (
            f"{compute} + {self.second.kind}:{self.memory_workers} memory, {copies}, {self.lanes} {order} lanes{parts}"
        )


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The highest load of a way within the SLOs, by the closed form.

    Attributes:
        way: The way.
        requests_s: Requests per second.
        batch: Sequences decoding at once in all copies of the weights.
        step_s: Seconds between tokens without a chunk in the step.
        chunk_step_s: Seconds between tokens with a chunk in the step.
        prompt_share: Share of the compute pool's time spent on prompts.
        compute_busy: Utilisation of the compute pool.
        memory_busy: Utilisation of the memory pool.
        usd_per_hour: Hourly cost of all pools.
        prompt_usd: Share of a request's cost that its prompt causes.
        found: Mean prompt tokens found in the prefix cache.
        seats: Sequences of one group that decode at once within the SLO on TBT; None if this SLO does not bound them.
    """

    way: Way
    requests_s: float
    batch: int
    step_s: float
    chunk_step_s: float
    prompt_share: float
    compute_busy: float
    memory_busy: float
    usd_per_hour: float
    prompt_usd: float
    found: float = 0.0
    seats: int | None = None

    @property
    def usd_per_request(self) -> float:
        """Dollars of one request."""
        return self.usd_per_hour / 3600 / self.requests_s


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits on 99th percentiles, in seconds, and on dollars an hour; infinite: no limit."""

    tbt_s: float = 0.2
    ttft_s: float = 10.0
    usd_per_hour: float = math.inf

    def affords(self, usd_per_hour: float) -> bool:
        """Return whether a cost is within the budget, with a margin for floating-point error."""
        return usd_per_hour <= self.usd_per_hour + 1e-6


NO_LIMITS = Slo(tbt_s=math.inf, ttft_s=math.inf)
INTERACTIVE = Slo(tbt_s=0.1, ttft_s=2.0)
"""Targets that a person who waits would accept."""


def segments(workload: Workload) -> tuple[int | None, ...]:
    """Return values of ``Way.segment`` to try for a workload."""
    return (None, SEGMENT) if workload.longest >= LONG * SEGMENT else (None,)


def ways(
    shape: ModelShape,
    compute: Sequence[tuple[Hardware, int]],
    memory: Sequence[tuple[Hardware, int]],
    segments: Sequence[int | None] = (None,),
    affords: Callable[[Way], bool] = lambda way: True,
    longest_prompt: float = math.inf,
) -> Iterator[Way]:
    """Yield every way with at most the given number of devices of each kind.

    One pool has all devices that ``affords`` allows, since its cost per request does not depend on its size. Prompts of
    one chunk, of ``longest_prompt`` tokens at most, attend to no earlier chunks.
    """
    kinds = _kinds(compute, memory)
    for way in layouts(shape, compute, memory, staged=True):
        if way.partition is Partition.REQUEST:
            stays = way.replicas == 1 or not way.rotates
            for chunk, segment in product(CHUNKS, segments if way.memory_workers > 1 else (None,)):
                for scratch in (False, True) if stays and chunk < longest_prompt else (False,):
                    yield replace(way, chunk=chunk, segment=segment, scratch=scratch)
    for kind, most in kinds.values():
        yield from _one_pool(shape, Kind.LOCAL, kind, most, affords)
    for kind, most in compute:
        for other, most_other in kinds.values():
            pools, scratch = ((kind, most), (other, most_other)), CHUNKS[-1] < longest_prompt
            ranks = [Shape(degree) for degree in _degrees(shape)]
            yield from _apart(*pools, product(ranks, ranks), scratch)
            pairs = product(_smallest(shape, kind), _smallest(shape, other))
            for way, (third, most_third) in product(_apart(*pools, pairs, scratch), memory):
                shared = third is other and other.kind not in {one.kind for one, _ in compute}
                yield from _with_pool(way, third, most_third - shared * way.compute_workers)


def baselines(
    shape: ModelShape, compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> Iterator[Way]:
    """Yield every way of another system with one pool and chunked prefill, on all devices."""
    for kind, most in _kinds(compute, memory).values():
        yield from _one_pool(shape, Kind.ONE_POOL, kind, most, lambda way: True)


def _kinds(
    compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> dict[str, tuple[Hardware, int]]:
    return {kind.kind: (kind, most) for kind, most in (*memory, *compute)}


def layouts(
    shape: ModelShape,
    compute: Sequence[tuple[Hardware, int]],
    memory: Sequence[tuple[Hardware, int]],
    staged: bool = False,
) -> Iterator[Way]:
    """Yield every way to offload attention, with at most the given workers of each kind, at the default chunk.

    With ``staged``, copies of the weights have the fewest stages that hold these, if there are enough workers: stages
    need no room for KV, so that further devices serve as much in further copies.
    """
    for (kind, most), (memory_kind, most_memory) in product(compute, memory):
        for degree in _degrees(shape):
            parts = fewest_stages(shape, MEMORY_SHARE_USABLE * kind.memory_bytes, degree) if staged else 1
            parts = parts if parts and degree * parts <= most else 1
            group = degree * parts
            for replicas, workers in product(range(1, most // group + 1), range(1, most_memory + 1)):
                for lanes, partition in product(_lanes(replicas, parts), Partition):
                    if partition is Partition.REQUEST or (workers > 1 and shape.kv_heads % workers == 0):
                        yield Way(
                            compute=kind,
                            compute_workers=replicas * group,
                            memory=memory_kind,
                            memory_workers=workers,
                            shape=Shape(degree, parts),
                            lanes=lanes,
                            partition=partition,
                        )


def _lanes(replicas: int, stages: int = 1) -> list[int]:
    """Return the numbers of lanes to try: one more than replicas, rotating, and one to three per replica, fixed; one or
    two per stage if there are several."""
    if stages > 1:
        return [each * replicas * stages for each in (1, 2)]
    return sorted({replicas + 1, *(each * replicas for each in (1, 2, 3))})


def _one_pool(
    shape: ModelShape, system: Kind, kind: Hardware, most: int, affords: Callable[[Way], bool]
) -> Iterator[Way]:
    """Yield ways of one pool with as many copies of the weights as ``affords`` allows, but at least one."""
    stages = STAGES if system is Kind.LOCAL else (1,)
    for degree, parts, chunk in product(_degrees(shape), stages, CHUNKS):
        group = degree * parts
        for copies in range(most // group, 0, -1):
            way = Way(
                kind=system,
                chunk=chunk,
                compute=kind,
                compute_workers=copies * group,
                shape=Shape(degree, parts),
            )
            if copies == 1 or affords(way):
                yield way
                break


def _apart(
    first: tuple[Hardware, int], second: tuple[Hardware, int], pairs: Iterable[tuple[Shape, Shape]], scratch: bool
) -> Iterator[Way]:
    """Yield ways with prefill apart and local memory. ``pairs``: Shapes of copies that prefill, and of those that
    decode."""
    (kind, most), (other, most_other) = first, second
    for early, late in pairs:
        for prefilling in range(early.workers, most + 1, early.workers):
            left = most - prefilling if other is kind else most_other
            for decoding in range(late.workers, left + 1, late.workers):
                yield Way(
                    kind=Kind.PREFILL,
                    scratch=scratch,
                    chunk=CHUNKS[-1],
                    prefill=kind,
                    prefill_workers=prefilling,
                    compute=other,
                    compute_workers=decoding,
                    shape=late,
                    prefill_shape=None if early == late else early,
                )


def _smallest(shape: ModelShape, kind: Hardware) -> Iterator[Shape]:
    """Yield the shapes of copies with the fewest stages that hold the weights."""
    for degree in _degrees(shape):
        if parts := fewest_stages(shape, MEMORY_SHARE_USABLE * kind.memory_bytes, degree):
            yield Shape(degree, parts)


def _with_pool(way: Way, kind: Hardware, most: int) -> Iterator[Way]:
    """Yield the variants of a way with prefill apart whose KV is in up to ``most`` memory workers."""
    stages = max(each.stages for each in way.shapes)
    copies = way.replicas + way.prefill_replicas
    for workers, each in product(range(1, most + 1), APART_LANES):
        yield replace(way, memory=kind, memory_workers=workers, lanes=each * stages * copies)


def spreads_memory(degree: int, kinds: Sequence[Hardware]) -> bool:
    """Return whether a sequence may have KV in local memory of several copies of the weights (``Pipeline.spreads``)."""
    return degree == 1 or {kind.kind for kind in kinds} == {"cpu"}


def _degrees(shape: ModelShape) -> list[int]:
    return [degree for degree in TENSOR_PARALLEL if shape.kv_heads % degree == 0]


def rivals(found: Sequence[Capacity], best_usd: float) -> list[Capacity]:
    """Return the ways that may be rivals by the closed form and its error.

    ``best_usd``: dollars of a request of the cheapest way that was simulated; infinite if none was.
    """
    return [one for one in found if one.usd_per_request * (1 - UNDERRATED) <= RIVAL * best_usd]


def shortlist(found: Sequence[Capacity]) -> list[Capacity]:
    """Return the ways to simulate: the cheapest for every system, kinds and number of lanes, with stages and without.

    Of ways with three pools, whose kinds have many combinations, only the cheapest. At most ``SHORTLISTED`` ways, with
    at least one of every system.
    """
    best: dict[tuple[object, ...], Capacity] = {}
    for one in sorted(found, key=lambda one: (one.usd_per_request, one.usd_per_hour)):
        way = one.way
        layout = (*(kind.kind for kind, _ in way.pools), way.shape.stages > 1) if len(way.pools) < 3 else ()
        each = 0 if way.rotates or way.kind is not Kind.OFFLOADED else way.lanes // (way.replicas * way.shape.stages)
        best.setdefault((way.kind, layout, way.rotates, each), one)
    kept = sorted(best.values(), key=lambda one: one.usd_per_request)
    first = {one.way.kind: one for one in reversed(kept)}.values()
    others = [one for one in kept if not any(one is chosen for chosen in first)]
    return sorted([*first, *others[: max(0, SHORTLISTED - len(first))]], key=lambda one: one.usd_per_request)
