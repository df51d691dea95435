"""Measures the time between tokens of running requests while a long prompt arrives: fixed chunks against an SLO.

    python -m bench.runtime.long_prompt [--model 60m] [--prompt 16000] [--running 8] [--context 512] [--rounds 3]
                                        [--simulated 131072] [--json FILE]

The runtime, with dummy weights and default pools: requests decode alone for a while, then the long prompt arrives. A
request that ends is replaced by a request with the same prompt, which is cached, so that contexts keep their lengths.
The SLO is twice the 99th percentile of the time between tokens alone with fixed chunks. All variants run in turn,
``--rounds`` times, in separate engines; figures are medians of the rounds. TTFT is that of the long prompt, which takes
longer with an SLO. Then the same in the simulator, with a longer prompt: Llama-3-8B on h100:1 and h20:2.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from bench.models import MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, simulate

TIMEOUT_S = 500.0
ALONE_S = 4.0  # that requests decode before the prompt arrives
OUTPUT = 256  # tokens of a request
FIXED = {"fixed, 2048 rows": 2048, "fixed, 512 rows": 512, "fixed, 128 rows": 128}
SLO = "SLO"
FACTOR = 2  # of the SLO to what requests have alone


@dataclass(frozen=True)
class Figures:
    """Milliseconds between tokens of the running requests, alone and beside the long prompt; its TTFT in seconds."""

    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    ttft_s: float

    @property
    def ratio(self) -> float:
        """How much longer the 99th percentile is beside the prompt."""
        return self.beside_p99 / self.alone_p99


class Running:
    """``count`` requests at a time that decode, until ``close``, and the times at which each got its tokens."""

    def __init__(self, engine: Engine, count: int, context: int, draw: random.Random, output: int = OUTPUT) -> None:
        """Start the requests, each of ``context`` random tokens, and wait for their first tokens.

        Args:
            output: Tokens of a request until another takes its place.
        """
        self._engine, self._closed, self._output = engine, False, output
        self._times: list[list[float]] = []  # by request
        self.failures = Failures()
        for number in range(count):
            # The first ones end at different times, and so do all that follow them.
            self._submit([draw.randrange(3, 900) for _ in range(context)], output * (number + 1) // count)
        _wait(lambda: all(self._times))

    def _submit(self, prompt: list[int], tokens: int) -> None:
        times: list[float] = []

        def on_update(update: RequestUpdate) -> None:
            self.failures.note(update)
            times.extend([time.monotonic()] * update.tokens)
            if update.finished and not self._closed:
                self._submit(prompt, self._output)

        self._times.append(times)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        self._engine.submit(str(len(self._times)), prompt, params, on_update)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between consecutive tokens of a request, for tokens that came in this interval."""
        stamps = [list(times) for times in self._times]
        return [(two - one) * 1e3 for times in stamps for one, two in itertools.pairwise(times) if begin <= two <= end]

    def steps(self, begin: float, end: float) -> int:
        """Return the most tokens that one request got after ``begin``, until ``end``."""
        return max(sum(begin < one <= end for one in list(times)) for times in list(self._times))

    def close(self) -> None:
        """End all requests."""
        self._closed = True
        for number in range(len(self._times)):
            self._engine.abort(str(number + 1))
        _wait(lambda: self._engine.stats().running == 0)


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: nothing happened within {TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def measured(config: EngineConfig, running: int, context: int, prompt: int) -> Figures:
    draw, engine = random.Random(prompt), launch(config)
    try:
        requests = Running(engine, running, context, draw)
        gc.freeze()  # as servers do: a scan of all imported objects would stop the engine for a third of a second
        time.sleep(1.0)
        begun = time.monotonic()
        time.sleep(ALONE_S)
        arrived, computed = time.monotonic(), threading.Event()
        alone = requests.gaps(begun, arrived)
        tokens = [draw.randrange(3, 900) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=1)

        def on_long(update: RequestUpdate) -> None:
            requests.failures.note(update)
            if update.finished:
                computed.set()

        engine.submit("long", tokens, params, on_long)
        if not computed.wait(TIMEOUT_S):
            raise SystemExit(f"error: the prompt was not computed within {TIMEOUT_S:.0f} s")
        first = time.monotonic()
        beside = requests.gaps(arrived, first)
        requests.failures.check()
        requests.close()
    finally:
        engine.close()
    alone_p50, alone_p99 = np.percentile(alone, (50, 99)).tolist()
    beside_p50, beside_p99 = np.percentile(beside, (50, 99)).tolist()
    return Figures(alone_p50, alone_p99, beside_p50, beside_p99, first - arrived)


def on_runtime(args: argparse.Namespace, model: Path) -> dict[str, Figures]:
    runs: dict[str, list[Figures]] = {name: [] for name in (*FIXED, SLO)}
    base = EngineConfig(model, load_format="dummy", max_num_seqs=64, memory=args.memory)
    for _ in range(args.rounds):
        for name, rows in FIXED.items():
            config = dataclasses.replace(base, max_num_batched_tokens=rows)
            runs[name].append(measured(config, args.running, args.context, args.prompt))
        alone = statistics.median(one.alone_p99 for each in runs.values() for one in each)
        config = dataclasses.replace(base, slo_tbt_ms=max(1, int(FACTOR * alone)))
        runs[SLO].append(measured(config, args.running, args.context, args.prompt))
    return {name: median(each) for name, each in runs.items()}


def median(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*(asdict(one).values() for one in runs), strict=True)))


def in_simulator(prompt: int) -> dict[str, Figures]:
    """Requests with short prompts that generate 2,000 tokens each, and the long prompt once all of them decode."""
    catalogue, running = hardware.load(), 64

    def run(long: bool, **settings: int) -> tuple[float, float, float]:
        deployment = Deployment(
            model=model_shapes.find("Llama-3-8B"),
            compute=catalogue["h100"],
            compute_workers=1,
            memory=catalogue["h20"],
            memory_workers=2,
            max_num_seqs=96,
            **settings,  # type: ignore[arg-type]
        )
        arrival_s, prompts, outputs = [0.0] * running, [64] * running, [2000] * running
        if long:
            arrival_s, prompts, outputs = [*arrival_s, 0.5], [*prompts, prompt], [*outputs, 1]
        result = simulate(deployment, Arrivals(np.array(arrival_s), np.array(prompts), np.array(outputs)))
        return result.tbt_s.p50 * 1e3, result.tbt_s.p99 * 1e3, float(result.log.first_s[-1]) - arrival_s[-1]

    alone = {name: run(False, max_num_batched_tokens=rows) for name, rows in FIXED.items()}
    slo_ms = max(1, int(FACTOR * next(iter(alone.values()))[1]))
    found = {name: Figures(*alone[name][:2], *run(True, max_num_batched_tokens=rows)) for name, rows in FIXED.items()}
    return found | {SLO: Figures(*run(False, slo_tbt_ms=slo_ms)[:2], *run(True, slo_tbt_ms=slo_ms))}


def table(title: str, rows: Mapping[str, Figures]) -> Table:
    made = Table(title=title)
    made.add_column("chunks")
    for heading in ("alone p50 ms", "alone p99 ms", "beside p50 ms", "beside p99 ms", "p99 / alone", "TTFT s"):
        made.add_column(heading, justify="right")
    for name, one in rows.items():
        times = (one.alone_p50, one.alone_p99, one.beside_p50, one.beside_p99)
        made.add_row(name, *(f"{value:.1f}" for value in times), f"{one.ratio:.2f}", f"{one.ttft_s:.1f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", metavar="POOL", help="memory pool, default: the runtime's")
    parser.add_argument("--simulated", type=int, default=131_072, metavar="TOKENS", help="the prompt in the simulator")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    simulated = in_simulator(args.simulated)
    console.print(table(f"Simulated: Llama-3-8B on h100:1 and h20:2, a prompt of {args.simulated} tokens", simulated))
    with model_directory(args.model) as model:
        on_machine = on_runtime(args, model)
    cores = len(os.sched_getaffinity(0))
    console.print(table(f"Measured: {args.model} on {cores} cores, a prompt of {args.prompt} tokens", on_machine))
    if args.json:
        tables = {"simulated": simulated, "measured": on_machine}
        figures = {what: {name: asdict(one) for name, one in rows.items()} for what, rows in tables.items()}
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
