"""Lamina with its default pools: a compute worker on all cores that keeps KV itself. See ``offline.py``."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.peers.offline import STEP_TOKENS, Cell, Generate, run
from lamina import Lamina
from lamina.observe.timing import decode_batch

TIMEOUT_S = 900


@contextmanager
def load(cell: Cell, memory: str | None = None) -> Iterator[Generate]:
    """An engine that gets requests in the way a server submits them. ``memory``: its memory pool."""
    quantization = "none" if cell.weights == "bf16" else cell.weights
    settings: dict[str, Any] = {"quantization": quantization, "activation_dtype": cell.activation_dtype}
    with Lamina(
        cell.model,
        memory=memory,
        threads=cell.threads,
        max_num_batched_tokens=STEP_TOKENS,
        prefix_cache=False,
        **settings,
    ) as lamina:

        def generate(prompts: list[list[int]], tokens: int) -> list[list[float]]:
            arrivals = decode_batch(lamina.engine, prompts, tokens, TIMEOUT_S)
            return [[time_ns / 1e9 for time_ns in times] for times in arrivals]

        yield generate


def about(_: Cell) -> dict[str, str]:
    return {"lamina": importlib.metadata.version("lamina")}


if __name__ == "__main__":
    run(load, about)
