"""The network's part of `lamina doctor`: cards, RDMA ports and what they need, and every transport tried."""

import resource
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.cli.findings import Finding, Status
from lamina.errors import LaminaError, TransportError

if TYPE_CHECKING:
    from lamina.protocol.choice import Transport
    from lamina.transport.rdma.devices import Port

MODULES = Path("/proc/modules")
TRY_S = 5.0
ENOUGH_LOCKED = 1 << 30  # arenas of a large model with many lanes

# How the kernel names what its RDMA consists of: ib_uverbs, rdma_rxe, mlx5_ib, bnxt_re, irdma ...
RDMA_PREFIXES = ("ib_", "rdma_", "irdma", "siw", "erdma")
RDMA_SUFFIXES = ("_ib", "_re", "_rdma", "_roce", "iw_cxgb4")

# What let an RDMA card read and write GPU memory before dma-bufs did.
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


def network() -> Iterator[Finding]:
    """All findings, in the order they are shown."""
    from lamina._native import tls_obstacle
    from lamina.transport.rdma.devices import inventory

    yield _cards()
    ports = inventory()
    loaded = _loaded_modules()
    yield rdma(ports, loaded)
    if ports:
        yield rdma_modules(loaded)
        yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
        yield _peer_memory(ports, loaded)
    yield from transports(bool(ports))
    yield encryption(tls_obstacle())


def _cards() -> Finding:
    import psutil

    addresses = psutil.net_if_addrs()
    up = {name: card for name, card in psutil.net_if_stats().items() if card.isup and name != "lo"}
    if not up:
        return Finding(
            "network", "no card is up", Status.NOTE, "workers of one machine need none; others: ip link set DEV up"
        )
    cards = [
        f"{name} ({card.speed} Mbit/s, MTU {card.mtu}, {_address(addresses.get(name, []))})"
        if card.speed
        else f"{name} (MTU {card.mtu}, {_address(addresses.get(name, []))})"
        for name, card in sorted(up.items())
    ]
    return Finding("network", ", ".join(cards))


def _address(entries: Sequence[object]) -> str:
    import socket

    found = [
        str(getattr(entry, "address", "")) for entry in entries if getattr(entry, "family", None) == socket.AF_INET
    ]
    return found[0] if found else "no IPv4 address"


def rdma(ports: "Sequence[Port]", modules: frozenset[str]) -> Finding:
    """The ports, and which of them would be used. ``modules``: of the kernel, loaded."""
    from lamina.env import environment
    from lamina.transport.rdma.devices import choose

    if not ports:
        return Finding("RDMA", "no device")
    if "ib_uverbs" not in modules and modules:
        return Finding(
            "RDMA", f"{_names(ports)}, but programs cannot use them", Status.NOTE, "as root: modprobe ib_uverbs"
        )
    try:
        choice = choose(ports, wanted=environment().rdma_device)
    except TransportError as error:
        return Finding("RDMA", str(error).partition(";")[0], Status.NOTE, str(error).partition("; ")[2])
    return Finding("RDMA", f"{_names(ports)}; would use {choice.reason}")


def rdma_modules(modules: frozenset[str]) -> Finding:
    """The kernel's modules for RDMA among those that are loaded."""
    found = sorted(name for name in modules if name.startswith(RDMA_PREFIXES) or name.endswith(RDMA_SUFFIXES))
    return Finding("RDMA modules", ", ".join(found) or "none: built into the kernel")


def _names(ports: "Sequence[Port]") -> str:
    return ", ".join(f"{port}: {' '.join(str(gid.address) for gid in port.gids)}" for port in ports)


def locked_memory(limit: int) -> Finding:
    """What RDMA needs of the limit of locked memory, in bytes; -1 is none."""
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "unlimited")
    found = f"at most {limit / 2**20:.0f} MiB"
    if limit >= ENOUGH_LOCKED:
        return Finding("locked memory", found)
    remedy = "RDMA arenas are locked: ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit file"
    return Finding("locked memory", found, Status.NOTE, remedy)


def _peer_memory(ports: "Sequence[Port]", modules: frozenset[str]) -> Finding:
    from lamina.env import environment
    from lamina.kernels.gpu import device
    from lamina.transport.device.peer_memory import ability
    from lamina.transport.rdma.devices import choose
    from lamina.transport.rdma.endpoint import dma_buf_obstacle

    cards = device.find().cards or ()
    try:
        choice = choose(ports, wanted=environment().rdma_device)
        port, refusal = choice.port.device, dma_buf_obstacle(choice)
    except TransportError as error:
        port, refusal = "the RDMA port", str(error)
    exports = {f"cuda:{index}": ability(index).obstacle for index in range(len(cards))}
    return peer_memory(exports, port, refusal, modules)


def peer_memory(exports: Mapping[str, str], port: str, refusal: str, modules: frozenset[str]) -> Finding:
    """Whether an RDMA port reaches the memory of GPUs (GPUDirect), which takes two drivers that can.

    Args:
        exports: for every GPU, why its driver exports no dma-buf; empty if it does.
        refusal: why the port's driver registers none; empty if it does. modules: of the kernel, loaded.
    """
    found = [f"{port} registers no dma-buf: {refusal}" if refusal else f"{port} registers dma-bufs"]
    found += [f"{gpu} exports none: {why}" if why else f"{gpu} exports them" for gpu, why in exports.items()]
    found += [] if exports else ["no GPU here"]
    found += [f"module {name} is loaded, and not needed" for name in PEER_MEMORY if name in modules]
    if not exports or not (refusal or any(exports.values())):
        return Finding("GPUDirect", "; ".join(found))
    remedy = "what the message says; until then peers' bytes for a GPU go by way of the host's memory"
    return Finding("GPUDirect", "; ".join(found), Status.NOTE, remedy)


def _loaded_modules() -> frozenset[str]:
    """Names of the kernel's modules; nothing where it does not say."""
    try:
        return frozenset(line.split()[0] for line in MODULES.read_text().splitlines())
    except OSError:
        return frozenset()


def transports(has_rdma: bool) -> Iterator[Finding]:
    """Each transport tried by a write to this process, and what would be chosen."""
    from lamina.protocol.choice import Transport

    works = {transport: _try(transport) for transport in Transport if transport is not Transport.RDMA or has_rdma}
    remedies = {
        Transport.SHM: "allow memfd, pidfd_open and /proc/PID/fd between processes of one user",
        Transport.TCP: "allow sockets on the loopback device: ip link set lo up",
        Transport.RDMA: "the message says what is missing; until then --transport tcp",
    }
    for transport, failure in works.items():
        if failure is None:
            yield Finding("transport", f"{transport} works (tried)")
            continue
        # The control plane uses the loopback device too.
        status = Status.NOTE if transport is Transport.RDMA else Status.PROBLEM
        yield Finding("transport", f"{transport} does not work: {failure}", status, remedies[transport])
    between = "rdma" if works.get(Transport.RDMA, "none") is None else "tcp"
    yield Finding("--transport auto", f"shm on this host; {between} to other hosts, if both sides prove it")


def encryption(obstacle: str) -> Finding:
    """Whether ``--tls`` can be given; ``obstacle`` says why not."""
    if not obstacle:
        return Finding("--tls", "tcp can be encrypted (OpenSSL 3)")
    found, _, remedy = obstacle.partition("): ")
    return Finding("--tls", f"tcp cannot be encrypted: {found})", Status.NOTE, remedy)


def _try(transport: "Transport") -> str | None:
    """Why a peer cannot write into an arena and ring its doorbell; None if it can."""
    from lamina.profiling.transports import make_endpoint
    from lamina.protocol.secret import new
    from lamina.transport.listener import LOOPBACK

    secret, message = new(), secrets.token_bytes(64)
    waiter, writer = (
        make_endpoint(transport, name, 0.0, secret, LOOPBACK) for name in ("doctor-waiter", "doctor-writer")
    )
    try:
        arena = waiter.register(len(message), 1)
        writer.register(64, 1)
        peer = writer.connect(waiter.descriptor(), TRY_S)
        writer.post(peer, 0, len(message), [message], 0, 1)
        waiter.wait([(0, 1)], TRY_S)
        return None if arena.view(0, len(message)) == message else "what arrived is not what was written"
    except (LaminaError, OSError) as error:
        return str(error)
    finally:
        writer.close()
        waiter.close()
