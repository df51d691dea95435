"""Arguments, prompts and rates, shared by all engines that ``serve.py`` measures. Uses the standard library alone.

Every engine is a module that runs in its own environment. It loads the model, warms up, and then measures its cell once
for every line that it reads, and prints one JSON object for each:

    yes | head -3 | PYTHON -m bench.peers.ENGINE MODEL --batch 8 --context 512 --threads 2 --weights int8

MODEL is a Hugging Face model directory. An engine gives :func:`run` a function that loads it for a cell and yields
``Generate``; greedy decoding, end of sequence ignored.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.peers.processor_time import ProcessorTime

DECODED = 64
"""Tokens decoded for every request."""

WARM_CONTEXT = 64
STEP_TOKENS = 2048
"""Prompt tokens that an engine may take in one step, where it lets one choose."""

Generate = Callable[[list[list[int]], int], list[list[float]]]
"""(prompts, tokens to decode for each) -> ``time.monotonic()`` when each token of each request was known."""


@dataclass(frozen=True)
class Cell:
    """A measurement: ``batch`` requests of ``context`` prompt tokens each, submitted at once."""

    model: Path
    batch: int
    context: int
    threads: int
    weights: str = "bf16"
    """Type of the weights of linear layers: bf16, int8, int4, q8_0 or q4_k_m. Each engine has some of these."""
    activation_dtype: str = "auto"
    """Lamina's ``activation_dtype``: auto, dtype or int8. Other engines decide themselves what they round."""

    @property
    def longest(self) -> int:
        """Tokens of one request at its end."""
        return self.context + DECODED


@dataclass(frozen=True)
class Rates:
    """Tokens per second, over all requests.

    Attributes:
        prefill: all prompt tokens, until the last request has its first token.
        decode: counted from then until the first request ends, so that all requests decode throughout.
        prefill_cpu, decode_cpu: the same per second of processor time of the engine's processes.
    """

    decode: float
    prefill: float
    decode_cpu: float
    prefill_cpu: float


def rates(start: float, arrivals: list[list[float]], context: int, used: Callable[[float], float]) -> Rates:
    """Return the rates of one batch. used: processor time until a time of the monotonic clock."""
    prompts_done = max(times[0] for times in arrivals)
    first_end = min(times[-1] for times in arrivals)
    decoded = sum(prompts_done < time_s <= first_end for times in arrivals for time_s in times)
    prompt_tokens = len(arrivals) * context
    return Rates(
        decode=decoded / (first_end - prompts_done),
        prefill=prompt_tokens / (prompts_done - start),
        decode_cpu=decoded / (used(first_end) - used(prompts_done)),
        prefill_cpu=prompt_tokens / (used(prompts_done) - used(start)),
    )


def prompts(draw: random.Random, batch: int, context: int) -> list[list[int]]:
    """Random tokens that every tokenizer knows and no engine has seen before."""
    return [[draw.randrange(3, 900) for _ in range(context)] for _ in range(batch)]


def run(load: Callable[[Cell], AbstractContextManager[Generate]], about: Callable[[Cell], dict[str, str]]) -> None:
    """Measure the cell on the command line for every line of the input: print its ``Rates`` and "about" as JSON.

    Warms up with one prompt as long as the cell's, then with short ones in the cell's batch. ``about`` names versions
    and settings. The engine waits for the next line without using a core, so that others can be measured meanwhile.

    Raises RuntimeError if a request did not get exactly ``DECODED`` tokens.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name in ("--batch", "--context", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--activation-dtype", default="auto")
    cell = Cell(**vars(parser.parse_args()))
    draw = random.Random()
    with load(cell) as generate:
        generate(prompts(draw, 1, cell.context), 2)
        generate(prompts(draw, cell.batch, min(cell.context, WARM_CONTEXT)), 4)
        for _ in sys.stdin:
            measured = measure(cell, prompts(draw, cell.batch, cell.context), generate)
            print(json.dumps(asdict(measured) | {"about": about(cell)}), flush=True)


def measure(cell: Cell, wanted: list[list[int]], generate: Generate) -> Rates:
    """Return the rates of one batch. Raises RuntimeError if a token is missing."""
    with ProcessorTime() as processor:
        start = time.monotonic()
        arrivals = generate(wanted, DECODED)
    counts = {len(times) for times in arrivals}
    if len(arrivals) != cell.batch or counts != {DECODED}:
        raise RuntimeError(f"{len(arrivals)} of {cell.batch} requests got {sorted(counts)} tokens, not {DECODED} each")
    return rates(start, arrivals, cell.context, processor.at)
