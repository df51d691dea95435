"""Enumerates ways to serve a model on given devices: layouts of pools, parallelism and lanes.

A ``Way`` is a layout of Lamina: attention offloaded to a second pool; one pool with KV beside each copy of the weights
(local memory); prefill apart from decode, on one or two kinds, with local memory. ``baselines`` are layouts of another
system with one pool, for comparison.
"""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.prices import Prices
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
        compute: Hardware of the pool with weights; if roles are divided, of the pool that prefills.
        compute_workers: Workers of that pool.
        memory: Hardware of the memory pool; if roles are divided, of the pool that decodes; None without a second pool.
        memory_workers: Workers of that pool.
        tensor_parallel: Devices of one copy of the weights, in both pools.
        lanes: Lanes with ``OFFLOADED``, else 1.
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
    tensor_parallel: int = 1
    lanes: int = 1
    segment: int | None = None
    partition: Partition = Partition.REQUEST
    scratch: bool = False

    @property
    def second(self) -> Hardware:
        """Hardware of the second pool, which must exist."""
        assert self.memory is not None
        return self.memory

    @property
    def replicas(self) -> int:
        """Copies of the weights in the compute pool."""
        return self.compute_workers // self.tensor_parallel

    @property
    def rotates(self) -> bool:
        """Whether lanes rotate over replicas."""
        return self.kind is Kind.OFFLOADED and self.lanes == self.replicas + 1

    def usd_per_hour(self, prices: Prices) -> tuple[float, float]:
        """Return the hourly cost of each pool, with its network if there are two."""
        two = self.memory is not None
        compute = prices.usd_per_hour(self.compute, networked=two) * self.compute_workers
        return compute, prices.usd_per_hour(self.second, networked=True) * self.memory_workers if two else 0.0

    def describe(self) -> str:
        """Return the pools in words."""
        copies = f"{self.replicas} x TP{self.tensor_parallel}"
        if self.kind is Kind.LOCAL:
            return f"{self.compute.kind}:{self.compute_workers} with local memory, {copies}"
        if self.kind is Kind.ONE_POOL:
            return f"{self.compute.kind}:{self.compute_workers} alone, {copies}"
        second = f"{self.second.kind}:{self.memory_workers}"
        if self.kind.divides_roles:
            return f"{self.compute.kind}:{self.compute_workers} prefill, {second} decode, TP{self.tensor_parallel}"
        order = "rotating" if self.rotates else "fixed"
        parts = f", KV in parts of {self.segment}" if self.segment else ""
        parts += ", prompts attend on compute" if self.scratch else ""
        return (
            f"{self.compute.kind}:{self.compute_workers} + {second} memory, {copies}, {self.lanes} {order} lanes{parts}"
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
    for way in layouts(shape, compute, memory):
        if way.partition is Partition.REQUEST:
            stays = way.replicas == 1 or not way.rotates
            for chunk, segment in product(CHUNKS, segments if way.memory_workers > 1 else (None,)):
                for scratch in (False, True) if stays and chunk < longest_prompt else (False,):
                    yield replace(way, chunk=chunk, segment=segment, scratch=scratch)
    for kind, most in kinds.values():
        yield from _one_pool(shape, Kind.LOCAL, kind, most, affords)
    for kind, most in compute:
        for other, most_other in kinds.values():
            yield from _apart(shape, (kind, most), (other, most_other), CHUNKS[-1] < longest_prompt)


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
    shape: ModelShape, compute: Sequence[tuple[Hardware, int]], memory: Sequence[tuple[Hardware, int]]
) -> Iterator[Way]:
    """Yield every way to offload attention, with at most the given workers of each kind, at the default chunk."""
    for (kind, most), (memory_kind, most_memory) in product(compute, memory):
        for degree in _degrees(shape):
            for replicas, workers in product(range(1, most // degree + 1), range(1, most_memory + 1)):
                for lanes, partition in product(_lanes(replicas), Partition):
                    if partition is Partition.REQUEST or (workers > 1 and shape.kv_heads % workers == 0):
                        yield Way(
                            compute=kind,
                            compute_workers=replicas * degree,
                            memory=memory_kind,
                            memory_workers=workers,
                            tensor_parallel=degree,
                            lanes=lanes,
                            partition=partition,
                        )


def _lanes(replicas: int) -> list[int]:
    """Return the numbers of lanes to try: one more than replicas, rotating, and one to three per replica, fixed."""
    return sorted({replicas + 1, *(each * replicas for each in (1, 2, 3))})


def _one_pool(
    shape: ModelShape, system: Kind, kind: Hardware, most: int, affords: Callable[[Way], bool]
) -> Iterator[Way]:
    """Yield ways of one pool with as many copies of the weights as ``affords`` allows, but at least one."""
    for degree, chunk in product(_degrees(shape), CHUNKS):
        for copies in range(most // degree, 0, -1):
            way = Way(kind=system, chunk=chunk, compute=kind, compute_workers=copies * degree, tensor_parallel=degree)
            if copies == 1 or affords(way):
                yield way
                break


def _apart(
    shape: ModelShape, first: tuple[Hardware, int], second: tuple[Hardware, int], scratch: bool
) -> Iterator[Way]:
    (kind, most), (other, most_other) = first, second
    for degree in _degrees(shape):
        for prefilling in range(1, most // degree + 1):
            left = most - prefilling * degree if other is kind else most_other
            for decoding in range(1, left // degree + 1):
                yield Way(
                    kind=Kind.PREFILL,
                    scratch=scratch,
                    chunk=CHUNKS[-1],
                    compute=kind,
                    compute_workers=prefilling * degree,
                    memory=other,
                    memory_workers=decoding * degree,
                    tensor_parallel=degree,
                )


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
    """Return the ways to simulate: the cheapest for every system, pair of kinds and number of lanes.

    At most ``SHORTLISTED`` ways, with at least one of every system.
    """
    best: dict[tuple[Kind, str, str, bool, int], Capacity] = {}
    for one in sorted(found, key=lambda one: (one.usd_per_request, one.usd_per_hour)):
        way = one.way
        offloaded = way.kind is Kind.OFFLOADED
        memory, each = way.memory.kind if way.memory else "", 0 if way.rotates else way.lanes // way.replicas
        best.setdefault((way.kind, way.compute.kind, memory, way.rotates, each if offloaded else 0), one)
    kept = sorted(best.values(), key=lambda one: one.usd_per_request)
    first = {one.way.kind: one for one in reversed(kept)}.values()
    others = [one for one in kept if not any(one is chosen for chosen in first)]
    return sorted([*first, *others[: max(0, SHORTLISTED - len(first))]], key=lambda one: one.usd_per_request)
