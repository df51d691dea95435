"""Implements ``Transfers`` on a GPU: moves rows between GPU memory and messages by recorded kernels.

For every attention, the host replays one recording that writes the rows of all messages, and waits for it. Rows are
written to peers' inboxes or mapped slots, else to pinned memory that messages are sent from. Once all replies have
arrived, the host copies them to the GPU and replays one recording that merges them, followed by the next slice without
a wait. The host does no work per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.compute.device.base import Array, ExchangedRows, Floats, Indices, Partial, Reply
from lamina.compute.device.kit import Kit, Replay, padded_rows
from lamina.core.types import AttentionSpec
from lamina.dataplane.leases import ALIGNMENT
from lamina.splitter import as_numpy


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge P partials over disjoint tokens: outs float32 [P, T, H, Dv], natural-log lses [P, T, H], sinks [H].

    An empty partial has an lse of -inf and a finite out; rows with only empty partials become 0.
    """
    if len(outs) == 1 and sinks is None:
        return outs[0]
    top = lses.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (lses - top).exp_()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks - top).exp_()
    merged = (weights[..., None] * outs).sum(0)
    return merged / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]


@dataclass(frozen=True)
class Arrivals:
    """Layout of all partials in one float32 array: for each source, out [n, h, Dv], then lse [n, h].

    A source begins at a multiple of ``h * Dv``. The array begins with an empty partial: out 0, lse -inf.

    Attributes:
        starts: Offset of each source.
        end: Offset after the last source.
        outs: int64 [P, S], the row of partial p of shard s in the array viewed as rows of h * Dv.
        lses: int64 [P, S], the row of the partial's lse in the array viewed as rows of h.
    """

    starts: tuple[int, ...]
    end: int
    outs: Indices
    lses: Indices


def arrange(exchanged: ExchangedRows, heads: int, v_dim: int) -> Arrivals:
    """Return the layout of partials with ``heads`` heads per shard: this worker's first, then memory workers'."""
    unit = heads * v_dim
    shape = exchanged.most_parts, exchanged.rows * exchanged.shards
    outs, lses = np.zeros(shape, np.int64), np.full(shape, v_dim, np.int64)
    starts, at = [], 2 * unit
    for shards, parts in zip(
        (*exchanged.here, *exchanged.queries), (*exchanged.here_parts, *exchanged.parts), strict=True
    ):
        count = np.arange(len(shards))
        starts.append(at)
        outs[parts, shards] = at // unit + count
        lses[parts, shards] = (at + len(shards) * unit) // heads + count
        at += -(-len(shards) * (unit + heads) // unit) * unit
    return Arrivals(tuple(starts), at, outs, lses)


class Lines:
    """Memory at fixed addresses that all steps on a GPU share, and the recordings that use it. One for each runner."""

    def __init__(self, kit: Kit, most: int) -> None:
        """``most``: most rows of a recorded step."""
        self.kit = kit
        self.most = most
        self._fixed: dict[object, Tensor] = {}
        self._views: dict[object, Tensor] = {}
        self._recorded: dict[object, Replay] = {}
        self._held: dict[object, object] = {}
        self._addresses = set[int]()

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor begins at the address of fixed memory."""
        return tensor.data_ptr() in self._addresses

    def fixed_rows(self, what: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the first ``count`` rows of fixed memory for rows of ``shape``; the same tensor at every call."""
        key = what, shape, dtype, count
        if key not in self._views:
            self._views[key] = self.fixed((what, shape, dtype), (self.most, *shape), dtype)[:count]
        return self._views[key]

    def fixed(self, what: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fixed memory on the GPU, by purpose (``what``); initially 0."""
        if what not in self._fixed:
            self._fixed[what] = torch.zeros(shape, dtype=dtype, device=self.kit.place)
            self._addresses.add(self._fixed[what].data_ptr())
        return self._fixed[what]

    def pinned(self, what: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fixed pinned memory of the host, by purpose (``what``)."""
        if what not in self._fixed:
            self._fixed[what] = self.kit.pinned(shape, dtype)
        return self._fixed[what]

    def recorded(self, what: object, work: Callable[[], None]) -> Replay:
        """Return the recording of ``work``, made at the first call for ``what``."""
        if what not in self._recorded:
            self._recorded[what] = self.kit.capture(work)
        return self._recorded[what]

    def add_copy(self, what: object, owner: object, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy ``pairs`` (target, source) to fixed memory ``what``, unless ``owner`` did so last."""
        if self._held.get(what) is not owner:
            self._held[what] = owner
            for target, source in pairs:
                target.copy_(source)


@dataclass(frozen=True)
class _Group:
    """Rows of one kind (q, or k and v) in messages: ``shards`` by message."""

    shards: Sequence[Indices]

    @property
    def counts(self) -> list[int]:
        """Number of rows in each message."""
        return [len(each) for each in self.shards]

    def table(self, before: Sequence[int], exchanged: ExchangedRows) -> Tensor:
        """Return the table for ``Kit.write_rows``, padded with columns of no message to one of few lengths.

        Args:
            before: By message, rows of each kind before this group.
            exchanged: The step's rows.
        """
        counts = np.array(self.counts, np.int64)
        total = int(counts.sum())
        length = (
            exchanged.rows * exchanged.shards if total == exchanged.total * exchanged.shards else padded_rows(total)
        )
        table = np.full((4, length), -1, np.int32)
        table[0, :total] = np.concatenate([*self.shards, np.empty(0, np.int64)])
        table[1, :total] = np.repeat(np.arange(len(counts)), counts)
        table[2, :total] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        table[3, :total] = np.repeat(np.array(before, np.int64), counts)
        return torch.from_numpy(table)


@dataclass(frozen=True)
class _Collected:
    """One recording that writes the rows of messages.

    Attributes:
        sources: Tensors that it reads rows from.
        tables: Tables of the rows, for ``Lines.add_copy``.
        bodies: int64, addresses that it writes to.
        starts: Address of pinned memory for each message.
        replay: Runs the recording.
        messages: Views of the pinned memory, by kind and message.
    """

    sources: tuple[Tensor, ...]
    tables: tuple[tuple[object, tuple[Tensor, Tensor]], ...]
    bodies: Array
    starts: Sequence[int]
    replay: Replay
    messages: tuple[list[Array], ...]


@dataclass(frozen=True)
class _Merge:
    """One recorded merge; ``targets`` are the places of partials, this worker's own first."""

    targets: tuple[Tensor, ...]
    sinks: Tensor | None
    replay: Replay
    result: Tensor


class GpuTransfers:
    """``Transfers`` of one step."""

    lingers = True

    def __init__(self, lines: Lines, exchanged: ExchangedRows, dtype: torch.dtype) -> None:
        self._lines, self._exchanged, self._dtype = lines, exchanged, dtype
        self._groups = {"queries": _Group(exchanged.queries), "appends": _Group(exchanged.appends)}
        before = self._groups["appends"].counts
        self._tables = {name: group.table(before, exchanged) for name, group in self._groups.items()}
        self._recorded = exchanged.rows <= lines.most
        self._answering = [number for number, shards in enumerate(exchanged.queries) if len(shards)]
        self._collected: dict[object, _Collected] = {}
        self._merges: dict[object, _Merge] = {}
        self._replies: dict[tuple[int, int, int, bool], Tensor] = {}

    def fill_messages(
        self, q: Tensor, k: Tensor, v: Tensor, bodies: Sequence[int] = ()
    ) -> tuple[list[Array], list[Array], list[Array]]:
        sources = ("appends", k), ("appends", v), ("queries", q)
        key = id(k), id(v), id(q)  # slices leave their results in the same tensors every time
        found = self._collected.get(key)
        if found is None:
            recorded = self._recorded and all(self._lines.owns(source) for _, source in sources)
            found = self._plan_collecting(sources, recorded)
            if recorded:
                self._collected[key] = found
        for what, pair in found.tables:
            self._lines.add_copy(what, self, pair)
        pinned = found.starts
        found.bodies[:] = [at or start for at, start in zip(bodies, pinned, strict=True)] if bodies else pinned
        found.replay()
        self._lines.kit.synchronize()
        keys, values, queries = found.messages
        return queries, keys, values

    def bulk(self, k: Tensor, v: Tensor) -> tuple[Array, Array]:
        """Return K and V of a chunk in pinned memory, of few sizes."""
        pairs = [(source, self._bulk_host(number, source)) for number, source in enumerate((k, v))]
        for source, host in pairs:
            host.copy_(source, non_blocking=True)
        self._lines.kit.synchronize()
        return as_numpy(pairs[0][1]), as_numpy(pairs[1][1])

    def _bulk_host(self, number: int, source: Tensor) -> Tensor:
        rows, *shape = source.shape
        most = 1 << (rows - 1).bit_length()
        return self._lines.pinned(("bulk", number, most, *shape, source.dtype), (most, *shape), source.dtype)[:rows]

    def wait_for_reads(self) -> None:
        self._lines.kit.synchronize()

    def _plan_collecting(self, sources: Sequence[tuple[str, Tensor]], recorded: bool) -> _Collected:
        lines, count, shards = self._lines, len(self._exchanged.queries), self._exchanged.shards
        tables = {name: self._table(name, recorded) for name, _ in sources}
        for what, pair in tables.values():
            if recorded:  # before it is recorded: that reads rows as well
                lines.add_copy(what, self, pair)
        most = 1 << max(6, (count - 1).bit_length())
        bodies = lines.pinned(("bodies", most), (most,), torch.int64)
        arrays, starts = self._lay_out(sources)
        bodies[:count] = torch.tensor(starts)
        ways, lead = [], 0
        for name, source in sources:
            rows, heads, size = source.shape
            # A copy if the model computes q, k and v as one: recorded slices leave each in memory of its own.
            split = source.contiguous().view(rows * shards, heads // shards, size)
            ways.append((split, tables[name][1][0], lead))
            lead += ways[-1][0][0].nbytes

        def work() -> None:
            for rows, table, lead in ways:
                lines.kit.write_rows(rows, table, bodies, lead)

        key = most, tuple((rows.data_ptr(), rows.shape, table.data_ptr(), lead) for rows, table, lead in ways)
        replay = lines.recorded(key, work) if recorded else work
        held = tuple(tables.values()) if recorded else ()
        return _Collected(tuple(source for _, source in sources), held, bodies.numpy()[:count], starts, replay, arrays)

    def _table(self, name: str, recorded: bool) -> tuple[object, tuple[Tensor, Tensor]]:
        """Return where rows of a group are written: a name, memory on the card, and its content."""
        table = self._tables[name]
        what = "table", name, table.shape[1]
        if not recorded:
            return what, (table.to(self._lines.kit.place), table)
        return what, (self._lines.fixed(what, tuple(table.shape), table.dtype), table)

    def _lay_out(self, sources: Sequence[tuple[str, Tensor]]) -> tuple[tuple[list[Array], ...], list[int]]:
        """Return views and addresses of pinned memory for messages, by source and message."""
        shards = self._exchanged.shards
        shapes = [(source.shape[1] // shards, source.shape[2]) for _, source in sources]
        counts = [self._groups[name].counts for name, _ in sources]
        element = sources[0][1].element_size()
        sizes = [[n * heads * size * element for n in each] for each, (heads, size) in zip(counts, shapes, strict=True)]
        ends = np.cumsum([-(-sum(each) // ALIGNMENT) * ALIGNMENT for each in zip(*sizes, strict=True)]).tolist()
        capacity = 1 << (max([1, *ends]) - 1).bit_length()
        memory = self._lines.pinned(("messages", capacity), (capacity,), torch.uint8)
        nbytes, kind = memory.numpy(), as_numpy(torch.empty(0, dtype=sources[0][1].dtype)).dtype
        arrays: tuple[list[Array], ...] = tuple([] for _ in sources)
        starts = [0, *ends[:-1]][: len(ends)]
        for message, at in enumerate(starts):
            for rows, each, size, shape in zip(arrays, counts, sizes, shapes, strict=True):
                rows.append(nbytes[at : at + size[message]].view(kind).reshape(each[message], *shape))
                at += size[message]  # noqa: PLW2901
        return arrays, [memory.data_ptr() + at for at in starts]

    def merged(
        self,
        spec: AttentionSpec,
        here: Sequence[Partial],
        replies: Sequence[Reply],
        sinks: Floats | None,
    ) -> Tensor:
        key = spec.query_heads, spec.v_dim, sinks is not None
        merge = self._merges.get(key)
        if merge is None:
            merge = self._merges[key] = self._plan_merge(spec, sinks is not None)
        for number in self._answering:
            self._lines.kit.upload(merge.targets[len(here) + number], self._body(number, *replies[number]))
        for (out, lse), target in zip(here, merge.targets, strict=False):
            target[: out.numel()].copy_(out.reshape(-1))
            target[out.numel() :].copy_(lse.reshape(-1))
        if merge.sinks is not None and sinks is not None:
            merge.sinks.copy_(torch.from_numpy(sinks))
        merge.replay()
        return merge.result

    def _body(self, number: int, slot: int, body: Any) -> Tensor:
        arrived = isinstance(body, Tensor)
        key = number, slot, len(body), arrived
        known = self._replies.get(key)
        if known is None:
            known = (
                body.view(torch.float32) if isinstance(body, Tensor) else torch.frombuffer(body, dtype=torch.float32)
            )
            if slot >= 0:
                self._replies[key] = known
        return known

    def _plan_merge(self, spec: AttentionSpec, has_sinks: bool) -> _Merge:
        exchanged, lines, v_dim = self._exchanged, self._lines, spec.v_dim
        heads = spec.query_heads // exchanged.shards
        plan, unit = arrange(exchanged, heads, v_dim), heads * v_dim
        # Few capacities, so that recordings can be used again: a power of two, and of all rows with padding at least.
        end = max(plan.end, 2 * unit + exchanged.rows * exchanged.shards * (unit + heads))
        capacity = (1 << (-(-end // unit) - 1).bit_length()) * unit
        shape = (exchanged.rows, spec.query_heads, v_dim)
        indices = torch.from_numpy(np.stack([plan.outs, plan.lses]))
        what = (heads, v_dim, exchanged.shards, exchanged.rows, exchanged.most_parts, capacity, has_sinks)
        if self._recorded:
            arrivals = lines.fixed(("arrivals", heads, v_dim, capacity), (capacity,), torch.float32)
            tables = lines.fixed(("tables", what), tuple(indices.shape), torch.int64)
            result = lines.fixed_rows("in 0", exchanged.rows, shape[1:], self._dtype)
            sinks = lines.fixed(("sinks", spec.query_heads), (spec.query_heads,), torch.float32) if has_sinks else None
        else:
            arrivals = torch.zeros(capacity, device=lines.kit.place)
            tables = indices.to(lines.kit.place)
            result = torch.empty(shape, dtype=self._dtype, device=lines.kit.place)
            sinks = torch.empty(spec.query_heads, device=lines.kit.place) if has_sinks else None
        arrivals[:unit], arrivals[unit : 2 * unit] = 0.0, -torch.inf

        def work() -> None:
            outs = arrivals.view(-1, unit).index_select(0, tables[0].view(-1)).view(-1, *shape)
            lses = arrivals.view(-1, heads).index_select(0, tables[1].view(-1)).view(-1, *shape[:2])
            result.copy_(merge_partials(outs, lses, sinks))

        recording = lines.recorded(("merge", what), work) if self._recorded else work

        def replay() -> None:
            if self._recorded:
                lines.add_copy(("tables", what), self, (tables, indices))
            recording()

        counts = map(len, (*exchanged.here, *exchanged.queries))
        targets = [
            arrivals[start : start + count * (unit + heads)] for start, count in zip(plan.starts, counts, strict=True)
        ]
        return _Merge(tuple(targets), sinks, replay, result)
