"""`lamina doctor`: checks whether Lamina can run on this machine, and says how to fix what is wrong."""

import enum
import os
import platform
import resource
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cluster.locality import Card, Locality, core_list
from lamina.core.errors import LaminaError, ModelError, TransportError

if TYPE_CHECKING:
    from lamina.dataplane.transport_choice import Transport
    from lamina.transport.rdma.ports import Port

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq", "nvidia-ml-py"),
    *("fastapi", "uvicorn", "httpx"),
)
THP = Path("/sys/kernel/mm/transparent_hugepage")
LITTLE_RAM = 2 * 2**30

MODULES = Path("/proc/modules")
TRY_S = 5.0
MIN_LOCKED_BYTES = 1 << 30  # holds the arenas of a large model with many lanes

# Names of the kernel's RDMA modules: ib_uverbs, rdma_rxe, mlx5_ib, bnxt_re, irdma ...
RDMA_PREFIXES = ("ib_", "rdma_", "irdma", "siw", "erdma")
RDMA_SUFFIXES = ("_ib", "_re", "_rdma", "_roce", "iw_cxgb4")

# Modules for RDMA access to GPU memory from before dma-bufs.
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


class Status(enum.Enum):
    """Severity of a finding; only PROBLEM makes the command fail."""

    OK = "[green]ok[/]"
    NOTE = "[yellow]note[/]"
    PROBLEM = "[bold red]problem[/]"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` says what to do, empty if all is well."""

    subject: str
    found: str
    status: Status = Status.OK
    remedy: str = ""


def doctor(
    topology: Annotated[
        bool,
        typer.Option("--topology", help="Show which cores, memory, GPUs and network interfaces are close together."),
    ] = False,
) -> None:
    """Check this machine. Exit status 1 if a problem must be fixed first."""
    from rich.markup import escape
    from rich.table import Column, Table

    from lamina.cli.console import output

    if topology:
        _show_topology()
        return
    findings = list(examine())
    table = Table("", "", Column(overflow="fold"), box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        remedy = f"\n[dim]remedy:[/] {escape(finding.remedy)}" if finding.remedy else ""
        table.add_row(finding.status.value, finding.subject, escape(finding.found) + remedy)
    output().print(table)
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    if problems:
        output().print(f"\n[bold red]{problems} problem{'s' * (problems > 1)} to fix first.[/]")
        raise typer.Exit(1)
    output().print('\n[bold green]Lamina runs here.[/] Try: lamina generate --memory cpu:2 "def fibonacci(n):"')


def _show_topology() -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    from lamina.cli.console import output
    from lamina.cluster.locality import here

    table = Table("", Column(overflow="fold"), box=None, padding=(0, 2, 0, 0), show_header=False)
    for part, found in topology_lines(here()):
        table.add_row(part, escape(found))
    output().print(table)


def examine() -> Iterator[Finding]:
    """Run all checks, in the order they are shown."""
    yield _python()
    yield from _packages()
    yield _quantisation()
    yield _native()
    yield _cpu(_cpu_flags())
    yield from _memory()
    yield _kernel()
    yield _gpus()
    yield from network()
    yield _model()


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", found, Status.PROBLEM, "Lamina needs Linux: it uses futexes, memfds and pidfds")
    return Finding("Python", found)


def _packages() -> Iterator[Finding]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("package", f"{name} is missing", Status.PROBLEM, f"pip install {name}")
    yield Finding("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _quantisation() -> Finding:
    try:
        return Finding("quantised weights", f"on CPUs and GPUs (torchao {metadata.version('torchao')})")
    except metadata.PackageNotFoundError:
        return Finding("quantised weights", "on CPUs and GPUs, but int4 on GPUs needs torchao: pip install torchao")


def _native() -> Finding:
    try:
        from lamina import _native
    except ImportError as error:
        return Finding("native module", str(error), Status.PROBLEM, "build it: pip install -e . (or make native)")
    paths = ", ".join(path.name.lower() for path in _native.attention_paths())
    return Finding("native module", f"loads; attention can run as {paths}")


def _cpu(flags: frozenset[str]) -> Finding:
    found = f"{len(os.sched_getaffinity(0))} cores for this process"
    if "avx512_bf16" in flags:
        return Finding("CPU", f"{found}, AVX-512 with bf16")
    if "avx2" in flags:
        remedy = "bf16 attention is fastest on a CPU with AVX-512 bf16 (Cooper Lake, Zen 4 or later)"
        return Finding("CPU", f"{found}, AVX2", Status.NOTE, remedy)
    remedy = "attention runs as portable code, several times slower; use a CPU with AVX2 or better"
    return Finding("CPU", f"{found}, no AVX2", Status.NOTE, remedy)


def _cpu_flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    if memory.available < LITTLE_RAM:
        yield Finding("RAM", found, Status.NOTE, "little room for weights and KV; close other programs")
    else:
        yield Finding("RAM", found)
    if not THP.is_dir():
        yield Finding(
            "huge pages", "not supported by this kernel", Status.NOTE, "use a kernel with them: KV reads are faster"
        )
        return
    mode = (THP / "enabled").read_text().partition("[")[2].partition("]")[0]
    shared = (THP / "shmem_enabled").read_text().partition("[")[2].partition("]")[0]
    found = f"transparent: {mode}, shared memory: {shared}"
    if mode == "never":
        yield Finding("huge pages", found, Status.NOTE, f"as root: echo madvise > {THP}/enabled")
    else:
        yield Finding("huge pages", found)


def _kernel() -> Finding:
    missing = []
    for name, argument in (("memfd_create", "lamina-doctor"), ("pidfd_open", os.getpid())):
        try:
            os.close(getattr(os, name)(argument))
        except (AttributeError, OSError) as error:
            missing.append(f"{name} ({error})")
    if missing:
        remedy = "Linux 5.3 or later, and a container profile that allows these calls"
        return Finding("kernel", f"lacks {', '.join(missing)}", Status.PROBLEM, remedy)
    return Finding("kernel", "has memfd and pidfd")


def _gpus() -> Finding:
    from lamina.cluster.pool import find_devices

    gpus = find_devices().gpus
    return Finding("GPUs", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none")


def _model() -> Finding:
    from lamina.models import directory

    try:
        model = directory.find(None)
    except ModelError as error:
        return Finding("bundled model", str(error), Status.PROBLEM, "install Lamina again")
    return Finding("bundled model", f"{model.name} at {model.path}")


def topology_lines(found: Locality) -> Iterator[tuple[str, str]]:
    """Yield lines (part, description) about a machine's topology."""
    for node in found.nodes:
        memory = f", {node.memory_bytes / 2**30:.1f} GiB" if node.memory_bytes else ""
        yield f"NUMA node {node.number}", f"cores {core_list(node.cores) or 'none'}{memory}"
    if not found.nodes:
        yield "NUMA", "the kernel does not report nodes"
    for nic in found.nics:
        yield nic.name, _about(found, nic)
    if not found.nics:
        yield "network", "no interface with a device of its own"
    for gpu in found.gpus:
        yield gpu.name, _about(found, gpu)
        yield "", _neighbours(found, gpu)
    if not found.gpus:
        yield "GPUs", "none"


def _about(found: Locality, card: Card) -> str:
    node = found.node(card)
    where = f"NUMA node {node}" if node >= 0 else "NUMA node unknown"
    return ", ".join(filter(None, (card.about, card.address, where)))


def _neighbours(found: Locality, gpu: Card) -> str:
    nearest, cores = found.nearest(gpu), found.cores(gpu)
    interface = "no network interface" if nearest is None else f"{nearest[0].name} is {nearest[1]}"
    run = f"its worker runs on cores {core_list(cores)}" if cores else "its worker runs on any cores"
    if len(found.gpus) == 1:
        return f"{run}; {interface}"
    others = ", ".join(other.name for other in found.reached(gpu)) or "no other GPU"
    return f"{run}; {interface}; it writes into the memory of {others}"


def network() -> Iterator[Finding]:
    """Run the checks of networks and transports, in the order they are shown."""
    from lamina._native import tls_obstacle
    from lamina.transport.rdma.ports import inventory

    yield _interfaces()
    ports = inventory()
    loaded = _loaded_modules()
    yield rdma(ports, loaded)
    if ports:
        yield rdma_modules(loaded)
        yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
        yield _peer_memory(ports, loaded)
    yield from transports(bool(ports))
    yield encryption(tls_obstacle())


def _interfaces() -> Finding:
    import psutil

    addresses = psutil.net_if_addrs()
    up = {name: stats for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"}
    if not up:
        return Finding(
            "network", "no interface is up", Status.NOTE, "workers on other machines need one: ip link set DEV up"
        )
    interfaces = []
    for name, stats in sorted(up.items()):
        speed = f"{stats.speed} Mbit/s, " if stats.speed else ""
        own = [entry.address for entry in addresses.get(name, []) if entry.family == socket.AF_INET]
        interfaces.append(f"{name} ({speed}MTU {stats.mtu}, {own[0] if own else 'no IPv4 address'})")
    return Finding("network", ", ".join(interfaces))


def rdma(ports: "Sequence[Port]", modules: frozenset[str]) -> Finding:
    """Report the RDMA ports and which one would be used. ``modules``: kernel modules that are loaded."""
    from lamina.config.environment import environment
    from lamina.transport.rdma.ports import choose

    if not ports:
        return Finding("RDMA", "no device")
    if modules and "ib_uverbs" not in modules:  # none are known if /proc/modules cannot be read
        return Finding(
            "RDMA",
            f"{_names(ports)}, but ib_uverbs is not loaded, so programs cannot open them",
            Status.NOTE,
            "as root: modprobe ib_uverbs",
        )
    try:
        choice = choose(ports, wanted=environment().rdma_device)
    except TransportError as error:
        return Finding("RDMA", str(error).partition(";")[0], Status.NOTE, str(error).partition("; ")[2])
    return Finding("RDMA", f"{_names(ports)}; would use {choice.reason}")


def rdma_modules(modules: frozenset[str]) -> Finding:
    """Report which of the loaded kernel ``modules`` are for RDMA."""
    found = sorted(name for name in modules if name.startswith(RDMA_PREFIXES) or name.endswith(RDMA_SUFFIXES))
    return Finding("RDMA modules", ", ".join(found) or "none found: built into the kernel, or not listed")


def _names(ports: "Sequence[Port]") -> str:
    return ", ".join(f"{port}: {' '.join(str(gid.address) for gid in port.gids)}" for port in ports)


def locked_memory(limit: int) -> Finding:
    """Report whether the limit on locked memory, in bytes (-1: unlimited), is enough for RDMA."""
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "unlimited")
    found = f"at most {limit / 2**20:.0f} MiB"
    if limit >= MIN_LOCKED_BYTES:
        return Finding("locked memory", found)
    remedy = "RDMA pins its buffers in memory: ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit file"
    return Finding("locked memory", found, Status.NOTE, remedy)


def _peer_memory(ports: "Sequence[Port]", modules: frozenset[str]) -> Finding:
    from lamina.config.environment import environment
    from lamina.kernels.gpu import device
    from lamina.transport.device.peer_memory import ability
    from lamina.transport.rdma.endpoint import dma_buf_obstacle
    from lamina.transport.rdma.ports import choose

    gpus = device.find().gpus or ()
    try:
        choice = choose(ports, wanted=environment().rdma_device)
        port, refusal = choice.port.device, dma_buf_obstacle(choice)
    except TransportError as error:
        port, refusal = "the RDMA port", str(error)
    exports = {f"cuda:{index}": ability(index).obstacle for index in range(len(gpus))}
    return peer_memory(exports, port, refusal, modules)


def peer_memory(exports: Mapping[str, str], port: str, refusal: str, modules: frozenset[str]) -> Finding:
    """Report whether an RDMA port can access GPU memory (GPUDirect): the drivers of both must support dma-bufs.

    Args:
        exports: by GPU, why its driver cannot export a dma-buf; empty if it can.
        refusal: why the port's driver cannot register one; empty if it can.
        modules: kernel modules that are loaded.
    """
    found = [f"{port} cannot register dma-bufs: {refusal}" if refusal else f"{port} registers dma-bufs"]
    found += [
        f"{gpu} cannot export dma-bufs: {why}" if why else f"{gpu} exports dma-bufs" for gpu, why in exports.items()
    ]
    found += [] if exports else ["no GPU here"]
    found += [f"module {name} is loaded but not needed" for name in PEER_MEMORY if name in modules]
    if not exports or not (refusal or any(exports.values())):
        return Finding("GPUDirect", "; ".join(found))
    remedy = "fix what the driver reports; until then, data for a GPU is copied through host memory"
    return Finding("GPUDirect", "; ".join(found), Status.NOTE, remedy)


def _loaded_modules() -> frozenset[str]:
    try:
        return frozenset(line.split()[0] for line in MODULES.read_text().splitlines())
    except OSError:
        return frozenset()


def transports(has_rdma: bool) -> Iterator[Finding]:
    """Test each transport by a write within this process; then say which would be selected."""
    from lamina.dataplane.transport_choice import Transport

    failures = {transport: _try(transport) for transport in Transport if transport is not Transport.RDMA or has_rdma}
    remedies = {
        Transport.SHM: "allow memfd, pidfd_open and /proc/PID/fd between processes of one user",
        Transport.TCP: "allow sockets on the loopback interface: ip link set lo up",
        Transport.RDMA: "install or enable what the message names; until then use --transport tcp",
    }
    for transport, failure in failures.items():
        if failure is None:
            yield Finding("transport", f"{transport} works (tried)")
            continue
        # Without the loopback interface, not even the control plane works.
        status = Status.NOTE if transport is Transport.RDMA else Status.PROBLEM
        yield Finding("transport", f"{transport} does not work: {failure}", status, remedies[transport])
    has_rdma = has_rdma and failures[Transport.RDMA] is None
    yield Finding(
        "--transport auto", f"shm on one host; {'rdma' if has_rdma else 'tcp'} between hosts, if a test write succeeds"
    )


def encryption(obstacle: str) -> Finding:
    """Report whether ``--tls`` is available; ``obstacle`` says why not."""
    if not obstacle:
        return Finding("--tls", "tcp can be encrypted (OpenSSL 3)")
    found, parenthesis, remedy = obstacle.partition("): ")  # only a missing library has a remedy
    return Finding("--tls", f"tcp cannot be encrypted: {found}{parenthesis.strip(': ')}", Status.NOTE, remedy)


def _try(transport: "Transport") -> str | None:
    from lamina.control.secret import new
    from lamina.planning.profiling.transports import make_endpoint
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
        return None if arena.view(0, len(message)) == message else "the bytes received differ from those written"
    except (LaminaError, OSError) as error:
        return str(error)
    finally:
        writer.close()
        waiter.close()
