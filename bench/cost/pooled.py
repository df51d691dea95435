"""Copies of a model that lend each other KV memory (Infinite-LLM, DistKV-LLM), played by the simulator's own engines.

A ``Lender`` is one copy of the weights. When its blocks are used up, it borrows those that another copy has free, which
attends to what lies there. Otherwise it is the baseline ``Instance``: whole prompts first, paged KV, continuous
batching. Prompts are computed where the request is; their K and V travel while later layers compute, for free.
"""

import numpy as np

from lamina.plan.cost import CostModel
from lamina.plan.gemm import Floats
from lamina.simulate import Arrivals, Deployment, Result, State, System
from lamina.simulate.arrivals import Ints
from lamina.simulate.baselines import BaselineSimulation
from lamina.simulate.instance import Batch, Instance, Running, blocks_of
from lamina.simulate.prefixes import BLOCK

MOST_BUSY = 0.9
"""Share of the time of a prompt that attention for others may take."""

OUTPUT = 256
"""Most output tokens of a request; short ones generate half of their context. The papers do not say."""


class Lender(Instance):
    """An engine that borrows blocks.

    Attributes:
        others: engines to borrow from. borrowed: blocks from each of them.
        step_s: seconds of the last step if it decoded, for which others attended to what they lend; else 0.
        stuck: the first waiting request if it found no room: later ones, of all engines, wait behind it.
    """

    def __init__(self, cost: CostModel, tensor_parallel: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        super().__init__(cost, tensor_parallel, max_num_seqs, max_num_batched_tokens, chunked=False)
        self.others: list[Lender] = []
        self.borrowed: dict[Lender, int] = {}
        self.step_s = 0.0
        self.stuck: Running | None = None

    def could_hold(self, tokens: int) -> bool:
        """Whether a request fits all engines together, each of which keeps its watermark."""
        return blocks_of(tokens) <= sum(one.blocks - one._watermark for one in (self, *self.others))

    def plan(self) -> Batch | None:
        """The next step. Blocks go back as soon as they are free; as many are borrowed as decoding and the next prompt
        need."""
        for lender in list(self.borrowed):
            self._give(lender, min(self.free, self.borrowed[lender]))
        full = sum(one.cached >= one.target and one.cached == one.blocks * BLOCK for one in self.running)
        first = blocks_of(self.waiting[0].target) + self._watermark if self.waiting else 0
        for needed in (full, full + first):  # the prompt waits unless all of it finds room
            if self.free < needed <= self.free + sum(one.spare for one in self.others):
                self._borrow(needed - self.free)
        batch = super().plan()
        room = super()._next_has_room()
        self.stuck = self.waiting[0] if self.waiting and not room else None
        return batch

    def _next_has_room(self) -> bool:
        """Long requests would wait for ever if shorter ones took all that becomes free."""
        if any(one.stuck and one.stuck.index < self.waiting[0].index for one in self.others if self.waiting):
            return False
        return super()._next_has_room()

    @property
    def spare(self) -> int:
        """Blocks that others may borrow."""
        return max(0, self.free - self._watermark)

    def _borrow(self, blocks: int) -> None:
        for lender in sorted(self.others, key=lambda one: one.spare, reverse=True):
            self._give(lender, -min(blocks, lender.spare))
            blocks -= min(blocks, lender.spare)

    def _give(self, lender: "Lender", blocks: int) -> None:
        """Blocks go back to ``lender``; a negative number comes from there."""
        self.free -= blocks
        lender.free += blocks
        self.borrowed[lender] = self.borrowed.get(lender, 0) - blocks
        if not self.borrowed[lender]:
            del self.borrowed[lender]

    def seconds(self, batch: Batch) -> float:
        """A step: attention to KV elsewhere runs beside that to KV here. Copies that decode keep pace, and attend once
        a step for each that borrows; beside a prompt, as often as these decode, for at most ``OUTPUT`` tokens."""
        seconds = super().seconds(batch)
        if batch.decoding:
            rows, tokens = len(batch.decoding), sum(one.cached + 1 for one in batch.decoding)
            away = {one: min(tokens, BLOCK * blocks) for one, blocks in self.borrowed.items()}
            if away:
                here = self._attention(max(0, tokens - sum(away.values())), rows)
                there = max(one._attention(share, rows) for one, share in away.items()) + self._messages(rows)
                seconds += max(here, there) - self._attention(tokens, rows)
        each = {one: self._for(one) for one in self.others if one.step_s}
        if batch.decoding:
            self.step_s = seconds + sum(each.values())
            return self.step_s
        self.step_s = 0.0
        busy = min(sum(own / one.step_s for one, own in each.items()), MOST_BUSY)
        return seconds + min(seconds * busy / (1 - busy), OUTPUT * sum(each.values()))

    def _for(self, debtor: "Lender") -> float:
        """Seconds of attention here for a step of ``debtor``."""
        blocks = debtor.borrowed.get(self, 0)
        return self._attention(BLOCK * blocks, 1) if blocks else 0.0

    def _attention(self, tokens: int, rows: int) -> float:
        return self._cost.shape.layers * float(self._cost.attention_seconds(tokens, rows, 1 / self._tp))

    def _messages(self, rows: int) -> float:
        """Queries of all layers there, and outputs back."""
        shape = self._cost.shape
        nbytes = rows * shape.query_heads * shape.head_size * shape.dtype.itemsize / self._tp
        return 2 * shape.layers * float(self._cost.send_recv_seconds(nbytes))


class Pooled(BaselineSimulation):
    """Lenders that all lend to each other."""

    def _instances(self, cost: CostModel, count: int, chunked: bool) -> list[Instance]:
        deployment = self._deployment
        deployment.require_weights(cost)
        degree, seats, rows = deployment.tensor_parallel, deployment.max_num_seqs, deployment.max_num_batched_tokens
        lenders = [Lender(cost, degree, seats, rows) for _ in range(count)]
        for one in lenders:
            one.others = [other for other in lenders if other is not one]
        return list(lenders)

    def _end(self, instance: Instance, batch: Batch, seconds: float, now: float) -> None:
        super()._end(instance, batch, seconds, now)
        for other in self._first:  # it may wait for what has just become free
            self._begin(other, now)


REQUESTS = 200
DONE = 0.7
"""Share of requests that come at once which end while engines are full: throughput is that until then."""

PER_TOKEN_S, ROUNDS = 0.2, 5
"""Mean time of a request by its output tokens that bounds a load, and runs in which that load is found."""


def lengths(mean: float, deviation: float, longest: int, seed: int = 1) -> Ints:
    """Contexts of ``REQUESTS`` requests: log-normal, and at most ``longest``."""
    variance = np.log(1 + (deviation / mean) ** 2)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - variance / 2, np.sqrt(variance), REQUESTS)
    return np.asarray(np.clip(drawn, 2, longest - 1), np.int64)


def ranges(normal: int, longest: int, share: float, seed: int = 1) -> Ints:
    """Contexts of ``REQUESTS`` requests: up to ``normal`` tokens, but a ``share`` of them up to ``longest``."""
    random = np.random.default_rng(seed)
    long = random.uniform(size=REQUESTS) < share
    return np.where(long, random.integers(normal, longest, REQUESTS), random.integers(2, normal, REQUESTS))


def _run(deployment: Deployment, contexts: Ints, arrival_s: Floats, pooled: bool) -> Result:
    output = np.minimum(OUTPUT, contexts // 2)
    arrivals = Arrivals(arrival_s, contexts - output, output)
    result = (Pooled if pooled else BaselineSimulation)(System.TENSOR_PARALLEL, deployment, arrivals, ()).run()
    assert result.log.count(State.FINISHED) == len(contexts), f"{result.log.count(State.REFUSED)} requests do not fit"
    return result


def throughput(deployment: Deployment, contexts: Ints, pooled: bool) -> float:
    """Requests per second while there are more than engines can take: until ``DONE`` of them have ended."""
    result = _run(deployment, contexts, np.zeros(len(contexts)), pooled)
    last = int(DONE * len(contexts)) - 1
    return (last + 1) / float(np.sort(result.log.end_s)[last])


def highest_load(deployment: Deployment, contexts: Ints, pooled: bool) -> float:
    """Requests per second, at random times, that take ``PER_TOKEN_S`` per generated token on average."""
    gaps = np.random.default_rng(2).exponential(1.0, len(contexts))
    output = np.minimum(OUTPUT, contexts // 2)
    low, high = 0.0, 1.2 * throughput(deployment, contexts, pooled)
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        arrival_s = np.cumsum(gaps) / rate
        took = (_run(deployment, contexts, arrival_s, pooled).log.end_s - arrival_s) / output
        low, high = (rate, high) if took.mean() <= PER_TOKEN_S else (low, rate)
    return low
