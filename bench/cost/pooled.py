"""Simulates copies of a model that lend each other KV memory (Infinite-LLM, DistKV-LLM).

A ``Lender`` is one copy of the weights. When its own blocks are used up, its sequences use free blocks of other copies,
which run the attention over them. Otherwise it is the baseline ``Instance``: whole prompts first, paged KV, continuous
batching. A request's own copy computes its prompt. No KV moves.
"""

from collections import Counter

import numpy as np

from bench.cost.transfers import send_recv_seconds
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.simulate import Arrivals, Deployment, State, System
from lamina.planning.simulate.baseline_instance import BLOCK, Batch, Instance, Running, blocks_of
from lamina.planning.simulate.baselines import BaselineSimulation
from lamina.planning.simulate.scenario import Ints

MOST_BUSY = 0.9
"""Share of the time of a prompt that attention for others may take."""

OUTPUT = 256
"""Most output tokens of a request; short ones generate half of their context. The papers do not say."""

OWN = 0.01
"""Share of an engine's blocks that it neither lends nor fills with new requests."""


class Lender(Instance):
    """An engine whose sequences may also use blocks of other engines.

    Attributes:
        free: Its own unused blocks.
        others: Engines to borrow from.
        away: By running sequence, the number of blocks on each other engine.
        step_s: Seconds of the last step if it decoded, else 0.
        stuck: The first waiting request if it does not fit; later requests of all engines then wait too.
    """

    def __init__(self, cost: CostModel, tensor_parallel: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        sizes = tensor_parallel, max_num_seqs, max_num_batched_tokens
        super().__init__(cost, *sizes, chunked=False, prefix_cache=False)
        self.others: list[Lender] = []
        self.away: dict[Running, Counter[Lender]] = {}
        self.step_s = 0.0
        self.stuck: Running | None = None

    @property
    def own(self) -> int:
        """Blocks that stay free when a request is admitted or another engine borrows."""
        return int(OWN * self.blocks)

    def has_room(self, tokens: int, held: int = 0) -> bool:
        return super().has_room(tokens + BLOCK * self.own, held)

    def could_hold(self, tokens: int) -> bool:
        """Whether a request fits all engines together, each of which keeps its own share of blocks."""
        return blocks_of(tokens) <= sum(one.blocks - one.own for one in (self, *self.others))

    @property
    def left(self) -> int:
        """Blocks of all engines that sequences of this engine may allocate."""
        return self.free + sum(one.spare for one in self.others)

    @property
    def spare(self) -> int:
        """Blocks that others may borrow."""
        return max(0, self.free - self.own)

    def grow(self, sequence: Running, blocks: int) -> None:
        """Allocate own blocks first, then blocks of the engines with most spare blocks."""
        sequence.blocks += blocks
        own = min(blocks, self.free)
        self.free -= own
        blocks -= own
        for lender in sorted(self.others, key=lambda one: one.spare, reverse=True) if blocks else ():
            taken = min(blocks, lender.spare)
            lender.free -= taken
            blocks -= taken
            self.away.setdefault(sequence, Counter())[lender] += taken

    def free_blocks(self, sequence: Running) -> None:
        away = self.away.pop(sequence, Counter[Lender]())
        for lender, blocks in away.items():
            lender.free += blocks
        self.free += sequence.blocks - away.total()
        sequence.blocks = 0

    def borrowed(self, lender: "Lender") -> int:
        """Blocks of this engine's sequences on another."""
        return sum(away[lender] for away in self.away.values())

    def plan(self) -> Batch | None:
        batch = super().plan()
        room = super()._next_has_room()
        self.stuck = self.waiting[0] if self.waiting and not room else None
        return batch

    def _next_has_room(self) -> bool:
        """Also return False if an earlier request of another engine does not fit, which would otherwise starve."""
        if any(one.stuck and one.stuck.index < self.waiting[0].index for one in self.others if self.waiting):
            return False
        return super()._next_has_room()

    def steps_alike(self, batch: Batch, most: int) -> int:
        return 1  # what it lends, and so how long a step takes, may change with every step

    def step_seconds(self, batch: Batch) -> float:
        """Return seconds of a step, with attention for borrowers.

        Attention on other engines overlaps with the engine's own. Decoding engines run in step and attend once per step
        for each borrower; beside a prompt, as often as the borrowers decode, for ``OUTPUT`` tokens at most.
        """
        seconds = super().step_seconds(batch)
        if batch.decoding:
            rows, tokens = len(batch.decoding), sum(one.cached + 1 for one in batch.decoding)
            away = Counter[Lender]()
            for one in batch.decoding:
                away.update(self.away.get(one, {}))
            if away:
                here = self.attention(max(0, tokens - BLOCK * away.total()), rows)
                there = max(one.attention(BLOCK * blocks, rows) for one, blocks in away.items()) + self._messages(rows)
                seconds += max(here, there) - self.attention(tokens, rows)
        each = {one: self._for(one) for one in self.others if one.step_s}
        if batch.decoding:
            self.step_s = seconds + sum(each.values())
            return self.step_s
        self.step_s = 0.0
        busy = min(sum(own / one.step_s for one, own in each.items()), MOST_BUSY)
        return seconds + min(seconds * busy / (1 - busy), OUTPUT * sum(each.values()))

    def _for(self, debtor: "Lender") -> float:
        """Return seconds of this engine's attention for a step of ``debtor``."""
        blocks = debtor.borrowed(self)
        return self.attention(BLOCK * blocks, 1) if blocks else 0.0

    def attention(self, tokens: int, rows: int) -> float:
        """Seconds of decode attention in all layers."""
        return self._cost.shape.layers * float(self._cost.attention_seconds(tokens, rows, 1 / self._tp))

    def dense(self, rows: float) -> float:
        """Seconds of a step of so many rows without attention."""
        return float(self._cost.pass_seconds(max(1.0, rows), self._tp))

    def _messages(self, rows: int) -> float:
        """Return seconds to send queries of all layers to another engine, and outputs back."""
        shape = self._cost.shape
        nbytes = rows * shape.query_heads * shape.head_size * shape.dtype.itemsize / self._tp
        return 2 * shape.layers * float(send_recv_seconds(self._cost, nbytes))


class Pooled(BaselineSimulation):
    """Lenders that all lend to each other."""

    def _instances(self, cost: CostModel, count: int, chunked: bool) -> list[Instance]:
        deployment = self._deployment
        deployment.require_weights(cost)
        degree, seats, rows = deployment.shape.ranks, deployment.max_num_seqs, deployment.max_num_batched_tokens
        self.lenders = [Lender(cost, degree, seats, rows) for _ in range(count)]
        for one in self.lenders:
            one.others = [other for other in self.lenders if other is not one]
        return list(self.lenders)

    def _end(self, instance: Instance, batch: Batch, seconds: float, now: float) -> None:
        super()._end(instance, batch, seconds, now)
        for other in self._first:  # it may wait for what has just become free
            self._begin(other, now)


REQUESTS = 200
"""Requests of a run."""

DONE = 0.7
"""Share of the requests that end while engines are full: throughput is that until then."""


def lengths(mean: float, deviation: float, longest: int, requests: int, seed: int = 1) -> Ints:
    """Contexts: log-normal, and at most ``longest``."""
    variance = np.log(1 + (deviation / mean) ** 2)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - variance / 2, np.sqrt(variance), requests)
    return np.asarray(np.clip(drawn, 2, longest - 1), np.int64)


def ranges(normal: int, longest: int, share: float, requests: int, seed: int = 1) -> Ints:
    """Contexts of up to ``normal`` tokens, but of a ``share`` of the requests up to ``longest``."""
    random = np.random.default_rng(seed)
    long = random.uniform(size=requests) < share
    return np.where(long, random.integers(normal, longest, requests), random.integers(2, normal, requests))


def ends(deployment: Deployment, contexts: Ints, pooled: bool) -> Floats:
    """Return the end times of requests that all arrive at once, in order."""
    output = np.minimum(OUTPUT, contexts // 2)
    arrivals = Arrivals(np.zeros(len(contexts)), contexts - output, output)
    run = (Pooled if pooled else BaselineSimulation)(System.TENSOR_PARALLEL, deployment, arrivals, ())
    log = run.simulate().log
    assert log.count(State.FINISHED) == len(contexts), f"{log.count(State.REFUSED)} requests do not fit"
    return np.sort(log.end_s)


def throughput(deployment: Deployment, contexts: Ints, pooled: bool) -> float:
    """Requests per second while there are more than engines can take: until ``DONE`` of them have ended."""
    last = int(DONE * len(contexts)) - 1
    return (last + 1) / float(ends(deployment, contexts, pooled)[last])
