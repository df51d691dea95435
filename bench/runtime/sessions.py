"""Measures idle chats on disk: ten times as many as fit in memory; time to first token when a chat continues.

    python -m bench.runtime.sessions [--agents] [--model 60m] [--folder .] [--tokens 2048] [--times 10] [--threads 1]
        [--json FILE]

Chats begin one after another, each with a prompt of its own, until they have ``--times`` as many tokens as the memory
worker has slots. Then each continues, in the same order: the next one is always the least recently used, whose KV is on
disk alone. Prints the time to the first token with KV from the disk; of the same prompt with a salt, which is computed
again; and of a chat that continues at once, from memory. Also prints the tokens read from the disk per second and the
memory of the memory worker before and after. Compares the answers.

With ``--agents``: agents that call tools. Each agent's next prompt is all that was said before and its tool's result.
While the tools run, other requests without anything in common fill the memory. Prints the time to the first token of
the agents' prompts after the first and how many of their tokens were found: with a plain cache, with ``priority`` -1
for the agents, and with a disk.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.models import MODELS, model_directory
from bench.runtime.prefix import VOCABULARY, Answer
from lamina.config.engine_config import EngineConfig
from lamina.engine.engine import Engine
from lamina.launch import launch

MESSAGE = 40
HELD = 4  # chats that fit in memory
SETTLE_S = 60.0


def kv_nbytes(model: str) -> int:
    """Bytes of K and V of one token, in bfloat16."""
    sizes = MODELS[model]
    return 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]


def resident_nbytes(engine: Engine) -> int:
    """Resident bytes of the only memory worker's process."""
    children = psutil.Process().children(recursive=True)
    (worker,) = [one for one in children if "lamina.memory" in " ".join(one.cmdline())]
    return int(worker.memory_info().rss)


def wait_until_copied(engine: Engine) -> None:
    """Wait until nothing is being copied to the disk."""
    deadline, before = time.monotonic() + SETTLE_S, -1
    while (spilled := engine.stats().spilled) != before and time.monotonic() < deadline:
        before = spilled
        time.sleep(0.5)


def measure(engine: Engine, chats: int, tokens: int) -> dict[str, float]:
    """Begin all chats, then continue each."""
    draw = random.Random(0)

    def words(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    empty = resident_nbytes(engine)
    said, at_once = [], []
    for number in range(chats):
        prompt = words(tokens)
        Answer(engine, prompt, "")
        if number % 8 == 7:
            at_once.append(Answer(engine, [*prompt, *words(MESSAGE)], "").ttft_s)
        said.append(prompt)
        wait_until_copied(engine)
    full, before = resident_nbytes(engine), engine.stats()
    resumed, computed, differ = list[Answer](), list[Answer](), 0
    for number, beginning in enumerate(said):
        prompt = [*beginning, *words(MESSAGE)]
        resumed.append(Answer(engine, prompt, ""))
        if number % 4 == 3:
            computed.append(Answer(engine, prompt, f"alone {number} "))
            differ += computed[-1].drawn != resumed[-1].drawn
    after = engine.stats()
    found = [one.found for one in resumed]
    return {
        "chats": chats,
        "tokens": tokens,
        "slots": next(iter(engine.cluster.capacities.values())),
        "ttft_disk_s": statistics.median(one.ttft_s for one in resumed),
        "ttft_disk_p95_s": statistics.quantiles([one.ttft_s for one in resumed], n=20)[-1],
        "ttft_computed_s": statistics.median(one.ttft_s for one in computed),
        "ttft_memory_s": statistics.median(at_once),
        "found": sum(found) / sum(map(len, said)),
        "fetched": after.fetched - before.fetched,
        "spilled": after.spilled,
        "compared": len(computed),
        "different_answers": differ,
        "empty_nbytes": empty,
        "full_nbytes": full,
        "end_nbytes": resident_nbytes(engine),
    }


AGENTS = 3
CALLS = 4  # of tools, by each agent

ARMS: Mapping[str, tuple[int, bool]] = {"plain": (0, False), "priority -1": (-1, False), "disk": (0, True)}
"""By name: the agents' priority, and whether idle KV is on a disk too."""


def measure_agents(engine: Engine, tokens: int, priority: int) -> dict[str, float]:
    """Run agents whose tools take as long as others need to fill the memory of the worker."""
    draw = random.Random(0)

    def words(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    system = words(tokens // 4)
    said = [[*system, *words(tokens // 4)] for _ in range(AGENTS)]
    for one in said:
        Answer(engine, one, "", priority)
    found, asked, first_s = 0, 0, list[float]()
    for _ in range(CALLS):
        for _ in range(HELD + 1):
            Answer(engine, words(tokens), "")
        for number, before in enumerate(said):
            prompt = [*before, *words(MESSAGE)]
            answer = Answer(engine, prompt, "", priority)
            first_s.append(answer.ttft_s)
            found, asked = found + answer.found, asked + len(before)
            said[number] = prompt + answer.drawn
    quantiles = statistics.quantiles(first_s, n=20)
    return {"ttft_s": statistics.median(first_s), "ttft_p95_s": quantiles[-1], "found": found / asked}


def agents_table(model: str, figures: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the figures of each arm."""
    made = Table("prefixes", title=f"{AGENTS} agents with {CALLS} tool calls each: {model}")
    for heading in ("found", "TTFT p50", "TTFT p95"):
        made.add_column(heading, justify="right")
    for name, one in figures.items():
        times = (f"{one[key] * 1e3:.0f} ms" for key in ("ttft_s", "ttft_p95_s"))
        made.add_row(name, f"{one['found']:.3f}", *times)
    return made


def table(model: str, figures: Mapping[str, float]) -> Table:
    made = Table(title=f"Idle chats: {model}, {figures['chats']:.0f} of {figures['tokens']:.0f} tokens")
    made.add_column("what")
    made.add_column("value", justify="right")
    held = figures["chats"] * figures["tokens"] / figures["slots"]
    made.add_row("tokens of all chats over slots in memory", f"{held:.1f}")
    made.add_row("TTFT p50 from the disk", f"{figures['ttft_disk_s'] * 1e3:.0f} ms")
    made.add_row("TTFT p95 from the disk", f"{figures['ttft_disk_p95_s'] * 1e3:.0f} ms")
    made.add_row("TTFT p50 computed again", f"{figures['ttft_computed_s'] * 1e3:.0f} ms")
    made.add_row("TTFT p50 from memory", f"{figures['ttft_memory_s'] * 1e3:.0f} ms")
    made.add_row("computed again over from the disk", f"{figures['ttft_computed_s'] / figures['ttft_disk_s']:.1f}x")
    made.add_row("tokens of chats found", f"{figures['found']:.3f}")
    made.add_row("answers that differ", f"{figures['different_answers']:.0f} of {figures['compared']:.0f}")
    for name, when in (("empty", "before"), ("full", "with all chats"), ("end", "at the end")):
        made.add_row(f"memory worker's resident memory {when}", f"{figures[f'{name}_nbytes'] / 1e6:.0f} MB")
    return made


def measure_chats(engine: Engine, tokens: int, times: float) -> dict[str, float]:
    """Measure as many chats as have ``times`` the tokens of the worker's slots."""
    slots = next(iter(engine.cluster.capacities.values()))
    return measure(engine, round(times * slots / tokens), tokens)


def run(config: EngineConfig, measured: Callable[[Engine], dict[str, float]]) -> dict[str, float]:
    """Return what ``measured`` returns for an engine that has answered a request before."""
    engine = launch(config)
    try:
        Answer(engine, list(range(3, 200)), "warm-up")
        return measured(engine)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", action="store_true", help="agents that call tools")
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--times", type=float, default=10, help="tokens of all chats over slots in memory")
    parser.add_argument("--threads", type=int, help="threads of each worker; 1 on a busy machine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: Mapping[str, float] | Mapping[str, Mapping[str, float]]
    with model_directory(given.model) as model:
        config = EngineConfig(
            model=str(model),
            load_format="dummy",
            kv_cache_memory_bytes=HELD * given.tokens * kv_nbytes(given.model),
            threads=given.threads,
        )
        on_disk = replace(config, kv_overcommit=2 + 1.2 * given.times, kv_spill_dir=given.folder)
        if given.agents:
            arms = {
                name: run(on_disk if disk else config, partial(measure_agents, tokens=given.tokens, priority=priority))
                for name, (priority, disk) in ARMS.items()
            }
            figures, shown = arms, agents_table(given.model, arms)
        else:
            chats = run(on_disk, partial(measure_chats, tokens=given.tokens, times=given.times))
            figures, shown = chats, table(given.model, chats)
    Console(width=120).print(shown)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
