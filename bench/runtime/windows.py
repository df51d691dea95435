"""Measures the memory saved by layers with a sliding window, which drop older tokens: slots gained, bytes in use.

    python -m bench.runtime.windows [--tokens 2048] [--requests 8] [--json FILE]

A small model like Gemma 3 (five of six layers see the last 256 tokens) serves chats of two turns with long prompts, all
at once, with the prefix cache and without. Prints for both: token slots in the same ``kv_cache_memory_bytes``, and how
much the memory worker grew in the first turn, each beside the figure if all layers kept every token; and the share of
the second turn's prompts that was found in the cache. Compares the answers of both.
"""

import argparse
import functools
import json
import random
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from bench.runtime.sessions import resident_nbytes
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.models import directory

NEXT = 32  # tokens that each user adds
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW, LAYERS, PERIOD, HEADS, SIZE, VOCABULARY = 256, 6, 6, 2, 64, 2048
TOKEN_NBYTES = LAYERS * 2 * HEADS * SIZE * 4
DRAWN = 24
TIMEOUT_S = 600
SIZES = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "query_pre_attn_scalar": SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "sliding_window": WINDOW,
    "layer_types": [FULL if layer % PERIOD == PERIOD - 1 else SLIDING for layer in range(LAYERS)],
}


@dataclass(frozen=True)
class Figures:
    """Results of one cluster. ``found``: share of the second prompts' tokens found in the cache. ``answers``: to all
    first prompts, then to all second ones."""

    slots: int
    grown_nbytes: int
    found: float
    answers: list[list[int]]


def run(engine: Engine, name: str, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The answers to prompts that are served together, and how many of their tokens were found in the cache."""
    greedy = SamplingParams(max_tokens=DRAWN, temperature=0.0, ignore_eos=True)
    answers, found, ended = [list[int]() for _ in prompts], [0] * len(prompts), threading.Semaphore(0)
    failures = Failures()

    def note(number: int, update: RequestUpdate) -> None:
        answers[number] += update.completions[0].token_ids
        found[number] = update.cached_tokens
        failures.note(update)
        if update.finished:
            ended.release()

    for number, prompt in enumerate(prompts):
        engine.submit(f"{name}-{number}", prompt, greedy, functools.partial(note, number))
    for _ in prompts:
        if not ended.acquire(timeout=TIMEOUT_S):
            raise TimeoutError(f"no answer within {TIMEOUT_S} s")
    failures.check()
    return answers, sum(found)


def measure(model: Path, tokens: int, requests: int, nbytes: int, prefix_cache: bool) -> Figures:
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        dtype=DType.FLOAT32,
        memory="cpu:1",
        kv_cache_memory_bytes=nbytes,
        max_num_seqs=requests,
        max_num_batched_tokens=256,
        threads=1,
        prefix_cache=prefix_cache,
    )
    draw = random.Random(0)

    def drawn(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    prompts = [drawn(tokens) for _ in range(requests)]
    engine = launch(config)
    try:
        before = resident_nbytes(engine)
        first, _ = run(engine, "first", prompts)
        grown = resident_nbytes(engine) - before
        longer = [prompt + answer + drawn(NEXT) for prompt, answer in zip(prompts, first, strict=True)]
        second, found = run(engine, "second", longer)
        slots = next(iter(engine.cluster.capacities.values()))
    finally:
        engine.close()
    return Figures(slots, grown, found / sum(map(len, longer)), first + second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each first prompt")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        model = Path(place)
        (model / "config.json").write_text(json.dumps(SIZES))
        bundled = directory.find(None).path
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (model / file).write_bytes((bundled / file).read_bytes())
        every = given.requests * (given.tokens + DRAWN) * TOKEN_NBYTES
        sizes = given.tokens, given.requests, 2 * every
        cached, alone = (measure(model, *sizes, prefix_cache=kept) for kept in (True, False))
    slots = 2 * every // TOKEN_NBYTES
    seen = f"{PERIOD - 1} of {PERIOD} layers see {WINDOW}"
    table = Table(title=f"{given.requests} chats, first prompts of {given.tokens} tokens; {seen}")
    for column in ("", "all kept (computed)", "prefix cache", "no prefix cache"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, whole: float, values: tuple[float, float], scale: float, unit: str) -> None:
        shown = [f"{value / scale:.0f}{unit} ({value / whole:.2f})" for value in values]
        table.add_row(name, f"{whole / scale:.0f}{unit}", *shown)

    row("token slots in the same memory", slots, (cached.slots, alone.slots), 1, "")
    row("memory in use after the first turn", every, (cached.grown_nbytes, alone.grown_nbytes), 1e6, " MB")
    table.add_row("found of the second prompts", "", f"{cached.found:.1%}", f"{alone.found:.1%}")
    different = sum(one != other for one, other in zip(cached.answers, alone.answers, strict=True))
    table.add_row("answers that differ", "", f"{different} of {len(alone.answers)}", "")
    Console(width=120).print(table)
    if given.json:
        figures = {"prefix_cache": asdict(cached), "no_prefix_cache": asdict(alone)}
        given.json.write_text(json.dumps({"slots": slots, "every_nbytes": every, **figures}, indent=1))


if __name__ == "__main__":
    main()
