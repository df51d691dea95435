"""Chunks of one prompt in several lanes, on real workers, against Hugging Face."""

import dataclasses
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.requests import Group
from lamina.core.sampling import SamplingParams
from lamina.core.steps import SequenceStep
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.lowering import Target
from lamina.schedule.lane import Lane
from lamina.schedule.loongserve import FourSteps
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import greedy, served
from tests.support.running import Killable, run_all, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

TOKENS = 6
SHORT = random.Random(0).choices(range(3, 90), k=60)
PROMPTS = [random.Random(length).choices(range(3, 90), k=length) for length in (150, 203)]
WAYS: dict[str, dict[str, Any]] = {
    "two replicas": {},
    "two stages": {"pipeline_parallel": 2},
    "one replica": {"compute": "cpu:1"},
    "one memory worker": {"memory": "cpu:1"},
    "two stages and one memory worker": {"pipeline_parallel": 2, "memory": "cpu:1"},
    "segments of 40 tokens": {"kv_tokens_per_worker": 40},
    "rotation": {"lanes": 3, "pipelining": "rotational"},
    "loongserve": {"policy": "loongserve", "lanes": 4},
    "two stages and halves of the heads": {"pipeline_parallel": 2, "partition": "head"},
    "instances with segments of 40 tokens": {"memory": "local", "kv_tokens_per_worker": 40},
    "instances of two ranks": {
        "compute": "cpu:4",
        "tensor_parallel": 2,
        "memory": "local",
        "kv_tokens_per_worker": 40,
    },
    "three instances and a memory worker": {
        "compute": "cpu:3",
        "lanes": 3,
        "memory": "local,cpu:1",
        "kv_tokens_per_worker": 40,
    },
}
MOVING: dict[str, dict[str, Any]] = {
    "two replicas": {"lanes": 4},
    "one replica": {"compute": "cpu:1"},
    "two lanes of stages": {"pipeline_parallel": 2},
    "rotation": {"lanes": 3, "pipelining": "rotational"},
    "tensor parallel": {"tensor_parallel": 2},
    "prompts on compute": {"prompt_attention": "compute", "pipelining": "fixed"},
    "one memory worker": {"memory": "cpu:1"},
}
"""Layouts in which lanes have no KV of their own."""


@dataclass(frozen=True)
class Reference:
    """A checkpoint, and what Hugging Face draws after each prompt.

    Attributes:
        logprobs: of the first token: they depend on all of the prompt.
    """

    folder: Path
    tokens: list[list[int]]
    logprobs: list[float]

    def check(self, number: int, output: RequestOutput, count: int = TOKENS) -> None:
        """Compare the completions of prompt ``number``, of ``count`` tokens each. The last prompt is ``SHORT``."""
        for completion in output.outputs:
            assert completion.token_ids == self.tokens[number][:count]
            assert completion.logprobs is not None
            assert completion.logprobs[0][0].logprob == pytest.approx(self.logprobs[number], abs=2e-5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = served("llama", layers=3, max_position_embeddings=256)
    write_prepared(config, folder, target=Target.GPU)
    model: PreTrainedModel = write_prepared(config, folder)
    prompts = [*PROMPTS, SHORT]
    tokens = [greedy(model, prompt, TOKENS) for prompt in prompts]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    drawn = zip(logits, tokens, strict=True)
    return Reference(folder, tokens, [float(row.log_softmax(-1)[first]) for row, (first, *_) in drawn])


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Counts the chunks that lanes ran for others, by lane."""
    counts, borrow = Counter[int](), Lane.borrow

    def counted(lane: Lane, *given: Any, **named: Any) -> tuple[SequenceStep, Group] | None:
        found = borrow(lane, *given, **named)
        counts[lane.number] += found is not None
        return found

    monkeypatch.setattr(Lane, "borrow", counted)
    yield counts


def begin(folder: Path, workers: Killable | None = None, **settings: Any) -> Engine:
    given: dict[str, Any] = {"compute": "cpu:2", "memory": "cpu:2", "lanes": 2} | settings
    wanted = EngineConfig(
        model=str(folder),
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=4 << 20,
        dtype=DType.FLOAT32,
        max_restarts=0,
        **given,
    )
    return launch(wanted) if workers is None else launch(wanted, workers=workers)


def params(n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    "settings", sweep(WAYS, {"two replicas", "two stages", "loongserve", "instances with segments of 40 tokens"})
)
def test_tokens_equal_hugging_face(settings: dict[str, Any], reference: Reference, lent: Counter[int]) -> None:
    engine = begin(reference.folder, **settings)
    try:
        for number, prompt in enumerate(PROMPTS):  # one at a time, so that lanes are idle
            for n in (1, 2):  # the second time from a cached prefix
                (output,) = run_all(engine, [prompt], params(n))
                assert len(output.outputs) == n
                reference.check(number, output)
        outputs = run_all(engine, PROMPTS, params())
        for number, output in enumerate(outputs):
            reference.check(number, output)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()
    assert sum(lent.values()) >= 6


def test_replicas_on_gpus_attend_to_their_own_memory_once_chunks_of_others_are_stored(
    reference: Reference, lent: Counter[int]
) -> None:
    """On emulated ones, whose slices overwrite what the last one has returned."""
    engine = begin(reference.folder, compute="emulated:2", memory="local", kv_tokens_per_worker=40)
    try:
        (output,) = run_all(engine, [SHORT], replace(params(), max_tokens=2))
        reference.check(len(PROMPTS), output, 2)
        for first in range(3, 60):  # until a chunk had to wait, which statistics show
            if any(memory.parked and memory.parked_nbytes for memory in engine.stats().memory.values()):
                break
            run_all(engine, [[first, *SHORT[1:]]], replace(params(), max_tokens=2))
        else:
            raise AssertionError(engine.stats().memory)
    finally:
        engine.close()
    assert sum(lent.values()) >= 1


@pytest.mark.parametrize("victim", ["memory0", "compute0", "compute1"])
def test_a_worker_killed_while_chunks_run_apart_changes_no_token(
    victim: str, reference: Reference, lent: Counter[int]
) -> None:
    workers = Killable()
    engine = begin(reference.folder, workers)
    try:
        engine.submit("long", PROMPTS[1], params(), lambda update: None)
        wait_until(lambda: sum(lent.values()) >= 3, "no chunk ran in another lane")
        workers.signal(victim, signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        outputs = run_all(engine, PROMPTS, params())
        for number, output in enumerate(outputs):
            reference.check(number, output)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


def test_a_request_aborted_while_its_chunks_run_apart_frees_its_slots(reference: Reference, lent: Counter[int]) -> None:
    engine = begin(reference.folder)
    try:
        for number in range(4):
            before = sum(lent.values())
            engine.submit(f"long {number}", PROMPTS[1], params(), lambda update: None)
            wait_until(lambda before=before: sum(lent.values()) > before, "no chunk ran in another lane")  # type: ignore[misc]
            engine.abort(f"long {number}")
        (output,) = run_all(engine, PROMPTS[:1], params())
        reference.check(0, output)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


@pytest.mark.parametrize("settings", sweep(MOVING, {"two replicas", "two lanes of stages"}))
def test_requests_that_go_to_another_lane_after_their_prompts_draw_the_same_tokens(
    settings: dict[str, Any], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the policy loongserve, they decode where others do, as if more rows took no longer."""
    monkeypatch.setattr(FourSteps, "memory_bound_rows", 16)
    engine = begin(reference.folder, policy="loongserve", **settings)
    try:
        for penalty, n in ((1.0, 1), (1.0, 2), (1.3, 1)):
            given = dataclasses.replace(params(n), repetition_penalty=penalty)
            alone = [run_all(engine, [prompt], given)[0].outputs for prompt in PROMPTS]
            before = engine._scheduler.handovers
            for number, output in enumerate(run_all(engine, PROMPTS * 3, given)):
                if penalty == 1.0:
                    reference.check(number % len(PROMPTS), output)
                tokens = [one.token_ids for one in output.outputs]
                assert tokens == [one.token_ids for one in alone[number % len(PROMPTS)]]
            assert engine._scheduler.handovers > before
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()
