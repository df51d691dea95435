"""Measures how much of slow attention two lanes hide that share a tensor-parallel replica.

    python -m bench.runtime.hidden_delay [--model 60m] [--batch 16] [--ranks 2] [--share 0.8] [--rounds 3] [--json FILE]

Attention is emulated: after each request, the memory worker sleeps for a time in proportion to its rows and heads,
which takes no core. For all rows and heads of a batch, this is ``--share`` of what a layer of one lane takes without
it. With one lane, a step takes longer by this delay in each layer; two lanes of half the rows each can hide it behind
each other's slices. ``hidden`` is the share of one lane's additional time that two lanes do not have, each compared
with itself without the delay. Memory workers have priority over ranks, which needs root: they stand for other machines,
and must not wait for a core that a rank computes on.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.models import COMMON, MODELS, model_directory
from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.launch import launch
from lamina.memory import worker
from lamina.memory.store import KvStore
from lamina.observe.timing import decode_batch, decode_window

ROW_S = "LAMINA_BENCH_ROW_S"  # environment variable of memory workers: seconds of sleep for a row of one rank
PRIORITY = -10  # of memory workers
CONTEXT, DECODED, TIMEOUT_S = 64, 64, 600.0


@dataclass(frozen=True)
class Result:
    """Seconds of a decode step of all requests, with one lane and with two: medians over rounds.

    Attributes:
        delay_s: Sleep of the memory workers in a step with one lane.
        hidden: Share of one lane's additional time that two lanes do not have.
    """

    model: str
    batch: int
    ranks: int
    delay_s: float
    one: float
    one_delayed: float
    two: float
    two_delayed: float
    hidden: float


class SlowMemory(LocalWorkers):
    """Starts memory workers whose attention sleeps."""

    def command(self, name: str, module: str) -> list[str]:
        if module.startswith("lamina.memory"):
            return [sys.executable, "-P", str(Path(__file__).resolve())]
        return super().command(name, module)


def run_slow_memory() -> None:
    """Body of a memory worker's process."""
    if os.geteuid() == 0:
        os.nice(PRIORITY)
    serve, row_s = KvStore.serve, float(os.environ[ROW_S])

    def slow(self: KvStore, layer: int, step: Any, number: int, *rest: Any) -> Iterator[None]:
        begun = time.monotonic()
        yield from serve(self, layer, step, number, *rest)
        piece = step.pieces[number]
        time.sleep(max(0.0, begun + (piece.stop - piece.start) * row_s - time.monotonic()))

    KvStore.serve = slow  # type: ignore[method-assign, assignment]
    worker.main()


def step_s(path: str, batch: int, ranks: int, lanes: int, row_s: float) -> float:
    """Return seconds of a decode step of ``batch`` requests."""
    os.environ[ROW_S] = str(row_s)
    config = EngineConfig(
        model=path,
        load_format="dummy",
        compute=f"cpu:{ranks}",
        tensor_parallel=ranks,
        memory="cpu:1",
        lanes=lanes,
        max_num_seqs=batch,
        prefix_cache=False,
    )
    engine = launch(config, workers=SlowMemory())
    try:
        draw = random.Random(0)
        prompts = [[draw.randrange(3, 900) for _ in range(CONTEXT)] for _ in range(batch)]
        window = decode_window(decode_batch(engine, prompts, DECODED, TIMEOUT_S))
    finally:
        engine.close()
    return batch / window.tokens_per_s


def measure(name: str, path: str, batch: int, ranks: int, share: float, rounds: int) -> Result:
    """Run one lane and two, with the delay and without it, in turn."""
    layers = {**COMMON, **MODELS[name]}["num_hidden_layers"]
    delay_s = share * step_s(path, batch, ranks, 1, 0.0)
    variants = [(lanes, row_s) for lanes in (1, 2) for row_s in (0.0, delay_s / layers / batch / ranks)]
    found = [[step_s(path, batch, ranks, *variant) for variant in variants] for _ in range(rounds)]
    one, one_delayed, two, two_delayed = map(statistics.median, zip(*found, strict=True))
    hidden = 1 - (two_delayed - two) / (one_delayed - one)
    return Result(name, batch, ranks, delay_s, one, one_delayed, two, two_delayed, hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--batch", type=int, default=16, help="requests in all")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the replica")
    parser.add_argument("--share", type=float, default=0.8, help="the delay of a layer, of what a layer takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with model_directory(args.model) as path:
        result = measure(args.model, str(path), args.batch, args.ranks, args.share, args.rounds)
    table = Table("lanes", "step, ms", "with the delay, ms", "longer, ms")
    table.title = f"{args.batch} requests, {args.model}, {args.ranks} ranks, delay {1e3 * result.delay_s:.1f} ms a step"
    for lanes, plain, delayed in ((1, result.one, result.one_delayed), (2, result.two, result.two_delayed)):
        table.add_row(str(lanes), *(f"{1e3 * each:.1f}" for each in (plain, delayed, delayed - plain)))
    Console(width=80).print(table)
    print(f"hidden by two lanes: {result.hidden:.0%}")
    if os.geteuid() != 0:
        print("Memory workers had no priority over ranks, and waited for cores: run this as root.")
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=1) + "\n")


if __name__ == "__main__":
    if os.environ.get(ROW_S) and len(sys.argv) == 1:
        run_slow_memory()
    else:
        main()
