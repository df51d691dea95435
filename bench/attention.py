"""KV bytes read per second by decode attention, against the memory read bandwidth measured between its calls.

    python bench/attention.py [--sequences 16] [--tokens 2048] [--threads 1 2] [--rounds 21] [--json FILE]

Each row is one shape: bfloat16 KV, one query row per sequence. ``slots`` says how tokens lie in the slab: one after
another, or anywhere. ``row read`` reads the same rows and does nothing else. Figures are medians over the rounds; the
ratio, of KV to the plain read, is the median of the ratios of neighbours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lamina.kernels.attention import Array, SegmentTable, partial
from lamina.kernels.memory import allocate, read, read_rows
from lamina.types import AttentionSpec

READ_BYTES = 256 * 1024 * 1024  # larger than any cache, and so it also empties them between calls
SHAPES = ((4, 4, 64), (16, 4, 64), (32, 4, 64), (4, 4, 128), (16, 4, 128), (32, 4, 128))  # query heads, KV heads, size


@dataclass(frozen=True)
class Result:
    """One row of the table; rates in bytes per second."""

    query_heads: int
    kv_heads: int
    head_dim: int
    slots: str
    threads: int
    attention_rate: float
    row_read_rate: float
    read_rate: float
    ratio: float


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def slab(slots: int, heads: int, dim: int) -> Array:
    """A bfloat16 slab of small values: exponents near 1, random mantissas."""
    array = allocate(slots * heads * dim * 2).view(np.uint16).reshape(slots, heads, dim)
    array[:] = np.random.default_rng(0).integers(0x3F00, 0x3F80, size=(1, heads, dim), dtype=np.uint16)
    return array


def measure(
    shape: tuple[int, int, int], scattered: bool, threads: int, sequences: int, tokens: int, rounds: int, memory: Array
) -> Result:
    """One shape, its calls interleaved with reads of ``memory``."""
    query_heads, kv_heads, dim = shape
    count = sequences * tokens
    k, v = slab(count, kv_heads, dim), slab(count, kv_heads, dim)
    q = np.random.default_rng(1).standard_normal((sequences, query_heads, dim)).astype(np.float32)
    slots = np.random.default_rng(2).permutation(count) if scattered else np.arange(count)
    segments = SegmentTable(
        query_offsets=np.arange(sequences + 1, dtype=np.int32),
        query_start=np.full(sequences, tokens - 1, np.int32),
        kv_offsets=np.arange(0, count + 1, tokens, dtype=np.int64),
        kv_start=np.zeros(sequences, np.int32),
        slots=slots.astype(np.int32),
    )
    spec = AttentionSpec(0, query_heads, kv_heads, dim, dim, dim**-0.5)
    slab_rows = [each.view(np.uint8).reshape(count, -1) for each in (k, v)]
    reads, row_reads, calls = [], [], []
    for _ in range(rounds):
        reads.append(len(memory) / seconds(lambda: read(memory, threads)))
        row_reads.append(
            (k.nbytes + v.nbytes) / seconds(lambda: [read_rows(r, segments.slots, threads) for r in slab_rows])
        )
        read(memory, threads)  # empties the caches again
        calls.append((k.nbytes + v.nbytes) / seconds(lambda: partial(q, k, v, segments, spec, threads)))
    ratio = statistics.median(call / read_rate for call, read_rate in zip(calls, reads, strict=True))
    order = "anywhere" if scattered else "in order"
    attention_rate, row_read_rate, read_rate = (statistics.median(rates) for rates in (calls, row_reads, reads))
    return Result(query_heads, kv_heads, dim, order, threads, attention_rate, row_read_rate, read_rate, ratio)


def show(results: list[Result], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for heading in (
        "query heads",
        "KV heads",
        "head size",
        "slots",
        "threads",
        "KV GB/s",
        "row read GB/s",
        "read GB/s",
        "ratio",
    ):
        table.add_column(heading, justify="left" if heading == "slots" else "right")
    for r in results:
        sizes = (r.query_heads, r.kv_heads, r.head_dim, r.slots, r.threads)
        rates = (f"{rate / 1e9:.1f}" for rate in (r.attention_rate, r.row_read_rate, r.read_rate))
        table.add_row(*map(str, sizes), *rates, f"{r.ratio:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()

    memory = allocate(READ_BYTES)
    memory[:] = 1
    cases = [(shape, scattered, threads) for threads in args.threads for shape in SHAPES for scattered in (False, True)]
    results = [
        measure(*case, args.sequences, args.tokens, args.rounds, memory)
        for case in track(cases, "attention", transient=True)
    ]
    show(results, f"decode attention, bfloat16, {args.sequences} sequences x {args.tokens} tokens")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
