"""Measures `lamina simulate`, and the engine's decisions as the cluster grows, in CPU seconds of one core.

The load is ``LOAD`` times the saturation throughput, which is measured first by overloading one cluster.

python -m bench.cost.simulate azure_conv_2023.csv                 # the trace, then clusters of growing size
python -m bench.cost.simulate azure_conv_2023.csv --large  # instead: 250 + 1,000 workers, 1,000,000 requests
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import RESULTS
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.workload import TracedRequest, read_trace
from lamina.planning.simulate import Arrivals, Deployment, Result, draw, replay, simulate

FILE = RESULTS / "simulate.json"
MODEL, COMPUTE, MEMORY = "Llama-2-7B", "a100", "rtx3090"
MEMORIES = 4  # per compute worker
REQUESTS = 800  # per compute worker
CLUSTERS = (2, 10, 50)
LOAD = 0.8
OVERLOAD = 1.5  # requests per compute worker and second, as a multiple of the trace's rate
SATURATED = 10  # compute workers of the cluster that is overloaded
LARGE, LARGE_REQUESTS = 250, 1_000_000


def deployment(computes: int, memories: int, **settings: Any) -> Deployment:
    catalogue = hardware.load()
    return Deployment(
        model=model_shapes.find(MODEL),
        compute=catalogue[COMPUTE],
        compute_workers=computes,
        memory=catalogue[MEMORY],
        memory_workers=memories,
        **settings,
    )


def cluster(computes: int) -> Deployment:
    """Two lanes pinned to each compute worker."""
    return deployment(computes, MEMORIES * computes, lanes=2 * computes, pipelining="fixed")


def capacity(trace: list[TracedRequest]) -> float:
    """Saturation throughput of a compute worker with its memory workers, as a multiple of the trace's rate."""
    arrivals = draw(trace, REQUESTS * SATURATED, 0, OVERLOAD * SATURATED)
    ends, last = simulate(cluster(SATURATED), arrivals).log.end_s, arrivals.arrival_s[-1]
    served = np.count_nonzero((ends > last / 2) & (ends <= last)) / (last / 2)
    offered = len(arrivals) / last
    print(f"{SATURATED} compute workers serve {served:.1f} requests a second of {offered:.1f}", flush=True)
    keep("capacity", {"compute_workers": SATURATED, "offered_requests_s": offered, "served_requests_s": served})
    return float(OVERLOAD * served / offered)


def measure(pools: Deployment, arrivals: Arrivals) -> dict[str, Any]:
    begun, begun_cpu = time.perf_counter(), time.process_time()

    def progress(ended: int) -> None:
        cpu_s = time.process_time() - begun_cpu
        print(f"\r{ended} of {len(arrivals)} requests, {cpu_s:.0f} s CPU", end="", file=sys.stderr, flush=True)

    result = simulate(pools, arrivals, on_progress=progress if sys.stderr.isatty() else None)
    row = {
        "compute_workers": pools.compute_workers,
        "memory_workers": pools.memory_workers,
        "requests": len(arrivals),
        "cpu_s": time.process_time() - begun_cpu,
        "wall_s": time.perf_counter() - begun,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **decisions(result),
        "summary": result.summary(),
    }
    show(row)
    return row


def decisions(result: Result) -> dict[str, Any]:
    spent = result.decisions
    assert spent is not None
    return {
        "steps": spent.steps,
        "sequences_a_step": spent.rows / spent.steps,
        "decisions_us_a_step": sum(spent.seconds.values()) / spent.steps * 1e6,
        "decisions_us_a_sequence": sum(spent.seconds.values()) / spent.rows * 1e6,
        "decisions_s": dict(spent.seconds),
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['compute_workers']:>4} compute {row['memory_workers']:>5} memory {row['requests']:>8} requests: "
        f"{row['cpu_s']:7.1f} s CPU ({row['wall_s']:7.1f} s), {row['peak_gib']:.2f} GiB; {row['steps']} steps of "
        f"{row['sequences_a_step']:.1f} sequences, decisions {row['decisions_us_a_step']:.0f} us a step, "
        f"{row['decisions_us_a_sequence']:.2f} us a sequence",
        flush=True,
    )


def keep(name: str, measured: object) -> None:
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps({**results, name: measured}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    trace = list(read_trace(arguments.trace))
    if not arguments.large:
        keep("trace", measure(deployment(2, 6), replay(trace)))
    rate = LOAD * capacity(trace)
    if arguments.large:
        keep("large", measure(cluster(LARGE), draw(trace, LARGE_REQUESTS, 0, rate * LARGE)))
    else:
        for size in CLUSTERS:
            keep(f"{size} compute workers", measure(cluster(size), draw(trace, REQUESTS * size, 0, rate * size)))


if __name__ == "__main__":
    main()
