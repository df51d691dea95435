"""Measures the gain by staggered pipelining and overlaps; one compute worker and one memory worker on a core each.

    python -m bench.runtime.pipeline [--batch 64] [--rounds 3] [--model 60m] [--json FILE]

First finds the context at which slices and attention of a step with one lane take equally long. There every variant
decodes the same batch in the same run, interleaved: one lane holds all of it, two lanes half each. "Idle" is the share
of the time in which a worker does nothing for a step.

Nearly all of a run is prefill on one core, in proportion to the model's layers: 60m has four of 250m's sixteen, and a
vocabulary to match, so that a layer's slices and attention take the same and all variants a quarter of the time.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.models import COMMON, MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.control.timeline import Span
from lamina.launch import launch
from lamina.observe.timing import IDLE, decode_batch, decode_window, shares

TIMEOUT_S = 600.0
DECODED = 96  # of each request, besides those that it decodes while other prompts are computed
VARIANTS: dict[str, dict[str, Any]] = {
    "one lane": {"lanes": 1},
    "two lanes, rotational": {"lanes": 2},
    "two lanes, nothing planned ahead": {"lanes": 2, "plan_ahead": False},
    "one lane, nothing planned ahead": {"lanes": 1, "plan_ahead": False},
}


@dataclass(frozen=True)
class Result:
    """One variant: tokens per second, its ratio to one lane, and shares of idle time."""

    variant: str
    tokens_per_s: float
    gain: float
    compute_idle: float
    memory_idle: float


@dataclass(frozen=True)
class Run:
    """One decode: tokens per second and the seconds that each (worker, stage) took, as shares of the time."""

    tokens_per_s: float
    parts: Mapping[tuple[str, str], float]

    def idle(self, worker: str) -> float:
        """Share of the time in which ``worker`` does nothing for a step."""
        return 1.0 - sum(share for (name, stage), share in self.parts.items() if name == worker and stage not in IDLE)


def decode(path: str, batch: int, context: int, settings: Mapping[str, Any]) -> Run:
    """Decode ``batch`` random prompts on cores 0 (compute) and 1 (memory)."""
    cores = sorted(os.sched_getaffinity(0))
    config = EngineConfig(
        model=path,
        load_format="dummy",
        dtype="auto",
        max_num_seqs=max(batch, 256),
        compute_cores=str(cores[0]),
        memory_cores=str(cores[-1]),
        **settings,
    )
    spans: dict[str, list[Span]] = {}
    engine = launch(config, None, spans.update)
    try:
        draw = random.Random(context)
        prompts = [[draw.randrange(3, 900) for _ in range(context)] for _ in range(batch)]
        tokens = DECODED + batch * context // config.max_num_batched_tokens
        window = decode_window(decode_batch(engine, prompts, tokens, TIMEOUT_S))
    finally:
        engine.close()
    parts = {(part.worker, part.stage): part.share for part in shares(spans, window.begin_ns, window.end_ns)}
    return Run(window.tokens_per_s, parts)


def balanced_context(path: str, batch: int) -> int:
    """Return the context at which one lane keeps memory worker and compute worker busy for equally long.

    Slices hardly depend on the context; attention is proportional to it.
    """
    context = 512
    for _ in range(2):
        run = decode(path, batch, context, {"lanes": 1})
        ratio = (1.0 - run.idle("compute0")) / (1.0 - run.idle("memory0"))
        context = max(32, round((context + DECODED / 2) * ratio - DECODED / 2))
        if context + DECODED > COMMON["max_position_embeddings"]:
            raise SystemExit(
                f"error: slices and attention of {batch} requests take equally long at {context} tokens; the model "
                f"knows {COMMON['max_position_embeddings']}. Give a larger --batch"
            )
    return context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--batch", type=int, default=64, help="requests in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with model_directory(args.model) as path:
        context = balanced_context(str(path), args.batch)
        runs: dict[str, list[Run]] = {name: [] for name in args.only}
        for _ in range(args.rounds):
            for name in args.only:
                runs[name].append(decode(str(path), args.batch, context, VARIANTS[name]))
    base = statistics.median(run.tokens_per_s for run in runs[args.only[0]])
    results = [
        Result(
            name,
            rate := statistics.median(run.tokens_per_s for run in own),
            rate / base,
            statistics.median(run.idle("compute0") for run in own),
            statistics.median(run.idle("memory0") for run in own),
        )
        for name, own in runs.items()
    ]
    table = Table("variant", "tokens/s", f"over {args.only[0]}", "compute idle", "memory idle")
    table.title = f"{args.batch} requests x {context} tokens, {args.model}"
    for r in results:
        cells = f"{r.tokens_per_s:.0f}", f"{r.gain:.2f}", f"{r.compute_idle:.0%}", f"{r.memory_idle:.0%}"
        table.add_row(r.variant, *cells)
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps([{"context": context, **asdict(r)} for r in results], indent=1))


if __name__ == "__main__":
    main()
