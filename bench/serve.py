"""Offline decode and prefill of a random Llama, against the memory limit measured in the same run.

    python bench/serve.py [--model 250m] [--grid 1x512,8x512,64x512,16x2048,4x8192] [--repeat 3] [--json FILE]

A decode step must read every weight once and every request's KV once: the limit is those bytes over the read bandwidth
that a native loop reaches with all cores. Weights are random, in bfloat16; prompts are random tokens.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lamina import Lamina, RequestOutput, SamplingParams
from lamina.kernels.memory import allocate, read
from lamina.models import directory

MODELS = {
    "250m": {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"intermediate_size": 2816, "head_dim": 64},
    "1.1b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"intermediate_size": 5632, "head_dim": 64},
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DECODED = 32
TIMEOUT_S = 900
READ_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Result:
    """One cell of the grid; rates in tokens per second over all requests."""

    batch: int
    context: int
    decode: float
    limit: float
    prefill: float


@contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """A config and the bundled tokenizer, for dummy weights."""
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        path = Path(place)
        (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
        bundled = directory.find(None).path
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (path / file).write_bytes((bundled / file).read_bytes())
        yield path


def weight_bytes(name: str) -> int:
    """Bytes of weights that one decode step reads: all layers and the output layer, one row of the embedding."""
    shape = MODELS[name]
    hidden, heads, groups, dim = (
        shape[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = hidden * dim * (2 * heads + 2 * groups) + 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + COMMON["vocab_size"] * hidden)


def kv_bytes_per_token(name: str) -> int:
    shape = MODELS[name]
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def read_bandwidth(threads: int) -> float:
    """Bytes per second that a native loop reads from memory larger than any cache: the median of seven."""
    memory = allocate(READ_BYTES)
    memory[:] = 1
    rates = []
    for _ in range(7):
        start = time.perf_counter()
        read(memory, threads)
        rates.append(READ_BYTES / (time.perf_counter() - start))
    return statistics.median(rates)


def measure(lamina: Lamina, batch: int, context: int) -> tuple[float, float]:
    """(decode, prefill) tokens per second: decode from the moment the last prompt is through to the last token."""
    draw = random.Random(batch * context)
    arrivals: dict[int, list[float]] = {index: [] for index in range(batch)}
    unfinished = set(arrivals)
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        arrivals[int(output.request_id)].append(time.perf_counter())
        if output.finished:
            unfinished.discard(int(output.request_id))
            if not unfinished:
                done.set()

    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    for index in arrivals:
        lamina.engine.submit(str(index), [draw.randrange(3, 900) for _ in range(context)], params, on_output)
    if not done.wait(TIMEOUT_S):
        raise TimeoutError(f"{len(unfinished)} of {batch} requests did not end within {TIMEOUT_S} s")
    prompts_done = max(times[0] for times in arrivals.values())
    late = [time_s for times in arrivals.values() for time_s in times if time_s > prompts_done]
    return len(late) / (max(late) - prompts_done), batch * context / (prompts_done - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="250m")
    parser.add_argument("--grid", default="1x512,8x512,64x512,16x2048,4x8192", help="batch x context, by commas")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in args.grid.split(",")]
    cores = len(os.sched_getaffinity(0))
    results = []
    with model_directory(args.model) as path, Lamina(path, load_format="dummy", dtype="bfloat16") as lamina:
        for batch, context in cells:
            bandwidth = read_bandwidth(threads=cores)
            rates = [measure(lamina, batch, context) for _ in range(args.repeat)]
            bytes_read = weight_bytes(args.model) + batch * (context + DECODED / 2) * kv_bytes_per_token(args.model)
            limit = batch * bandwidth / bytes_read
            decode, prefill = (statistics.median(column) for column in zip(*rates, strict=True))
            results.append(Result(batch, context, decode, limit, prefill))
    table = Table("batch x context", "decode tokens/s", "memory limit", "ratio", "prefill tokens/s")
    for r in results:
        cell = f"{r.batch} x {r.context}"
        table.add_row(cell, f"{r.decode:.0f}", f"{r.limit:.0f}", f"{r.decode / r.limit:.2f}", f"{r.prefill:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
