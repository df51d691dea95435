"""Computes slab sizes: the bytes of KV of each memory worker, and the token slots that fit in them. Pure."""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lamina.cluster.sizing import ClusterPlan, boot_id
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import MemorySetup, Resources
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.tables import MOST_BYTES
from lamina.kv import prefix_tree
from lamina.memory.device.windows import most_rows, with_spare
from lamina.schedule.limits import Limits

KV_SHARE = 0.5  # share that all memory workers together get of the memory that is free once weights are loaded
LEAST_GAIN = 1.2
"""With a prefix cache, layers with a window forget only if that gives at least this many times the token slots.

Requests may then continue cached prefixes only from checkpoints, not from any token.
"""


def kv_bytes_per_worker(config: EngineConfig, workers: int, free_bytes: int) -> int:
    """Return the bytes of KV of each of ``workers`` memory workers that share ``free_bytes``. Raises ConfigError."""
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return int(free_bytes * KV_SHARE) // workers
    if wanted * workers > free_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {wanted} for each of {workers} memory workers; "
            f"{free_bytes} bytes are free beside the weights. Give less, or leave it out"
        )
    return wanted


def kv_bytes_on_gpu(config: EngineConfig, found: Resources, host_bytes: int = 0) -> int:
    """Return the bytes of KV of a memory worker on a GPU. Raises ConfigError.

    Memory used by other processes, such as the weights of a compute worker, is not available.

    Args:
        host_bytes: Free bytes of host memory. KV may spill over to ``KV_SHARE`` of them if kv_cache_memory_bytes is
            more than the GPU has.
    """
    wanted, share = config.kv_cache_memory_bytes, config.gpu_memory_utilization
    free, total, host = found.gpu_bytes, found.gpu_total, int(KV_SHARE * host_bytes)
    spared = total - int(share * total)
    if wanted is None and free <= spared:
        raise ConfigError(
            f"{free} of the {total} bytes of a memory worker's GPU are free, and gpu_memory_utilization "
            f"{share:g} leaves {spared} of them unused. Raise it, or free memory there"
        )
    if wanted is not None and wanted > free + host:
        besides = f" and {host} in host memory" if host else ""
        raise ConfigError(
            f"kv_cache_memory_bytes is {wanted} for each memory worker; {free} bytes are free on its GPU"
            f"{besides}. Give less, or leave it out"
        )
    return free - spared if wanted is None else wanted


def kv_bytes_of_joiner(config: EngineConfig, found: Resources, largest: int, promised: int) -> int:
    """Return the bytes of KV of a memory worker that joins: those of the largest other worker, if they are free.

    Args:
        largest: Bytes of KV of the largest other memory worker.
        promised: Bytes of KV that memory workers of the same machine were given but have not yet touched.

    Raises ConfigError.
    """
    if found.gpu_total:
        return kv_bytes_on_gpu(config, found, max(0, found.machine_bytes - promised))
    left = max(0, found.free_bytes - promised)
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return min(largest, int(left * KV_SHARE))
    if wanted > left:
        raise ConfigError(
            f"another memory worker needs kv_cache_memory_bytes, {wanted} bytes; {found.free_bytes} are free, of which "
            f"the others may still use {promised}. Free some memory, or add fewer workers"
        )
    return wanted


@dataclass(frozen=True)
class Rows:
    """Rows of a layer that drops tokens before its window (``lamina.memory.device.windows``).

    Attributes:
        nbytes: Bytes of one row: K and V of one token.
        running: Rows for running sequences.
        prompts: Rows for the cached checkpoints of their prompts; None without a prefix cache.
    """

    nbytes: int
    running: int
    prompts: int | None = None

    def most(self, slots: int) -> int:
        """Return the most rows in use if layers that keep every token have ``slots`` token slots."""
        cached = 0 if self.prompts is None else max(self.prompts, prefix_tree.most_rows(slots))
        return min(self.running + with_spare(cached), slots)


@dataclass(frozen=True)
class SlabSize:
    """Bytes of a memory worker's slab as a function of its token slots.

    Attributes:
        slot: Bytes of one token slot, in all layers that keep every token.
        rows: Rows of each layer that drops tokens.
    """

    slot: int
    rows: tuple[Rows, ...] = ()

    def nbytes(self, slots: int) -> int:
        """Return the bytes of a slab with ``slots`` token slots."""
        return self.slot * slots + sum(each.nbytes * each.most(slots) for each in self.rows)

    def slots(self, nbytes: int, most: int) -> int:
        """Return the token slots that fit in ``nbytes``, at most ``most``."""
        return bisect.bisect_right(range(most + 1), nbytes, key=self.nbytes) - 1

    @property
    def whole(self) -> "SlabSize":
        """Return the slab's size if all layers keep every token."""
        return SlabSize(self.nbytes(1))

    def with_pages(self, shards: int) -> "SlabSize":
        """Return the size on a GPU, which also holds page tables of ``shards`` head shards."""
        return SlabSize(self.slot + MOST_BYTES * shards, self.rows)


def slab_size(
    attentions: Sequence[AttentionSpec],
    element: KvElement,
    forgets: bool,
    limits: Limits,
    lanes: int,
    prefix_cache: bool = False,
) -> SlabSize:
    """Return the size of a slab in host memory that holds whole tokens of these attentions.

    ``forgets``: Whether layers with a window drop tokens before it.
    """
    slot, rows = 0, list[Rows]()
    sequences, tokens = limits.max_sequences, lanes * limits.max_num_batched_tokens
    for spec in attentions:
        each = spec.slab_bytes_per_token(element)
        if forgets and spec.window:
            running = most_rows(spec.window, sequences, tokens)
            rows.append(Rows(each, running, sequences * spec.window if prefix_cache else None))
        else:
            slot += each
    return SlabSize(slot, tuple(rows))


def slab_of(plan: ClusterPlan, setup: MemorySetup) -> SlabSize:
    """Return the size of the slab of ``setup`` on a CPU."""
    element = KvElement.from_setting(setup.kv_cache_dtype, setup.dtype)
    lanes, cached = plan.pipeline.lanes, plan.config.prefix_cache
    return slab_size(setup.own, element, setup.forgets, plan.limits, lanes, cached)


def without_reserved(
    found: Mapping[str, Resources], hosts: Mapping[str, str], reserved: Mapping[str, int]
) -> dict[str, Resources]:
    """Return ``found`` less memory that workers have allocated and not yet used, which still counts as free.

    Args:
        found: Free memory, by worker.
        hosts: By worker, its host.
        reserved: Bytes of such memory, by host.
    """
    near = Counter[str]()
    for one, nbytes in reserved.items():
        near[boot_id(one)] += nbytes
    return {
        name: msgspec.structs.replace(
            each,
            free_bytes=max(0, each.free_bytes - reserved.get(hosts[name], 0)),
            machine_bytes=max(0, each.machine_bytes - near[boot_id(hosts[name])]),
        )
        for name, each in found.items()
    }


def with_capacities(
    plan: ClusterPlan, setup: MemorySetup, found: Mapping[str, Resources]
) -> tuple[MemorySetup, dict[str, int]]:
    """Decide whether layers with a window drop tokens, and how many token slots each worker with a slab gets.

    Returns:
        ``setup`` with the decision and the largest capacity, and the capacity of each worker.

    Raises ConfigError for fewer than 2 slots.
    """
    keeps = msgspec.structs.replace(setup, forgets=False)
    capacities, whole = (_capacities(plan, each, found) for each in (setup, keeps))
    if plan.config.prefix_cache and sum(capacities.values()) < LEAST_GAIN * sum(whole.values()):
        setup, capacities = keeps, whole
    return msgspec.structs.replace(setup, capacity=max(capacities.values())), capacities


def _capacities(plan: ClusterPlan, setup: MemorySetup, found: Mapping[str, Resources]) -> dict[str, int]:
    """Return the token slots of each worker with a slab. All stages of a replica have as many as the fewest of them."""
    sizes = _kv_bytes(plan.config, {name: plan.greetings[name].host for name in found}, found)
    setups, least = {name: plan.slab_setup(setup, name) for name in found}, dict[str, int]()
    for name, own in setups.items():
        slots, home = token_slots(name, slab_of(plan, own), own, found[name], sizes[name]), own.home or name
        least[home] = min(slots, least.get(home, slots))
    return {name: least[own.home or name] for name, own in setups.items()}


def token_slots(name: str, slab: SlabSize, setup: MemorySetup, found: Resources, nbytes: int) -> int:
    """Return the token slots of worker ``name`` that fit in ``nbytes``, at most ``setup.capacity``.

    Raises ConfigError for fewer than 2.
    """
    capacity = slab_there(slab, setup, found).slots(nbytes, setup.capacity)
    if capacity < 2:
        raise ConfigError(
            f"{name} has {nbytes} bytes for KV; a request needs at least 2 tokens of {slab.nbytes(1)} bytes. "
            "Free memory, or give more with kv_cache_memory_bytes"
        )
    return capacity


def slab_there(slab: SlabSize, setup: MemorySetup, found: Resources) -> SlabSize:
    """Return the slab size of the worker that reported ``found``; GPUs keep every token, and page tables."""
    return slab if found.forgets else slab.whole.with_pages(setup.head_shards)


def _kv_bytes(config: EngineConfig, hosts: Mapping[str, str], found: Mapping[str, Resources]) -> dict[str, int]:
    """Return the bytes of KV of each memory worker. GPU workers get no host memory that CPU workers use.

    Raises ConfigError.
    """
    on_hosts = {name: host for name, host in hosts.items() if not found[name].gpu_total}
    on_gpus = {name: host for name, host in hosts.items() if name not in on_hosts}
    sizes = {name: kv_bytes_per_worker(config, *_share(name, on_hosts, found)) for name in on_hosts}
    for name, host in on_gpus.items():
        count, free = _share(name, on_gpus, found)
        left = free - sum(sizes[one] for one in on_hosts if boot_id(hosts[one]) == boot_id(host))
        sizes[name] = kv_bytes_on_gpu(config, found[name], max(0, left) // count)
    return sizes


def _share(name: str, hosts: Mapping[str, str], found: Mapping[str, Resources]) -> tuple[int, int]:
    """Return the number of memory workers that share memory with ``name``, and its free bytes.

    The shared memory is that of the worker's container, or of its machine if that leaves each worker less.
    """
    here = [one for one, host in hosts.items() if host == hosts[name]]
    near = [one for one, host in hosts.items() if boot_id(host) == boot_id(hosts[name])]
    shares = (
        (len(here), min(found[one].free_bytes for one in here)),
        (len(near), min(found[one].machine_bytes for one in near)),
    )
    return min(shares, key=lambda share: share[1] / share[0])
