"""`lamina doctor`: checks whether Lamina can run on this machine, and says how to fix what is wrong."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from lamina.cli.doctor_network import Finding, Status, network
from lamina.cluster.locality import Card, Locality, core_list

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq", "nvidia-ml-py"),
    *("fastapi", "uvicorn"),
)
THP = Path("/sys/kernel/mm/transparent_hugepage")
LITTLE_RAM = 2 * 2**30


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
    for part, found in lines(here()):
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
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores for this process"
    for flag, name in (("avx512_bf16", "AVX-512 with bf16"), ("avx2", "AVX2")):
        if flag in flags:
            status, remedy = Status.OK, ""
            if flag == "avx2":
                status, remedy = (
                    Status.NOTE,
                    "bf16 attention is fastest on a CPU with AVX-512 bf16 (Cooper Lake, Zen 4 or later)",
                )
            return Finding("CPU", f"{found}, {name}", status, remedy)
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
    try:
        os.close(os.memfd_create("lamina-doctor"))
    except (AttributeError, OSError) as error:
        missing.append(f"memfd_create ({error})")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        missing.append(f"pidfd_open ({error})")
    if missing:
        remedy = "Linux 5.3 or later, and a container profile that allows these calls"
        return Finding("kernel", f"lacks {', '.join(missing)}", Status.PROBLEM, remedy)
    return Finding("kernel", "has memfd and pidfd")


def _gpus() -> Finding:
    from lamina.cluster.pool import find_devices

    gpus = find_devices().gpus
    if not gpus:
        return Finding("GPUs", "none")
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return Finding("GPUs", names)


def _model() -> Finding:
    from lamina.core.errors import ModelError
    from lamina.models import directory

    try:
        model = directory.find(None)
    except ModelError as error:
        return Finding("bundled model", str(error), Status.PROBLEM, "install Lamina again")
    return Finding("bundled model", f"{model.name} at {model.path}")


def lines(found: Locality) -> Iterator[tuple[str, str]]:
    """What to show of a machine: (part, what is known of it)."""
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
    """What a worker on this GPU should use."""
    nearest, cores = found.nearest(gpu), found.cores(gpu)
    interface = "no network interface" if nearest is None else f"{nearest[0].name} is {nearest[1]}"
    run = f"its worker runs on cores {core_list(cores)}" if cores else "its worker runs on any cores"
    if len(found.gpus) == 1:
        return f"{run}; {interface}"
    others = ", ".join(other.name for other in found.reached(gpu)) or "no other GPU"
    return f"{run}; {interface}; it writes into the memory of {others}"
