"""Measures one long request among short ones: the gain by balancing memory workers, the cost of splitting a request.

    python -m bench.runtime.placement [--model 3m] [--tokens 8192] [--short 24] [--answer 400] [--rounds 3]

Three tables:

* simulated: Llama-2-13B on an H100 with four A100s or RTX 3090s as memory; each policy's tokens a second over those
  without one (target: 1.3);
* on the runtime: one compute worker and four memory workers of this machine, with each policy and without, in turns.
  Workers that share cores gain only while some of these idle: compare with ``--threads`` and cores of your own;
* one request over 1, 2, 4 and 8 memory workers: its time per layer of a step, what the attention of one worker and
  the merge on the compute worker take of this, timed in this process (merge: target under 1%), and the rest: network
  and slices.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from bench.models import MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import AttentionSpec, Balance
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.kernels.attention import merge, partial
from lamina.kernels.segments import SegmentTable
from lamina.launch import launch
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, simulate

POLICIES: tuple[Balance, ...] = ("off", "bandwidth", "throughput", "ledger")
TIMEOUT_S = 480.0
SHORT_PROMPT = 64
SPLITS = (1, 2, 4, 8)


class Run:
    """Requests that run together. Tokens are counted while all of them decode."""

    def __init__(self, engine: Engine, prompts: list[int], answer: int) -> None:
        self._left = len(prompts)
        self._first: dict[str, float] = {}
        self._ended: list[float] = []
        self._tokens: list[float] = []
        self._done = threading.Event()
        self._failures = Failures()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        draw = np.random.default_rng(1)
        for number, length in enumerate(prompts):
            engine.submit(str(number), draw.integers(3, 900, length).tolist(), params, self._on_update)
        if not self._done.wait(TIMEOUT_S):
            raise SystemExit(f"error: {self._left} requests have not ended within {TIMEOUT_S:g} s; {engine.stats()}")
        self._failures.check()

    def _on_update(self, update: RequestUpdate) -> None:
        now = time.perf_counter()
        self._failures.note(update)
        if update.tokens:
            self._first.setdefault(update.request.request_id, now)
            self._tokens += [now] * update.tokens
        if update.finished:
            self._ended.append(now)
            self._left -= 1
            if not self._left:
                self._done.set()

    @property
    def tokens_s(self) -> float:
        """Tokens per second while all requests decode."""
        begin, end = max(self._first.values()), min(self._ended)
        return sum(begin <= moment < end for moment in self._tokens) / max(end - begin, 1e-9)

    @property
    def step_s(self) -> float:
        """Median time between tokens of the only request, from its second token on."""
        return statistics.median(np.diff(self._tokens[1:]).tolist())


def simulated(kind: str, tokens: int) -> dict[str, float]:
    """Tokens a second by policy: 48 short requests come while a long one decodes."""
    found: dict[str, float] = {}
    for balance in POLICIES:
        deployment = Deployment(
            model=model_shapes.find("Llama-2-13B"),
            compute=hardware.load()["h100"],
            compute_workers=1,
            memory=hardware.load()[kind],
            memory_workers=4,
            balance=balance,
        )
        prompts = np.array([min(tokens, deployment.memory_cost.kv_tokens * 9 // 10), *[200] * 48])
        arrivals = Arrivals(np.array([0.0, *[2.0] * 48]), prompts, np.full(49, 3000))
        found[balance] = simulate(deployment, arrivals).tokens_s
    return found


def start(model: str, place: Path, memories: int, slots: int, **settings: Any) -> Engine:
    """An engine whose memory workers have ``slots`` token slots each."""
    shape = MODELS[model]
    heads = shape["num_key_value_heads"]
    nbytes = 2 * 4 * shape["num_hidden_layers"] * heads * shape["hidden_size"] // shape["num_attention_heads"]
    return launch(
        EngineConfig(
            model=place,
            load_format="dummy",
            dtype="float32",
            compute="cpu:1",
            memory=f"cpu:{memories}",
            kv_cache_memory_bytes=slots * nbytes,
            max_num_seqs=64,
            threads=1,
            prefix_cache=False,
            **settings,
        )
    )


def balanced(model: str, place: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by policy, the median tokens per second of the rounds, and the moves of the last round."""
    speeds: dict[str, list[float]] = {balance: [] for balance in POLICIES}
    moves: dict[str, int] = {}
    prompts = [arguments.tokens, *[SHORT_PROMPT] * arguments.short]
    for _ in range(arguments.rounds):
        for balance in POLICIES:
            engine = start(model, place, 4, 2 * arguments.tokens, balance=balance)
            try:
                speeds[balance].append(Run(engine, prompts, arguments.answer).tokens_s)
                moves[balance] = engine.stats().placement.moves
            finally:
                engine.close()
    return {one: {"tokens_s": statistics.median(found), "moves": moves[one]} for one, found in speeds.items()}


def split(model: str, place: Path, tokens: int, workers: int) -> dict[str, float]:
    """Seconds per layer of a step of one request over so many workers: all, one worker's attention, merge, rest."""
    shape, answer = MODELS[model], 64
    engine = start(
        model, place, workers, 2 * tokens, kv_tokens_per_worker=-(-tokens // workers) if workers > 1 else None
    )
    try:
        run = Run(engine, [tokens], answer)
    finally:
        engine.close()
    layers = shape["num_hidden_layers"]
    heads, size = shape["num_attention_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    outs = [np.zeros((1, heads, size), np.float32) for _ in range(workers)]
    lses = [np.zeros((1, heads), np.float32) for _ in range(workers)]
    held, kv_heads = -(-tokens // workers), shape["num_key_value_heads"]
    table = SegmentTable(
        np.array([0, 1], np.int32), np.array([tokens], np.int32), np.array([0, held], np.int64), np.zeros(1, np.int32),
        np.arange(held, dtype=np.int32),
    )  # fmt: skip
    spec = AttentionSpec(layer=0, query_heads=heads, kv_heads=kv_heads, qk_dim=size, v_dim=size, scale=1.0)
    k, v = (np.ones((held, kv_heads, size), np.float32) for _ in range(2))
    merge_s = timed(lambda: merge(outs, lses))
    attention_s = timed(lambda: partial(outs[0], k, v, table, spec, 1))
    return {
        "step_s": run.step_s / layers,
        "attention_s": attention_s,
        "merge_s": merge_s,
        "rest_s": run.step_s / layers - attention_s - merge_s,
    }


def timed(call: Callable[[], object]) -> float:
    """Median seconds of a call in this process."""
    spent = []
    for _ in range(500):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="3m")
    parser.add_argument("--tokens", type=int, default=8192, help="of the long request's prompt")
    parser.add_argument("--short", type=int, default=24, help="short requests beside it")
    parser.add_argument("--answer", type=int, default=400, help="tokens that every request draws")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console, figures = Console(), dict[str, Any]()
    for kind, tokens in (("a100", 32_768), ("a100", 65_536), ("a100", 81_920), ("rtx3090", 24_576)):
        speeds = simulated(kind, tokens)
        figures[f"simulated {kind} {tokens}"] = speeds
        title = f"Simulated: h100:1 and {kind}:4, a prompt of {tokens:,} tokens"
        show(console, title, {one: {"tokens_s": speed} for one, speed in speeds.items()})
    if not arguments.simulate_only:
        with model_directory(arguments.model) as place:
            figures["runtime"] = balanced(arguments.model, place, arguments)
            show(console, "This machine: cpu:1 and cpu:4", figures["runtime"])
            figures["splits"] = {count: split(arguments.model, place, arguments.tokens, count) for count in SPLITS}
        table = Table(title=f"One request of {arguments.tokens} tokens, per layer", title_justify="left")
        for column in ("workers", "step", "attention", "merge", "network and slices", "merge share"):
            table.add_column(column, justify="right")
        for count, one in figures["splits"].items():
            times = [f"{one[name] * 1e6:.1f} us" for name in ("step_s", "attention_s", "merge_s", "rest_s")]
            table.add_row(str(count), *times, f"{one['merge_s'] / one['step_s']:.2%}")
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    """Tokens a second by policy, and over those without one."""
    table = Table(title=title, title_justify="left")
    for column in ("balance", "tokens/s", "over off", "moves"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        moves = f"{row['moves']:.0f}" if "moves" in row else ""
        table.add_row(name, f"{row['tokens_s']:.0f}", f"{row['tokens_s'] / rows['off']['tokens_s']:.2f}", moves)
    console.print(table)


if __name__ == "__main__":
    main()
