"""Time of a dense slice over the time of its bare matrix products, and of those over oneDNN's; weights packed in all.

    python -m bench.kernels.slices [--model 250m] [--rows 1 8 16 64 512] [--threads 1 2] [--json FILE]

Runs the inner slices of a random Llama one after another, as a decode step does, so that weights come from memory and
not from the cache; then the same linear layers alone on inputs of the same shapes, by the product that slices use
and by oneDNN. Medians over interleaved rounds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.models import model_directory
from lamina.cluster.local_workers import OPENMP_SPIN_COUNT, allocation_variables
from lamina.core.types import DType
from lamina.lowering import LoweredSlice, lower
from lamina.lowering.native_operators import ONEDNN, Packing, packing
from lamina.models import directory, pretrained
from lamina.models.pretrained import load_config
from lamina.splitter import SplitModel, split


@dataclass(frozen=True)
class Result:
    """Microseconds per slice."""

    rows: int
    threads: int
    slice_us: float
    products_us: float
    onednn_us: float

    @property
    def ratio(self) -> float:
        return self.slice_us / self.products_us

    @property
    def over_onednn(self) -> float:
        return self.products_us / self.onednn_us


@dataclass(frozen=True)
class Products:
    """The linear layers of all inner slices by one packing; ``weights`` [outputs, inputs] by slice."""

    way: Packing
    layers: list[list[tuple[torch.Tensor, int, int]]]  # packed, outputs, inputs

    @classmethod
    def of(cls, way: Packing, weights: list[list[torch.Tensor]]) -> "Products":
        return cls(way, [[(way.pack(weight), *weight.shape) for weight in group] for group in weights])

    def run(self, inputs: dict[int, torch.Tensor]) -> None:
        for group in self.layers:
            for packed, outputs, width in group:
                self.way.linear(inputs[width], packed, None, outputs)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(
    model: SplitModel, slices: list[LoweredSlice], products: list[Products], rows: int, threads: int, rounds: int
) -> Result:
    """All inner slices but the first, whose work differs; then each of ``products``: the slices' own, oneDNN's."""
    torch.set_num_threads(threads)
    inner, spec, cut = slices[1:-1], model.attentions[1], model.cuts[0]
    ids, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    attention = torch.randn(rows, spec.query_heads, spec.v_dim, dtype=torch.bfloat16)
    context = tuple(torch.randn(rows, *crossing.shape).to(crossing.dtype) for crossing in cut.context)
    widths = {width for _, _, width in products[0].layers[0]}
    inputs = {width: torch.randn(1, rows, width, dtype=torch.bfloat16) for width in widths}

    def run_slices() -> None:
        prepared = inner[0].prepare(positions)
        for piece in inner:
            piece.run(ids, positions, attention, context, prepared)

    calls: list[Callable[[], object]] = [run_slices, *(partial(one.run, inputs) for one in products)]
    times = [[seconds(call) for call in calls] for _ in range(rounds + 2)][2:]
    return Result(rows, threads, *(statistics.median(column) * 1e6 / len(inner) for column in zip(*times, strict=True)))


def restart_with_worker_variables() -> None:
    """Replace this process by one with a worker's environment, unless it has that already.

    The variables are read when a process starts; without them oneDNN's threads busy-wait into the next measurement.
    """
    variables = {"GOMP_SPINCOUNT": OPENMP_SPIN_COUNT} | allocation_variables()
    if not variables.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, os.environ | variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="250m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    restart_with_worker_variables()
    with model_directory(args.model) as path:
        place = directory.find(path, weights=False)
        config = load_config(place)
        model = split(config, DType.BFLOAT16)
        tensors = pretrained.load(place, sorted(model.weights), config, DType.BFLOAT16, "dummy")
    slices = lower(model).with_weights(tensors)
    linears = [[tensors[n] for n in part.weights if tensors[n].dim() == 2] for part in model.slices[1:-1]]
    own = packing(DType.BFLOAT16)
    if own is None:
        raise SystemExit("error: no packed product of bfloat16 runs on this processor")
    products = [Products.of(way, linears) for way in (own, ONEDNN)]
    results = [
        measure(model, slices, products, rows, threads, args.rounds) for threads in args.threads for rows in args.rows
    ]
    heads = ["rows", "threads", "slice us", "products us", "slice / products", "oneDNN us", "products / oneDNN"]
    table = Table(*heads, title=f"dense slices, {args.model}, bfloat16")
    for r in results:
        times = [f"{r.slice_us:.0f}", f"{r.products_us:.0f}", f"{r.ratio:.2f}", f"{r.onednn_us:.0f}"]
        table.add_row(str(r.rows), str(r.threads), *times, f"{r.over_onednn:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(
            json.dumps([asdict(r) | {"ratio": r.ratio, "over_onednn": r.over_onednn} for r in results], indent=1)
        )


if __name__ == "__main__":
    main()
