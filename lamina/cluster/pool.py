"""Parses pools such as ``a100:2,cpu:1`` and assigns workers to devices of a machine or resources of a Ray cluster."""

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import psutil

from lamina.config.environment import environment
from lamina.core.errors import ConfigError
from lamina.core.topology import Pool, Role
from lamina.kernels.gpu.device import find_gpus

CPU, CUDA, EMULATED, REMOTE, LOCAL = "cpu", "cuda", "emulated", "remote", "local"
GPUS = {
    "p100": "NVIDIA P100",
    "v100": "NVIDIA V100",
    "t4": "NVIDIA T4",
    "a10": "NVIDIA A10",
    "a16": "NVIDIA A16",
    "a30": "NVIDIA A30",
    "a40": "NVIDIA A40",
    "a800": "NVIDIA A800",
    "a100": "NVIDIA A100",
    "a6000": "NVIDIA RTX A6000",
    "l4": "NVIDIA L4",
    "l20": "NVIDIA L20",
    "l40": "NVIDIA L40",
    "l40s": "NVIDIA L40S",
    "h20": "NVIDIA H20",
    "h800": "NVIDIA H800",
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
    "gh200": "NVIDIA GH200",
    "b200": "NVIDIA B200",
    "rtx3080": "NVIDIA GeForce RTX 3080",
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "rtx4080": "NVIDIA GeForce RTX 4080",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5080": "NVIDIA GeForce RTX 5080",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}
"""GPU kinds by their name in a pool, with the driver's name of the device."""

PLANNED = (
    *("a100-40g", "a100-80g", "gb200", "rtxpro6000", "mi300x", "mi355x", "rx7900xtx", "arc-a770", "tpu-v6e"),
    *("epyc", "xeon", "turin", "granite-rapids"),
)
"""Kinds besides the GPUs above that only `lamina plan` knows: workers do not run on them."""

RUNNABLE = (CPU, CUDA, *GPUS, EMULATED)
"""Kinds of workers that one machine can start."""

MOST_PER_CORE = 32
"""CPU workers of one pool per core: more start too slowly to be useful."""

MAX_COUNT = 1024
"""Most workers of one kind in one pool: a higher number is probably a typing error."""

Bundle = Mapping[str, float]
"""Amounts of Ray's resources, by name."""

ACCELERATORS = {kind: name.split()[1] for kind, name in GPUS.items() if len(name.split()) == 2}
"""GPU kinds that Ray recognizes by itself, with its names for them: the driver's without NVIDIA."""

_HIDDEN = ("memory", "object_store_memory", "node:")  # prefixes of Ray's resources that no worker takes

PLACE_S = 600.0  # longest wait for Ray to find a node for a worker: its autoscaler may have to rent one
A_LITTLE = 0.001  # amount that a worker takes of an accelerator type, which every GPU of a node shares

_VENDORS = ("nvidia", "geforce", "tesla", "rtx")

_ENTRY = re.compile(r"(?P<kind>[a-z0-9_-]+)\s*(?P<count>:.*)?", re.DOTALL)
_GRAMMAR = "give kind:count, separated by commas, such as cpu:2 or a100:2,rtx3090:6"


@dataclass(frozen=True)
class PoolEntry:
    """``count`` workers on devices of one ``kind``."""

    kind: str
    count: int

    def __str__(self) -> str:
        return self.kind if self.kind == LOCAL else f"{self.kind}:{self.count}"


@dataclass(frozen=True)
class PoolChange:
    """A change of a pool.

    Attributes:
        count: Workers to add, or to remove if it is negative.
        kind: Their kind; empty for the pool's own kind.
        is_size: Whether ``count`` is the size that the pool is to have instead.
    """

    count: int
    kind: str = ""
    is_size: bool = False

    def from_size(self, size: int) -> "PoolChange":
        """Return the workers that a pool of ``size`` workers adds or removes."""
        return PoolChange(self.count - size) if self.is_size else self


Kinds = tuple[str, ...]
"""The kind of each worker that joins together with others: one memory worker, or all workers of a replica."""


class Assigned(NamedTuple):
    """The kind of a worker, and its device: "cpu", "cuda:INDEX", "emulated:INDEX" or "emulated"; "" if its own machine
    decides."""

    kind: str
    device: str


@dataclass(frozen=True)
class Devices:
    """Resources of this machine: usable CPU cores, bytes of RAM, GPUs by the driver's names, which may be emulated.

    ``gpu_bytes``: Memory of each GPU; empty for emulated ones, whose memory is RAM.
    """

    cores: int
    ram_bytes: int
    gpus: tuple[str, ...] = ()
    emulated: bool = False
    gpu_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        gpus = ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)) or "no GPU"
        cores = "1 CPU core" if self.cores == 1 else f"{self.cores} CPU cores"
        return f"{gpus} ({cores}, {self.ram_bytes / 2**30:.0f} GiB RAM)"


def parse(text: str, known: Collection[str] | None = None, default_count: int = 1) -> tuple[PoolEntry, ...]:
    """Parse a pool, keeping the order of its entries.

    Args:
        text: The pool.
        known: Accepted kinds; None: all kinds of this module.
        default_count: Count of an entry without a count.

    Raises:
        ConfigError: The text is empty or malformed, a kind is unknown or repeated, or a count is not 1 to 1024.
    """
    if not text.strip():
        raise ConfigError(f"the pool is empty; {_GRAMMAR}")
    known = [CPU, LOCAL, CUDA, *GPUS, *PLANNED, EMULATED, REMOTE] if known is None else list(known)
    entries = tuple(_parse_entry(part, text, known, default_count) for part in text.split(","))
    kinds = [entry.kind for entry in entries]
    for kind in kinds:
        if kinds.count(kind) > 1:
            if kind == LOCAL:
                raise ConfigError(f"pool {text!r} names {kind} {kinds.count(kind)} times; write it once")
            total = sum(entry.count for entry in entries if entry.kind == kind)
            raise ConfigError(f"pool {text!r} names {kind} {kinds.count(kind)} times; write {kind}:{total} once")
    return entries


def parse_change(role: str, text: str) -> PoolChange:
    """Parse a change of a pool such as "+2", "-1" or "rtx3090:+2", without checking the kind, or its size, such as "3".

    Raises ConfigError if the text is malformed.
    """
    match = re.fullmatch(r"(?:(?P<kind>[a-z0-9_-]+):)?(?P<count>[+-][0-9]{1,9})", text.strip().lower())
    if match is not None and 1 <= abs(int(match["count"])) <= MAX_COUNT:
        return PoolChange(int(match["count"]), match["kind"] or "")
    if re.fullmatch("[0-9]{1,9}", text.strip()) and int(text) <= MAX_COUNT:
        return PoolChange(int(text), is_size=True)
    raise ConfigError(
        f"{role} is {text!r}; give the workers to add or remove, 1 to {MAX_COUNT}, such as +2, -1 or cpu:+2, or the "
        f"size of the pool, 0 to {MAX_COUNT}"
    )


def pool_change(role: str, wanted: int | str) -> PoolChange:
    """Return the change for a number of workers or a text (``parse_change``). Raises ConfigError."""
    return PoolChange(wanted) if isinstance(wanted, int) else parse_change(role, wanted)


def require_kind(kind: str, known: Collection[str]) -> None:
    """Raise ConfigError unless ``kind`` is in ``known``."""
    if kind not in known:
        raise ConfigError(f"unknown kind {kind!r}{near(kind, known)} Known here: {_names(known)}")


def _names(kinds: Collection[str]) -> str:
    return ", ".join(name for name in kinds if name != EMULATED)


def parse_bounds(text: str) -> dict[Pool, tuple[int, int]]:
    """Return the least and the most workers of the pools that scale by load, from "memory=1:4,compute=1:2".

    Raises ConfigError if the text is malformed, or for a pool that is named twice or would have no worker.
    """
    bounds: dict[Pool, tuple[int, int]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(prefill|compute|memory)\s*=\s*([0-9]{1,4}):([0-9]{1,4})", part.strip().lower())
        if match is None:
            raise ConfigError(
                f"autoscale is {text!r}; give the smallest and the largest size of a pool, such as memory=1:4 or "
                "memory=1:4,compute=1:2"
            )
        pool = next(one for one in get_args(Pool) if one == match[1])
        least, most = int(match[2]), int(match[3])
        if pool in bounds:
            raise ConfigError(f"autoscale is {text!r}, which names the {pool} pool twice; name it once")
        if not (pool != "memory") <= least <= most or not 1 <= most <= MAX_COUNT:
            raise ConfigError(
                f"autoscale is {text!r}: {least} to {most} {pool} workers; give a smallest size of "
                f"{'1' if pool != 'memory' else '0 (beside local memory) or 1'} and a largest from that to {MAX_COUNT}"
            )
        bounds[pool] = least, most
    return bounds


def memory_pool(text: str | None, compute: tuple[PoolEntry, ...], apart: bool) -> tuple[PoolEntry, ...]:
    """Return the memory pool beside the pool ``compute``. Raises ConfigError if the text is malformed.

    ``text`` None: ``local`` beside one CPU worker of this machine, unless other settings concern memory workers
    (``apart``).
    """
    is_one_cpu = compute == (PoolEntry(CPU, 1),)
    return parse(text if text is not None else LOCAL if is_one_cpu and not apart else CPU)


def size(text: str | None) -> int:
    """Return the number of workers in a pool that ``parse`` accepts, with or without degrees; 0 for None."""
    workers, _, _ = (text or "").partition("/")
    return sum(int(part.partition(":")[2] or 1) for part in workers.split(",") if part)


def kinds(pool: tuple[PoolEntry, ...]) -> list[str]:
    """Return the kind of each worker of a pool; ``local`` once."""
    return [entry.kind for entry in pool for _ in range(entry.count)]


def assign_pools(
    pools: Mapping[Role, tuple[PoolEntry, ...]], devices: Devices, prefills: int = 0
) -> dict[Role, tuple[Assigned, ...]]:
    """Assign devices to both pools, which share a GPU only if there are too few. ``prefills``: see ``assign``."""
    assigned: dict[Role, tuple[Assigned, ...]] = {}
    taken: list[str] = []
    for role in sorted(pools, key=lambda role: any(entry.kind == CUDA for entry in pools[role])):
        assigned[role] = assign(role, pools[role], devices, taken, prefills=prefills if role == "compute" else 0)
        taken += [worker.device for worker in assigned[role]]
    return assigned


def assign(
    role: Role,
    pool: tuple[PoolEntry, ...],
    devices: Devices,
    taken: Collection[str] = (),
    remedy: str = "",
    prefills: int = 0,
) -> tuple[Assigned, ...]:
    """Return a device of this machine for each worker of a pool, a GPU for one worker only. ``local`` has no worker.

    Args:
        role: Role of the pool.
        pool: The kinds of its workers.
        devices: Devices of this machine.
        taken: Devices of the other pool, used only if no other is left.
        remedy: What the error says to do; by default, to give a pool that works.
        prefills: Number of entries, the first ones, that are of the prefill pool.

    Raises:
        ConfigError: The machine lacks a device. The error names its devices.
    """
    own = remedy or f"Use --{role} cpu:{2 if role == 'memory' else 1}"
    assigned: dict[int, list[Assigned]] = {}
    prefix = EMULATED if devices.emulated else CUDA
    named = [(f"{prefix}:{index}", name) for index, name in enumerate(devices.gpus)]
    free = dict(sorted(named, key=lambda gpu: gpu[0] in taken))
    for place, entry in sorted(enumerate(pool), key=lambda one: one[1].kind == CUDA):  # any GPU is what others left
        remedy = own if place >= prefills else "Use --prefill cpu:1, or leave it out"
        if entry.kind == LOCAL:
            if role == "compute":
                raise ConfigError(f"local is memory of the compute workers; it cannot compute. {remedy}")
            continue
        if entry.kind in (CPU, EMULATED):
            if entry.count > (most := MOST_PER_CORE * devices.cores):
                raise ConfigError(
                    f"{entry} asks for {entry.count} processes; this machine has {devices}, enough for {most} at most. "
                    f"{remedy}"
                )
            assigned[place] = [Assigned(entry.kind, entry.kind)] * entry.count
            continue
        if entry.kind in PLANNED:
            raise ConfigError(f"{entry}: {entry.kind} is for `lamina plan` only; no worker runs on it. {remedy}")
        asked = f"{entry} asks for {entry.count} GPU{'s' if entry.count > 1 else ''}"
        found = [device for device, name in free.items() if entry.kind == CUDA or _is_kind(name, entry.kind)]
        if len(found) < entry.count:
            raise ConfigError(f"{asked}; this machine has {devices}. {remedy}")
        for device in found[: entry.count]:
            del free[device]
        assigned[place] = [Assigned(entry.kind, device) for device in found[: entry.count]]
    return tuple(worker for place in sorted(assigned) for worker in assigned[place])


def _is_kind(device: str, kind: str) -> bool:
    # An A100 reads "NVIDIA A100-SXM4-80GB"; an A10 must not match it.
    return device == GPUS[kind] or device.startswith((f"{GPUS[kind]} ", f"{GPUS[kind]}-"))


def _parse_entry(part: str, text: str, known: list[str], default_count: int) -> PoolEntry:
    match = _ENTRY.fullmatch(part.strip().lower())
    if "/" in part:
        raise ConfigError(
            f"pool {text!r} has degrees; `lamina launch` and `simulate` take them in --prefill and --compute"
        )
    if match is None:
        what = repr(part.strip()) if part.strip() else "an empty entry"
        raise ConfigError(f"pool {text!r} contains {what}; {_GRAMMAR}")
    kind, count = match["kind"], (match["count"] or f":{default_count}")[1:].strip()
    if kind not in known:
        raise ConfigError(f"pool {text!r} has the unknown kind {kind!r}{near(kind, known)} Known: {_names(known)}")
    if kind == LOCAL and match["count"]:
        raise ConfigError(f"pool {text!r} gives local a count; it is the compute worker's own memory: write local")
    if not (count.isascii() and count.isdigit() and len(count) <= 9 and 1 <= int(count) <= MAX_COUNT):
        raise ConfigError(
            f"pool {text!r} has an invalid count {count!r} for {kind}; give a whole number from 1 to {MAX_COUNT}"
        )
    return PoolEntry(kind, int(count))


def near(kind: str, known: Collection[str]) -> str:
    """Return a hint at the kinds that an unknown one may mean: "; did you mean cuda?", or "." if none is similar.

    "gpu" never means cpu, although their names differ in one letter.
    """
    if "gpu" in kind or kind in _VENDORS:
        matches = [name for name in (CUDA, "a100") if name in known]
    else:
        matches = difflib.get_close_matches(kind, known, n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else "."


def find_devices() -> Devices:
    """Return the cores that this process may use, RAM, and NVIDIA GPUs or those of ``LAMINA_EMULATED_GPUS``."""
    cores, ram_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    if emulated := environment().emulated_gpus:
        names = [GPUS[entry.kind] for entry in parse(emulated, GPUS) for _ in range(entry.count)]
        return Devices(cores, ram_bytes, tuple(names), emulated=True)
    gpus = find_gpus() or ()
    own = tuple(gpu.name for gpu in gpus)
    return Devices(cores, ram_bytes, own, gpu_bytes=tuple(gpu.memory_bytes for gpu in gpus))


@dataclass(frozen=True)
class RayNode:
    """A node of a Ray cluster: its displayed name, all its resources, and the free ones."""

    name: str
    total: Bundle
    free: Bundle

    def less(self, bundle: Bundle) -> "RayNode":
        """Return the node with ``bundle`` taken from its free resources."""
        left = {name: amount - bundle.get(name, 0.0) for name, amount in self.free.items()}
        return dataclasses.replace(self, free=left)

    def holds(self, bundle: Bundle) -> bool:
        """Return whether the node has ``bundle`` free."""
        return all(self.free.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items())


def own_kinds(text: str | None) -> dict[str, str]:
    """Parse kinds and their Ray resources, such as "rtx3090=my_gpu,far=zone:b". Raises ConfigError."""
    kinds: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        kind, equals, resource = (word.strip() for word in part.partition("="))
        if not (kind and equals and resource):
            raise ConfigError(f"kind {part!r} names no resource; give name=resource, such as rtx3090=my_gpu")
        kinds[kind.lower()] = resource
    return kinds


def ray_kinds(own: Mapping[str, str]) -> list[str]:
    """Return all kinds of workers for a Ray cluster. ``own``: see ``own_kinds``."""
    return [*RUNNABLE, *own]


def ray_bundle(kind: str, own: Mapping[str, str], threads: int | None) -> dict[str, float]:
    """Return the Ray resources of a worker: a GPU or a core per thread, and the resource that names the kind.

    ``own``: see ``own_kinds``. A GPU that Ray does not recognise has the kind's name as a resource.
    """
    named = {own[kind]: 1.0} if kind in own else {}
    if kind in GPUS or kind == CUDA:
        if not named and kind in ACCELERATORS:
            named = {f"accelerator_type:{ACCELERATORS[kind]}": A_LITTLE}
        elif not named and kind != CUDA:
            named = {kind: 1.0}
        return {"GPU": 1.0, **named}
    return {"CPU": float(threads or 1), **named}


def ray_device(kind: str) -> str:
    """Return the device of a worker, numbered within the GPUs that Ray has assigned to it."""
    if kind in GPUS or kind == CUDA:
        return "cuda:0"
    return EMULATED if kind == EMULATED else CPU


def place_bundles(bundles: Mapping[str, Bundle], nodes: Sequence[RayNode]) -> dict[str, str]:
    """Return a node for each worker, by first fit, the most demanding worker first. Ray may choose other nodes.

    Raises ConfigError with the missing resource and the cluster's resources if workers do not fit.
    """
    left, placed, missing = list(nodes), {}, []
    for worker, wanted in sorted(bundles.items(), key=lambda item: (-len(item[1]), -sum(item[1].values()))):
        index = next((index for index, node in enumerate(left) if node.holds(wanted)), None)
        if index is None:
            missing.append(worker)
        else:
            placed[worker] = left[index].name
            left[index] = left[index].less(wanted)
    if missing:
        raise ConfigError(_shortage(missing, bundles, nodes, left))
    return {worker: placed[worker] for worker in bundles}


def _shortage(
    missing: Sequence[str], bundles: Mapping[str, Bundle], nodes: Sequence[RayNode], left: Sequence[RayNode]
) -> str:
    wanted = bundles[missing[0]]
    lacking = [name for name, amount in wanted.items() if all(node.total.get(name, 0.0) < amount for node in nodes)]
    alike = [worker for worker in bundles if bundles[worker] == wanted]
    if lacking:
        why = f"no node of the Ray cluster has {_amounts({name: wanted[name] for name in lacking})}"
    else:
        why = f"of {len(alike)} workers that need it, the Ray cluster has room for {len(alike) - len(missing)}"
        why = why if set(missing) <= set(alike) else "the Ray cluster has too little room"
    each = "; ".join(
        f"{node.name} has {_amounts(node.total)}, free before this {_amounts(node.free)}" for node in nodes
    )
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return f"{names} need {_amounts(wanted)} each: {why}. {each or 'It has no node'}"


def _amounts(amounts: Bundle) -> str:
    shown = {name: amount for name, amount in sorted(amounts.items()) if amount and not name.startswith(_HIDDEN)}
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "nothing"
