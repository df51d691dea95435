"""Requests that share the KV of earlier ones give the tokens that they give without it."""

import itertools
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from tests.support.prefix_runs import GREEDY, drawn, run, start, tokens
from tests.support.running import Killable, wait_for_recoveries
from tests.support.waiting import wait_until

KINDS = [
    GREEDY,
    SamplingParams(n=2, seed=5, max_tokens=10, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=14, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
    SamplingParams(n=3, seed=7, max_tokens=9, temperature=1.5, stop_token_ids=list(range(3, 40))),
]


def wait_until_idle(engine: Engine) -> None:
    """No request has KV any more, and what is left is cached, once the workers have reported their usage."""
    placement = engine._scheduler.placement

    def is_idle() -> bool:
        memory = engine.stats().memory
        used = any(one.used or one.sequences for one in memory.values())
        return not used and {name: one.cached for name, one in memory.items()} == placement.idle

    wait_until(is_idle, "slots in use")
    assert not any(placement.reserved.values())


def conversation(engine: Engine, system: list[int], seed: int, params: SamplingParams) -> list[RequestOutput]:
    """Three turns of a chat: each prompt begins with all that was said before."""
    prompt, outputs = system, []
    for turn in range(3):
        prompt = prompt + tokens(9, 100 * seed + turn)
        outputs += run(engine, [(prompt, params)])
        wait_until(lambda: not any(engine._scheduler.placement.reserved.values()), "its KV is not released")
        prompt = prompt + outputs[-1].outputs[0].token_ids
    return outputs


def test_a_hit_gives_the_same_tokens_as_a_miss(model: Path) -> None:
    """Of a shared system prompt, turns of a chat, a repeated prompt; greedy, seeded, penalized, n > 1; then a memory
    worker is lost, with what it had of them. Requests with salts of their own share nothing."""
    systems = [tokens(70, 1), tokens(45, 2)]
    together = [(systems[number % 2] + tokens(5 + number, number), KINDS[number % 4]) for number in range(8)]
    salts = itertools.count()

    def apart(requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
        return run(engine, [(prompt, replace(params, cache_salt=str(next(salts)))) for prompt, params in requests])

    workers = Killable()
    engine = start(model, workers)
    try:
        first = run(engine, [(system, GREEDY) for system in systems])
        chats = [conversation(engine, systems[0], number, kind) for number, kind in enumerate(KINDS)]
        shared = run(engine, together) + run(engine, together)
        outputs = [*first, *itertools.chain(*chats), *shared]
        stats = engine.stats()
        requests = [(output.prompt_token_ids, GREEDY) for output in first]
        requests += [(turn.prompt_token_ids, kind) for chat, kind in zip(chats, KINDS, strict=True) for turn in chat]
        missed = apart(requests + together)
        wait_until_idle(engine)
        (again,) = run(engine, [(systems[1], replace(GREEDY, cache_salt="1"))])

        homes = {output.placement[0].worker for output in run(engine, together)}
        workers.signal("memory1", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        survived = run(engine, together)
        wait_until_idle(engine)
    finally:
        engine.close()
    assert drawn(outputs) == drawn(missed) + drawn(missed[-8:])
    assert not any(output.cached_tokens for output in (*first, *missed))
    assert stats.prefix_hits == sum(output.cached_tokens for output in outputs)
    for chat in chats:
        assert chat[0].cached_tokens == 70  # the system prompt
        for before, after in itertools.pairwise(chat):  # all that was said, but the last token drawn
            said = len(before.prompt_token_ids) + len(before.outputs[0].token_ids)
            assert after.cached_tokens >= said - 1
    assert all(output.cached_tokens >= 45 for output in shared[:8])
    assert all(output.cached_tokens == len(output.prompt_token_ids) - 1 for output in shared[8:])
    assert again.cached_tokens == 44 and homes == {"memory0", "memory1"}
    assert drawn(survived) == drawn(missed[-8:])
    lost = [output.cached_tokens < len(output.prompt_token_ids) - 1 for output in survived]
    assert any(lost) and not all(lost)


@pytest.mark.slow  # tests/schedule/test_prefixes.py checks it without workers
def test_prefixes_make_way_for_requests_and_the_least_recently_used_go_first(model: Path) -> None:
    engine = start(model, memory="cpu:1", compute="cpu:1", kv_cache_memory_bytes=300_000)
    capacity = engine.cluster.capacities["memory0"]
    prompts = [tokens(capacity // 8, number) for number in range(20)]
    try:
        expected = [run(engine, [(prompt, GREEDY)]) for prompt in prompts]
        (memory,) = engine.stats().memory.values()
        assert capacity * 0.7 < engine._scheduler.placement.idle["memory0"] <= capacity and memory.capacity == capacity
        recent = run(engine, [(prompts[-1], GREEDY)])
        oldest = run(engine, [(prompts[0], GREEDY)])
        assert recent[0].cached_tokens == len(prompts[-1]) - 1 and oldest[0].cached_tokens == 0
        assert drawn(recent) == drawn(expected[-1]) and drawn(oldest) == drawn(expected[0])
        assert drawn(run(engine, [(prompt, GREEDY) for prompt in prompts])) == [drawn(one)[0] for one in expected]
        wait_until_idle(engine)
    finally:
        engine.close()


def test_the_prefix_of_a_smaller_priority_stays_while_others_come_and_go(model: Path) -> None:
    """An agent's prompt is found again after its tool has run, though others have filled the memory meanwhile."""
    engine = start(model, compute="cpu:1", memory="cpu:1", kv_cache_memory_bytes=300_000)
    try:
        agent, plain = tokens(60, 1), tokens(60, 2)
        run(engine, [(agent, replace(GREEDY, priority=-1)), (plain, GREEDY)])
        slots = next(iter(engine.cluster.capacities.values()))
        for number in range(-(-3 * slots // 60)):
            run(engine, [(tokens(60, 10 + number), GREEDY)])
        kept, evicted = run(engine, [(agent, GREEDY), (plain, GREEDY)])
    finally:
        engine.close()
    assert kept.cached_tokens == 59 and evicted.cached_tokens == 0
