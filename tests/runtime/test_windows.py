"""Layers with a window forget what it has left, with the prefix cache: tokens equal those of Hugging Face."""

import random
from pathlib import Path

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all
from tests.support.waiting import wait_until

DRAWN = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=DRAWN, ignore_eos=True)
WINDOW = 24


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["cpu:1", "cpu:2", "local"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_requests_go_on_from_checkpoints_of_cached_prefixes(family: str, memory: str, tmp_path: Path) -> None:
    """The end of a prompt, the end of an answer, and, once a request has computed it again, a shared beginning."""
    reference = write_prepared(served(family, sliding_window=WINDOW, max_position_embeddings=4096), tmp_path)
    draw = random.Random(family)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)]

    system = tokens(400)
    config = EngineConfig(
        model=str(tmp_path),
        memory=memory,
        dtype=DType.FLOAT32,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=10_000_000,
    )
    engine = launch(config)
    found: list[tuple[int, int]] = []  # by request: tokens of its prompt, and those in the cache
    asked: list[tuple[list[int], list[int]]] = []

    def ask(*prompts: list[int]) -> list[list[int]]:
        outputs = run_all(engine, list(prompts), GREEDY)
        answers = [output.outputs[0].token_ids for output in outputs]
        asked.extend(zip(prompts, answers, strict=True))
        found.extend((len(output.prompt_token_ids), output.cached_tokens) for output in outputs)
        wait_until(lambda: not any(engine._scheduler.placement.reserved.values()), "its KV is not released")
        return answers

    try:
        assert engine.cluster.window == WINDOW
        first = [system + tokens(3 + number) for number in range(4)]
        answers = [answer for prompt in first for answer in ask(prompt)]
        ask(first[0])
        second = [prompt + answer + tokens(5) for prompt, answer in zip(first, answers, strict=True)]
        ask(*second)
        ask(*(tokens(450) for _ in range(4)))  # others use the rows that were forgotten
        ask(*second)
        ask(system + tokens(40))
        wait_until(lambda: not any(one.sequences for one in engine.stats().memory.values()), "slots are in use")
    finally:
        engine.close()
    for prompt, answer in asked:
        assert answer == greedy(reference, prompt, DRAWN)
    if memory != "cpu:2":  # else each worker has prefixes of its own
        assert [cached for _, cached in found[:4]] == [0, 0, 400, 400]
        assert found[4] == (403, 402)
        assert [cached for _, cached in found[5:9]] == [length - 6 for length, _ in found[5:9]]
        assert [cached for _, cached in found[13:17]] == [length - 1 for length, _ in found[13:17]]
        assert found[17] == (440, 400)
