"""Measures the prefix cache: the time it saves, its hit rate, and its CPU time.

    python -m bench.runtime.prefix [--model 3m] [--chats 2] [--turns 3] [--threads 1] [--json FILE]

Eight tenants with system prompts of 2,048 tokens of their own; each has several chats of several turns, whose prompts
begin with all that was said before. Every turn is answered twice, one after the other: as it is, and with a salt of its
own, which finds nothing. Printed: the time to the first token with and without the cache (target: at least 5 times
lower), and the tokens found, beside those that an oracle finds, which forgets nothing.

The cost is counted, not timed against the clock: the CPU time that scheduler and slab take for random prompts without
anything in common, with the cache and without. The difference is divided by the CPU time that a request of the same
length takes on the runtime, of all processes (target: less than 1%).
"""

import argparse
import json
import random
import statistics
import threading
import time
from array import array
from collections.abc import Mapping
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from bench.models import MODELS, model_directory
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.types import Request
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.kv.placement import Placement
from lamina.launch import launch
from lamina.memory.slab import Slab
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler

TENANTS, SYSTEM, MESSAGE, ANSWER = 8, 2048, 40, 16
VOCABULARY = 900
TIMEOUT_S = 300.0
KV_NBYTES = 500_000_000
UNSHARED_REQUESTS, ROUNDS = 64, 5
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


class Answer:
    """One request, alone: seconds to the first token, the tokens drawn, and those of the prompt that were found."""

    def __init__(self, engine: Engine, prompt: list[int], salt: str, priority: int = 0) -> None:
        self.drawn: list[int] = []
        self.found = 0
        self.ttft_s = 0.0
        self._ended = threading.Event()
        self._failures = Failures()
        self._begun = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, cache_salt=salt, priority=priority)
        engine.submit(f"{salt}{self._begun}", prompt, params, self._on_update)
        if not self._ended.wait(TIMEOUT_S):
            raise SystemExit(f"error: a request has not ended within {TIMEOUT_S:g} s; {engine.stats()}")
        self._failures.check()

    def _on_update(self, update: RequestUpdate) -> None:
        self._failures.note(update)
        if update.tokens and not self.drawn:
            self.ttft_s = time.perf_counter() - self._begun
        self.drawn += update.completions[0].token_ids
        self.found = update.cached_tokens
        if update.finished:
            self._ended.set()


class Oracle:
    """An unbounded prefix cache: remembers every computed sequence."""

    def __init__(self) -> None:
        self._known: list[array[int]] = []

    def found(self, prompt: list[int]) -> int:
        """The longest beginning of ``prompt``, without its last token, that some sequence has."""
        ids, best = array("i", prompt[:-1]), 0
        for known in self._known:
            while best < min(len(ids), len(known)) and known[: best + 1] == ids[: best + 1]:
                best += 1
        return best

    def add(self, computed: list[int]) -> None:
        """Add a sequence; the KV of its last token was not computed."""
        self._known.append(array("i", computed[:-1]))


def chats(engine: Engine, count: int, turns: int, draw: random.Random) -> dict[str, float]:
    """All turns of all chats, in turn, each with the cache and without."""
    systems = [[draw.randrange(3, VOCABULARY) for _ in range(SYSTEM)] for _ in range(TENANTS)]
    said = [system for system in systems for _ in range(count)]
    oracle, hits, misses, expected, differ = Oracle(), list[Answer](), list[Answer](), 0, 0
    prompts = 0
    me = psutil.Process()
    miss_cpu_s = 0.0
    for _ in range(turns):
        for chat, before in enumerate(said):
            prompt = before + [draw.randrange(3, VOCABULARY) for _ in range(MESSAGE)]
            expected += oracle.found(prompt)
            prompts += len(prompt)
            hits.append(Answer(engine, prompt, ""))
            begun = cpu_s(me)
            misses.append(Answer(engine, prompt, f"alone {len(misses)} "))
            miss_cpu_s += cpu_s(me) - begun
            differ += hits[-1].drawn != misses[-1].drawn
            said[chat] = prompt + hits[-1].drawn
            oracle.add(said[chat])
    later = TENANTS * count  # answers of the first turn: a tenant's first chat finds nothing
    return {
        "ttft_hit_s": statistics.median(one.ttft_s for one in hits),
        "ttft_miss_s": statistics.median(one.ttft_s for one in misses),
        "ttft_later_hit_s": statistics.median(one.ttft_s for one in hits[later:]),
        "ttft_later_miss_s": statistics.median(one.ttft_s for one in misses[later:]),
        "requests": len(hits),
        "prompt_tokens": prompts,
        "found": sum(one.found for one in hits),
        "oracle": expected,
        "different_answers": differ,
        "cpu_s_per_miss": miss_cpu_s / len(misses),
        "tokens_per_miss": prompts / len(misses),
    }


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def unshared(prefix_cache: bool, length: int) -> float:
    """CPU seconds per request that scheduler and slab take for random prompts, served as fast as they are planned."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(UNSHARED_REQUESTS)]
    capacity = 16 * (length + ANSWER)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2 * length)
    scheduler = Scheduler(limits, Placement({"m": capacity}), 1, 4, 4, prefix_cache=prefix_cache)
    slab = Slab[int](capacity)
    begun = time.process_time()
    for number, prompt in enumerate(prompts):
        scheduler.submit(Request(str(number), None, prompt, PARAMS))
    while scheduler.running or scheduler.waiting:
        while scheduler.in_flight(0) < 2 and (plan := scheduler.plan(0)) is not None:
            _apply(slab, plan)
        for group, completion in list(scheduler.complete(0).values()):
            completion.generated.append(draw.randrange(3, VOCABULARY))
            if len(completion.generated) == ANSWER:
                scheduler.end_completion(group, completion)
    return (time.process_time() - begun) / len(prompts)


def _apply(slab: Slab[int], plan: StepPlan) -> None:
    for fork in plan.forks:
        slab.fork(fork.parent, fork.child, fork.tokens)
    for sequence in plan.released:
        slab.free(sequence)
    for admission in plan.admitted:
        if admission.sequence not in slab:
            slab.open(admission.sequence)
    steps = plan.sequences
    slab.extend([step.sequence for step in steps], [len(step.tokens) for step in steps])


def table(model: str, figures: Mapping[str, float]) -> Table:
    made = Table(title=f"Prefix cache: {model}, {TENANTS} tenants x {SYSTEM} tokens, {figures['requests']:.0f} turns")
    for heading in ("what", "value", "target"):
        made.add_column(heading, justify="left" if heading == "what" else "right")
    for name, what in (("ttft", "all turns"), ("ttft_later", "second turn on")):
        hit, miss = figures[f"{name}_hit_s"], figures[f"{name}_miss_s"]
        made.add_row(f"TTFT p50 with / without, {what}", f"{hit * 1e3:.0f} / {miss * 1e3:.0f} ms", "")
        made.add_row(f"lower by, {what}", f"{miss / hit:.1f}x", ">= 5x")
    made.add_row("prompt tokens found", f"{figures['found'] / figures['prompt_tokens']:.3f}", "")
    made.add_row("of those an oracle finds", f"{figures['found'] / figures['oracle']:.4f}", "")
    made.add_row("answers that differ", f"{figures['different_answers']:.0f}", "rounding of bfloat16")
    made.add_row("CPU per request without sharing", f"{figures['overhead_s'] * 1e6:.0f} us", "")
    made.add_row("of the CPU time of a request", f"{figures['overhead']:.3%}", "< 1%")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="3m")
    parser.add_argument("--chats", type=int, default=2, help="of each tenant")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each worker; 1 on a machine that does other things")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with model_directory(given.model) as model:
        engine = launch(
            EngineConfig(model=str(model), load_format="dummy", kv_cache_memory_bytes=KV_NBYTES, threads=given.threads)
        )
        try:
            draw = random.Random(0)
            Answer(engine, [draw.randrange(3, VOCABULARY) for _ in range(SYSTEM)], "warm-up")
            figures = chats(engine, given.chats, given.turns, draw)
        finally:
            engine.close()
    length = round(figures["tokens_per_miss"])
    costs = [[unshared(cached, length) for cached in (True, False)] for _ in range(ROUNDS)]
    figures["overhead_s"] = statistics.median(on - off for on, off in costs)
    figures["overhead"] = figures["overhead_s"] / figures["cpu_s_per_miss"]
    Console().print(table(given.model, figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
