"""Measures the overhead of the split: the same model with local memory and with a memory worker.

    python -m bench.gpu.split [--model 8b] [--compute cuda:1] [--memory cuda:1] [--cells 1x1024 ...] [--picture FILE]

Slices and attention kernels are the same in both; with two workers, q, k, v and results are sent in every layer, and on
a single GPU the workers run in turn. ``overhead`` is the additional time of a step, per layer. The model has random
weights. If vLLM is installed, its steps are timed as well (``vllm_peer``). ``--picture`` draws both workers' activity
in some steps of the last cell, which runs once more.
Without a GPU: ``--model 60m --compute cpu:1 --memory cpu:1 --cells 4x256``.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu import vllm_peer
from bench.models import MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.control.timeline import Span
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.observe.timing import Window, decode_batch, decode_window

TIMEOUT_S = 300.0
CELLS = ("1x1024", "1x32768", "16x4096", "64x1024", "64x4096", "256x1024")
STEPS_DRAWN = 2
WIDTH, LEFT, ROW, TOP = 1000, 110, 34, 40
COLOURS = ("#4c78a8", "#54a24b", "#e45756", "#b279a2", "#f58518", "#72b7b2", "#9d755d", "#bab0ac")


@dataclass(frozen=True)
class Cell:
    """Decode steps of ``batch`` requests with ``context`` tokens each, with local memory and with a memory worker."""

    batch: int
    context: int
    local_ms: float
    split_ms: float
    overhead_us: float  # for each layer
    vllm_ms: float | None = None

    @property
    def ratio(self) -> float:
        return self.local_ms / self.split_ms


def measure(engine: Engine, batch: int, context: int, tokens: int) -> tuple[float, Window]:
    """Seconds of a decode step, and when steps of all requests ran."""
    draw = random.Random(context)
    prompts = [[draw.randrange(3, 900) for _ in range(context)] for _ in range(batch)]
    # The first to be decoded go on while other prompts are computed.
    more = batch * context // engine.config.max_num_batched_tokens
    window = decode_window(decode_batch(engine, prompts, tokens + more, TIMEOUT_S))
    return batch / window.tokens_per_s, window


def run(config: EngineConfig, cells: Sequence[tuple[int, int]], tokens: int, drawn: Path | None = None) -> list[float]:
    """Return seconds of a step of each cell. ``drawn``: file for a picture of some steps of the last cell."""
    spans: dict[str, list[Span]] = {}
    begun, seconds = time.monotonic(), list[float]()
    engine = launch(config, None, None if drawn is None else spans.update)
    print(f"memory {config.memory}: started in {time.monotonic() - begun:.0f} s", flush=True)
    try:
        for batch, context in cells:
            begun = time.monotonic()
            step_s, window = measure(engine, batch, context, tokens)
            seconds.append(step_s)
            print(f"{batch} x {context}: {1e3 * step_s:.2f} ms ({time.monotonic() - begun:.0f} s)", flush=True)
    finally:
        engine.close()
    middle = (window.begin_ns + window.end_ns) // 2
    if drawn is not None:
        drawn.write_text(picture(spans, middle, middle + round(STEPS_DRAWN * seconds[-1] * 1e9)))
    return seconds


def picture(spans: dict[str, list[Span]], begin_ns: int, end_ns: int) -> str:
    """Draw the workers' spans between two moments as SVG: a row for each worker, a colour for each stage."""
    scale = (WIDTH - LEFT - 20) / (end_ns - begin_ns)
    seen = {
        worker: [span for span in own if begin_ns < span.end_ns and span.begin_ns < end_ns]
        for worker, own in spans.items()
    }
    stages = sorted({span.stage for own in seen.values() for span in own if span.stage != "wait"})
    colours = {stage: COLOURS[number % len(COLOURS)] for number, stage in enumerate(stages)}
    shapes = []
    for number, (worker, own) in enumerate(sorted(seen.items())):
        y = TOP + number * ROW
        shapes.append(f'<text x="8" y="{y + 17}">{worker}</text>')
        for span in own:
            if span.stage in colours:
                left, right = max(span.begin_ns, begin_ns) - begin_ns, min(span.end_ns, end_ns) - begin_ns
                place = f'x="{LEFT + left * scale:.2f}" y="{y}" width="{(right - left) * scale:.2f}" height="24"'
                shapes.append(f'<rect {place} fill="{colours[span.stage]}"><title>{span.stage}</title></rect>')
    y = TOP + len(seen) * ROW + 20
    for number, (stage, colour) in enumerate(colours.items()):
        x = LEFT + number * 120
        shapes.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 18}" y="{y}">{stage}</text>')
    title = f"{STEPS_DRAWN} steps, {(end_ns - begin_ns) / 1e6:.1f} ms"
    style = "svg{background:#fff;color:#1b1f24}text{font:13px sans-serif;fill:currentColor}"
    size = f'width="{WIDTH}" height="{y + 20}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<text x="{LEFT}" y="24">{title}</text>{"".join(shapes)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--compute", default="cuda:1")
    parser.add_argument("--memory", default="cuda:1")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="requests x tokens of each")
    parser.add_argument("--tokens", type=int, default=48, help="decoded of each request")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [(int(batch), int(context)) for batch, context in (cell.split("x") for cell in args.cells)]
    layers = MODELS[args.model]["num_hidden_layers"]
    with model_directory(args.model) as path:
        split = EngineConfig(
            model=str(path),
            load_format="dummy",
            compute=args.compute,
            memory=args.memory,
            max_num_seqs=max(256, *(batch for batch, _ in cells)),
            prefix_cache=False,
        )
        local_s = run(dataclasses.replace(split, memory="local"), cells, args.tokens)
        split_s = run(split, cells, args.tokens)
        if args.picture:
            run(split, cells[-1:], args.tokens, args.picture)
        vllm_s = vllm_peer.measure(path, cells, args.tokens) if args.compute.startswith("cuda") else None
    peers: list[float | None] = [None] * len(cells) if vllm_s is None else [*vllm_s]
    found = [
        Cell(*cell, 1e3 * local, 1e3 * apart, 1e6 * (apart - local) / layers, None if vllm is None else 1e3 * vllm)
        for cell, local, apart, vllm in zip(cells, local_s, split_s, peers, strict=True)
    ]
    table = Table(
        "requests", "tokens of each", "local, ms", "split, ms", "tokens/s, split / local", "overhead, us per layer"
    )
    if vllm_s is not None:
        table.add_column("vLLM, ms")
    table.title = f"a decode step of {args.model}: {args.compute} with local memory, and with {args.memory}"
    for one in found:
        times = [f"{one.local_ms:.2f}", f"{one.split_ms:.2f}", f"{one.ratio:.2f}", f"{one.overhead_us:.0f}"]
        times += [] if one.vllm_ms is None else [f"{one.vllm_ms:.2f}"]
        table.add_row(str(one.batch), str(one.context), *times)
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
