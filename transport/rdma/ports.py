"""Selects the RDMA device, port and address to use, from sysfs (``inventory``, ``choose``)."""

import ipaddress
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from lamina.core.errors import TransportError

SYSFS = Path("/sys/class/infiniband")
NODES = Path("/sys/devices/system/node")
ROCE_V2 = "RoCE v2"
ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"


@dataclass(frozen=True)
class Gid:
    """One address of a port. ``kind`` is the kernel's name: "RoCE v2" or "IB/RoCE v1"."""

    index: int
    kind: str
    address: ipaddress.IPv6Address


@dataclass(frozen=True)
class Port:
    """One port of one device. ``numa_node`` is -1 if the machine has a single node or reports none."""

    device: str
    number: int
    active: bool
    link_layer: str
    gigabits_per_s: float
    numa_node: int
    lid: int
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        state = "active" if self.active else "down"
        return f"{self.device}:{self.number} ({self.link_layer}, {state}, {len(self.gids)} addresses)"


@dataclass(frozen=True)
class SelectedPort:
    """The port to use, its address, and why it was selected."""

    port: Port
    gid: Gid
    reason: str

    @property
    def host(self) -> str | None:
        """The IPv4 address that the GID maps, if any."""
        mapped = self.gid.address.ipv4_mapped
        return str(mapped) if mapped else None


def inventory(sysfs: Path = SYSFS) -> list[Port]:
    """Return every port of every RDMA device of this machine."""
    return [
        _read_port(device, port)
        for device in sorted(sysfs.glob("*"))
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name))
    ]


def own_numa_node(cores: AbstractSet[int], nodes: Path = NODES) -> int:
    """Return the NUMA node that all of a process's cores belong to; -1 if they span several or the kernel reports
    none."""
    for node in nodes.glob("node[0-9]*"):
        ranges = [part.partition("-") for part in read_text(node / "cpulist").split(",") if part]
        if cores <= {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}:
            return int(node.name.removeprefix("node"))
    return -1


def choose(ports: Sequence[Port], *, wanted: str = "", numa_node: int = -1) -> SelectedPort:
    """Select the port and address to use.

    RoCE v2 with an IPv4 address comes first because it crosses routers and needs no subnet manager; then InfiniBand,
    then RoCE v2 with other addresses. Ties: a port of this process's NUMA node, then the faster one, then by name.

    Args:
        wanted: the device, or device:port, to use; empty: any.
        numa_node: the node this process runs on; -1: any.

    Raises TransportError, which lists the ports found, if none is usable.
    """
    named = [port for port in ports if wanted in ("", port.device, f"{port.device}:{port.number}")]
    candidates = [
        (rank, port.numa_node != numa_node, -port.gigabits_per_s, port.device, port.number, gid.index, port, gid)
        for port in named
        if port.active
        for gid in port.gids
        if (rank := _rank(port, gid)) is not None
    ]
    if not candidates:
        found = ", ".join(map(str, ports)) or "none"
        remedy = (
            "unset LAMINA_RDMA_DEVICE or name one of them"
            if wanted and not named
            else "bring a port up (ip link set DEV up) and give its network device an IPv4 address, or use tcp"
        )
        named_so = f" named {wanted}" if wanted else ""
        raise TransportError(
            f"no usable RDMA port{named_so}: found {found}; {remedy}. `rdma link` and `ibv_devinfo` show ports; "
            "`rdma link add rxe0 type rxe netdev DEV` makes one of any network device (Soft-RoCE)"
        )
    *_, port, gid = min(candidates, key=lambda candidate: candidate[:-2])
    why = "named by LAMINA_RDMA_DEVICE" if wanted else f"best of {len({c[-2] for c in candidates})} usable ports"
    return SelectedPort(port, gid, f"{port.device}:{port.number} with {_describe(port, gid)}, {why}")


def _rank(port: Port, gid: Gid) -> int | None:
    """Return the rank of an address: lower is better; None: not usable. RoCE v1 cannot leave its network segment."""
    if port.link_layer == INFINIBAND:
        return 1 if gid.index == 0 else None
    if gid.kind != ROCE_V2:
        return None
    if gid.address.ipv4_mapped:
        return 0
    return 3 if gid.address.is_link_local else 2


def _describe(port: Port, gid: Gid) -> str:
    address = gid.address.ipv4_mapped or gid.address
    return f"{gid.kind if port.link_layer == ETHERNET else INFINIBAND} address {address} (GID {gid.index})"


def _read_port(device: Path, port: Path) -> Port:
    numa_node = read_text(device / "device" / "numa_node")
    return Port(
        device=device.name,
        number=int(port.name),
        active=read_text(port / "state").startswith("4:"),
        link_layer=read_text(port / "link_layer"),
        gigabits_per_s=float((read_text(port / "rate") or "0").split()[0]),
        numa_node=int(numa_node) if numa_node else -1,
        lid=int(read_text(port / "lid") or "0", 0),
        gids=tuple(
            Gid(int(gid.name), kind, address)
            for gid in sorted((port / "gids").glob("*"), key=lambda path: int(path.name))
            if (address := ipaddress.IPv6Address(read_text(gid) or "::")) != ipaddress.IPv6Address("::")
            if (kind := read_text(port / "gid_attrs" / "types" / gid.name))
        ),
    )


def read_text(file: Path) -> str:
    """Return the file's text; empty if it does not exist or cannot be read (the kernel reports empty entries as
    EINVAL)."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
