"""LoongServe's scheduler beside fifo on LoongServe's workloads, simulated; and the time of its batching.

    python -m bench.cost.policies [--load 0.6] [--requests 120]     # over fifo; minutes

Lengths, model and devices are those of ``bench.cost.figures``. Requests arrive at random, at shares of the rate at
which fifo computes them if all come at once. Latencies are per token, as the paper's: from arrival to the first token
over the prompt, from then to the end over the output, and of both together.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cost.figures import a800s, lengths
from lamina.planning.simulate import Arrivals, Deployment, Result, simulate
from lamina.schedule.loongserve import UNBOUNDED, PrefillTime, batches

DRAWS = (1, 2, 3)
LOADS = (0.3, 0.6, 0.9)
DATASETS = ("ShareGPT", "L-Eval", "LV-Eval", "Mixed")

LAYOUTS: Mapping[str, Deployment] = {
    "4 copies, 4 memory workers": a800s(4, 1, 4, lanes=4, pipelining="fixed"),
    "2 copies, 4 memory workers, 4 lanes": a800s(2, 1, 4, lanes=4, pipelining="fixed"),
    "8 copies, local memory": a800s(8, 1, local=True),
}


def latencies(result: Result) -> tuple[float, float, float]:
    """Return the mean seconds per prompt token, per output token and per token of the requests that finished."""
    log = result.log
    done = log.finished
    come, prompt = log.arrivals.arrival_s[done], log.arrivals.prompt[done]
    first, end, output = log.first_s[done], log.end_s[done], log.drawn[done]
    return (
        float(((first - come) / prompt).mean()),
        float(((end - first) / output).mean()),
        float(((end - come) / (prompt + output)).mean()),
    )


def ratios(deployment: Deployment, dataset: str, load: float, requests: int) -> list[list[float]]:
    """Return ``latencies`` with loongserve over those with fifo, for each draw of lengths."""
    found = []
    for seed in DRAWS:
        prompt, output = lengths(dataset, requests, seed)
        at_once = simulate(deployment, Arrivals(np.zeros(requests), prompt, output))
        gaps = np.random.default_rng(seed).exponential(at_once.seconds / requests / load, requests).cumsum()
        arrivals = Arrivals(gaps - gaps[0], prompt, output)
        runs = [simulate(replace(deployment, policy=name), arrivals) for name in ("loongserve", "fifo")]
        found.append([ours / theirs for ours, theirs in zip(*map(latencies, runs), strict=True)])
    return found


def batching_s(prompts: int, replicas: int) -> float:
    """Return the processor time of Equation 5."""
    lengths = sorted(np.random.default_rng(1).integers(1, 200_000, prompts).tolist(), reverse=True)
    begun = time.process_time()
    batches(lengths, [UNBOUNDED] * replicas, PrefillTime(0.01, 1e-4, 1e-9, 2048, 1e-3))
    return time.process_time() - begun


def _shown(values: Sequence[float]) -> str:
    """Show the mean over all draws, and the least and the greatest."""
    return f"{np.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, action="append", help="only this share of the rate")
    parser.add_argument("--requests", type=int, default=120)
    args = parser.parse_args()
    table = Table("pools", "lengths", "load", "first token", "further tokens", "all", box=None, padding=(0, 1, 0, 0))
    for name, deployment in LAYOUTS.items():
        for dataset in DATASETS:
            for load in args.load or LOADS:
                columns = zip(*ratios(deployment, dataset, load, args.requests), strict=True)
                table.add_row(name, dataset, f"{load}", *map(_shown, columns))
    console = Console(width=110)
    console.print(table)
    for prompts in (32, 100):
        console.print(f"Equation 5, {prompts} prompts on 16 replicas: {1e3 * batching_s(prompts, 16):.0f} ms")


if __name__ == "__main__":
    main()
