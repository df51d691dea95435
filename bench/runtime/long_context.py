"""The time to the first token of one long prompt, on one pair of workers and on two.

    python -m bench.runtime.long_context [--model 250m] [--prompt 8192] [--rows 512] [--rounds 3]
                                         [--json FILE] [--picture FILE.svg]

A pair is a compute worker and a memory worker that share one core. Two pairs serve the prompt as two replicas, whose
chunks run one attention apart, and as two stages of one replica, whose chunks run one stage apart. Each of two memory
workers attends with half of the heads, and four lanes let a chunk begin before an earlier one has left the last stage.
Every way runs in turn, ``--rounds`` times, in an engine of its own, after a prompt that warms it up; figures are
medians. ``--picture`` needs matplotlib.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from bench.models import MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch

TIMEOUT_S = 500.0
ONE = "one pair"
TWO_PAIRS = {"compute": "cpu:2", "memory": "cpu:2", "lanes": 4, "partition": "head"}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    ONE: (1, {"compute": "cpu:1", "memory": "cpu:1", "lanes": 1}),
    "two replicas": (2, TWO_PAIRS),
    "two stages": (2, {**TWO_PAIRS, "pipeline_parallel": 2}),
}
"""The cores of each way, and its settings."""
TARGET = 1 / 1.6
"""Most time of two pairs, as a share of what one pair takes."""


def first_token_s(engine: Engine, name: str, length: int) -> float:
    """Seconds from the arrival of a random prompt to its first token."""
    draw, drawn, failures = random.Random(name), threading.Event(), Failures()

    def on_update(update: RequestUpdate) -> None:
        failures.note(update)
        if update.finished:
            drawn.set()

    tokens = [draw.randrange(3, 900) for _ in range(length)]
    begun = time.monotonic()
    engine.submit(name, tokens, SamplingParams(temperature=0.0, max_tokens=1), on_update)
    if not drawn.wait(TIMEOUT_S):
        raise SystemExit(f"error: the prompt was not computed within {TIMEOUT_S:.0f} s")
    failures.check()
    return time.monotonic() - begun


def measured(model: Path, way: str, args: argparse.Namespace) -> float:
    """Run one way once, on as many cores as it has pairs."""
    cores, settings = WAYS[way]
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:cores])  # workers inherit it
    try:
        wanted = EngineConfig(model, load_format="dummy", max_num_batched_tokens=args.rows, **settings)
        engine = launch(wanted)
        try:
            first_token_s(engine, "warm-up", 2 * args.rows)
            return first_token_s(engine, "long", args.prompt)
        finally:
            engine.close()
    finally:
        os.sched_setaffinity(0, available)


def draw(runs: Mapping[str, Sequence[float]], prompt: int, file: Path) -> None:
    """Draw a bar for each way, its rounds as dots, and the target."""
    from bench.pictures import axes, legend_above, save

    drawing, (axis,) = axes(height=2.4)
    medians = [statistics.median(seconds) for seconds in runs.values()]
    axis.barh(list(runs), medians, height=0.55)
    for place, seconds in enumerate(runs.values()):
        axis.plot(seconds, [place] * len(seconds), "o", color="C5")
        text = f"{medians[place]:.1f} s, {medians[place] / medians[0]:.2f} of {ONE}"
        axis.annotate(
            text, (max(*seconds, TARGET * medians[0]), place), (6, 0), textcoords="offset points", va="center"
        )
    axis.axvline(TARGET * medians[0], color="C1", linestyle="--", label=f"target: {TARGET:.3f} of {ONE}")
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set(xlabel=f"time to the first token of {prompt} tokens (s)", xlim=(0, 1.45 * max(medians)))
    legend_above(axis, 1)
    save(drawing, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="250m", help="a random Llama of about this size")
    parser.add_argument("--prompt", type=int, default=8192, help="its tokens")
    parser.add_argument("--rows", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=3, help="times that every way runs")
    parser.add_argument("--json", type=Path, help="write the seconds of all rounds to this file")
    parser.add_argument("--picture", type=Path, help="draw them to this .svg or .png file")
    args = parser.parse_args()
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    with model_directory(args.model) as model:
        for _ in range(args.rounds):
            for way in WAYS:
                runs[way].append(measured(model, way, args))
    alone = statistics.median(runs[ONE])
    table = Table("way", "first token s", f"over {ONE}")
    for way, seconds in runs.items():
        table.add_row(way, f"{statistics.median(seconds):.2f}", f"{statistics.median(seconds) / alone:.2f}")
    Console().print(table)
    if args.json:
        about = {"model": args.model, "prompt": args.prompt, "rows": args.rows}
        args.json.write_text(json.dumps(about | {"first_token_s": runs}, indent=1) + "\n")
    if args.picture:
        draw(runs, args.prompt, args.picture)


if __name__ == "__main__":
    main()
