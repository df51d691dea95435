"""Prompts that keep K and V in scratch memory of their replica, on real workers, against Hugging Face."""

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.steps import SequenceStep, StepPlan
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.lowering import Target
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.workload import TracedRequest
from lamina.planning.simulate import Deployment, replay, simulate
from lamina.schedule.scheduler import Scheduler
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import Killable, Streams, run_all, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

TOKENS, LENGTH, CHUNK = 6, 256, 24
CACHED = 40  # tokens of a prompt that are cached when it arrives
DRAW = random.Random(56)
PROMPTS = [[DRAW.randrange(3, SERVED_VOCABULARY) for _ in range(size)] for size in (90, 9, 121, 203)]
WAYS: dict[str, dict[str, Any]] = {
    "pool": {},
    "pool, two replicas": {"compute": "cpu:2", "lanes": 4},
    "apart": {"prefill": "cpu:1"},
    "apart, chosen by itself, over TCP": {"prefill": "cpu:1", "prompt_attention": "auto", "transport": "tcp"},
    "apart, decoding in local memory": {"prefill": "cpu:1", "memory": "local"},
    "ranks": {"compute": "cpu:2", "tensor_parallel": 2},
    "stages": {"compute": "cpu:2", "pipeline_parallel": 2},
    "ranks and stages apart": {
        "prefill": "cpu:4",
        "compute": "cpu:4",
        "lanes": 4,
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
    },
    "ranks that share a head": {"compute": "cpu:4", "tensor_parallel": 4},
    "halves of the heads": {"partition": "head"},
    "runs of tokens": {"partition": "token"},
    "segments of 40 tokens": {"kv_tokens_per_worker": 40},
    "one step at a time": {"plan_ahead": False, "lanes": 1},
}
SHARING = {name: way for name, way in WAYS.items() if name not in ("runs of tokens", "segments of 40 tokens")}
FAMILIES = ("gemma2", "gpt_oss", "bloom", "deepseek_v3")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SequenceStep]]:
    """All chunks that are planned."""
    planned, plan_of = list[SequenceStep](), Scheduler.plan

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        made = plan_of(scheduler, lane)
        planned.extend([] if made is None else made.chunks)
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    yield planned


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what Hugging Face draws after each prompt."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = served("llama", layers=3, max_position_embeddings=LENGTH)
    write_prepared(model, folder, ranks=2)
    reference = write_prepared(model, folder)
    return folder, [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]


def begin(folder: Path, workers: Killable | None = None, **settings: Any) -> Engine:
    given = {"compute": "cpu:1", "memory": "cpu:2", "prompt_attention": "compute"} | settings
    wanted = EngineConfig(
        model=str(folder),
        max_model_len=LENGTH,
        max_num_seqs=6,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=8 << 20,
        dtype=DType.FLOAT32,
        **given,
    )
    return launch(wanted) if workers is None else launch(wanted, workers=workers)


def params(n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def check_empty(engine: Engine) -> None:
    wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    wait_until(lambda: not engine._scheduler.scratch.used, "scratch memory stayed in use")


@pytest.mark.parametrize("settings", sweep(WAYS, {"pool, two replicas", "apart, chosen by itself, over TCP", "ranks"}))
def test_tokens_equal_hugging_face(
    settings: dict[str, Any], llama: tuple[Path, list[list[int]]], chunks: list[SequenceStep]
) -> None:
    """The prompts of five rounds would not fit at once: scratch memory holds two of the longest."""
    folder, expected = llama
    engine = begin(folder, prefix_cache=False, **settings)
    try:
        for n in (1, 2, 1, 2, 1):
            assert tokens(run_all(engine, PROMPTS, params(n))) == [[one] * n for one in expected]
        assert engine.stats().recomputed == engine.stats().recoveries == 0
        check_empty(engine)
    finally:
        engine.close()
    first = {chunk.sequence for chunk in chunks if chunk.start == 0 and chunk.scratch == 0}
    assert len(first) >= 10
    assert not [chunk for chunk in chunks if chunk.sequence in first and chunk.scratch is None]


@pytest.mark.parametrize("settings", sweep(SHARING, {"pool", "apart, decoding in local memory", "ranks"}))
def test_what_follows_a_cached_prefix_is_in_scratch_memory(
    settings: dict[str, Any], llama: tuple[Path, list[list[int]]], chunks: list[SequenceStep]
) -> None:
    """Memory workers, or the memory of the replica that decodes, attend to the prefix."""
    folder, expected = llama
    engine = begin(folder, **settings)
    try:
        for n, prompt, one in ((1, PROMPTS[3], expected[3]), (2, PROMPTS[2], expected[2])):
            run_all(engine, [prompt[:CACHED]], params())
            chunks.clear()
            assert tokens(run_all(engine, [prompt], params(n))) == [[one] * n]
            assert {chunk.scratch for chunk in chunks} == {CACHED} and len(chunks) > 2
        check_empty(engine)
    finally:
        engine.close()


CPUS = replace(hardware.load()["h100"], kind="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_attention": "compute"},
        {"prompt_attention": "auto"},
        {"prompt_attention": "auto", "prefill": "cpu:1"},
        {"prompt_attention": "memory", "prefill": "cpu:1", "memory": "local"},
        {"prompt_attention": "compute", "prefill": "cpu:1", "memory": "local"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_the_simulator_plans_the_chunks_of_the_runtime(
    settings: dict[str, Any], llama: tuple[Path, list[list[int]]], chunks: list[SequenceStep]
) -> None:
    """Prompts that follow each other: where each chunk begins, how long it is, and where it attends."""
    local, prefill = settings.get("memory") == "local", "prefill" in settings
    engine = begin(llama[0], prefix_cache=False, lanes=1 + prefill, **{"memory": "cpu:1", **settings})
    try:
        for prompt in PROMPTS:
            run_all(engine, [prompt], params())
        check_empty(engine)
    finally:
        engine.close()
    planned = [(chunk.start, len(chunk.tokens), chunk.scratch) for chunk in chunks]
    chunks.clear()
    deployment = Deployment(
        model=model_shapes.find("Llama-2-7B"),
        compute=CPUS,
        compute_workers=1,
        memory=None if local else CPUS,
        memory_workers=0 if local else 1,
        prefill=CPUS if prefill else None,
        prefill_workers=int(prefill),
        local=local,
        lanes=1 + prefill,
        max_num_seqs=6,
        max_num_batched_tokens=CHUNK,
        prompt_attention=settings["prompt_attention"],
    )
    simulate(deployment, replay(TracedRequest(1000.0 * n, len(each), TOKENS) for n, each in enumerate(PROMPTS)))
    assert [(chunk.start, len(chunk.tokens), chunk.scratch) for chunk in chunks] == planned and len(planned) > 16


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_sinks_and_slopes_equal_hugging_face(family: str, tmp_path: Path, chunks: list[SequenceStep]) -> None:
    reference = write_prepared(served(family, max_position_embeddings=LENGTH), tmp_path)
    engine = begin(tmp_path, prefill="cpu:1")
    try:
        run_all(engine, [PROMPTS[0][:CACHED]], params())
        got = tokens(run_all(engine, PROMPTS, params()))
        check_empty(engine)
    finally:
        engine.close()
    assert got == [[greedy(reference, prompt, TOKENS)] for prompt in PROMPTS]
    assert sum(chunk.scratch is not None and chunk.start > 0 for chunk in chunks) >= 10
    assert any(chunk.scratch for chunk in chunks), "no prompt began after a cached prefix"


@pytest.mark.slow
def test_an_emulated_gpu_keeps_a_prompt_in_its_memory(tmp_path: Path, chunks: list[SequenceStep]) -> None:
    """Triton's interpreter is slow."""
    reference = write_prepared(served("llama", max_position_embeddings=LENGTH), tmp_path, target=Target.GPU)
    prompt = PROMPTS[0][: 2 * CHUNK + 3]
    engine = begin(tmp_path, compute="emulated:1", memory="cpu:1")
    try:
        assert tokens(run_all(engine, [prompt], params())) == [[greedy(reference, prompt, TOKENS)]]
        check_empty(engine)
    finally:
        engine.close()
    assert [chunk.start for chunk in chunks if chunk.scratch is not None] == [0, CHUNK, 2 * CHUNK]


def drawn_logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [entries[0].logprob for output in outputs for entries in output.outputs[0].logprobs or ()]


@pytest.mark.parametrize("kv", sweep(("int8", "fp8"), {"int8"}))
def test_rounded_kv_is_the_same_wherever_prompts_attend(kv: str, llama: tuple[Path, list[list[int]]]) -> None:
    """Log probabilities show whether attention saw the same K and V: rounding changes them by about 0.01.

    K and V between two codes may become either, as sums differ in their last bits, which changes a few of them. Prompts
    run one at a time, since their chunks depend on which others wait.
    """
    outputs = []
    for where in ("memory", "compute"):
        engine = begin(llama[0], prompt_attention=where, kv_cache_dtype=kv)
        try:
            outputs.append([run_all(engine, [one], params())[0] for one in (PROMPTS[0][:CACHED], *PROMPTS)])
        finally:
            engine.close()
    there, here = outputs
    assert tokens(there) == tokens(here)
    pairs = zip(drawn_logprobs(there), drawn_logprobs(here), strict=True)
    assert median(abs(one - other) for one, other in pairs) < 1e-4


@pytest.mark.parametrize(
    "loss",
    sweep(
        {
            **{name: (name, 0, "cpu:2") for name in ("memory0", "compute0", "compute1")},
            **{f"{name}, cached prefixes": (name, CACHED, "cpu:2") for name in ("memory0", "compute0")},
            **{f"{name}, cached prefixes, local": (name, CACHED, "local") for name in ("compute0", "compute1")},
        },
        {"memory0", "compute0", "memory0, cached prefixes"},
    ),
)
def test_a_worker_killed_while_prompts_run_changes_no_token(
    loss: tuple[str, int, str], llama: tuple[Path, list[list[int]]], chunks: list[SequenceStep]
) -> None:
    victim, cached, memory = loss
    folder, expected = llama
    workers = Killable()
    engine = begin(folder, workers, compute="cpu:1", prefill="cpu:1", memory=memory, max_restarts=1)
    try:
        if cached:
            run_all(engine, [prompt[:cached] for prompt in PROMPTS], params())
        chunks.clear()
        streams = Streams(engine, [(prompt, params()) for prompt in PROMPTS])
        wait_until(lambda: any(one.scratch == cached and one.start > cached for one in chunks), "no prompt has begun")
        workers.signal(victim, signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert [[one.token_ids for one in each] for each in streams.results()] == [[one] for one in expected]
        if memory == "local":  # where a replica that decodes has no scratch memory
            wait_until(lambda: len(engine._members.topology.computes) == 2, f"{victim} was not replaced")
            assert [bool(one.scratch) for one in engine._members.topology.members] == [True, False]
        chunks.clear()
        assert tokens(run_all(engine, [prompt[::-1] for prompt in PROMPTS], params())) and chunks
        assert any(chunk.scratch is not None for chunk in chunks)
        check_empty(engine)
    finally:
        engine.close()


def test_requests_aborted_in_their_prompts_free_scratch_memory(
    llama: tuple[Path, list[list[int]]], chunks: list[SequenceStep]
) -> None:
    folder, expected = llama
    engine = begin(folder, prefix_cache=False)
    try:
        for number in range(6):
            chunks.clear()
            engine.submit(f"long {number}", PROMPTS[3], params(), lambda update: None)
            wait_until(lambda: any(one.scratch is not None and one.start for one in chunks), "no prompt has begun")
            engine.abort(f"long {number}")
        assert tokens(run_all(engine, PROMPTS, params())) == [[one] for one in expected]
        check_empty(engine)
    finally:
        engine.close()
