"""Native attention on this machine's processor, each figure against a limit measured between its calls.

    python -m bench.kernels.attention [--only decode split ...] [--sequences 16] [--tokens 2048]
                              [--threads 1 2] [--rounds 21] [--shapes 8x1x64 ...]
                              [--json FILE]

decode   KV bytes read per second (bfloat16, one query row per sequence) over a plain read loop's. ``slots`` says how
         tokens lie in the slab: one after another, in runs anywhere (as slabs give them to sequences that grow side by
         side), or each anywhere. ``row read`` reads the same rows and does nothing else.
split    time of the same requests as 8 segments each, merged, over their time as one.
ragged   time of one request of 64 Ki tokens among 15 of 1 Ki over that of 16 equal requests of as many tokens.
codes    bytes read per second of KV as int8 and fp8 codes, scales included, over those of bfloat16, tokens in runs;
         and the tokens read per second over those of bfloat16.
prefill  a prompt chunk's causal attention to itself, in visible multiply-adds per second, over a bfloat16 matrix
         product's.

Figures are medians over the rounds; ratios are medians of the ratios of neighbours in time.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # else torch's idle threads spin on the cores that attention is timed on
import torch
from rich.console import Console
from rich.table import Table

from lamina import _native
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.attention import Array, Scales, append, merge, partial
from lamina.kernels.host_memory import allocate
from lamina.kernels.segments import SegmentTable
from lamina.memory.device.cpu import KvArrays

READ_BYTES = 256 * 1024 * 1024  # larger than any cache, and so it also empties them between calls
SHAPES = ((4, 4, 64), (16, 4, 64), (32, 4, 64), (4, 4, 128), (16, 4, 128), (32, 4, 128))  # query heads, KV heads, size
LONGER_SHAPES = ((16, 4, 64), (16, 4, 128))
SEGMENTS = 8
LONG_TOKENS, SHORT_TOKENS, RAGGED_SEQUENCES = 64 * 1024, 1024, 16
TABLES = ("decode", "codes", "split", "ragged", "prefill")
CHUNKS = (512, 1024, 2048)
RUNS = {"in order": 0, "runs of 64": 64, "anywhere": 1}  # tokens next to each other in the slab; 0: all
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Result:
    """One row of a table: the case, the rates in its units per second, and the ratio the case is about."""

    case: dict[str, int | str]
    rates: dict[str, float]
    ratio: float


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(rounds: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call in each round, after one round that is not counted."""
    times = [[seconds(call) for call in calls] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*times[1:], strict=True)]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def small_values(seed: int, shape: tuple[int, ...]) -> Array:
    """Random bfloat16 bits of values from 0.5 to 1."""
    return np.random.default_rng(seed).integers(0x3F00, 0x3F80, size=shape, dtype=np.uint16)


def slab(slots: int, heads: int, dim: int) -> Array:
    array = allocate(slots * heads * dim * 2).view(np.uint16).reshape(slots, heads, dim)
    array[:] = small_values(0, (1, heads, dim))
    return array


class Requests:
    """K, V and queries of requests with ``tokens`` cached tokens each, and the attention of all of them."""

    def __init__(self, shape: Shape, tokens: list[int], rows: int = 1, run: int = 0) -> None:
        """The last ``rows`` tokens of every request are the queries; see ``RUNS``."""
        query_heads, kv_heads, dim = shape
        self.spec = AttentionSpec(0, query_heads, kv_heads, dim, dim, dim**-0.5)
        self.tokens, self.rows = np.array(tokens), rows
        count = int(self.tokens.sum())
        self.k, self.v = slab(count, kv_heads, dim), slab(count, kv_heads, dim)
        self.scales: Scales | None = None
        self.nbytes = self.k.nbytes + self.v.nbytes
        q = np.random.default_rng(1).standard_normal((rows * len(tokens), query_heads, dim), np.float32)
        self.q = (q.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, rounded down
        runs = np.arange(count, dtype=np.int32).reshape(-1, run or count)
        self.slots = np.random.default_rng(2).permutation(runs).ravel()
        self.whole = self.pairs(1)

    def as_codes(self, element: KvElement) -> "Requests":
        """The same with K and V as codes."""
        codes, kept = copy.copy(self), KvArrays.allocate(self.spec, element, len(self.k))
        append(kept.k, kept.v, self.k, self.v, np.arange(len(self.k), dtype=np.int32), scales=kept.scales)
        codes.k, codes.v, codes.scales = kept.k, kept.v, kept.scales
        codes.nbytes = len(self.k) * self.spec.slab_bytes_per_token(element)
        return codes

    def pairs(self, count: int) -> SegmentTable:
        """Every request as ``count`` equal segments, each with the request's query rows: first segments first."""
        requests = len(self.tokens)
        starts = np.array([self.tokens * index // count for index in range(count + 1)])  # [count + 1, requests]
        places = starts + np.cumsum(self.tokens) - self.tokens
        parts = [self.slots[begin:end] for begin, end in zip(places[:-1].ravel(), places[1:].ravel(), strict=True)]
        return SegmentTable(
            query_offsets=np.arange(0, self.rows * requests * count + 1, self.rows, dtype=np.int32),
            query_start=np.tile(self.tokens - self.rows, count).astype(np.int32),
            kv_offsets=np.cumsum([0, *map(len, parts)]),
            kv_start=starts[:-1].ravel().astype(np.int32),
            slots=np.concatenate(parts),
        )

    def attend(self, segments: SegmentTable, threads: int) -> tuple[Array, Array]:
        return partial(self.q, self.k, self.v, segments, self.spec, threads, scales=self.scales)


def case_of(shape: Shape, threads: int, **more: int | str) -> dict[str, int | str]:
    return dict(zip(("query heads", "KV heads", "head size"), shape, strict=True)) | more | {"threads": threads}


def decode(shape: Shape, threads: int, slots: str, tokens: list[int], rounds: int, memory: Array) -> Result:
    requests = Requests(shape, tokens, run=RUNS[slots])
    slab_rows = [each.view(np.uint8).reshape(len(each), -1) for each in (requests.k, requests.v)]
    reads, row_reads, _, calls = interleave(
        rounds,
        lambda: _native.read_memory(memory, threads),
        lambda: [_native.read_rows(rows, requests.slots, threads) for rows in slab_rows],
        lambda: _native.read_memory(memory, threads),  # empties the caches again
        lambda: requests.attend(requests.whole, threads),
    )
    read_rates = [len(memory) / each for each in reads]
    rates = [requests.nbytes / each for each in calls]
    return Result(
        case_of(shape, threads, slots=slots),
        {
            "KV GB/s": statistics.median(rates) / 1e9,
            "row read GB/s": requests.nbytes / statistics.median(row_reads) / 1e9,
            "read GB/s": statistics.median(read_rates) / 1e9,
        },
        median_ratio(rates, read_rates),
    )


def codes(shape: Shape, threads: int, element: KvElement, tokens: list[int], rounds: int, memory: Array) -> Result:
    plain = Requests(shape, tokens, run=RUNS["runs of 64"])
    narrow = plain.as_codes(element)
    reads, plains, _, narrows = interleave(
        rounds,
        lambda: _native.read_memory(memory, threads),
        lambda: plain.attend(plain.whole, threads),
        lambda: _native.read_memory(memory, threads),
        lambda: narrow.attend(narrow.whole, threads),
    )
    speedup = median_ratio(plains, narrows)
    return Result(
        case_of(shape, threads, KV=element.value),
        {
            "KV GB/s": narrow.nbytes / statistics.median(narrows) / 1e9,
            "bfloat16 GB/s": plain.nbytes / statistics.median(plains) / 1e9,
            "read GB/s": len(memory) / statistics.median(reads) / 1e9,
            "tokens/s ratio": speedup,
        },
        speedup * narrow.nbytes / plain.nbytes,
    )


def split(shape: Shape, threads: int, tokens: list[int], rounds: int, memory: Array) -> Result:
    requests = Requests(shape, tokens)
    segments, q = requests.pairs(SEGMENTS), np.tile(requests.q, (SEGMENTS, 1, 1))
    out, lse = partial(q, requests.k, requests.v, segments, requests.spec, threads)
    outs, lses = np.split(out, SEGMENTS), np.split(lse, SEGMENTS)

    def in_segments() -> None:
        partial(q, requests.k, requests.v, segments, requests.spec, threads, out, lse)
        merge(outs, lses, threads=threads)

    _, whole, _, merged = interleave(
        rounds,
        lambda: _native.read_memory(memory, threads),
        lambda: requests.attend(requests.whole, threads),
        lambda: _native.read_memory(memory, threads),
        in_segments,
    )
    rates = {
        name: requests.nbytes / statistics.median(times) / 1e9
        for name, times in (("whole GB/s", whole), (f"{SEGMENTS} segments GB/s", merged))
    }
    return Result(case_of(shape, threads, requests=len(tokens), tokens=tokens[0]), rates, median_ratio(merged, whole))


def ragged(shape: Shape, threads: int, rounds: int, memory: Array) -> Result:
    uneven = [LONG_TOKENS] + [SHORT_TOKENS] * (RAGGED_SEQUENCES - 1)
    one_long = Requests(shape, uneven)
    equal = Requests(shape, [sum(uneven) // RAGGED_SEQUENCES] * RAGGED_SEQUENCES)
    _, equals, _, raggeds = interleave(
        rounds,
        lambda: _native.read_memory(memory, threads),
        lambda: equal.attend(equal.whole, threads),
        lambda: _native.read_memory(memory, threads),
        lambda: one_long.attend(one_long.whole, threads),
    )
    rates = {
        "equal GB/s": equal.nbytes / statistics.median(equals) / 1e9,
        "ragged GB/s": one_long.nbytes / statistics.median(raggeds) / 1e9,
    }
    return Result(case_of(shape, threads), rates, median_ratio(raggeds, equals))


def prefill(shape: Shape, threads: int, chunk: int, rounds: int) -> Result:
    """Causal: a row's operations are those on the tokens it sees."""
    query_heads, _, dim = shape
    requests = Requests(shape, [chunk], rows=chunk)
    operations = 4 * query_heads * dim * chunk * (chunk + 1) // 2
    size = 1024
    torch.set_num_threads(threads)
    left, right = torch.randn(size, size, dtype=torch.bfloat16), torch.randn(size, size, dtype=torch.bfloat16)
    products, calls = interleave(
        rounds, lambda: torch.mm(left, right), lambda: requests.attend(requests.whole, threads)
    )
    product_rates, rates = [2 * size**3 / each for each in products], [operations / each for each in calls]
    medians = {
        "attention GFLOP/s": statistics.median(rates) / 1e9,
        "product GFLOP/s": statistics.median(product_rates) / 1e9,
    }
    return Result(case_of(shape, threads, chunk=chunk), medians, median_ratio(rates, product_rates))


def show(results: list[Result], title: str) -> None:
    table = Table(title=title)
    for heading in (*results[0].case, *results[0].rates, "ratio"):
        words = heading in ("slots", "KV")
        table.add_column(heading, justify="left" if words else "right", no_wrap=words, min_width=10 if words else None)
    for r in results:
        table.add_row(*map(str, r.case.values()), *(f"{rate:.2f}" for rate in r.rates.values()), f"{r.ratio:.3f}")
    Console().print(table)


def shape_of(text: str) -> Shape:
    query_heads, kv_heads, size = map(int, text.split("x"))
    return query_heads, kv_heads, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="some of the tables")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=2048, help="per sequence; the split's requests are 4 times as long"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--shapes",
        type=shape_of,
        nargs="+",
        default=SHAPES,
        help="query heads x KV heads x head size, of the tables decode and codes; 8x1x64: multi-query",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()

    memory = allocate(READ_BYTES)
    memory[:] = 1
    rounds, tokens = args.rounds, [args.tokens] * args.sequences
    longer = [4 * args.tokens] * max(1, args.sequences // 4)
    title, each = (
        {
            "decode": "decode, bfloat16: KV bytes per second over a read's",
            "codes": "decode of codes: KV bytes per second over bfloat16's",
            "split": f"requests in {SEGMENTS} segments, merged: time over that of one call",
            "ragged": f"{LONG_TOKENS} tokens among {RAGGED_SEQUENCES - 1} x {SHORT_TOKENS}: time over that of equals",
            "prefill": "causal attention of a prompt chunk: operations per second over a matrix product's",
        },
        {
            "decode": lambda threads: [
                decode(shape, threads, slots, tokens, rounds, memory) for shape, slots in product(args.shapes, RUNS)
            ],
            "codes": lambda threads: [
                codes(shape, threads, element, tokens, rounds, memory)
                for shape, element in product(args.shapes, (KvElement.INT8, KvElement.FP8))
            ],
            "split": lambda threads: [split(shape, threads, longer, rounds, memory) for shape in LONGER_SHAPES],
            "ragged": lambda threads: [ragged(shape, threads, rounds, memory) for shape in LONGER_SHAPES],
            "prefill": lambda threads: [
                prefill(shape, threads, chunk, rounds) for shape, chunk in product(LONGER_SHAPES, CHUNKS)
            ],
        },
    )
    results = {}
    for name in args.only:
        results[name] = [result for threads in args.threads for result in each[name](threads)]
        show(results[name], title[name])
    if args.json:
        args.json.write_text(
            json.dumps({name: [asdict(row) for row in rows] for name, rows in results.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
