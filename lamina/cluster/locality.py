"""Reads the topology of this machine from sysfs: how close cores, memory, GPUs and network interfaces are.

A worker's messages and copies are fastest if its cores, GPU and network interface are on one NUMA node, and GPU and
interface behind one PCIe switch, so that they exchange data without the processor.
"""

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.kernels.gpu.device import Gpu
from lamina.transport.rdma.ports import read_text

SYS = Path("/sys")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its cores, and bytes of its memory (0: the kernel does not say)."""

    number: int
    cores: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True)
class Card:
    """A GPU or a network interface.

    Attributes:
        name: Such as "cuda:0" or "mlx5_0 (ens1)".
        about: Model of a GPU, or speed of a network interface; "" if unknown.
        address: PCI address; "" if the card is not on a PCI bus.
        path: PCI root and bridges between the processor and the card, from the root on.
        node: NUMA node that firmware reports; -1 if unknown.
    """

    name: str
    about: str
    address: str
    path: tuple[str, ...]
    node: int


class Route(enum.IntEnum):
    """Distance between two cards, in ascending order."""

    SWITCH = 0
    HOST_BRIDGE = 1
    NODE = 2
    SYSTEM = 3
    UNKNOWN = 4

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Route.SWITCH: "behind the same PCIe switch",
    Route.HOST_BRIDGE: "on the same PCIe root",
    Route.NODE: "on the same NUMA node",
    Route.SYSTEM: "on another NUMA node",
    Route.UNKNOWN: "at an unknown distance",
}


@dataclass(frozen=True)
class Locality:
    """The NUMA nodes, GPUs and network interfaces of a machine.

    Attributes:
        reach: Pairs of indices into ``gpus``: the first GPU can write into the memory of the second.
    """

    nodes: tuple[NumaNode, ...]
    gpus: tuple[Card, ...] = ()
    nics: tuple[Card, ...] = ()
    reach: frozenset[tuple[int, int]] = frozenset()

    def reached(self, gpu: Card) -> list[Card]:
        """Return the other GPUs into whose memory ``gpu`` can write."""
        place = self.gpus.index(gpu)
        return [other for number, other in enumerate(self.gpus) if (place, number) in self.reach]

    def way(self, one: Card, other: Card) -> Route:
        """Return the distance between two cards."""
        shared = sum(1 for _ in _common(one.path, other.path))
        if shared >= 2:  # the root, and a bridge behind it
            return Route.SWITCH
        if shared == 1:
            return Route.HOST_BRIDGE
        nodes = {self.node(one), self.node(other)}
        if -1 in nodes:
            return Route.UNKNOWN
        return Route.NODE if len(nodes) == 1 else Route.SYSTEM

    def node(self, card: Card) -> int:
        """Return the NUMA node of a card; -1 if firmware does not report it and the machine has several."""
        return self.nodes[0].number if len(self.nodes) == 1 else card.node

    def cores(self, card: Card) -> frozenset[int]:
        """Return the cores of a card's NUMA node; empty if it is unknown."""
        return next((node.cores for node in self.nodes if node.number == self.node(card)), frozenset())

    def nearest(self, card: Card) -> tuple[Card, Route] | None:
        """Return the network interface nearest to a card; None without any."""
        ways = [(nic, self.way(card, nic)) for nic in self.nics]
        return min(ways, key=lambda each: each[1], default=None)


def find(gpus: Sequence[Gpu], sys: Path = SYS, reach: frozenset[tuple[int, int]] = frozenset()) -> Locality:
    """Read the topology of this machine from ``sys``.

    Args:
        gpus: GPUs that this process may use, as the driver reports them.
        sys: Mount point of sysfs.
        reach: See ``Locality``.
    """
    nodes = [_node(node) for node in sys.glob("devices/system/node/node[0-9]*")]
    return Locality(
        tuple(sorted(nodes, key=lambda node: node.number)),
        tuple(_gpu(f"cuda:{index}", gpu, sys) for index, gpu in enumerate(gpus)),
        tuple(sorted(_nics(sys), key=lambda nic: nic.name)),
        reach,
    )


def core_list(cores: frozenset[int]) -> str:
    """Return cores in the format of ``taskset``, such as "0-3,8"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return list(one[:length])


def _node(folder: Path) -> NumaNode:
    found = re.search(r"MemTotal:\s*(\d+) kB", read_text(folder / "meminfo"))
    return NumaNode(
        int(folder.name.removeprefix("node")),
        _cores(read_text(folder / "cpulist")),
        int(found[1]) * 1024 if found else 0,
    )


def _cores(text: str) -> frozenset[int]:
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def _gpu(name: str, gpu: Gpu, sys: Path) -> Card:
    # The driver writes the bus's domain with eight digits, the kernel with four.
    domain, _, rest = gpu.address.lower().partition(":")
    address = f"{int(domain, 16):04x}:{rest}" if rest else ""
    return _card(name, gpu.name, sys / "bus" / "pci" / "devices" / address if address else None)


def _nics(sys: Path) -> list[Card]:
    """Return one card for each network device; its name joins all interfaces of the device, RDMA first."""
    names: dict[Path, list[str]] = {}
    speeds: dict[Path, int] = {}
    for kind in ("infiniband", "net"):
        for folder in sorted((sys / "class" / kind).glob("*")):
            if (folder / "device").exists():
                place = (folder / "device").resolve()
                names.setdefault(place, []).append(folder.name)
                speed = read_text(folder / "speed")
                speeds[place] = max(speeds.get(place, 0), int(speed) if speed.isdecimal() else 0)
    return [
        _card(f"{first} ({', '.join(others)})" if others else first, _speed(speeds[place]), place)
        for place, (first, *others) in names.items()
    ]


def _speed(megabits_per_s: int) -> str:
    return f"{megabits_per_s / 1000:g} Gbit/s" if megabits_per_s else ""


def _card(name: str, about: str, place: Path | None) -> Card:
    if place is None or not place.exists():
        return Card(name, about, "", (), -1)
    parts = place.resolve().parts
    buses = [part for part in parts if part.startswith("pci") or _ADDRESS.fullmatch(part)]
    addresses = [part for part in buses if _ADDRESS.fullmatch(part)]
    if not addresses:
        return Card(name, about, "", (), -1)
    device = Path(*parts[: parts.index(addresses[-1]) + 1])
    number = read_text(device / "numa_node")
    return Card(name, about, addresses[-1], tuple(buses[:-1]), int(number) if number else -1)


def near_cores(locality: Locality, device: str, available: frozenset[int]) -> frozenset[int]:
    """Return the ``available`` cores on the NUMA node of GPU ``device``; all ``available`` cores if none is there."""
    gpu = next((gpu for gpu in locality.gpus if gpu.name == device), None)
    return (locality.cores(gpu) & available if gpu is not None else frozenset()) or available


def here() -> Locality:
    """Return the topology of this machine, with the GPUs that this process may use."""
    from lamina.kernels.gpu.device import find_gpus, reach

    gpus = find_gpus() or ()
    pairs = reach(gpus) if len(gpus) > 1 else frozenset()
    return find(gpus, SYS if os.path.isdir(SYS) else Path("/nonexistent"), pairs)
