"""Sequences in several segments, on real workers, against Hugging Face: ranges that end anywhere, and a whole pool."""

import itertools
import random
from pathlib import Path

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import RequestError
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED, SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all
from tests.support.sweep import sweep

LONGEST = 7
TOKENS = 12


def tokens_by_worker(output: RequestOutput, completion: int = 0) -> list[tuple[str, int]]:
    """Of each segment of a completion, whose tokens must follow one another from 0 on."""
    sequence = sorted({segment.sequence for segment in output.placement})[completion]
    segments = [segment for segment in output.placement if segment.sequence == sequence]
    stops = [segment.tokens[1] or 0 for segment in segments]
    assert [segment.tokens[0] for segment in segments] == [0, *stops[:-1]]
    return [(segment.worker, stop - start) for segment, start, stop in zip(segments, [0, *stops], stops, strict=False)]


# The first has sinks and windows, the second a bias by position.
@pytest.mark.parametrize("family", sweep(SERVED, []))
def test_sequences_in_many_segments_equal_hugging_face(family: str, tmp_path: Path) -> None:
    reference = write_prepared(served(family), tmp_path)
    draw = random.Random(family)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in (1, 6, 7, 8, 21, 34, 45, 14)]
    config = EngineConfig(
        model=str(tmp_path),
        memory="cpu:3",
        dtype=DType.FLOAT32,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_tokens_per_worker=LONGEST,
    )
    engine = launch(config)
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    for output in outputs:
        for completion, _ in enumerate(output.outputs):
            segments = tokens_by_worker(output, completion)
            assert max(tokens for _, tokens in segments) == min(LONGEST, sum(tokens for _, tokens in segments))
            assert all(first != second for (first, _), (second, _) in itertools.pairwise(segments))
    assert len(tokens_by_worker(outputs[6])) == -(-(45 + TOKENS - 1) // LONGEST), "more than one on each worker"


def test_one_request_uses_the_whole_pool_and_equals_hugging_face(tmp_path: Path) -> None:
    """Three workers, whose slots a request of 95% of all takes while it and others run; none is too long for all."""
    capacity, workers = 60, 3
    reference = write_prepared(served("llama", max_position_embeddings=320), tmp_path)
    heads, size = (
        reference.config.num_key_value_heads,
        reference.config.hidden_size // reference.config.num_attention_heads,
    )
    per_token = 2 * reference.config.num_hidden_layers * heads * size * 4
    config = EngineConfig(
        model=str(tmp_path),
        memory=f"cpu:{workers}",
        dtype=DType.FLOAT32,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=capacity * per_token,
    )
    draw = random.Random(2)
    lengths = [(20, 15), (120, 52), (30, 25), (36, 136), (5, 40)]
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length, _ in lengths]
    engine = launch(config)
    try:
        assert set(engine.cluster.capacities.values()) == {capacity}
        params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for _, tokens in lengths]
        outputs = run_all(engine, prompts, params)
        with pytest.raises(RequestError, match="238 KV tokens; 3 memory workers hold 180 in all"):
            run_all(engine, [prompts[1]], SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    finally:
        engine.close()
    for output, prompt, (_, tokens) in zip(outputs, prompts, lengths, strict=True):
        assert output.outputs[0].token_ids == greedy(reference, prompt, tokens)
    for index in (1, 3):
        held = tokens_by_worker(outputs[index])
        assert sum(tokens for _, tokens in held) == 171 and {worker for worker, _ in held} == {
            f"memory{number}" for number in range(workers)
        }
