"""Measures what it costs other requests if clients set a higher ``max_tokens`` than they use.

    python -m bench.runtime.admission --trace FILE [--simulated 4000] [--rounds 3] [--json FILE]

The same requests are served several times: with a ``max_tokens`` of exactly the tokens that they use, of 1,024, of
4,096 and, on the runtime, of the rest of the context, as for chats without a limit. KV is not reserved for tokens that
may come, so all variants should serve the same tokens per second: target 0.97 of the first.

Simulated: lengths and arrivals of a trace (an Azure CSV or Mooncake .jsonl) on Llama-2-13B, a100:2 and rtx3090:6.
Measured: lengths of the same trace divided by 16, on the bundled model with one compute and two memory workers, which
hold a tenth of the requests at a time; all arrive at once. What clients ask for is divided too. Rounds alternate; the
median counts.
"""

import argparse
import dataclasses
import json
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.planning import simulate
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.workload import TracedRequest, read_trace

ASKED = {"what they use": 1, "1,024": 1024, "4,096": 4096}
NO_LIMIT = "no limit"
SCALE = 16
REQUESTS = 96
AT_ONCE = 10
LATE = 4  # tokens drawn until a cancelled request has ended: asked for beyond those used, so that all three cancel
KV_NBYTES = 4 * 2 * 2 * 64 * 2  # per token of the bundled model: layers, heads, K and V, head size, bfloat16
TIMEOUT_S = 400


@dataclasses.dataclass(frozen=True)
class Figures:
    """One run: output tokens per second and per step, median time to first token, and preemptions.

    Tokens per step do not depend on the machine's load.
    """

    tokens_s: float
    tokens_step: float
    ttft_s: float
    preempted: int


def simulated(trace: list[TracedRequest], asked: int) -> Figures:
    catalogue = hardware.load(None)
    deployment = simulate.Deployment(
        model=model_shapes.find("Llama-2-13B"),
        compute=catalogue["a100"],
        compute_workers=2,
        memory=catalogue["rtx3090"],
        memory_workers=6,
    )
    result = simulate.simulate(deployment, simulate.replay(trace, max_tokens=asked))
    return Figures(result.tokens_s, result.tokens / result.steps, result.ttft_s.p50, result.preempted)


def measured(engine: Engine, trace: list[TracedRequest], asked: int | None) -> Figures:
    """The scaled requests, submitted at once; each client cancels when it has the tokens that it uses.

    Args:
        asked: tokens that clients ask for, before scaling; None: the rest of the context.
    """
    firsts: list[float] = []
    left, ended, before = set(range(len(trace))), threading.Event(), engine.stats()
    drawn, failures = [0] * len(trace), Failures()
    begun = time.perf_counter()

    def on_update(update: RequestUpdate) -> None:
        failures.note(update)
        index = int(update.request.request_id)
        if update.tokens and not drawn[index]:
            firsts.append(time.perf_counter() - begun)
        drawn[index] += update.tokens
        if update.finished:
            left.discard(index)
            if not left:
                ended.set()
        elif drawn[index] >= scaled(trace[index].output):
            engine.abort(update.request.request_id)

    for index, request in enumerate(trace):
        most = None if asked is None else max(scaled(asked), scaled(request.output) + LATE)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        engine.submit(str(index), [7 + index % 50] * scaled(request.prompt), params, on_update)
    if not ended.wait(TIMEOUT_S):
        raise SystemExit(f"error: {len(left)} requests have not ended within {TIMEOUT_S} s; {engine.stats()}")
    failures.check()
    seconds = time.perf_counter() - begun
    useful = sum(scaled(request.output) for request in trace)
    after = engine.stats()
    steps = after.steps - before.steps
    return Figures(useful / seconds, useful / steps, statistics.median(firsts), after.preempted - before.preempted)


def scaled(tokens: int) -> int:
    return max(1, round(tokens / SCALE))


def on_runtime(trace: list[TracedRequest], rounds: int) -> dict[str, Figures]:
    chosen = [trace[place] for place in np.random.default_rng(0).integers(len(trace), size=REQUESTS)]
    slots = AT_ONCE * sum(scaled(one.prompt) + scaled(one.output) for one in chosen) // len(chosen)
    largest = max(scaled(one.prompt) + max(scaled(one.output), scaled(max(ASKED.values()))) for one in chosen)
    nbytes = max(slots // 2, largest) * KV_NBYTES
    engine = launch(
        EngineConfig(memory="cpu:2", max_num_batched_tokens=512, kv_cache_memory_bytes=nbytes, prefix_cache=False)
    )
    try:
        limits: dict[str, int | None] = {**ASKED, NO_LIMIT: None}
        runs: dict[str, list[Figures]] = {name: [] for name in limits}
        measured(engine, chosen[:8], 1)
        for _ in range(rounds):
            for name, asked in limits.items():
                runs[name].append(measured(engine, chosen, asked))
    finally:
        engine.close()
    return {
        name: Figures(
            statistics.median(one.tokens_s for one in each),
            statistics.median(one.tokens_step for one in each),
            statistics.median(one.ttft_s for one in each),
            round(statistics.median(one.preempted for one in each)),
        )
        for name, each in runs.items()
    }


def table(title: str, rows: Mapping[str, Figures]) -> Table:
    made = Table(title=title)
    made.add_column("clients ask for")
    for heading in ("tokens/s", "of the first", "tokens/step", "of the first", "TTFT p50 (s)", "preempted"):
        made.add_column(heading, justify="right")
    first = next(iter(rows.values()))
    for name, one in rows.items():
        made.add_row(
            name,
            f"{one.tokens_s:.0f}",
            f"{one.tokens_s / first.tokens_s:.3f}",
            f"{one.tokens_step:.1f}",
            f"{one.tokens_step / first.tokens_step:.3f}",
            f"{one.ttft_s:.1f}",
            str(one.preempted),
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--simulated", type=int, help="only the trace's first requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trace = list(read_trace(arguments.trace))
    part, console = trace[: arguments.simulated], Console()
    in_simulator = {name: simulated(part, asked) for name, asked in ASKED.items()}
    console.print(table("Simulated: Llama-2-13B on a100:2 and rtx3090:6", in_simulator))
    on_machine = on_runtime(trace, arguments.rounds)
    console.print(table(f"Measured: the bundled model, lengths / {SCALE}", on_machine))
    if arguments.json:
        tables = {"simulated": in_simulator, "measured": on_machine}
        figures = {what: {name: dataclasses.asdict(one) for name, one in rows.items()} for what, rows in tables.items()}
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
