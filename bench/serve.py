"""Offline decode and prefill of a random Llama, against the memory limit measured in the same run.

    python bench/serve.py [--model 250m] [--grid 1x512,8x512,64x512,16x2048,4x8192] [--repeat 3] [--json FILE]

A decode step must read every weight once and every request's KV once: the limit is those bytes over the read bandwidth
that a native loop reaches with all cores. Weights are random, in bfloat16; prompts are random tokens.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_models import MODELS, kv_bytes_per_token, model_directory, weight_bytes
from rich.console import Console
from rich.table import Table

from lamina import Lamina, RequestOutput, SamplingParams
from lamina.kernels.memory import allocate, read

DECODED = 64
TIMEOUT_S = 900
READ_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Result:
    """One cell of the grid; rates in tokens per second over all requests."""

    batch: int
    context: int
    decode: float
    limit: float
    prefill: float


def read_bandwidth(threads: int) -> float:
    """Bytes per second that a native loop reads from memory larger than any cache: the median of seven."""
    memory = allocate(READ_BYTES)
    memory[:] = 1
    rates = []
    for _ in range(7):
        start = time.perf_counter()
        read(memory, threads)
        rates.append(READ_BYTES / (time.perf_counter() - start))
    return statistics.median(rates)


def measure(lamina: Lamina, batch: int, context: int) -> tuple[float, float]:
    """(decode, prefill) tokens per second; decode from the last prompt to the first request that ends."""
    draw = random.Random(batch * context)
    arrivals: dict[int, list[float]] = {index: [] for index in range(batch)}
    unfinished = set(arrivals)
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        arrivals[int(output.request_id)].append(time.perf_counter())
        if output.finished:
            unfinished.discard(int(output.request_id))
            if not unfinished:
                done.set()

    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    for index in arrivals:
        lamina.engine.submit(str(index), [draw.randrange(3, 900) for _ in range(context)], params, on_output)
    if not done.wait(TIMEOUT_S):
        raise TimeoutError(f"{len(unfinished)} of {batch} requests did not end within {TIMEOUT_S} s")
    prompts_done = max(times[0] for times in arrivals.values())
    first_end = min(times[-1] for times in arrivals.values())
    decoded = sum(prompts_done < time_s <= first_end for times in arrivals.values() for time_s in times)
    return decoded / (first_end - prompts_done), batch * context / (prompts_done - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="250m")
    parser.add_argument("--grid", default="1x512,8x512,64x512,16x2048,4x8192", help="batch x context, by commas")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in args.grid.split(",")]
    cores = len(os.sched_getaffinity(0))
    results = []
    with model_directory(args.model) as path, Lamina(path, load_format="dummy", dtype="bfloat16") as lamina:
        for batch, context in cells:
            bandwidth = read_bandwidth(threads=cores)
            rates = [measure(lamina, batch, context) for _ in range(args.repeat)]
            bytes_read = weight_bytes(args.model) + batch * (context + DECODED / 2) * kv_bytes_per_token(args.model)
            limit = batch * bandwidth / bytes_read
            decode, prefill = (statistics.median(column) for column in zip(*rates, strict=True))
            results.append(Result(batch, context, decode, limit, prefill))
    table = Table("batch x context", "decode tokens/s", "memory limit", "ratio", "prefill tokens/s")
    for r in results:
        cell = f"{r.batch} x {r.context}"
        table.add_row(cell, f"{r.decode:.0f}", f"{r.limit:.0f}", f"{r.decode / r.limit:.2f}", f"{r.prefill:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
