"""TCP against programs it is compared with, in the same run: a bare C ping-pong and one stream of iperf3.

    python -m bench.transport.transport [--transports shm,tcp] [--sizes 64,1024,...] [--json FILE] [--plot FILE.png]

What `lamina bench transport` measures, and beside it ``pingpong.c`` and iperf3, where a C compiler and iperf3 are
installed. Each process has a core of its own if there are two.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lamina.cli.bench import local_far_side, plot, show
from lamina.dataplane.transport_choice import Transport
from lamina.planning.profiling.transports import MAX_NBYTES, SPINS, Result

SIZES = (64, 1024, 16 << 10, 256 << 10, 1 << 20, MAX_NBYTES)
TRIES = 50  # until iperf3's server listens


def bare_round_trips(sizes: Sequence[int], cores: tuple[int, int]) -> list[Result]:
    """Return the round trips of a C program with plain sockets; empty without a C compiler."""
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
        for _ in range(TRIES):  # until the server listens
            finished = subprocess.run(client, capture_output=True, text=True, check=False)
            if finished.returncode == 0:
                break
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    if finished.returncode != 0:  # what it prints then is no report, or nothing at all
        said = (finished.stderr or finished.stdout).strip()
        raise SystemExit(f"iperf3 failed {TRIES} times with status {finished.returncode}: {said}")
    report: dict[str, Any] = json.loads(finished.stdout)
    return [Result("iperf3", "default", nbytes, None, report["end"]["sum_received"]["bits_per_second"] / 8e9)]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a message, at most 8 MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    results: list[Result] = []
    transports = args.transports.split(",")
    with local_far_side(cores) as near:
        for transport in transports:
            for wait in SPINS:
                results += near.measure(Transport(transport), wait, sizes, args.seconds)
    if "tcp" in transports:
        results += bare_round_trips([size for size in sizes if size <= 256 << 10], cores)
        results += iperf3_rate(1 << 20, 2 * args.seconds, cores)
    show(results)
    show_ratios(results)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
