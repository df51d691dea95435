"""`lamina bench`: measures how fast a batch decodes, and where the time goes; also `transport` and `cost`."""

import contextlib
import ipaddress
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, DeadlineError, LaminaError, TransportError

if TYPE_CHECKING:
    from lamina.cluster.bringup import Cluster
    from lamina.control.timeline import Span
    from lamina.observe.timing import Share, Window
    from lamina.planning.profiling.transports import Near, Result

SUITE = Path(__file__).parents[2] / "bench" / "cost" / "report.py"
REPORT = Path("lamina-cost.html")
SUITE_TIMEOUT_S = 600.0


def write_cost_report() -> None:
    """Write the report to ``REPORT`` in the current directory.

    Raises:
        ConfigError: this is not a source tree, matplotlib is missing, or the directory is not writable.
        LaminaError: the suite failed or took longer than ``SUITE_TIMEOUT_S``.
    """
    from lamina.config.engine_config import check_writable
    from lamina.observe.progress import waiting

    if not SUITE.is_file():
        raise ConfigError(
            f"the cost suite is not part of the installed package: {SUITE} does not exist. Run it from a checkout"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError("the cost suite needs matplotlib, which is not installed: pip install matplotlib")
    check_writable("the report", REPORT)
    try:
        with waiting("Comparing with the papers"):
            done = subprocess.run([sys.executable, SUITE, "--out", REPORT], timeout=SUITE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaminaError(
            f"{SUITE} did not finish within {SUITE_TIMEOUT_S:g} s; is the machine busy? Run it without a time limit: "
            f"python {SUITE} --out {REPORT}"
        ) from error
    if done.returncode:
        raise LaminaError(f"{SUITE} failed with status {done.returncode}; its message is above")


TIMEOUT_S = 900.0


@options.engine_options
def bench(
    config: EngineConfig,
    invocation: typer.Context,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")] = 512,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request draws.")] = 64,
) -> None:
    """Measure how fast a batch decodes and where the time goes.

    The commands below measure something else.
    """
    if invocation.invoked_subcommand is not None:
        return
    options.check_model(config)
    from lamina.launch import launch
    from lamina.observe.progress import loading_progress, waiting
    from lamina.observe.timing import decode_batch, decode_window

    config = replace(config, max_num_seqs=max(batch, config.max_num_seqs))
    spans: dict[str, list[Span]] = {}
    with loading_progress() as on_progress:
        engine = launch(config, on_progress, spans.update)
    try:
        draw = random.Random(0)
        prompts = [[draw.randrange(engine.vocab_size) for _ in range(context)] for _ in range(batch)]
        with waiting(f"Running {batch} prompts of {context} tokens and drawing {tokens} more for each"):
            window = decode_window(decode_batch(engine, prompts, tokens, TIMEOUT_S))
    finally:
        engine.close()
    _show(spans, window)
    _show_network(engine.cluster)


def _show(spans: "Mapping[str, list[Span]]", window: "Window") -> None:
    from rich.table import Column, Table

    from lamina.cli.console import output, print_table
    from lamina.observe.timing import shares, turnarounds

    parts = shares(spans, window.begin_ns, window.end_ns)
    title = f"Where {window.seconds:.2f} s of decoding went"
    columns = "worker", "stage", Column("seconds", justify="right"), Column("share", justify="right")
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for part in parts:
        table.add_row(part.worker, part.stage, f"{part.seconds:.3f}", f"{part.share:.0%}")
    print_table(table)
    output().print(f"[bold]{window.tokens_per_s:.1f} tokens/s[/]. {verdict(parts)}", soft_wrap=True)
    between = turnarounds(spans, window.begin_ns, window.end_ns)
    if between:
        microseconds = statistics.median(between) / 1000
        output().print(
            f"From sampling a lane's tokens to its next slice: {microseconds:.0f} us (median).", soft_wrap=True
        )


def verdict(parts: "Sequence[Share]") -> str:
    """Say what the bottleneck is: the longest stage, or its worker's time outside all stages if that is longer."""
    from lamina.observe.timing import OTHER, bottleneck

    worst = bottleneck(parts)
    other = next((part for part in parts if (part.worker, part.stage) == (worst.worker, OTHER)), None)
    if other is None or other.share <= worst.share:
        return f"The bottleneck is {worst.stage} on {worst.worker}: {worst.share:.0%} of the time."
    return (
        f"No stage is the bottleneck: {worst.worker} spends {other.share:.0%} of the time outside all stages (plans, "
        f"replies, waiting for a core). Its longest stage is {worst.stage}: {worst.share:.0%}."
    )


def _show_network(cluster: "Cluster") -> None:
    from lamina.cli.console import output
    from lamina.dataplane.transport_choice import summary
    from lamina.dataplane.wire import nbytes_per_token, paper_nbytes_per_token

    if not cluster.links:
        output().print("One worker does everything: nothing travels between workers.")
        return
    attentions, dtype = cluster.loaded.attentions, cluster.loaded.dtype
    ours, paper = (count(attentions, dtype) for count in (nbytes_per_token, paper_nbytes_per_token))
    output().print(
        f"Bytes between workers per token: {ours}, {ours / paper:.2f} x the paper's (2 + 2/G) e d L = {paper:.0f}; "
        f"{', '.join(summary(cluster.links))}.",
        soft_wrap=True,
    )


START_S, END_S = 60.0, 10.0  # longest start and end of the far side's process
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
    """Return the ways of waiting to measure: no spinning if both sides share a single core."""
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
        if not select.select([far.stdout], [], [], START_S)[0]:
            raise DeadlineError(f"the far side's process has not started within {START_S:g} s; try again")
        port = far.stdout.readline()
        if not port:
            raise TransportError("the far side's process exited at once; its messages are above")
        with contextlib.closing(Near(secret, LOOPBACK, int(port))) as near:
            yield near
        far.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # everything has been measured
            far.wait(END_S)
    finally:
        far.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            far.wait(END_S)
        for pipe in (far.stdin, far.stdout):
            pipe.close()
        os.sched_setaffinity(0, available)


def _named(secret_file: str | None) -> str:
    if secret_file is None:
        raise ConfigError("two hosts authenticate by a shared secret: give --secret-file, the same file on both")
    return secret_file


def _host_and_port(where: str) -> tuple[str, int]:
    """Return HOST:PORT as an IPv4 address and a port. Raises ConfigError."""
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
