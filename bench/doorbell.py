"""Round trip of one message between two processes over shared memory, spinning and sleeping.

    python bench/doorbell.py [--rounds 20000] [--nbytes 4096] [--json FILE]

Each process has a core of its own, if there are two: on one core, whoever spins keeps the other from running.
"spinning" waits on the doorbell without giving up the core; "sleeping" goes to the futex at once; "default" is what
workers do. The time is that of Outbox.send and Endpoint.wait on both sides, Python included.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lamina.transport.channel import Inbox, Outbox, Slot
from lamina.transport.shm import SPIN_S, ShmEndpoint

TIMEOUT_S = 30.0
MODES = {"spinning": 0.01, "default": SPIN_S, "sleeping": 0.0}


@dataclass(frozen=True)
class RoundTrip:
    """Microseconds per round trip of one mode."""

    mode: str
    spin_us: float
    p50_us: float
    p99_us: float


def answer(descriptor: str, spin_s: float, rounds: int, nbytes: int) -> None:
    """The far process: print one's descriptor, then answer every request."""
    endpoint = ShmEndpoint("far", spin_s=spin_s)
    arena = endpoint.register(nbytes, 1)
    print(endpoint.descriptor().hex(), flush=True)
    peer = endpoint.connect(bytes.fromhex(descriptor), TIMEOUT_S)
    inbox, outbox = Inbox(arena, Slot(0, nbytes, 0)), Outbox(endpoint, peer, Slot(0, nbytes, 0))
    for n in range(1, rounds + 1):
        endpoint.wait([(0, n)], TIMEOUT_S)
        outbox.send([inbox.view], n)
    endpoint.close()


def measure(mode: str, rounds: int, nbytes: int, *, far_core: int) -> RoundTrip:
    """Time ``rounds`` round trips of ``nbytes`` each way; the first tenth warms up and does not count."""
    spin_s = MODES[mode]
    endpoint = ShmEndpoint("near", spin_s=spin_s)
    endpoint.register(nbytes, 1)
    arguments = ["--answer", endpoint.descriptor().hex(), "--spin-s", str(spin_s), "--core", str(far_core)]
    sizes = ["--rounds", str(rounds), "--nbytes", str(nbytes)]
    with subprocess.Popen([sys.executable, __file__, *arguments, *sizes], stdout=subprocess.PIPE, text=True) as far:
        assert far.stdout
        peer = endpoint.connect(bytes.fromhex(far.stdout.readline()), TIMEOUT_S)
        outbox = Outbox(endpoint, peer, Slot(0, nbytes, 0))
        message, times = [bytes(nbytes)], np.empty(rounds)
        for i in range(rounds):
            start = time.perf_counter()
            outbox.send(message, i + 1)
            endpoint.wait([(0, i + 1)], TIMEOUT_S)
            times[i] = time.perf_counter() - start
        endpoint.disconnect(peer)
    endpoint.close()
    p50, p99 = np.percentile(times[rounds // 10 :] * 1e6, [50, 99])
    return RoundTrip(mode, spin_s * 1e6, float(p50), float(p99))


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
    results = [measure(mode, args.rounds, args.nbytes, far_core=cores[-1]) for mode in MODES]
    table = Table("waiting", "spin us", "p50 us", "p99 us", title=f"round trip of {args.nbytes} bytes each way")
    for result in results:
        table.add_row(result.mode, f"{result.spin_us:.0f}", f"{result.p50_us:.1f}", f"{result.p99_us:.1f}")
    Console().print(table)
    if args.json:
        figures = {"nbytes": args.nbytes, "rounds": args.rounds, "round_trips": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
