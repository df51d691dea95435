"""Measures what moves of KV cost decoding: tokens per second by tokens moved per step, over those without moves.

    python -m bench.runtime.moves [--model 60m] [--requests 8] [--context 512] [--answer 256] [--rounds 3]

As in Infinite-LLM's Figure 12(a), the batch is constant, so that only the moves differ; there, 16 tokens per step cost
nothing, and 32 cost 8.6%. One compute worker and two memory workers of this machine decode; a policy that wants all KV
on the other memory worker runs with each bound in turn. "Moved" is the measured number: a move has 256 tokens at most
and takes a few steps.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from bench.models import MODELS, kv_bytes_per_token, model_directory
from bench.runtime.placement import Run
from lamina.config.engine_config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.stats import LOOK_S
from lamina.kv import balancing
from lamina.kv.balancing import Proposal, View
from lamina.launch import launch
from lamina.schedule import moves

BOUNDS = (8, 16, 32, 64, 128)
"""Tokens that may move in a step, on average."""


class Elsewhere:
    """Wants all tokens of all requests to be on another worker than now."""

    def propose(self, view: View) -> list[Proposal]:
        others = {worker: tuple(one for one in view.loads if one != worker) for worker in view.loads}
        return [Proposal(held.request, held.worker, others[held.worker], held.tokens) for held in view.held]


@contextmanager
def engine(model: str, place: Path, arguments: argparse.Namespace, bound: int) -> Iterator[Engine]:
    """An engine that moves up to ``bound`` tokens a step; 0: none."""
    slots = 2 * arguments.requests * (arguments.context + arguments.answer)
    config = EngineConfig(
        model=place,
        load_format="dummy",
        compute="cpu:1",
        memory="cpu:2",
        kv_cache_memory_bytes=slots * kv_bytes_per_token(model),
        max_num_seqs=arguments.requests,
        threads=1,
        prefix_cache=False,
        balance="bandwidth" if bound else "off",
    )
    with (
        mock.patch.dict(balancing.POLICIES, bandwidth=Elsewhere),
        mock.patch.object(moves, "TOKENS_PER_STEP", bound),
    ):
        running = launch(config)
    try:
        yield running
    finally:
        running.close()


def measure(model: str, place: Path, arguments: argparse.Namespace, bound: int) -> tuple[float, float]:
    """Tokens per second, and tokens moved per step."""
    with engine(model, place, arguments, bound) as running:
        speed = Run(running, [arguments.context] * arguments.requests, arguments.answer).tokens_s
        time.sleep(2 * LOOK_S)  # what moved is counted that often
        stats = running.stats()
    moved = sum(stats.placement.moved.values()) / kv_bytes_per_token(model)
    return speed, moved / stats.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="60m")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, help="tokens of every prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens that every request draws")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are printed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    found: dict[int, list[tuple[float, float]]] = {bound: [] for bound in (0, *BOUNDS)}
    with model_directory(arguments.model) as place:
        for _ in range(arguments.rounds):
            for bound, runs in found.items():
                runs.append(measure(arguments.model, place, arguments, bound))
    without = [speed for speed, _ in found[0]]
    rows = [
        {
            "bound": bound,
            "moved": statistics.median(moved for _, moved in runs),
            "tokens_s": statistics.median(speed for speed, _ in runs),
            "over": statistics.median(speed / alone for (speed, _), alone in zip(runs, without, strict=True)),
        }
        for bound, runs in found.items()
    ]
    table = Table(title=f"{arguments.requests} requests of {arguments.context} tokens, {arguments.model}")
    for column in ("most tokens a step", "moved a step", "tokens/s", "over none"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row['bound']}", f"{row['moved']:.1f}", f"{row['tokens_s']:.0f}", f"{row['over']:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
