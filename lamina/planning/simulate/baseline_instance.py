"""Simulates one engine of the baselines: a copy of the weights with a paged KV cache and continuous batching.

As in vLLM, KV is allocated in blocks of 16 tokens as needed. When no block is left, the latest sequence is preempted
and recomputed later, but for its blocks that were not used meanwhile; such a step admits nobody. Two policies: whole
prompts first while decoding waits (``chunked`` False); or decoding first, with chunks of prompts filling the rest of
each step (Sarathi-Serve). Prompts whose content is known share the KV of equal prefixes.
"""

import bisect
import collections
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.overheads import NO_OVERHEAD, Engine
from lamina.planning.plan.workload import Content
from lamina.planning.simulate.step_times import slice_times

BLOCK = 16  # tokens of KV per block


@dataclass(slots=True)
class _Unit:
    blocks: int
    holders: int = 0


class Prefixes:
    """Prefix cache of an engine: sequences share blocks of equal prefixes, and idle blocks are evicted.

    Blocks are counted by *unit*: a run of tokens of a trace (``lamina.planning.plan.workload``) without its last token,
    or that token. A unit owns the blocks that end in it. Idle units count as free blocks; the least recently used are
    evicted when blocks are needed.

    Attributes:
        idle: Blocks of units that no sequence holds.
        queried: Tokens of admitted prompts.
        hit: Tokens of admitted prompts that were found.
    """

    def __init__(self) -> None:
        self.idle = self.queried = self.hit = 0
        self._units: dict[int, _Unit] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # blocks, least recently used first
        self._keys: dict[tuple[int, tuple[int, int]], int] = {}

    def keys(self, content: Content) -> list[tuple[int, int]]:
        """Return (key, last block) of every unit. Two keys are equal if all tokens up to the ends of their units are.

        The last token of a run is a unit of its own, since the last token of an answer has no KV when its request ends.
        """
        keys, key, end = [], 0, 0
        for name, tokens in content:
            for part in (tokens - 1, 1):
                key = self._keys.setdefault((key, (name, part)), len(self._keys) + 1)
                end += part
                keys.append((key, end // BLOCK))
        return keys

    def find_prefix(self, content: Content, most: int) -> list[int]:
        """Return keys of the longest cached prefix of at most ``most`` tokens."""
        found = []
        for key, last in self.keys(content):
            if key not in self._units or last * BLOCK > most:
                break
            found.append(key)
        return found

    def held(self, keys: list[int]) -> int:
        """Return the number of blocks of ``keys`` that sequences hold already."""
        return sum(self._units[key].blocks for key in keys if self._units[key].holders)

    def blocks(self, keys: list[int]) -> int:
        """Return the number of blocks of ``keys``."""
        return sum(self._units[key].blocks for key in keys)

    def acquire(self, keys: list[int]) -> int:
        """Let another sequence hold ``keys``; return how many blocks were idle until now."""
        woken = 0
        for key in keys:
            unit = self._units[key]
            if not unit.holders:
                woken += self._idle.pop(key)
            unit.holders += 1
        self.idle -= woken
        return woken

    def release(self, keys: list[int]) -> int:
        """Let a sequence no longer hold ``keys``; return how many blocks become idle."""
        idle = 0
        for key in reversed(keys):  # the end of a prefix is evicted before its beginning
            unit = self._units[key]
            unit.holders -= 1
            if not unit.holders:
                self._idle[key] = unit.blocks
                idle += unit.blocks
        self.idle += idle
        return idle

    def publish(self, content: Content, held: list[int], tokens: int) -> list[int]:
        """Publish the first ``tokens`` of ``content``, which now have KV: units after ``held`` can be found.

        Stops at a unit that another sequence has published; the sequence then keeps its own copy of the rest. Returns
        all keys that the sequence holds.
        """
        keys = self.keys(content)
        blocks = [last for _, last in keys]
        for place in range(len(held), len(keys)):
            key, last = keys[place]
            if key in self._units or last * BLOCK > tokens:
                break
            self._units[key] = _Unit(last - (blocks[place - 1] if place else 0), holders=1)
            held = [*held, key]
        return held

    def evict(self, most: int) -> None:
        """Keep at most ``most`` idle blocks."""
        while self.idle > most:
            key, blocks = self._idle.popitem(last=False)
            del self._units[key]
            self.idle -= blocks


@dataclass(slots=True)
class _Run:
    blocks: int
    kept: bool = False


class FreeBlocks:
    """Free blocks of an engine in the order in which they are used again: those freed first, as in vLLM.

    A preempted request that is admitted again finds the KV in its blocks that were not used meanwhile. These are its
    first ones, since a request's last block is freed first.
    """

    def __init__(self, blocks: int) -> None:
        self._runs = collections.deque([_Run(blocks)])
        self._kept: dict[Running, _Run] = {}

    def add(self, blocks: int) -> None:
        """Add blocks that were freed."""
        if self._runs and not self._runs[-1].kept:
            self._runs[-1].blocks += blocks
        else:
            self._runs.append(_Run(blocks))

    def keep(self, owner: "Running", blocks: int) -> None:
        """Remember that the last ``blocks`` blocks that were added are the first of a preempted request."""
        self._runs[-1].blocks -= blocks
        self._kept[owner] = _Run(blocks, kept=True)
        self._runs.append(self._kept[owner])

    def use(self, blocks: int) -> None:
        """Use ``blocks`` blocks, which must be free."""
        while blocks:
            first = self._runs[0]
            used = min(blocks, first.blocks)
            first.blocks -= used
            blocks -= used
            if not first.blocks:
                self._runs.popleft()

    def reclaim(self, owner: "Running") -> int:
        """Use the blocks of a preempted request that are left; return their number."""
        run = self._kept.pop(owner, None)
        if run is None:
            return 0
        left, run.blocks = run.blocks, 0
        return left


class Running:
    """A request in an instance.

    Attributes:
        index: Index of the request.
        prompt: Its prompt tokens.
        drawn: Tokens generated so far.
        content: Its prompt and answer as runs of tokens; empty if it shares no prefix.
        cached: Tokens with KV in this instance.
        target: Cached tokens needed before the next token can be generated.
        blocks: KV blocks that it holds.
        shared: Keys of its blocks that other requests may hold too.
    """

    __slots__ = ("blocks", "cached", "content", "drawn", "index", "prompt", "shared", "target")

    def __init__(self, index: int, prompt: int, content: Content = ()) -> None:
        self.index = index
        self.prompt = prompt
        self.target = prompt
        self.content = content
        self.drawn = self.cached = self.blocks = 0
        self.shared: list[int] = []


def blocks_of(tokens: int) -> int:
    """Return the number of blocks for ``tokens``."""
    return -(-tokens // BLOCK)


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + length) of a prompt."""

    sequence: Running
    start: int
    length: int


@dataclass(frozen=True)
class Batch:
    """One step: sequences that decode, and chunks of prompts."""

    decoding: Sequence[Running]
    chunks: Sequence[Chunk]


class Instance:
    """Plans steps, one at a time, and predicts how long they take.

    Attributes:
        blocks: All KV blocks.
        free: Blocks that no sequence holds, including idle blocks of ``prefixes``.
        waiting: Requests that wait.
        late: Requests that arrived after the next step was planned.
        running: Requests that run.
        coming: Requests whose KV is moving here.
        preempted: Number of preemptions.
        factor: Slowdown of everything.
        entering: Requests whose prompts are tokenized, one after another.
        received_until_s: When the last of them is tokenized.
        busy_s: Seconds in completed steps.
        sent_s: Seconds for which its NICs were busy.
        idle: Whether no step runs.
        lost: Whether it has failed.
    """

    def __init__(
        self,
        cost: CostModel,
        tensor_parallel: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked: bool,
        engine: Engine = NO_OVERHEAD,
        prefix_cache: bool = True,
    ) -> None:
        shape = cost.shape
        free = tensor_parallel * (cost.usable_bytes - engine.reserved(max_num_batched_tokens)) - shape.weight_bytes
        self.blocks = int(free / shape.kv_bytes_per_token) // BLOCK
        self.free = self.blocks
        self._order = FreeBlocks(self.blocks)
        self._prefix_cache = prefix_cache
        self.prefixes = Prefixes()
        self.waiting: collections.deque[Running] = collections.deque()
        self.late: list[Running] = []
        self.running: list[Running] = []
        self.coming: list[Running] = []
        self.preempted = 0
        self.factor = 1.0
        self.busy_s = self.sent_s = self.sent_until_s = self.received_until_s = 0.0
        self.entering = 0
        self.idle, self.lost = True, False
        self._seats, self._rows, self._chunked = max_num_seqs, max_num_batched_tokens, chunked
        self._cost, self._tp, self._engine = cost, tensor_parallel, engine
        # A prompt longer than the budget runs alone if it is not divided into chunks.
        self._slices = slice_times(cost, tensor_parallel, max(max_num_batched_tokens, max_num_seqs))

    @property
    def load(self) -> int:
        """Number of requests that are tokenized, wait or run."""
        return self.entering + len(self.waiting) + len(self.late) + len(self.running)

    def could_hold(self, tokens: int) -> bool:
        """Return whether a request of ``tokens`` fits an empty instance."""
        return blocks_of(tokens) <= self.blocks

    def has_room(self, tokens: int, held: int = 0) -> bool:
        """Return whether a request of ``tokens`` could be admitted now. ``held``: blocks that others hold already."""
        seats = len(self.running) + len(self.coming) < self._seats
        return seats and blocks_of(tokens) - held <= self.left

    def cached_prefix(self, sequence: Running) -> list[int]:
        """Return keys of a waiting request's longest cached prefix; its last token is always computed."""
        return self.prefixes.find_prefix(sequence.content, sequence.target - 1) if sequence.content else []

    @property
    def left(self) -> int:
        """Number of blocks that running sequences may still allocate."""
        return self.free

    def allocate(self, sequence: Running) -> None:
        """Allocate blocks for the cached or target tokens of a sequence, which must be free."""
        self.grow(sequence, blocks_of(max(sequence.cached, sequence.target)) - sequence.blocks)

    def grow(self, sequence: Running, blocks: int) -> None:
        """Allocate ``blocks`` more blocks for a sequence, which must be free."""
        sequence.blocks += blocks
        self._use(blocks)
        self.prefixes.evict(self.free)

    def _use(self, blocks: int) -> None:
        self.free -= blocks
        self._order.use(blocks)

    def free_blocks(self, sequence: Running) -> None:
        """Free the blocks of a sequence."""
        self.free_detached(*self.detach_blocks(sequence))

    def detach_blocks(self, sequence: Running) -> tuple[int, list[int]]:
        """Take the blocks of a sequence, whose KV then moves; they stay in use until ``free_detached``."""
        held = sequence.blocks, sequence.shared
        sequence.blocks, sequence.shared = 0, []
        return held

    def free_detached(self, blocks: int, shared: list[int]) -> None:
        """Free the blocks returned by ``detach_blocks``."""
        freed = blocks - self.prefixes.blocks(shared) + self.prefixes.release(shared)
        self.free += freed
        self._order.add(freed)

    @property
    def queue(self) -> list[Running]:
        """All requests that wait."""
        return [*self.waiting, *self.late]

    def enter(self, request: Running) -> None:
        """Let a request wait."""
        (self.late if self._engine.plans_ahead and not self.idle else self.waiting).append(request)

    def plan(self) -> Batch | None:
        """Return the next step; None if there is nothing to do."""
        batch = self._plan()
        self.waiting.extend(self.late)
        self.late.clear()
        return batch or (self._plan() if self.waiting else None)

    def _plan(self) -> Batch | None:
        if self._chunked:
            preempted = self.preempted
            decoding = self._decoding()
            batch = Batch(decoding, self._chunks(self._rows - len(decoding), admits=self.preempted == preempted))
        else:
            chunks = self._whole_prompts()
            batch = Batch([] if chunks else self._decoding(), chunks)
        return batch if batch.decoding or batch.chunks else None

    def _decoding(self) -> list[Running]:
        """Return the sequences that decode, each with a block for its next token; preempt the latest ones if needed."""
        decoding = [sequence for sequence in self.running if sequence.cached >= sequence.target]
        full = [sequence for sequence in decoding if sequence.cached == sequence.blocks * BLOCK]
        for sequence in full:
            while not self.left and sequence.blocks:
                self._preempt(self.running[-1])
            if sequence.blocks:
                self.grow(sequence, 1)
        return [sequence for sequence in decoding if sequence.blocks]

    def _preempt(self, victim: Running) -> None:
        self.running.remove(victim)
        self.free_blocks(victim)
        if self._prefix_cache and not victim.content:
            self._order.keep(victim, victim.cached // BLOCK)
        victim.cached, victim.target = 0, victim.prompt + victim.drawn
        self.waiting.appendleft(victim)
        self.preempted += 1

    def _whole_prompts(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._rows
        while self._next_has_room():
            first = self.waiting[0]
            if chunks and first.target - BLOCK * self.prefixes.blocks(self.cached_prefix(first)) > budget:
                break
            sequence = self._admit()
            chunks.append(Chunk(sequence, sequence.cached, sequence.target - sequence.cached))
            budget -= chunks[-1].length
        return chunks

    def _next_has_room(self) -> bool:
        return bool(self.waiting) and self.has_room(
            self.waiting[0].target, self.prefixes.held(self.cached_prefix(self.waiting[0]))
        )

    def _chunks(self, budget: int, admits: bool) -> list[Chunk]:
        chunks: list[Chunk] = []
        begun = [sequence for sequence in self.running if sequence.cached < sequence.target]
        while budget > 0 and (begun or (admits and self._next_has_room())):
            sequence = begun.pop(0) if begun else self._admit()
            length = min(budget, sequence.target - sequence.cached)
            chunks.append(Chunk(sequence, sequence.cached, length))
            budget -= length
        return chunks

    def _admit(self) -> Running:
        sequence = self.waiting.popleft()
        sequence.shared = self.cached_prefix(sequence)
        kept = self._order.reclaim(sequence)
        self.free -= kept
        self._use(self.prefixes.acquire(sequence.shared))
        sequence.blocks = self.prefixes.blocks(sequence.shared) + kept
        sequence.cached = BLOCK * sequence.blocks
        self.prefixes.queried += sequence.target if sequence.content else 0
        self.prefixes.hit += sequence.cached if sequence.content else 0
        self.allocate(sequence)
        self.running.append(sequence)
        return sequence

    def step_seconds(self, batch: Batch) -> float:
        """Return the seconds that one step takes."""
        return float(self.run_seconds(batch, 1)[0])

    def run_seconds(self, batch: Batch, steps: int) -> Floats:
        """Return the seconds of each of ``steps`` steps of one batch, which has no chunks if ``steps`` > 1."""
        layers, cost, tp, engine = self._cost.shape.layers, self._cost, self._tp, self._engine
        decoding = len(batch.decoding)
        rows = decoding + sum(chunk.length for chunk in batch.chunks)
        attention: Floats = np.zeros(steps)
        if batch.decoding:
            tokens = sum(sequence.cached for sequence in batch.decoding) + decoding * np.arange(1, steps + 1)
            attention = cost.attention_seconds(tokens, decoding, 1 / tp)
        for chunk in batch.chunks:
            attention = attention + float(cost.chunk_attention_seconds(chunk.length, chunk.start, tp))
        draws = decoding + sum(chunk.start + chunk.length == chunk.sequence.target for chunk in batch.chunks)
        host_s = engine.step_s + engine.step_row_s * draws
        return self.factor * (layers * (self._slice(rows) + attention) + self._slices.ends[draws] + host_s)

    def steps_alike(self, batch: Batch, most: int) -> int:
        """Return how many times, up to ``most``, a batch can run without a preemption or another admission.

        1 if it has chunks. ``complete_steps`` allocates the blocks that the sequences then need.
        """
        if batch.chunks or self._next_has_room():
            return 1
        spare = np.array([sequence.blocks * BLOCK - sequence.cached for sequence in batch.decoding])

        def enough(steps: int) -> bool:
            return int(-(-np.maximum(steps - spare, 0) // BLOCK).sum()) <= self.left

        if enough(most):
            return most
        return bisect.bisect_left(range(most), True, key=lambda steps: not enough(steps + 1))

    def least_seconds(self, batch: Batch) -> float:
        """Return a lower bound of the seconds of a step of a batch without chunks: the slices' alone."""
        return self.factor * self._cost.shape.layers * self._slice(len(batch.decoding))

    def _slice(self, rows: int) -> float:
        inner = self._slices.inner
        return inner[rows] if rows < len(inner) else float(self._cost.slice_seconds(rows, self._tp))

    def complete(self, batch: Batch) -> list[Running]:
        """Record that a step has run; return the sequences that generated a token."""
        drew = list(batch.decoding)
        for sequence in drew:
            sequence.cached += 1
        for chunk in batch.chunks:
            chunk.sequence.cached = chunk.start + chunk.length
            if chunk.sequence.cached == chunk.sequence.target:
                drew.append(chunk.sequence)
                self._publish(chunk.sequence)
        for sequence in drew:
            sequence.drawn += 1
        return drew

    def complete_steps(self, batch: Batch, steps: int) -> None:
        """Record that ``steps`` steps of a batch without chunks have run, and allocate blocks for one more."""
        for sequence in batch.decoding:
            sequence.cached += steps
            sequence.drawn += steps
            self.grow(sequence, max(0, blocks_of(sequence.cached + 1) - sequence.blocks))

    def _publish(self, sequence: Running) -> None:
        if sequence.content:
            sequence.shared = self.prefixes.publish(sequence.content, sequence.shared, sequence.cached)

    def remove_sequence(self, sequence: Running) -> None:
        """Remove a running sequence that has ended."""
        self._publish(sequence)
        self.running.remove(sequence)
        self.free_blocks(sequence)
