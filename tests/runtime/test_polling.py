"""The whole runtime with memory workers whose (emulated) device waits for messages and answers them itself."""

import dataclasses
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.control import liveness
from lamina.control.timeline import Span
from lamina.core.types import DType, RequestOutput, SamplingParams
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import Killable, Streams, run_all, wait_for_recoveries
from tests.support.whole_outputs import whole

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
pytestmark = pytest.mark.slow

LENGTHS = (1, 3, 13, 30, 2, 9)  # of prompts: of several chunks, some of one token
TOKENS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "one lane": {"lanes": 1},
    "two lanes": {"lanes": 2},
    "three lanes": {"lanes": 3},
    "lanes that rotate": {"compute": "cpu:2", "lanes": 3},
    "lanes that stay": {"compute": "cpu:2", "lanes": 4, "pipelining": "fixed"},
    "two ranks": {"compute": "cpu:2", "tensor_parallel": 2},
    "two stages": {"compute": "cpu:2", "pipeline_parallel": 2},
    "two workers": {"memory": "emulated:2", "partition": "token", "kv_tokens_per_worker": 16},
    "by heads": {"memory": "emulated:2", "partition": "head"},
    "over TCP": {"transport": "tcp"},
}
BY_HOST = ("three lanes", "lanes that rotate", "two stages", "over TCP")
"""More lanes than a link has slots, steps of several compute workers, and no shared memory."""


def settings(place: Path, **others: Any) -> EngineConfig:
    wanted = EngineConfig(
        model=str(place),
        compute="cpu:1",
        memory="emulated:1",
        dtype=DType.FLOAT32,
        polling="device",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
    )
    return dataclasses.replace(wanted, **others)


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in LENGTHS]


def params(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def by_device(spans: dict[str, list[Span]]) -> int:
    """Attentions that a device has answered itself: the host sends no message for them."""
    own = [span.stage for name, each in spans.items() if name.startswith("memory") for span in each]
    return own.count("attention") - own.count("send")


def check(place: Path, family: str, **others: Any) -> int:
    """Run all prompts; how many attentions the devices have answered themselves."""
    reference = write_prepared(served(family), place)
    spans: dict[str, list[Span]] = {}
    engine = launch(settings(place, **others), on_trace=spans.update)
    try:
        outputs = run_all(engine, prompts(), params())
    finally:
        engine.close()
    assert [one.outputs[0].token_ids for one in outputs] == [greedy(reference, each, TOKENS) for each in prompts()]
    return by_device(spans)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "bloom"])
def test_tokens_equal_hugging_face(family: str, tmp_path: Path) -> None:
    assert check(tmp_path, family) > TOKENS


@pytest.mark.parametrize("which", SETTINGS)
def test_so_they_do_with_any_lanes(which: str, tmp_path: Path) -> None:
    served_by_device = check(tmp_path, "gpt_oss", **SETTINGS[which])
    assert served_by_device == 0 if which in BY_HOST else served_by_device > TOKENS


def test_codes_are_served_too(tmp_path: Path) -> None:
    write_prepared(served("llama"), tmp_path)
    results = []
    for polling in ("host", "device"):
        engine = launch(settings(tmp_path, polling=polling, kv_cache_dtype="int8"))
        try:
            outputs = run_all(engine, prompts(), params())
            results.append([one.outputs[0].token_ids for one in outputs])
        finally:
            engine.close()
    assert results[0] == results[1]


def test_a_request_that_is_cancelled_leaves_others_alone(tmp_path: Path) -> None:
    reference = write_prepared(served("llama"), tmp_path)
    engine = launch(settings(tmp_path, lanes=2))
    first, *others = prompts()[-3:]
    try:
        finals: list[RequestOutput] = []

        def on_output(output: RequestOutput) -> None:
            if output.outputs and len(output.outputs[0].token_ids) == 2:
                engine.abort("cancelled")
            if output.finished:
                finals.append(output)

        engine.submit("cancelled", first, params(500), whole(engine.tokenizer, on_output))
        outputs = run_all(engine, others, params(8))
        assert [one.outputs[0].token_ids for one in outputs] == [greedy(reference, each, 8) for each in others]
        outputs = run_all(engine, others, params(2))  # slots of both can be used again
        assert [one.outputs[0].token_ids for one in outputs] == [greedy(reference, each, 2) for each in others]
        assert [final.request_id for final in finals] == ["cancelled"] and len(finals[0].outputs[0].token_ids) < 500
    finally:
        engine.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["compute0", "memory1"])
def test_a_lost_or_hung_worker_is_noticed_as_a_pause(
    victim: str, how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that hangs between two messages that a device waits for: the epoch's end ends the waits."""
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    reference = write_prepared(served("llama"), tmp_path)
    workers = Killable()
    wanted = settings(tmp_path, compute="cpu:2", memory="emulated:2", lanes=4, pipelining="fixed", max_restarts=0)
    engine = launch(wanted, workers=workers)
    try:
        streams = Streams(engine, [(prompt, params(16)) for prompt in prompts()])
        streams.wait_for_tokens(12)
        workers.signal(victim, how)
        wait_for_recoveries(engine, 1)
        results = streams.results()
        assert [one[0].token_ids for one in results] == [greedy(reference, each, 16) for each in prompts()]
    finally:
        engine.close()
