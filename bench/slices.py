"""Time of a dense slice over the time of its bare matrix products, with packed weights in both.

    python bench/slices.py [--model 250m] [--rows 1 8 16 64 512] [--threads 1 2] [--json FILE]

Runs the inner slices of a random Llama one after another, as a decode step does, so that weights come from memory and
not from the cache; then the same linear layers alone on inputs of the same shapes. Medians over interleaved rounds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_models import model_directory
from rich.console import Console
from rich.table import Table

from lamina.models import directory, weights
from lamina.models.config import load_config
from lamina.splitter import LoweredSlice, SplitModel, lower, split
from lamina.types import DType


@dataclass(frozen=True)
class Result:
    """Microseconds per slice."""

    rows: int
    threads: int
    slice_us: float
    products_us: float

    @property
    def ratio(self) -> float:
        return self.slice_us / self.products_us


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(model: SplitModel, slices: list[LoweredSlice], rows: int, threads: int, rounds: int) -> Result:
    """All inner slices but the first, whose work differs."""
    torch.set_num_threads(threads)
    inner, spec, cut = slices[1:-1], model.attentions[1], model.cuts[0]
    ids, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    attention = torch.randn(rows, spec.query_heads, spec.v_dim, dtype=torch.bfloat16)
    context = tuple(torch.randn(rows, *crossing.shape).to(crossing.dtype) for crossing in cut.context)
    packed = [[weight for weight in piece.weights if weight.is_mkldnn] for piece in inner]
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1], dtype=torch.bfloat16) for weight in packed[0]}

    def run_slices() -> None:
        prepared = inner[0].prepare(positions)
        for piece in inner:
            piece.run(ids, positions, attention, context, prepared)

    def run_products() -> None:
        for group in packed:
            for weight in group:
                torch.ops.mkldnn._linear_pointwise(inputs[weight.shape[1]], weight, None, "none", [], "")

    times = [(seconds(run_slices), seconds(run_products)) for _ in range(rounds + 2)][2:]
    whole, products = (statistics.median(column) * 1e6 / len(inner) for column in zip(*times, strict=True))
    return Result(rows, threads, whole, products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="250m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with model_directory(args.model) as path:
        place = directory.find(path, weights=False)
        config = load_config(place)
        model = split(config, DType.BFLOAT16)
        tensors = weights.load(place, sorted(model.weights), config, DType.BFLOAT16, "dummy")
    slices = lower(model, {**tensors, **model.constants})
    results = [measure(model, slices, rows, threads, args.rounds) for threads in args.threads for rows in args.rows]
    table = Table("rows", "threads", "slice us", "products us", "ratio", title=f"dense slices, {args.model}, bfloat16")
    for r in results:
        table.add_row(str(r.rows), str(r.threads), f"{r.slice_us:.0f}", f"{r.products_us:.0f}", f"{r.ratio:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"ratio": r.ratio} for r in results], indent=1))


if __name__ == "__main__":
    main()
