"""Round trip of one message between two processes over shared memory, spinning and sleeping.

    python -m bench.transport.doorbell [--rounds 20000] [--nbytes 4096] [--json FILE]

Each process has its own core, if there are two: on one core, a spinning process blocks the other.
"spinning" waits on the doorbell without giving up the core; "sleeping" goes to the futex at once; "default" is what
workers do. The time is that of Outbox.write_and_ring and Endpoint.wait on both sides, Python included;
``doorbell.cpp``, where a compiler is there, does the same in native code alone, and without a message.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import ROOT
from lamina.dataplane.slot import Outbox, Slot
from lamina.transport.endpoint import SPIN_S
from lamina.transport.shm import ShmEndpoint

TIMEOUT_S = 30.0
MODES = {"spinning": 0.01, "default": SPIN_S, "sleeping": 0.0}


@dataclass(frozen=True)
class RoundTrip:
    """Microseconds per round trip of ``nbytes`` each way."""

    by: str  # Python or native
    mode: str
    nbytes: int
    spin_us: float
    p50_us: float
    p99_us: float


def answer(descriptor: str, spin_s: float, rounds: int, nbytes: int) -> None:
    """The far process: print one's descriptor, then answer every request."""
    endpoint = ShmEndpoint("far", spin_s=spin_s)
    arena = endpoint.register(nbytes, 1)
    print(endpoint.descriptor().hex(), flush=True)
    peer = endpoint.connect(bytes.fromhex(descriptor), TIMEOUT_S)
    outbox, arrived = Outbox(endpoint, peer, Slot(0, nbytes, 0)), arena.view(0, nbytes)
    for n in range(1, rounds + 1):
        endpoint.wait([(0, n)], TIMEOUT_S)
        outbox.write_and_ring([arrived], n)
    endpoint.close()


def measure(mode: str, rounds: int, nbytes: int, *, far_core: int) -> RoundTrip:
    """Time ``rounds`` round trips of ``nbytes`` each way; the first tenth warms up and does not count."""
    spin_s = MODES[mode]
    endpoint = ShmEndpoint("near", spin_s=spin_s)
    endpoint.register(nbytes, 1)
    arguments = ["--answer", endpoint.descriptor().hex(), "--spin-s", str(spin_s), "--core", str(far_core)]
    sizes = ["--rounds", str(rounds), "--nbytes", str(nbytes)]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.transport.doorbell", *arguments, *sizes],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as far:
        assert far.stdout
        peer = endpoint.connect(bytes.fromhex(far.stdout.readline()), TIMEOUT_S)
        outbox = Outbox(endpoint, peer, Slot(0, nbytes, 0))
        message, times = [bytes(nbytes)], np.empty(rounds)
        for i in range(rounds):
            start = time.perf_counter()
            outbox.write_and_ring(message, i + 1)
            endpoint.wait([(0, i + 1)], TIMEOUT_S)
            times[i] = time.perf_counter() - start
        endpoint.disconnect(peer)
    endpoint.close()
    p50, p99 = np.percentile(times[rounds // 10 :] * 1e6, [50, 99])
    return RoundTrip("Python", mode, nbytes, spin_s * 1e6, float(p50), float(p99))


def measure_native(rounds: int, sizes: Sequence[int], cores: tuple[int, int]) -> list[RoundTrip]:
    """Time ``doorbell.cpp``; nothing without a C++ compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        Console(stderr=True).print("no C++ compiler (c++): native round trips are not measured")
        return []
    results = []
    source = Path(__file__).with_suffix(".cpp")
    native = ROOT / "native"
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/doorbell"
        sources = [str(source), str(native / "transport/doorbell.cpp")]
        subprocess.run([compiler, "-std=c++20", "-O2", f"-I{native / 'include'}", *sources, "-o", program], check=True)
        for mode, spin_s in MODES.items():
            for nbytes in sizes:
                command = [program, *map(str, (rounds, nbytes, round(spin_s * 1e9), *cores))]
                p50, p99 = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                results.append(RoundTrip("native", mode, nbytes, spin_s * 1e6, float(p50) / 1e3, float(p99) / 1e3))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--nbytes", type=int, default=4096, help="bytes of a message, each way")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--answer", metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    parser.add_argument("--spin-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        os.sched_setaffinity(0, {args.core})
        answer(args.answer, args.spin_s, args.rounds, args.nbytes)
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    results = measure_native(args.rounds, (0, args.nbytes), (cores[0], cores[-1]))
    results += [measure(mode, args.rounds, args.nbytes, far_core=cores[-1]) for mode in MODES]
    table = Table("by", "bytes each way", "waiting", "spin us", "p50 us", "p99 us", title="round trips")
    for r in results:
        times = (f"{time_us:.2f}" for time_us in (r.p50_us, r.p99_us))
        table.add_row(r.by, str(r.nbytes), r.mode, f"{r.spin_us:.0f}", *times)
    Console().print(table)
    if args.json:
        figures = {"rounds": args.rounds, "round_trips": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
