"""Moves rows between a GPU and messages: gathered and merged on the device, as planned once per step.

For every attention, the host starts one recording that gathers the rows of all messages in their order and copies them
to pinned memory, and waits for it; once all replies are here, it copies each as it is, and starts one recording that
merges, and the next slice behind it, without a wait in between. Nothing is done per row, and messages are parts of one
array that stays where it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lamina.compute.device.base import Array, Floats, Partial, Reply
from lamina.compute.device.kit import Kit, Replay, padded_rows
from lamina.compute.device.moves import Indices, Moves, arrange
from lamina.splitter import as_numpy
from lamina.types import AttentionSpec


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge P partials over disjoint tokens: outs float32 [P, T, H, Dv], natural-log lses [P, T, H], sinks [H].

    A partial of nothing has an lse of -inf and a finite out; what has only such ones becomes 0.
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


def _padded(index: Indices, moves: Moves) -> Tensor:
    """An index, and zeros up to one of few lengths: what they gather is discarded. If all rows travel, there is one
    length for each number of rows with padding."""
    every = len(index) == moves.total * moves.shards
    length = moves.rows * moves.shards if every else padded_rows(len(index))
    return torch.from_numpy(np.pad(index, (0, length - len(index))))


class Lines:
    """What all steps on a card share: memory that stays where it is, and what is recorded on it. One to a runner."""

    def __init__(self, kit: Kit, most: int) -> None:
        """``most``: rows of the largest step that is recorded."""
        self.kit = kit
        self.most = most
        self._fixed: dict[object, Tensor] = {}
        self._views: dict[object, Tensor] = {}
        self._recorded: dict[object, Replay] = {}
        self._held: dict[object, object] = {}
        self._addresses = set[int]()

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor begins where fixed memory does."""
        return tensor.data_ptr() in self._addresses

    def at(self, what: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Fixed memory for ``count`` rows of this shape, the first of as many as are ever recorded: the same tensor
        every time."""
        key = what, shape, dtype, count
        if key not in self._views:
            self._views[key] = self.fixed((what, shape, dtype), (self.most, *shape), dtype)[:count]
        return self._views[key]

    def fixed(self, what: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Fixed memory on the card, by what it is for; 0 at first."""
        if what not in self._fixed:
            self._fixed[what] = torch.zeros(shape, dtype=dtype, device=self.kit.place)
            self._addresses.add(self._fixed[what].data_ptr())
        return self._fixed[what]

    def pinned(self, what: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Fixed memory of the host that the card copies to."""
        if what not in self._fixed:
            self._fixed[what] = self.kit.pinned(shape, dtype)
        return self._fixed[what]

    def recorded(self, what: object, work: Callable[[], None]) -> Replay:
        """``work``, recorded at its first use."""
        if what not in self._recorded:
            (self._recorded[what],) = self.kit.capture(lambda cut: work())
        return self._recorded[what]

    def hold(self, what: object, owner: object, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy to fixed memory ``what``, in (target, source) ``pairs``, unless ``owner`` did so last."""
        if self._held.get(what) is not owner:
            self._held[what] = owner
            for target, source in pairs:
                target.copy_(source)


@dataclass(frozen=True)
class _Group:
    """Rows of one kind that travel: q, or k and v. ``index``: their shards, of all messages one after another."""

    index: Indices
    ends: tuple[int, ...]  # of each message

    @classmethod
    def of(cls, shards: Sequence[Indices]) -> "_Group":
        ends = np.cumsum([len(each) for each in shards]).tolist()
        return cls(np.concatenate([*shards, np.empty(0, np.int64)]), tuple(ends))

    def cut(self, rows: Array) -> list[Array]:
        """The rows of each message."""
        return np.split(rows[: len(self.index)], self.ends[:-1]) if self.ends else []


@dataclass(frozen=True)
class _Collected:
    """One recording that gathers rows, and where the rows of each message are then, by kind.

    Attributes:
        sources: what it gathers from. indices: what it reads besides, for ``Lines.hold``.
    """

    sources: tuple[Tensor, ...]
    indices: tuple[tuple[object, tuple[Tensor, Tensor]], ...]
    replay: Replay
    messages: tuple[list[Array], ...]


@dataclass(frozen=True)
class _Merge:
    """One merge: where partials are copied to, those from here first, and where the result is."""

    targets: tuple[Tensor, ...]
    sinks: Tensor | None
    replay: Replay
    result: Tensor


class GpuTransfers:
    """``Transfers`` of one step."""

    lingers = True

    def __init__(self, lines: Lines, moves: Moves, dtype: torch.dtype) -> None:
        self._lines, self._moves, self._dtype = lines, moves, dtype
        self._groups = {"queries": _Group.of(moves.queries), "appends": _Group.of(moves.appends)}
        self._padded = {name: _padded(group.index, moves) for name, group in self._groups.items()}
        self._recorded = moves.rows <= lines.most
        self._answering = [number for number, shards in enumerate(moves.queries) if len(shards)]
        self._collected: dict[object, _Collected] = {}
        self._merges: dict[object, _Merge] = {}
        self._bodies: dict[tuple[int, int, int], Tensor] = {}

    def queries(self, q: Tensor) -> list[Array]:
        """See ``Transfers``."""
        return self._collect(("queries", q))[0]

    def all(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Array], list[Array], list[Array]]:
        """See ``Transfers``."""
        queries, keys, values = self._collect(("queries", q), ("appends", k), ("appends", v))
        return queries, keys, values

    def keys_values(self, k: Tensor, v: Tensor) -> tuple[list[Array], list[Array]]:
        """See ``Transfers``."""
        keys, values = self._collect(("appends", k), ("appends", v))
        return keys, values

    def bulk(self, k: Tensor, v: Tensor) -> tuple[Array, Array]:
        """See ``Transfers``; through pinned memory, of few sizes."""
        pairs = [(source, self._bulk_host(number, source)) for number, source in enumerate((k, v))]
        for source, host in pairs:
            host.copy_(source, non_blocking=True)
        self._lines.kit.wait()
        return as_numpy(pairs[0][1]), as_numpy(pairs[1][1])

    def _bulk_host(self, number: int, source: Tensor) -> Tensor:
        rows, *shape = source.shape
        most = 1 << (rows - 1).bit_length()
        return self._lines.pinned(("bulk", number, most, *shape, source.dtype), (most, *shape), source.dtype)[:rows]

    def settle(self) -> None:
        """See ``Transfers``."""
        self._lines.kit.wait()

    def _collect(self, *sources: tuple[str, Tensor]) -> tuple[list[Array], ...]:
        """The rows of each message of these tensors [rows, H, D], by the names of their groups, in pinned memory."""
        key = tuple(id(source) for _, source in sources)  # slices leave their results in the same tensors every time
        found = self._collected.get(key)
        if found is None:
            recorded = self._recorded and all(self._lines.has(source) for _, source in sources)
            found = self._plan_collecting(sources, recorded)
            if recorded:
                self._collected[key] = found
        for what, pair in found.indices:
            self._lines.hold(what, self, pair)
        found.replay()
        self._lines.kit.wait()
        return found.messages

    def _plan_collecting(self, sources: Sequence[tuple[str, Tensor]], recorded: bool) -> _Collected:
        indices = tuple(self._fixed(name) for name in dict.fromkeys(name for name, _ in sources)) if recorded else ()
        for what, pair in indices:  # before it is recorded: that reads rows as well
            self._lines.hold(what, self, pair)
        ways = [self._way(number, name, source, recorded) for number, (name, source) in enumerate(sources)]

        def work() -> None:
            for rows, index, stage, host in ways:
                torch.index_select(rows, 0, index, out=stage)
                host.copy_(stage, non_blocking=True)

        key = tuple((rows.data_ptr(), rows.shape, index.data_ptr(), len(index)) for rows, index, _, _ in ways)
        replay = self._lines.recorded(key, work) if recorded else work
        hosts = [self._groups[name].cut(as_numpy(host)) for (name, _), (*_, host) in zip(sources, ways, strict=True)]
        return _Collected(tuple(source for _, source in sources), indices, replay, tuple(hosts))

    def _way(self, number: int, name: str, source: Tensor, recorded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The shards of a tensor; the index of those that travel; memory for them on the card and on the host."""
        rows, heads, size = source.shape
        # A copy if the model computes q, k and v as one: recorded slices leave each in memory of its own.
        shards = source.reshape(rows * self._moves.shards, heads // self._moves.shards, size)
        if not recorded:
            index = torch.from_numpy(self._groups[name].index).to(self._lines.kit.place)
            host = self._lines.kit.pinned((len(index), *shards.shape[1:]), source.dtype)
            return shards, index, torch.empty_like(host, device=source.device), host
        (_, (index, _)), shape = self._fixed(name), tuple(shards.shape[1:])
        what, most = (number, name, shape, source.dtype, len(index)), (len(index), *shape)
        stage = self._lines.fixed(("stage", *what), most, source.dtype)
        return shards, index, stage, self._lines.pinned(("host", *what), most, source.dtype)

    def _fixed(self, name: str) -> tuple[object, tuple[Tensor, Tensor]]:
        """Fixed memory for the shards of a group, padded to one of few lengths: its name, and (memory, content)."""
        padded = self._padded[name]
        what = "index", name, len(padded)
        return what, (self._lines.fixed(what, (len(padded),), torch.int64), padded)

    def merged(
        self,
        spec: AttentionSpec,
        here: Sequence[Partial],
        replies: Sequence[Reply],
        sinks: Floats | None,
    ) -> Tensor:
        """See ``Transfers``."""
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

    def _body(self, number: int, slot: int, body: memoryview) -> Tensor:
        """A reply as an array; the next one may come in the same slot."""
        key = number, slot, len(body)
        known = self._bodies.get(key)
        if known is None:
            known = torch.frombuffer(body, dtype=torch.float32)
            if slot >= 0:
                self._bodies[key] = known
        return known

    def _plan_merge(self, spec: AttentionSpec, has_sinks: bool) -> _Merge:
        moves, lines, v_dim = self._moves, self._lines, spec.v_dim
        heads = spec.query_heads // moves.shards
        plan, unit = arrange(moves, heads, v_dim), heads * v_dim
        # Few capacities, so that recordings can be used again: a power of two, and of all rows with padding at least.
        end = max(plan.end, 2 * unit + moves.rows * moves.shards * (unit + heads))
        capacity = (1 << (-(-end // unit) - 1).bit_length()) * unit
        shape = (moves.rows, spec.query_heads, v_dim)
        indices = torch.from_numpy(np.stack([plan.outs, plan.lses]))
        what = (heads, v_dim, moves.shards, moves.rows, moves.most_parts, capacity, has_sinks)
        if self._recorded:
            arrivals = lines.fixed(("arrivals", heads, v_dim, capacity), (capacity,), torch.float32)
            tables = lines.fixed(("tables", what), tuple(indices.shape), torch.int64)
            result = lines.at("in 0", moves.rows, shape[1:], self._dtype)
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
                lines.hold(("tables", what), self, (tables, indices))
            recording()

        counts = map(len, (*moves.here, *moves.queries))
        targets = [
            arrivals[start : start + count * (unit + heads)] for start, count in zip(plan.starts, counts, strict=True)
        ]
        return _Merge(tuple(targets), sinks, replay, result)
