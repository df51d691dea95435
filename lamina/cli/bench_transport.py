"""`lamina bench transport`: measures latency and bandwidth of each transport between two processes or two hosts."""

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.core.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from lamina.planning.profiling.transports import Near, Result

END_S = 10.0
CONNECT_S = 5.0
MAX_PORT = 65535


def transport(
    transports: Annotated[str, typer.Option(help="Any of shm, tcp and rdma, separated by commas.")] = "shm,tcp",
    sizes: Annotated[
        str, typer.Option(help="Message sizes in bytes, separated by commas.")
    ] = "64,1024,16384,262144,1048576",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to measure each figure.")] = 0.5,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve measurements started on another host.")
    ] = None,
    connect: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure to a host that runs --listen.")
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="For --listen and --connect: the same file on both hosts, created if missing.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Plot them to a .png or .svg file; needs matplotlib.")
    ] = None,
) -> None:
    """Measure latency and bandwidth between processes.

    By default between two processes on this machine. Between two hosts, run on one of them: lamina bench transport
    --listen HOST:PORT --secret-file F. Copy F to the other and run there: lamina bench transport --transports tcp
    --connect HOST:PORT --secret-file F
    """
    from lamina.config.engine_config import check_writable
    from lamina.dataplane.transport_choice import Transport
    from lamina.observe.progress import waiting
    from lamina.planning.profiling.transports import MAX_NBYTES

    if listen is not None:
        return _listen(listen, secret_file)
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file:
            check_writable(option, Path(file))
    named = transports.split(",")
    if unknown := set(named) - {item.value for item in Transport}:
        raise ConfigError(f"unknown transport {', '.join(sorted(unknown))}; give shm, tcp or rdma, separated by commas")
    numbers = [int(size) if size.isdigit() else 0 for size in sizes.split(",")]
    if not all(0 < number <= MAX_NBYTES for number in numbers):
        raise ConfigError(f"sizes are {sizes!r}; give numbers from 1 to {MAX_NBYTES}, separated by commas")
    waits = _waits(two_hosts=connect is not None)
    with (
        waiting(f"Measuring {', '.join(named)}"),
        local_far_side() if connect is None else _remote(connect, secret_file) as near,
    ):
        results = [
            result
            for name in named
            for wait in waits
            for result in near.measure(Transport(name), wait, numbers, seconds)
        ]
    show(results)
    if json_file:
        Path(json_file).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if plot_file:
        plot(results, plot_file)
    return None


def _waits(two_hosts: bool) -> list[str]:
    """The ways of waiting to measure: on a single core, two spinning sides only take it from each other."""
    from lamina.cli.console import output
    from lamina.planning.profiling.transports import SPINS

    if two_hosts or len(os.sched_getaffinity(0)) > 1:
        return list(SPINS)
    output().print("[dim]This process may use one core only: spinning waits are not measured.[/]")
    return ["default"]


def _listen(where: str, secret_file: str | None) -> None:
    from lamina.cli.console import output
    from lamina.control.secret import from_file
    from lamina.planning.profiling.transports import Far

    host, port = _host_and_port(where)
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"{host} means all addresses of this machine; give the one that the other host connects to")
    far = Far(from_file(_named(secret_file)), host, port)
    output().print(f"Listening on {host}:{far.port}. [dim]Ctrl-C stops it.[/]", soft_wrap=True)
    try:
        while True:
            far.serve()
    except KeyboardInterrupt:
        return
    finally:
        far.close()


@contextlib.contextmanager
def _remote(where: str, secret_file: str | None) -> "Iterator[Near]":
    from lamina.control.secret import from_file
    from lamina.planning.profiling.transports import Near

    host, port = _host_and_port(where)
    secret = from_file(_named(secret_file))
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise TransportError(
            f"cannot connect to {host}:{port} ({error.strerror or error}); start the other side there first: "
            f"lamina bench transport --listen {host}:{port} --secret-file F"
        ) from error
    with contextlib.closing(Near(secret, host, port)) as near:
        yield near


@contextlib.contextmanager
def local_far_side(cores: tuple[int, int] | None = None) -> "Iterator[Near]":
    """Connect to a far side in a new process on this machine, which ends with the block.

    ``cores`` = (near, far), by default the first and the last core that this process may use.
    """
    from lamina.control.secret import new
    from lamina.planning.profiling.transports import Near
    from lamina.transport.listener import LOOPBACK

    available = sorted(os.sched_getaffinity(0))
    near_core, far_core = cores or (available[0], available[-1])
    os.sched_setaffinity(0, {far_core})  # inherited by the far side
    secret = new()
    command = [sys.executable, "-m", "lamina.planning.profiling.transports"]
    far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, {near_core})
    assert far.stdin and far.stdout
    try:
        print(secret.data.hex(), file=far.stdin, flush=True)
        port = far.stdout.readline()
        if not port:
            raise TransportError("the far side's process exited at once; its messages are above")
        with contextlib.closing(Near(secret, LOOPBACK, int(port))) as near:
            yield near
        far.stdin.close()
        far.wait(END_S)
    finally:
        far.kill()
        far.wait(END_S)
        for pipe in (far.stdin, far.stdout):
            pipe.close()
        os.sched_setaffinity(0, available)


def _named(secret_file: str | None) -> str:
    if secret_file is None:
        raise ConfigError("two hosts authenticate by a shared secret: give --secret-file, the same file on both")
    return secret_file


def _host_and_port(where: str) -> tuple[str, int]:
    """HOST:PORT as an IPv4 address and a port. Raises ConfigError."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"{where!r} is not an address; give HOST:PORT, with a port up to {MAX_PORT}")
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host!r} does not resolve to an IPv4 address ({error}); give an address or another name"
        ) from error
    return str(address), int(port)


def show(results: "Sequence[Result]") -> None:
    """Print one row per measurement."""
    from rich.table import Table

    from lamina.cli.console import print_table

    table = Table("transport", "wait", "bytes", "p50 us", "p90 us", "p99 us", "GB/s", title="Between two processes")
    for result in results:
        trips = result.round_trip_us or {}
        times = [f"{trips[name]:.1f}" if name in trips else "" for name in ("p50", "p90", "p99")]
        rate = "" if result.gigabytes_per_s is None else f"{result.gigabytes_per_s:.2f}"
        table.add_row(result.transport, result.wait, str(result.nbytes), *times, rate)
    print_table(table)


def plot(results: "Sequence[Result]", file: str) -> None:
    """Plot round trips and bandwidth over message size. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib, or give --json instead") from error

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for transport, wait in dict.fromkeys((result.transport, result.wait) for result in results):
        mine = [result for result in results if (result.transport, result.wait) == (transport, wait)]
        trips = [(result.nbytes, result.round_trip_us) for result in mine if result.round_trip_us]
        rates = [(result.nbytes, result.gigabytes_per_s) for result in mine if result.gigabytes_per_s]
        if trips:
            medians = [(nbytes, times["p50"]) for nbytes, times in trips]
            line = latency.plot(*zip(*medians, strict=True), marker="o", label=f"{transport}, {wait}")[0]
            tails = [times["p99"] for _, times in trips]
            latency.plot([nbytes for nbytes, _ in trips], tails, linestyle=":", color=line.get_color())
        if rates:
            bandwidth.plot(*zip(*rates, strict=True), marker="o", label=f"{transport}, {wait}")
    for axes, title in ((latency, "round trip, us (median; p99 dotted)"), (bandwidth, "one way, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="message size in bytes", title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
