"""Stores KV in a compute worker's own memory and attends to it without messages (``--memory local``).

Slab, bookkeeping and kernels are those of a memory worker (``lamina.memory.store``), on the compute worker's own
device.
"""

import collections
import contextlib
import functools
from collections.abc import Callable

import numpy as np

from lamina.control.sockets import ControlClient
from lamina.core.steps import StepPlan
from lamina.memory.device.base import Array, New, Table
from lamina.memory.slab_setup import UsageReports, make_store
from lamina.memory.store import KvStore, StepTables
from lamina.splitter.parts import ONLY, Rank

Partial = tuple[Array, Array]  # (out [R, Hq, Dv], lse [R, Hq]), float32
Index = slice | Array
Partials = dict[tuple[object, ...], Partial]


class LocalMemory:
    """The KV slab of a compute worker. The worker's thread owns it.

    Attributes:
        store: The slab.
        usage: Reports the slab's use to the engine.
    """

    def __init__(self, control: ControlClient, rank: Rank) -> None:
        """Allocate the slab as the engine directs. Raises ConfigError, WorkerError."""
        self.store, _, _ = make_store(control, contextlib.ExitStack())  # without a disk there is nothing to close
        self._rank = rank
        self.usage = UsageReports(control, self.store)
        # By lane: other lanes attend between the attention of a step and the merge of its result.
        self._partials = collections.defaultdict[int, Partials](dict)

    def apply_plan(self, plan: StepPlan) -> "LocalShare | None":
        """Apply a plan's deltas and allocate slots for the tokens of its step.

        Returns None if the step has no segment in this slab. Raises the errors of ``KvStore.apply``.
        """
        tables = self.store.apply(plan)[self._rank.number]  # the tables of other ranks are empty
        if tables.rows.empty:
            return None
        return LocalShare(self.store, tables, self._partials[plan.lane], self._rank)


class LocalShare:
    """The part of one step in local memory. Planned once per step, used by every attention.

    Attributes:
        worker: Name of the worker.
        queries: int64 [R], the step's rows (or shards of rows) that attend to this slab, in the order of
            ``lamina.dataplane.wire.MessageRows``.
    """

    def __init__(self, store: KvStore, tables: StepTables, partials: Partials, rank: Rank = ONLY) -> None:
        """``partials``: results by shape, overwritten by every ``attend``."""
        rows, shards = tables.rows, store.shards.range_of_rank(rank.number, rank.count)
        self.worker, self.queries = store.worker, rows.queries
        self._store, self._tables, self._partials = store, tables, partials
        self._count = count = len(shards)
        total, sent = count * sum(len(step.tokens) for step in tables.plan.sequences), store.device.sent
        self._new: Index | None = None
        kept, slots = rows.appends, tables.slots
        if tables.appends:  # attention keeps them
            self._new = _indices(kept, total, sent) if count == 1 else sent(kept)
            kept, slots = kept[:0], slots[:0]
        if rows.pulled or count > 1:  # else they are in order
            spans = [(np.arange(chunk.row, chunk.row + chunk.rows), chunk.shard) for chunk in rows.pulled]
            pulled = [each * count + shard - shards.start for each, shard in spans]
            kept, slots = np.concatenate([kept, *pulled]), np.concatenate([slots, tables.pulled_slots])
            order = np.argsort(kept)
            kept, slots = kept[order], slots[order]
        self._kept, self._slots = _indices(kept, total, sent), sent(slots)
        # With several shards, one shard after another.
        self._asking = _indices(self.queries, total, sent) if count == 1 else sent(self.queries)
        self._merges = any(tables.further)  # partials over several segments, on the host

    @functools.cached_property
    def only_table(self) -> Table | None:
        """What all rows of the step attend to, in order, while their k and v are appended. None for other steps: with
        prompt chunks, or of which a part is elsewhere."""
        tables = self._tables
        in_order = self._count == 1 and isinstance(self._asking, slice) and isinstance(self._new, slice)
        stores = len(self._slots) > 0 or tables.order.stores is not None or len(tables.order.after) > 0
        if not in_order or stores or self._merges or len(tables.tables) != 1 or len(tables.tables[0]) != 1:
            return None
        return tables.tables[0][0].table

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Partial | None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of the step's tokens, then attend with its rows of q [T, Hq, D].

        All three are device arrays. Returns (out [R, Hq, Dv], lse [R, Hq]) for ``queries``, in device or host memory,
        valid until the next call; None without queries. Hq counts the heads of a shard in the result.
        """
        if self._count > 1:
            q, k, v = (_sharded(array, self._count) for array in (q, k, v))
        device = self._store.device
        if len(self._slots):
            device.keep(layer, k[self._kept], v[self._kept], self._slots)
        self._store.watermarks.on_stored(self._tables.order, layer)
        new = None if self._new is None else New(k[self._new], v[self._new], self._tables.sent_slots)
        if not len(self.queries):
            return None
        spec = self._store.attentions[layer]
        count = len(self.queries)
        key = count, spec.query_heads, spec.v_dim, self._merges
        if key not in self._partials:
            self._partials.clear()
            self._partials[key] = device.results(count, spec) if self._merges else device.made(count, spec)
        partial, asked = self._partials[key], q[self._asking]
        if not self._merges:
            self._store.attend_there(layer, self._tables, asked, *partial, new)
            return partial
        for _ in self._store.attend(layer, self._tables, 0, asked, *partial, new):
            pass  # a memory worker would serve other messages here
        return partial


def _indices(rows: Array, total: int, sent: Callable[[Array], Array]) -> Index:
    """Return an index that selects ``rows`` of ``total`` rows: a slice if these are all rows, else an array."""
    return slice(None) if len(rows) == total else sent(rows)


def _sharded(array: Array, count: int) -> Array:
    """Rows [T, H, D] as shards of rows [T * count, H / count, D]."""
    return array.reshape(len(array) * count, -1, array.shape[2])
