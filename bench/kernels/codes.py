"""Time of linear layers on weights of 8 and 4 bits, over that of the same in bfloat16, and over reading the weights.

    python -m bench.kernels.codes [--size 4096 4096] [--rows 1 2 4 8 16 64 512] [--threads 1 2]

Six matrices one after another, so that they come from memory and not from the cache. "x int8": activations are rounded
to 8 bits too (``--activation-dtype int8``). The last columns are the shares of the bandwidth that reading memory alone
reaches. Medians over interleaved rounds.
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
from lamina.core.types import ActivationDType, Quantization
from lamina.lowering.cpu_codes import PackedCodes, linear_codes, pack_codes
from lamina.lowering.native_operators import NATIVE
from lamina.models.quantisation.codes import quantise

MATRICES = 6
READ_BYTES = 1 << 28
KINDS: dict[str, tuple[Quantization, ActivationDType]] = {
    "int8": ("int8", "dtype"),
    "int8 x int8": ("int8", "int8"),
    "int4": ("int4", "dtype"),
    "int4 x int8": ("int4", "int8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 4096], metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    restart_with_worker_variables()
    outputs, inputs = args.size
    weights = [torch.randn(outputs, inputs).to(torch.bfloat16) for _ in range(MATRICES)]
    pairs = [NATIVE.pack(weight) for weight in weights]
    kinds = {
        name: (to, activations)
        for name, (to, activations) in KINDS.items()
        if activations == "dtype" or _native.linear_takes_byte_rows()
    }
    codes = {
        name: [pack_codes(quantise("w", weight, to, {}), activations) for weight in weights]
        for name, (to, activations) in kinds.items()
    }
    memory = np.ones(READ_BYTES, np.uint8)
    heads = ["rows", "threads", "bfloat16 us", *(f"{name} / bfloat16" for name in kinds)]
    heads += [f"{name} / bandwidth" for name in kinds]
    table = Table(*heads, title=f"linear layers of {outputs} x {inputs}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        read = partial(_native.read_memory, memory, threads)
        bandwidth = READ_BYTES / statistics.median(seconds(read) for _ in range(args.rounds))
        for rows in args.rows:
            x = torch.randn(rows, inputs).to(torch.bfloat16)
            calls: list[Callable[[], object]] = [partial(in_bfloat16, x, pairs, outputs)]
            calls += [partial(in_codes, x, each) for each in codes.values()]
            times = [[seconds(call) for call in calls] for _ in range(args.rounds + 2)][2:]
            plain, *others = (statistics.median(column) / MATRICES for column in zip(*times, strict=True))
            ratios = [f"{other / plain:.2f}" for other in others]
            shares = [
                f"{each[0].nbytes / bandwidth / other:.2f}" for each, other in zip(codes.values(), others, strict=True)
            ]
            table.add_row(str(rows), str(threads), f"{plain * 1e6:.0f}", *ratios, *shares)
    Console(width=160).print(table)


def in_bfloat16(x: torch.Tensor, weights: list[torch.Tensor], outputs: int) -> None:
    for weight in weights:
        NATIVE.linear(x, weight, None, outputs)


def in_codes(x: torch.Tensor, weights: list[PackedCodes]) -> None:
    for weight in weights:
        linear_codes(x, weight, None)


if __name__ == "__main__":
    main()
