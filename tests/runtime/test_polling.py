"""The whole runtime with memory workers whose (emulated) device waits for messages and answers them itself."""

import signal
from pathlib import Path

import pytest

from lamina.control import liveness
from lamina.core.outputs import RequestOutput
from lamina.launch import launch
from tests.support.polling_runs import BY_HOST, SETTINGS, TOKENS, check_polling, params, prompts, settings
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import greedy, served
from tests.support.running import Killable, Streams, run_all, wait_for_recoveries
from tests.support.whole_outputs import whole

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "bloom"])
def test_tokens_equal_hugging_face(family: str, tmp_path: Path) -> None:
    assert check_polling(tmp_path, family) > TOKENS


@pytest.mark.parametrize("which", SETTINGS)
def test_so_they_do_with_any_lanes(which: str, tmp_path: Path) -> None:
    served_by_device = check_polling(tmp_path, "gpt_oss", **SETTINGS[which])
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
