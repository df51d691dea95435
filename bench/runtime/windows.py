"""What layers with a window save by forgetting: token slots in the same memory, and memory in use.

    python -m bench.runtime.windows [--tokens 2048] [--requests 8] [--json FILE]

A small model like Gemma 3 (five of six layers see the last 256 tokens) serves long prompts at once, with the prefix
cache, for which all layers keep every token, and without. Printed for both: token slots in the same
``kv_cache_memory_bytes``, and how much the memory worker grew, beside the bytes of all tokens in all layers. Answers
are compared.
"""

import argparse
import functools
import json
import random
import tempfile
import threading
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.runtime.sessions import resident_nbytes
from lamina.config import EngineConfig
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.models import directory
from lamina.types import DType, SamplingParams

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


def measure(model: Path, tokens: int, requests: int, prefix_cache: bool) -> tuple[dict[str, float], list[list[int]]]:
    """The figures of one cluster, and what it answered."""
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        dtype=DType.FLOAT32,
        memory="cpu:1",
        kv_cache_memory_bytes=2 * requests * tokens * TOKEN_NBYTES,
        max_num_seqs=requests,
        max_num_batched_tokens=256,
        threads=1,
        prefix_cache=prefix_cache,
    )
    draw = random.Random(0)
    greedy = SamplingParams(max_tokens=DRAWN, temperature=0.0, ignore_eos=True)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(requests)]
    engine = launch(config)
    try:
        before = resident_nbytes(engine)
        answers, ended = [list[int]() for _ in prompts], threading.Semaphore(0)

        def note(number: int, update: RequestUpdate) -> None:
            answers[number] += update.completions[0].token_ids
            if update.finished:
                ended.release()

        for number, prompt in enumerate(prompts):
            engine.submit(str(number), prompt, greedy, functools.partial(note, number))
        for _ in prompts:
            if not ended.acquire(timeout=TIMEOUT_S):
                raise TimeoutError(f"no answer within {TIMEOUT_S} s")
        grown = resident_nbytes(engine) - before
        slots = next(iter(engine.cluster.capacities.values()))
    finally:
        engine.close()
    return {"slots": slots, "grown_nbytes": grown}, answers


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        model = Path(place)
        (model / "config.json").write_text(json.dumps(SIZES))
        bundled = directory.find(None).path
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (model / file).write_bytes((bundled / file).read_bytes())
        keeps, first = measure(model, given.tokens, given.requests, prefix_cache=True)
        forgets, second = measure(model, given.tokens, given.requests, prefix_cache=False)
    every = given.requests * (given.tokens + DRAWN) * TOKEN_NBYTES
    seen = f"{PERIOD - 1} of {PERIOD} layers see {WINDOW}"
    table = Table(title=f"{given.requests} prompts of {given.tokens} tokens; {seen}")
    for column in ("", "all is kept", "windows forget", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    slots, grown = (f"{figures['slots']:.0f}" for figures in (keeps, forgets)), keeps["grown_nbytes"]
    table.add_row("token slots in the same memory", *slots, f"{forgets['slots'] / keeps['slots']:.2f}")
    sizes = (f"{figures['grown_nbytes'] / 1e6:.0f} MB" for figures in (keeps, forgets))
    table.add_row("memory in use", *sizes, f"{forgets['grown_nbytes'] / grown:.2f}")
    shares = (f"{figures['grown_nbytes'] / every:.2f}" for figures in (keeps, forgets))
    table.add_row("over that of all tokens in all layers", *shares)
    table.add_row("answers that differ", "", f"{sum(a != b for a, b in zip(first, second, strict=True))}")
    Console(width=120).print(table)
    if given.json:
        given.json.write_text(json.dumps({"keeps": keeps, "forgets": forgets, "every_nbytes": every}, indent=1))


if __name__ == "__main__":
    main()
