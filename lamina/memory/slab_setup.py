"""Sets up a worker's KV slab as the engine asks, and reports the slab's use to the engine."""

import contextlib
import time
from collections.abc import Callable

import msgspec

from lamina.control.messages import USAGE_S, MemorySetup, Reserve, SlabReady, SlabUsage, Stored
from lamina.control.sockets import ControlClient, expect
from lamina.core.errors import ConfigError, is_out_of_memory
from lamina.core.heads import HeadShards
from lamina.core.types import AttentionSpec, KvElement, Polling
from lamina.dataplane.leases import LANDING_NBYTES
from lamina.dataplane.wire import NUMPY_DTYPE, reply_nbytes, request_nbytes
from lamina.memory.device import gpu_polls, reserve
from lamina.memory.device.base import Largest
from lamina.memory.device_steps import MOST_LANES
from lamina.memory.disk_tier import Tier, open_tier
from lamina.memory.store import KvStore


def _all_of(setup: MemorySetup) -> MemorySetup:
    return setup


def make_store(
    control: ControlClient,
    resources: contextlib.ExitStack,
    part: Callable[[MemorySetup], MemorySetup] = _all_of,
    name: str = "",
    remedy: str = "",
) -> tuple[KvStore, Tier | None, MemorySetup]:
    """Receive the engine's Reserve and MemorySetup, make the KV slab and its disk tier, and report SlabReady.

    Args:
        resources: Closes the disk tier.
        part: Returns the setup of the part of all attentions that the slab is for.
        name: Name by which segments refer to the slab, if it is not the worker's.
        remedy: What to do if the slab does not fit, if it is not to lower the memory for KV.

    Raises ConfigError, WorkerError.
    """
    asked = expect(control, Reserve)
    _reserve(control, msgspec.structs.replace(asked, setup=part(asked.setup)))
    setup = part(expect(control, MemorySetup))
    setup = msgspec.structs.replace(setup, polling=polling_of(control, setup.polling))
    try:
        store = KvStore(name or setup.home or control.name, setup, control.device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        lower = "Lower kv_cache_memory_bytes" + (" or gpu_memory_utilization" if control.device != "cpu" else "")
        raise ConfigError(
            f"{control.device} has too little memory for the KV of {setup.capacity} tokens: {error}. {remedy or lower}"
        ) from error
    tier = open_tier(store, setup.spill_dir, setup.overcommit, lambda *done: control.send(Stored(*done)), resources)
    control.send(SlabReady())
    return store, tier, setup


def _reserve(control: ControlClient, asked: Reserve) -> None:
    setup, (_, specs) = asked.setup, _of_shards(asked.setup)
    element, query = KvElement.from_setting(setup.kv_cache_dtype, setup.dtype), NUMPY_DTYPE[setup.dtype]
    polls = gpu_polls(control.device, polling_of(control, setup.polling))
    try:
        reserve(control.device, specs, element, query, largest(asked, polls))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{control.device} has too little memory for steps of {asked.rows} rows beside the KV: {error}. Lower "
            "max_num_batched_tokens, or free memory there"
        ) from error


def polling_of(control: ControlClient, asked: Polling) -> Polling:
    """Return who polls for messages: ``asked``, but the host on a GPU that also runs slices.

    A polling kernel would delay slices there. Raises ConfigError if ``asked`` is "device" on such a GPU.
    """
    if not control.shares_gpu:
        return asked
    if asked == "device":
        raise ConfigError(
            f"polling is device, but {control.device} also runs slices, which would have to wait for kernels that "
            "poll; give polling auto or host, or another GPU"
        )
    return "host"


def _of_shards(setup: MemorySetup) -> tuple[HeadShards, list[AttentionSpec]]:
    """Return how heads are sharded, and each attention with the heads of one shard."""
    shards = HeadShards(max(spec.kv_heads for spec in setup.attentions), setup.head_shards)
    return shards, [shards.spec(spec, 0, shards.sharers(setup.ranks)) for spec in setup.own]


def largest(asked: Reserve, polls: bool = False) -> Largest:
    """Return upper bounds of a worker's steps. ``polls``: Whether its GPU polls, and so serves lanes itself."""
    setup, (shards, specs) = asked.setup, _of_shards(asked.setup)
    own = shards.of_rank(setup.least_ranks).count
    rows = asked.rows * own
    # With slopes, rows of each shard of heads have tables of their own.
    by_shard = any(spec.alibi_slopes is not None for spec in specs)
    request, reply = request_nbytes(specs, setup.dtype, rows), reply_nbytes(specs, rows)
    # A request three times: as received, aligned copies of its parts, queries of further segments. Two partials. Pieces
    # of two moving segments, one in each direction. Slots of the new tokens of all steps.
    buffers = (*[request] * 3, *[reply] * 2, *[LANDING_NBYTES] * 2, 12 * rows * asked.steps)
    tables = asked.steps * setup.ranks * (setup.overlap.mini_batches + 2) * (own if by_shard else 1)
    few, lanes = asked.slot_rows * own, min(asked.lanes * setup.ranks, MOST_LANES)
    if polls:  # each lane keeps a request, and out and lse separately
        buffers += (request_nbytes(specs, setup.dtype, few), *[reply_nbytes(specs, few)] * 2) * lanes
    polled = (lanes, few) if polls else (0, 0)
    return Largest(min(rows, asked.sequences * own), rows, tables, buffers, polled, setup.gpu_share)


class UsageReports:
    """Reports the slab's use to the engine every ``USAGE_S``, and immediately when the slab becomes empty."""

    def __init__(self, control: ControlClient, store: KvStore) -> None:
        self._control, self._store = control, store
        self._last = SlabUsage(0, 0)
        self._sent_at = 0.0
        self._repeated = True  # whether the last two reports were equal

    def send_if_due(self, busy_s: float, parked: int = 0, parked_nbytes: int = 0) -> None:
        """Send a report if one is due. Arguments are fields of ``SlabUsage``."""
        now = time.monotonic()
        emptied = self._last.sequences > 0 and self._store.sequences == 0
        if not emptied and now - self._sent_at < USAGE_S:
            return
        usage = SlabUsage(self._store.used_tokens, self._store.sequences, busy_s, parked, parked_nbytes)
        repeats = usage == self._last
        if not (repeats and self._repeated):
            self._control.send(usage)
        self._last, self._repeated, self._sent_at = usage, repeats, now
