"""Time of linear layers on weights of 8 and 4 bits, over that of the same in bfloat16, and over reading the weights.

    python -m bench.kernels.codes [--size 4096] [--rows 1 2 4 8 16 64] [--threads 1 2]

Six square matrices one after another, so that they come from memory and not from the cache. The last columns are the
shares of the bandwidth that reading memory alone reaches. Medians over interleaved rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.kernels.slices import restart_with_worker_variables, seconds
from lamina import _native
from lamina.lowering.cpu_codes import PackedCodes, linear_codes, pack_codes
from lamina.lowering.native_operators import NATIVE
from lamina.models.quantisation.codes import quantise

MATRICES = 6
READ_BYTES = 1 << 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    restart_with_worker_variables()
    weights = [torch.randn(args.size, args.size).to(torch.bfloat16) for _ in range(MATRICES)]
    pairs = [NATIVE.pack(weight) for weight in weights]
    codes = {to: [pack_codes(quantise("w", weight, to, {})) for weight in weights] for to in ("int8", "int4")}
    memory = np.ones(READ_BYTES, np.uint8)
    heads = ["rows", "threads", "bfloat16 us", "int8 / bfloat16", "int4 / bfloat16"]
    table = Table(*heads, "int8 / bandwidth", "int4 / bandwidth", title=f"linear layers of {args.size} x {args.size}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        read = partial(_native.read_memory, memory, threads)
        bandwidth = READ_BYTES / statistics.median(seconds(read) for _ in range(args.rounds))
        for rows in args.rows:
            x = torch.randn(rows, args.size).to(torch.bfloat16)
            calls: list[Callable[[], object]] = [partial(in_bfloat16, x, pairs, args.size)]
            calls += [partial(in_codes, x, each) for each in codes.values()]
            times = [[seconds(call) for call in calls] for _ in range(args.rounds + 2)][2:]
            plain, *others = (statistics.median(column) / MATRICES for column in zip(*times, strict=True))
            ratios = [f"{other / plain:.2f}" for other in others]
            shares = [
                f"{each[0].nbytes / bandwidth / other:.2f}" for each, other in zip(codes.values(), others, strict=True)
            ]
            table.add_row(str(rows), str(threads), f"{plain * 1e6:.0f}", *ratios, *shares)
    Console().print(table)


def in_bfloat16(x: torch.Tensor, weights: list[torch.Tensor], outputs: int) -> None:
    for weight in weights:
        NATIVE.linear(x, weight, None, outputs)


def in_codes(x: torch.Tensor, weights: list[PackedCodes]) -> None:
    for weight in weights:
        linear_codes(x, weight, None)


if __name__ == "__main__":
    main()
