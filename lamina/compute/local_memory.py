"""Stores KV in a compute worker's own memory and attends to it without messages.

Slab, bookkeeping and kernels are those of a memory worker (``lamina.memory.store``), on the compute worker's own
device. ``LocalMemory`` holds the KV of requests (``--memory local``).

``Scratch`` keeps K and V of running prompts in memory of the replica that runs them, until their last chunks (Lamina,
5.6). The chunks of such a prompt attend to these tokens here, and memory workers store K and V, and attend only to
tokens that were computed before, such as a cached prefix. The engine says in plans which chunks these are
(``lamina.schedule.scratch``). Nothing depends on scratch memory for longer than a step: memory workers have the same K
and V, so that a prompt can continue without it. Each rank and stage has scratch memory for its own heads and layers.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from lamina.compute.device.base import Runner
from lamina.control.messages import MemorySetup
from lamina.control.sockets import ControlClient
from lamina.core.sampling import SamplingParams
from lamina.core.segments import grown
from lamina.core.steps import Admission, SequenceStep, StepPlan
from lamina.core.types import Segment
from lamina.dataplane.wire import SCRATCH
from lamina.memory.device.base import Array, New, Table
from lamina.memory.slab_setup import UsageReports, make_store
from lamina.memory.store import KvStore, StepTables
from lamina.memory.watermarks import Storing
from lamina.splitter.parts import ONLY, Rank

Partial = tuple[Array, Array]  # (out [R, Hq, Dv], lse [R, Hq]), float32
Index = slice | Array
Partials = dict[tuple[object, ...], Partial]


class Served(NamedTuple):
    """What a compute worker has done for other replicas so far.

    Attributes:
        seconds: Time of attention.
        parked: Requests that have waited for earlier chunks.
        parked_nbytes: Bytes of these requests.
    """

    seconds: float = 0.0
    parked: int = 0
    parked_nbytes: int = 0


class LocalMemory:
    """Holds the KV slab of a compute worker: the heads of its rank, in the layers of its stage.

    The worker's thread owns it.

    Attributes:
        store: The slab. In plans and segments, it has the name of the replica's first stage.
    """

    def __init__(self, control: ControlClient, rank: Rank) -> None:
        """Allocate the slab as the engine directs. Raises ConfigError, WorkerError."""
        self.store, _, _ = make_store(control, contextlib.ExitStack())  # without a disk there is nothing to close
        self._rank = rank
        self._usage = UsageReports(control, self.store)
        self._parked = self._parked_nbytes = 0
        # By lane: between a step's attention and the merge of its result, other lanes may attend.
        self._partials = collections.defaultdict[int, Partials](dict)
        self._spent = Spent() if control.device == "cpu" else None

    def apply_plan(self, plan: StepPlan) -> "LocalShare | None":
        """Apply a plan's deltas and allocate slots for the tokens of its step.

        Returns None if the step has no segment in this slab. Raises the errors of ``KvStore.apply``.
        """
        tables = self.store.apply(plan, self._rank.count)[self._rank.number]  # those of other ranks are empty
        if tables.rows.empty:
            return None
        return LocalShare(self.store, tables, self._partials[plan.lane], self._rank, self._spent)

    def note_parked(self, nbytes: int) -> None:
        """Record that ``nbytes`` of q, k and v of this replica wait until earlier chunks are stored."""
        self._parked += 1
        self._parked_nbytes += nbytes

    def report_usage(self, served: Served) -> None:
        """Report the slab's use, attention and waits, if a report is due.

        ``served``: Attention for other replicas. On a GPU no time of attention is known, since kernels run later.
        """
        busy_s = 0.0 if self._spent is None else self._spent.seconds + served.seconds
        self._usage.send_if_due(busy_s, self._parked + served.parked, self._parked_nbytes + served.parked_nbytes)


@dataclass
class Spent:
    """Time spent on attention."""

    seconds: float = 0.0


class LocalShare:
    """Attends to the KV of one step in local memory. Planned once per step, used by every attention.

    Attributes:
        worker: Name of the slab.
        queries: int64 [R], the step's rows (or shards of rows) that attend to this slab, in the order of
            ``lamina.dataplane.wire.MessageRows``.
    """

    def __init__(
        self, store: KvStore, tables: StepTables, partials: Partials, rank: Rank = ONLY, spent: Spent | None = None
    ) -> None:
        """``partials``: result arrays by shape, which every ``attend`` overwrites. ``spent``: counts its time."""
        rows, shards = tables.rows, store.shards.range_of_rank(rank.number, rank.count)
        self.worker, self.queries = store.worker, rows.queries
        self._store, self._tables, self._partials, self._spent = store, tables, partials, spent
        self._kept = -1  # the layer whose k and v ``keep`` has stored last
        self._count = count = len(shards)
        total, sent = count * tables.plan.row_count, store.device.sent
        self._new: Index | None = None
        stored, slots = rows.appends, tables.slots  # what ``attend`` stores before attention
        if tables.appends:  # attention itself stores these rows
            self._new = _indices(stored, total, sent) if count == 1 else sent(stored)
            stored, slots = stored[:0], slots[:0]
        if rows.pulled or count > 1:  # otherwise the rows ascend already
            spans = [(np.arange(chunk.row, chunk.row + chunk.rows), chunk.shard) for chunk in rows.pulled]
            pulled = [each * count + shard - shards.start for each, shard in spans]
            stored, slots = np.concatenate([stored, *pulled]), np.concatenate([slots, tables.pulled_slots])
            order = np.argsort(stored)
            stored, slots = stored[order], slots[order]
        self._stored, self._slots = _indices(stored, total, sent), sent(slots)
        # ``queries`` as an index of rows, or of shards of rows: those go shard by shard and are never all in order.
        self._query_index = _indices(self.queries, total, sent) if count == 1 else sent(self.queries)
        self._merges = any(tables.further)  # the host merges partials, since some rows attend to several segments

    @functools.cached_property
    def only_table(self) -> Table | None:
        """The one table that all rows of the step attend to, in order, while they append k and v.

        None if the step has prompt chunks or a part elsewhere.
        """
        tables = self._tables
        in_order = self._count == 1 and isinstance(self._query_index, slice) and isinstance(self._new, slice)
        stores = len(self._slots) > 0 or tables.order.stores is not None or len(tables.order.after) > 0
        if not in_order or stores or self._merges or len(tables.tables) != 1 or len(tables.tables[0]) != 1:
            return None
        return tables.tables[0][0].table

    def missing(self, layer: int) -> list[Storing]:
        """Return the earlier chunks in other lanes for whose K and V ``attend`` must wait; empty once it may begin."""
        return self._tables.order.missing(layer - self._store.first)

    def keep(self, layer: int, k: Array, v: Array) -> None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of the step's tokens before ``attend``, which stores what is left."""
        if self._new is None:
            k, v = (_sharded(each, self._count) for each in (k, v)) if self._count > 1 else (k, v)
            self._keep(layer - self._store.first, k, v)

    def _keep(self, layer: int, k: Array, v: Array) -> None:
        if self._kept == layer:
            return
        if len(self._slots):
            self._store.device.keep(layer, k[self._stored], v[self._stored], self._slots)
        self._store.watermarks.on_stored(self._tables.order, layer)
        self._kept = layer

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Partial | None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of the step's tokens, then attend with its rows of q [T, Hq, D].

        Nothing must be ``missing`` at this layer. All three are device arrays. Returns (out [R, Hq, Dv], lse [R, Hq])
        of ``queries`` in device or host memory, valid until the next call; None if there are no queries. In the result,
        Hq is the number of heads of a shard.
        """
        begun = time.monotonic()
        partial = self._attend(layer - self._store.first, q, k, v)
        if self._spent is not None:
            self._spent.seconds += time.monotonic() - begun
        return partial

    def _attend(self, layer: int, q: Array, k: Array, v: Array) -> Partial | None:
        if self._count > 1:
            q, k, v = (_sharded(array, self._count) for array in (q, k, v))
        device = self._store.device
        self._keep(layer, k, v)
        new = None if self._new is None else New(k[self._new], v[self._new], self._tables.sent_slots)
        if not len(self.queries):
            return None
        spec = self._store.attentions[layer]
        count = len(self.queries)
        key = count, spec.query_heads, spec.v_dim, self._merges
        if key not in self._partials:
            self._partials.clear()
            self._partials[key] = device.results(count, spec) if self._merges else device.device_results(count, spec)
        partial, queries = self._partials[key], q[self._query_index]
        if not self._merges:
            self._store.attend_there(layer, self._tables, queries, *partial, new)
            return partial
        for _ in self._store.attend(layer, self._tables, 0, queries, *partial, new):
            pass  # where a memory worker would serve other messages
        return partial


def _indices(rows: Array, total: int, sent: Callable[[Array], Array]) -> Index:
    """Return an index that selects ``rows`` of ``total`` rows: a slice if ``rows`` are all of them, else an array."""
    return slice(None) if len(rows) == total else sent(rows)


def _sharded(array: Array, count: int) -> Array:
    """View rows [T, H, D] as shards of rows [T * count, H / count, D]."""
    return array.reshape(len(array) * count, -1, array.shape[2])


class ScratchShare:
    """Stores the chunks of one step in scratch memory, and attends to the tokens before them that are there."""

    def __init__(self, share: LocalShare, store: KvStore, layers: Sequence[int], ending: Sequence[int]) -> None:
        """``layers``: attentions of the worker's slices. ``ending``: sequences whose last chunk the step runs."""
        self.queries = share.queries
        self._share, self._store, self._layers, self._ending = share, store, layers, ending

    def attend(self, index: int, q: Array, k: Array, v: Array) -> Partial | None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of the step's tokens, then attend with the rows ``queries`` of
        q [T, Hq, D]; arguments and result are those of ``LocalShare.attend``.

        After the worker's last attention, the prompts that end are forgotten.
        """
        partial = self._share.attend(self._layers.index(index), q, k, v)
        if index == self._layers[-1]:
            self._store.release(self._ending)
        return partial


class Scratch:
    """The scratch memory of a compute worker. The worker's thread owns it."""

    def __init__(self, store: KvStore, layers: Sequence[int]) -> None:
        """``layers``: attentions of the worker's slices, in the order of the store's."""
        self.store, self._layers = store, layers
        self._partials: Partials = {}  # merged before the next attention, so that all lanes share them

    @classmethod
    def allocate(cls, control: ControlClient, runner: Runner) -> "Scratch":
        """Allocate the slab as the engine directs. Raises ConfigError, WorkerError."""
        layers = [index for index in runner.slices if index < len(runner.attentions)]
        own = [runner.attentions[index] for index in layers] or list(runner.attentions[:1])

        def part(setup: MemorySetup) -> MemorySetup:
            return msgspec.structs.replace(setup, attentions=own)

        remedy = "Free memory there, or set --prompt-attention memory"
        store, _, _ = make_store(control, contextlib.ExitStack(), part, SCRATCH, remedy)  # it has no disk to close
        return cls(store, layers)

    def apply_plan(self, plan: StepPlan) -> ScratchShare | None:
        """Allocate slots for the chunks of a plan whose released prompts are forgotten; None without such chunks."""
        chunks = [chunk for chunk in plan.chunks if chunk.scratch is not None]
        if not chunks or not self._layers:
            return None
        begun = [self._admission(chunk) for chunk in chunks if chunk.start == chunk.scratch]
        rows = StepPlan(plan.step, plan.lane, plan.turn, [], [], begun, plan.chunks, plan.decoding)
        tables = self.store.apply(rows)[0]
        ending = [chunk.sequence for chunk in chunks if chunk.draws]
        return ScratchShare(LocalShare(self.store, tables, self._partials), self.store, self._layers, ending)

    def _admission(self, chunk: SequenceStep) -> Admission:
        elsewhere = Segment(chunk.sequence, "", self.store.shards.whole, (0, None))
        here = replace(elsewhere, worker=SCRATCH, tokens=(chunk.start, None))
        return Admission(chunk.sequence, 1, chunk.stop, grown([elsewhere], here), SamplingParams(), 0)

    def end_epoch(self) -> None:
        """Forget all prompts: those that continue use memory workers."""
        self.store.truncate({})
