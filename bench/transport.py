"""Latency and bandwidth of the transports between two processes of this machine, by size of message.

    python bench/transport.py [--transports shm,tcp] [--sizes 64,1024,...] [--json FILE] [--plot FILE.png]

A round trip is one post each way; bandwidth is that of a stream of posts into slots that the receiver gives back. Both
are timed at the endpoints' Python interface, spinning and with the default wait. TCP is compared, in the same run,
with a bare C program (``pingpong.c``) and with one stream of iperf3, where a C compiler and iperf3 are installed. Each
process has a core of its own if there are two.
"""

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lamina.transport.base import Endpoint
from lamina.transport.shm import SPIN_S, ShmEndpoint
from lamina.transport.tcp import TcpEndpoint

TIMEOUT_S = 60.0
SPINS = {"spinning": 0.01, "default": SPIN_S}
SIZES = (64, 1024, 16 << 10, 256 << 10, 1 << 20, 8 << 20)
IN_FLIGHT_NBYTES = 4 << 20  # of a stream, at most
MAX_SLOTS = 16
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Result:
    """One transport or peer program at one size.

    Attributes:
        round_trip_us: microseconds by percentile; None if it was not measured.
        gigabytes_per_s: 1e9 bytes a second, one way.
    """

    transport: str
    wait: str
    nbytes: int
    round_trip_us: dict[str, float] | None = None
    gigabytes_per_s: float | None = None


def make_endpoint(transport: str, name: str, spin_s: float, secret: bytes) -> Endpoint:
    """An endpoint that spins for ``spin_s`` seconds."""
    match transport:
        case "shm":
            return ShmEndpoint(name, spin_s=spin_s)
        case "tcp":
            return TcpEndpoint(name, spin_s=spin_s, secret=secret)
    raise SystemExit(f"no transport {transport}; there are shm and tcp")


def slots_for(nbytes: int) -> int:
    """Messages of a stream that are on their way at once."""
    return max(2, min(MAX_SLOTS, IN_FLIGHT_NBYTES // nbytes))


def far(transport: str, spin_s: float) -> None:
    """The far process: read (secret, descriptor) from standard input, print one's own, then do what is asked."""
    secret, descriptor = (bytes.fromhex(word) for word in input().split())
    endpoint = make_endpoint(transport, "far", spin_s, secret)
    arena = endpoint.register(2 * max(*SIZES, IN_FLIGHT_NBYTES), 1)
    print(endpoint.descriptor().hex(), flush=True)
    peer = endpoint.connect(descriptor, TIMEOUT_S)
    sequence = 0
    for line in sys.stdin:
        task, nbytes, count = line.split()[0], *(int(word) for word in line.split()[1:])
        answer = [arena.view(0, nbytes)]
        for _ in range(count):
            sequence += 1
            endpoint.wait([(0, sequence)], TIMEOUT_S)
            if task == "echo":
                endpoint.post(peer, 0, nbytes, answer, 0, sequence)
            else:
                endpoint.ring(peer, 0, sequence)
    endpoint.close()


class Near:
    """The near process's side of one transport."""

    def __init__(self, transport: str, wait: str, far_core: int) -> None:
        self.transport, self.wait = transport, wait
        secret = secrets.token_bytes(32)
        self._endpoint = make_endpoint(transport, "near", SPINS[wait], secret)
        self._endpoint.register(max(SIZES), 1)
        command = ["taskset", "-c", str(far_core), sys.executable, __file__, "--far", transport, "--spin-s"]
        self._far = subprocess.Popen(
            [*command, str(SPINS[wait])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tell(f"{secret.hex()} {self._endpoint.descriptor().hex()}")
        assert self._far.stdout
        self._peer = self._endpoint.connect(bytes.fromhex(self._far.stdout.readline()), TIMEOUT_S)
        self._sequence = 0

    def _tell(self, line: str) -> None:
        assert self._far.stdin
        print(line, file=self._far.stdin, flush=True)

    def round_trips(self, nbytes: int, rounds: int) -> dict[str, float]:
        """Percentiles of the time of a round trip in microseconds; the first tenth warms up."""
        self._tell(f"echo {nbytes} {rounds}")
        message, times = [os.urandom(nbytes)], np.empty(rounds)
        for i in range(rounds):
            self._sequence += 1
            start = time.perf_counter()
            self._endpoint.post(self._peer, 0, nbytes, message, 0, self._sequence)
            self._endpoint.wait([(0, self._sequence)], TIMEOUT_S)
            times[i] = time.perf_counter() - start
        values = np.percentile(times[rounds // 10 :] * 1e6, PERCENTILES)
        return {f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, values, strict=True)}

    def stream(self, nbytes: int, messages: int) -> float:
        """Gigabytes per second of a stream of messages."""
        self._tell(f"take {nbytes} {messages}")
        message, slots, first = [os.urandom(nbytes)], slots_for(nbytes), self._sequence
        start = time.perf_counter()
        for i in range(messages):
            if i >= slots:
                self._endpoint.wait([(0, first + i + 1 - slots)], TIMEOUT_S)
            self._endpoint.post(self._peer, i % slots * nbytes, nbytes, message, 0, first + i + 1)
        self._sequence = first + messages
        self._endpoint.wait([(0, self._sequence)], TIMEOUT_S)
        return messages * nbytes / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        """End both sides."""
        self._endpoint.disconnect(self._peer)
        assert self._far.stdin and self._far.stdout
        self._far.stdin.close()
        self._far.wait(TIMEOUT_S)
        self._far.stdout.close()
        self._endpoint.close()


def measure(transport: str, wait: str, sizes: Sequence[int], seconds: float, far_core: int) -> list[Result]:
    """Every size, about ``seconds`` each for latency and for bandwidth."""
    near = Near(transport, wait, far_core)
    results = []
    for nbytes in sizes:
        once_s = near.round_trips(nbytes, 20)["p50"] * 1e-6
        trips = near.round_trips(nbytes, max(20, min(50_000, int(seconds / once_s))))
        pace = near.stream(nbytes, 20)
        rate = near.stream(nbytes, max(20, min(200_000, int(seconds * pace * 1e9 / nbytes))))
        results.append(Result(transport, wait, nbytes, trips, rate))
    near.close()
    return results


def bare_round_trips(sizes: Sequence[int], cores: tuple[int, int]) -> list[Result]:
    """What a C program with plain sockets needs; nothing without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        Console(stderr=True).print("no C compiler (cc): the bare round trip is not measured")
        return []
    results = []
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/pingpong"
        source = str(Path(__file__).with_name("pingpong.c"))
        subprocess.run([compiler, "-O2", "-o", program, source], check=True)
        for wait, spin in (("spinning", "1"), ("default", "0")):
            for nbytes in sizes:
                rounds = 20_000 if nbytes <= 16 << 10 else 500
                command = [program, str(nbytes), str(rounds), spin, *map(str, cores)]
                p50, p99 = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                results.append(Result("bare C", wait, nbytes, {"p50": float(p50), "p99": float(p99)}))
    return results


def iperf3_rate(nbytes: int, seconds: float, cores: tuple[int, int]) -> list[Result]:
    """One stream of iperf3 with writes of ``nbytes``; nothing where it is not installed."""
    if shutil.which("iperf3") is None:
        Console(stderr=True).print("no iperf3 (Debian: apt-get install iperf3): its rate is not measured")
        return []
    with socket.socket() as free:  # bound, never used: it leaves the port at once
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ["-p", port, "-A"]
    server = subprocess.Popen(["iperf3", "-s", *place, str(cores[1])], stdout=subprocess.DEVNULL, stderr=sys.stderr)
    client = ["iperf3", "-c", "127.0.0.1", *place, str(cores[0]), "-l", str(nbytes), "-t", str(round(seconds)), "-J"]
    try:
        for _ in range(50):  # until the server listens
            finished = subprocess.run(client, capture_output=True, text=True, check=False)
            if finished.returncode == 0:
                break
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    report: dict[str, Any] = json.loads(finished.stdout)
    if "error" in report:
        Console(stderr=True).print(f"iperf3 failed, its rate is not measured: {report['error']}")
        return []
    return [Result("iperf3", "default", nbytes, None, report["end"]["sum_received"]["bits_per_second"] / 8e9)]


def show(results: Sequence[Result]) -> None:
    """Print one row per measurement."""
    table = Table("transport", "wait", "bytes", "p50 us", "p90 us", "p99 us", "GB/s", title="between two processes")
    for result in results:
        trips = result.round_trip_us or {}
        times = [f"{trips[name]:.1f}" if name in trips else "" for name in ("p50", "p90", "p99")]
        rate = "" if result.gigabytes_per_s is None else f"{result.gigabytes_per_s:.2f}"
        table.add_row(result.transport, result.wait, str(result.nbytes), *times, rate)
    Console().print(table)


def show_ratios(results: Sequence[Result]) -> None:
    """Print how TCP stands against its peers of the same run."""
    by_key = {(result.transport, result.wait, result.nbytes): result for result in results}
    for (transport, wait, nbytes), result in by_key.items():
        bare = by_key.get(("bare C", wait, nbytes))
        iperf = by_key.get(("iperf3", "default", nbytes))
        if transport != "tcp":
            continue
        if bare and bare.round_trip_us and result.round_trip_us:
            ratio = result.round_trip_us["p50"] / bare.round_trip_us["p50"]
            print(f"tcp, {wait}, {nbytes} bytes: round trip {ratio:.2f} x bare C")
        if iperf and iperf.gigabytes_per_s and result.gigabytes_per_s:
            ratio = result.gigabytes_per_s / iperf.gigabytes_per_s
            print(f"tcp, {wait}, {nbytes} bytes: bandwidth {ratio:.2f} x iperf3")


def plot(results: Sequence[Result], file: str) -> None:
    """Draw round trips and bandwidth over the size of a message."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for transport, wait in dict.fromkeys((result.transport, result.wait) for result in results):
        mine = [result for result in results if (result.transport, result.wait) == (transport, wait)]
        trips = [(result.nbytes, result.round_trip_us["p50"]) for result in mine if result.round_trip_us]
        rates = [(result.nbytes, result.gigabytes_per_s) for result in mine if result.gigabytes_per_s]
        for axes, points in ((latency, trips), (bandwidth, rates)):
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{transport}, {wait}")
    for axes, title in ((latency, "round trip, median, us"), (bandwidth, "one way, GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes of a message", title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a message, at most 8 MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    parser.add_argument("--far", metavar="TRANSPORT", help=argparse.SUPPRESS)
    parser.add_argument("--spin-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.far:
        return far(args.far, args.spin_s)
    sizes = [int(size) for size in args.sizes.split(",")]
    if not all(0 < size <= max(SIZES) for size in sizes):
        raise SystemExit(f"sizes lie between 1 and {max(SIZES)} bytes")
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    os.sched_setaffinity(0, {cores[0]})
    results: list[Result] = []
    transports = args.transports.split(",")
    for transport in transports:
        for wait in SPINS:
            results += measure(transport, wait, sizes, args.seconds, cores[1])
    if "tcp" in transports:
        results += bare_round_trips([size for size in sizes if size <= 256 << 10], cores)
        results += iperf3_rate(1 << 20, 2 * args.seconds, cores)
    show(results)
    show_ratios(results)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)
    return None


if __name__ == "__main__":
    main()
