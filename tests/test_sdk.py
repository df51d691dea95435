"""The SDK over real workers and the bundled model."""

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lamina import (
    ConfigError,
    EngineDeadError,
    FinishReason,
    Lamina,
    ModelError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from lamina.models.directory import BUNDLED, find, sampling_defaults
from lamina.serve.engine_process import describe
from lamina.text.tokenizer import Tokenizer
from tests.support.waiting import END_S
from tests.support.whole_outputs import whole

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
PROMPTS = ["def fibonacci(n):", "import os", "class Stack:\n    def push(self, item):", "for key, value in"]
SMALL: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 32 * 2**20}


@pytest.fixture(scope="module")
def lamina() -> Iterator[Lamina]:
    with Lamina(memory="cpu:2", **SMALL) as runtime:
        yield runtime


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(lamina: Lamina) -> None:
    deadline = time.monotonic() + END_S
    while True:
        stats = lamina.engine.stats()
        if (stats.running, stats.waiting, stats.dead) == (0, 0, None):
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)


def test_outputs_come_in_the_order_of_the_prompts(lamina: Lamina) -> None:
    lengths = [12, 1, 7, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = lamina.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.error is None for output in outputs)
    assert all(output.outputs[0].finish_reason is FinishReason.LENGTH for output in outputs)


def test_every_form_of_prompt_gives_the_same_tokens(lamina: Lamina) -> None:
    batch = tokens(lamina.generate(PROMPTS, GREEDY))
    assert [lamina.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS] == batch
    ids = [lamina.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert tokens(lamina.generate(ids, GREEDY)) == batch
    assert tokens(lamina.generate(ids[0], GREEDY)) == batch[:1]
    assert tokens(asyncio.run(lamina.generate_async(tuple(PROMPTS), GREEDY))) == batch


def test_a_list_longer_than_the_engine_takes_goes_in_parts(lamina: Lamina, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (3, 9, 5, 1)]
    whole = tokens(lamina.generate(PROMPTS, params))
    monkeypatch.setattr("lamina.sdk.PART", 3)
    assert tokens(lamina.generate(PROMPTS, params)) == whole
    assert tokens(asyncio.run(lamina.generate_async(PROMPTS, params))) == whole


def test_placement_names_the_workers_and_tokens(lamina: Lamina) -> None:
    outputs = lamina.generate(PROMPTS, GREEDY)
    for output in outputs:
        (segment,) = output.placement
        assert segment.worker in lamina.engine.stats().memory
        # The last token drawn is never fed back, so it has no KV.
        assert segment.tokens == (0, len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1)
    assert len({output.placement[0].worker for output in outputs}) == 2


def test_a_stream_grows_to_what_generate_returns(lamina: Lamina) -> None:
    whole = lamina.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    states = list(lamina.stream(PROMPTS[0], GREEDY))
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    texts = [state.outputs[0].text for state in states]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert (texts[-1], states[-1].outputs[0].token_ids) == (whole.text, whole.token_ids)


def test_closing_a_stream_cancels_its_request(lamina: Lamina) -> None:
    stream = lamina.stream(PROMPTS[0], ENDLESS)
    assert not next(stream).finished
    stream.close()
    assert_idle(lamina)


def test_a_request_may_be_cancelled_many_times(lamina: Lamina) -> None:
    ended: list[FinishReason | None] = []

    def note(output: RequestOutput) -> None:
        for _ in range(3):  # the first time, a step of this request is done; the next, one may be under way
            lamina.engine.abort(output.request_id)
        if output.finished:
            ended.append(output.outputs[0].finish_reason)

    for number in range(20):
        lamina.engine.submit(f"cancelled-{number}", PROMPTS[0], ENDLESS, whole(lamina.tokenizer, note))
    assert_idle(lamina)
    assert ended == [FinishReason.ABORT] * 20


async def test_cancelling_a_task_cancels_its_requests(lamina: Lamina) -> None:
    async def first() -> None:
        async for output in lamina.stream_async(PROMPTS[0], ENDLESS):
            assert not output.finished
            return

    await first()
    for _ in range(5):  # cancellation and news may fall together
        task = asyncio.create_task(lamina.generate_async(PROMPTS, ENDLESS))
        async for _ in lamina.stream_async(PROMPTS[0], GREEDY):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.to_thread(assert_idle, lamina)


async def test_streams_of_one_loop_run_together(lamina: Lamina) -> None:
    async def last(prompt: str) -> list[int]:
        async for output in lamina.stream_async(prompt, GREEDY):
            final = output.outputs[0].token_ids
        return final

    expected = tokens(await asyncio.to_thread(lamina.generate, PROMPTS, GREEDY))
    assert await asyncio.gather(*map(last, PROMPTS)) == expected


def test_several_threads_may_generate_at_once(lamina: Lamina) -> None:
    expected = tokens(lamina.generate(PROMPTS, GREEDY))
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        results[number] = tokens(lamina.generate(PROMPTS, GREEDY))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    assert results == dict.fromkeys(range(4), expected)


def test_chat_goes_through_the_model_s_template(lamina: Lamina) -> None:
    turns = [{"role": "user", "content": "sort a list"}]
    prompt = lamina.tokenizer.apply_chat_template(turns)
    assert prompt != "sort a list"
    (answer,) = lamina.chat(turns, GREEDY)
    assert answer.outputs[0].text == lamina.generate(prompt, GREEDY)[0].outputs[0].text
    assert tokens(lamina.chat([turns, turns], GREEDY)) == tokens([answer, answer])


def test_chats_without_a_limit_run_beside_each_other(lamina: Lamina) -> None:
    """Each may take the rest of the context, so that together they ask for four times the 2 x 8,192 slots."""
    slots = sum(worker.capacity for worker in lamina.engine.stats().memory.values())
    prompt = lamina.tokenizer.apply_chat_template([{"role": "user", "content": "sort a list"}])
    assert slots < 64 * 1024
    most = 0

    def note(output: RequestOutput) -> None:
        nonlocal most
        most = max(most, lamina.engine.stats().running)
        if most == 64:
            lamina.engine.abort(output.request_id)

    for number in range(64):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        lamina.engine.submit(f"chat-{number}", prompt, params, whole(lamina.tokenizer, note))
    assert_idle(lamina)
    assert most == 64
    (answer,) = lamina.chat([{"role": "user", "content": "sort a list"}], {"ignore_eos": True})
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == lamina.engine.max_model_len


def test_parameters_may_be_dicts(lamina: Lamina) -> None:
    given = {"temperature": 0.0, "max_tokens": 12}
    expected = tokens(lamina.generate(PROMPTS, GREEDY))
    assert tokens(lamina.generate(PROMPTS, given)) == expected
    assert tokens(lamina.generate(PROMPTS, [given, GREEDY] * 2)) == expected
    assert tokens([list(lamina.stream(PROMPTS[0], given))[-1]]) == expected[:1]
    assert tokens(asyncio.run(lamina.generate_async(PROMPTS, given))) == expected
    with pytest.raises(RequestError, match="no field 'max_new_tokens'; its fields are n, best_of, temperature"):
        lamina.generate(PROMPTS, {"max_new_tokens": 2})
    with pytest.raises(RequestError, match="top_p is 2; give a number from 0"):
        lamina.generate(PROMPTS, {"top_p": 2})


def test_prompts_may_come_as_arrays_and_from_generators(lamina: Lamina) -> None:
    expected = tokens(lamina.generate(PROMPTS, GREEDY))
    ids = [lamina.tokenizer.encode(prompt) for prompt in PROMPTS]
    arrays = [np.array(each, dtype=np.int32) for each in ids]
    for prompts in (arrays, map(np.asarray, ids), (list(each) for each in arrays), (text for text in PROMPTS)):
        assert tokens(lamina.generate(prompts, GREEDY)) == expected
    assert tokens(lamina.generate(arrays[0], GREEDY)) == expected[:1]
    assert tokens(lamina.generate(np.stack([arrays[0]] * 2), GREEDY)) == expected[:1] * 2
    assert tokens([list(lamina.stream(arrays[0], GREEDY))[-1]]) == expected[:1]
    assert tokens(update for _, update in lamina.stream_batch(iter(PROMPTS[:1]), GREEDY))[-1:] == expected[:1]


def test_no_prompts_have_no_outputs(lamina: Lamina) -> None:
    assert lamina.generate([]) == lamina.chat([]) == []
    assert not list(lamina.stream_batch(iter(())))
    assert asyncio.run(lamina.generate_async(np.array([]))) == []


def test_outputs_can_be_written_as_json(lamina: Lamina) -> None:
    (output,) = lamina.generate(PROMPTS[0], {"max_tokens": 2, "logprobs": 1, "ignore_eos": True})
    (completion,) = json.loads(json.dumps(dataclasses.asdict(output)))["outputs"]
    assert completion["finish_reason"] == "length"
    assert bytes(completion["logprobs"][0][0]["bytes"]).decode() == completion["logprobs"][0][0]["text"]


def test_tools_need_a_template_with_a_place_for_them(lamina: Lamina) -> None:
    with pytest.raises(RequestError, match="no place for tools"):
        lamina.chat([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_setting_of_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no setting 'tensor_parallel_size'; the nearest name is 'tensor_parallel'"):
        Lamina(tensor_parallel_size=2)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose authors recommend to take the most likely token, three times."""
    path = tmp_path_factory.mktemp("decided")
    shutil.copytree(BUNDLED, path, dirs_exist_ok=True)
    file = path / "generation_config.json"
    recommended = {"do_sample": True, "temperature": 0.9, "top_k": 1, "top_p": None, "max_new_tokens": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | recommended))
    return path


def test_the_model_s_sampling_defaults_apply_where_none_are_given(decided: Path, lamina: Lamina) -> None:
    greedy = tokens(lamina.generate(PROMPTS, {"temperature": 0.0, "max_tokens": 3}))
    with Lamina(decided, **SMALL) as runtime:
        assert runtime.get_default_sampling_params() == SamplingParams(temperature=0.9, top_k=1, max_tokens=3)
        assert "sampling temperature 0.9, top_k 1, max_tokens 3 unless" in describe(runtime.engine)
        for params in (None, {"seed": 4}):
            assert tokens(runtime.generate(PROMPTS, params)) == greedy
        assert len(runtime.generate(PROMPTS[0], {"max_tokens": 5, "ignore_eos": True})[0].outputs[0].token_ids) == 5
        turns = [{"role": "user", "content": "sort a list"}]
        assert tokens(runtime.chat(turns)) == tokens(lamina.chat(turns, {"temperature": 0.0, "max_tokens": 3}))
        drawn = tokens(runtime.generate(PROMPTS[:1] * 8, SamplingParams(max_tokens=3)))
        assert len(set(map(tuple, drawn))) > 1, "parameters that are given are all given"
        assert len(runtime.generate(PROMPTS[0], {"use_beam_search": True, "n": 2})[0].outputs) == 2


def test_generation_config_none_takes_no_defaults_but_the_end_of_sequence(tmp_path: Path, decided: Path) -> None:
    model = find(decided, weights=False)
    assert sampling_defaults(model, "none") == {}
    file = shutil.copytree(decided, tmp_path / "model") / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [5, 6], "top_p": 0, "temperature": 0.5}))
    model = find(tmp_path / "model", weights=False)
    assert sampling_defaults(model, "none") == {}
    assert Tokenizer(model).eos_token_ids >= {5, 6}
    with pytest.raises(ModelError, match=r"generation_config.json: top_p is 0; give .* generation_config none"):
        Lamina(tmp_path / "model")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("", "empty"),
        ([[]], "empty"),
        (["ok", ""], "empty"),
        (["ok", 3], "prompt must be a text"),
        (None, "prompt must be a text"),
        ([[0, 10**6]], "token id 1000000 is outside the vocabulary of 2048 tokens"),
        ([[-1]], "token id -1 is outside"),
        ("a b c " * 600, "1024"),
    ],
)
def test_bad_prompts_are_refused_with_the_figures(lamina: Lamina, prompts: object, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        lamina.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert_idle(lamina)


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": [5, 6]},
        [{"prompt_token_ids": np.array([5, 6])}],
        ({"prompt": None, "prompt_token_ids": (5, 6)},),
    ],
)
def test_prompts_in_vllm_s_form(lamina: Lamina, prompts: Any) -> None:
    assert tokens(lamina.generate(prompts, GREEDY)) == tokens(lamina.generate([[5, 6]], GREEDY))
    assert tokens(lamina.generate({"prompt": "import os"}, GREEDY)) == tokens(lamina.generate("import os", GREEDY))
    with pytest.raises(RequestError, match="prompt must be a text"):
        lamina.generate({"prompt": "a", "multi_modal_data": {}}, GREEDY)


def test_parameters_may_be_numbers_of_numpy(lamina: Lamina) -> None:
    given = {"seed": np.int64(5), "temperature": np.float32(0.5), "max_tokens": np.int32(4), "top_p": torch.tensor(0.5)}
    plain = {"seed": 5, "temperature": 0.5, "max_tokens": 4, "top_p": 0.5}
    assert tokens(lamina.generate("a", given)) == tokens(lamina.generate("a", plain))
    several: Any = {
        "stop_token_ids": [np.int64(3)],
        "allowed_token_ids": np.array([3, 4]),
        "logit_bias": {np.int64(3): 1},
    }
    wanted = SamplingParams(stop_token_ids=[3], allowed_token_ids=[3, 4], logit_bias={3: 1.0})
    assert SamplingParams(**several) == wanted
    fraction: Any = np.float64(4.5)
    with pytest.raises(ValueError, match=r"max_tokens is 4\.5; give an integer"):
        SamplingParams(max_tokens=fraction)


def test_none_among_several_parameters_stands_for_the_defaults(lamina: Lamina) -> None:
    first, second = lamina.generate(["a", "b"], [None, {"max_tokens": 2}])
    assert (len(first.outputs[0].token_ids), len(second.outputs[0].token_ids)) == (16, 2)


def test_bad_arguments_are_refused(lamina: Lamina) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts; give one for all or one per prompt"):
        lamina.generate(["a", "b", "c"], [GREEDY, GREEDY])
    for given in ({"logit_bias": {2048: 1.0}}, {"allowed_token_ids": [1, 2048]}):
        with pytest.raises(RequestError, match=f"{next(iter(given))}: token id 2048 is outside the vocabulary of 2048"):
            lamina.generate("a", given)
    with pytest.raises(RequestError, match="stream takes one prompt"):
        next(lamina.stream(["a"], GREEDY))  # type: ignore[list-item]
    with pytest.raises(RequestError, match="messages is empty"):
        lamina.chat([[]], GREEDY)


def test_a_seed_of_minus_one_is_random_as_in_vllm(lamina: Lamina) -> None:
    assert SamplingParams(seed=-1).seed is None
    asked = {"seed": -1, "max_tokens": 8, "temperature": 2.0}
    assert len({tuple(lamina.generate("a", asked)[0].outputs[0].token_ids) for _ in range(3)}) == 3


def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    text = tmp_path / "model"
    text.write_text("not a directory")
    before = psutil.Process().children()
    for kind, given, said in (
        (ConfigError, {"memory": "toaster:1"}, "unknown kind"),
        (ConfigError, {"compute": "h100:8"}, "h100:8 asks for 8 GPUs; this machine has"),
        (ConfigError, {"dtype": "int3"}, "dtype is 'int3'; give auto, float32"),
        (ConfigError, {"max_model_len": 10**9}, "1000000000"),
        (ModelError, {"model": text}, str(text)),
        (ModelError, {"model": tmp_path / "nothing"}, "nothing"),
    ):
        with pytest.raises(kind) as caught:
            Lamina(**given)
        assert said in str(caught.value)
    assert psutil.Process().children() == before


def test_closing_ends_the_workers_and_may_be_repeated() -> None:
    before = set(psutil.Process().children())
    runtime = Lamina(**{**SMALL, "memory": "cpu:1"})
    started = set(psutil.Process().children()) - before
    workers = {one for one in started if "tests.support.forked_workers" not in one.cmdline()}
    assert len(workers) == 2
    stream = runtime.stream(PROMPTS[0], ENDLESS)
    next(stream)
    runtime.close()
    runtime.close()
    assert not any(worker.is_running() for worker in workers)
    final = list(stream)[-1]
    assert final.finished and "closed" in (final.error or "")
    with pytest.raises(EngineDeadError, match="closed"):
        runtime.generate("x", GREEDY)


@pytest.mark.slow  # tests/runtime/test_faults.py and tests/cli/test_launch_ends.py kill one of the engine, of a server
def test_a_killed_worker_ends_requests_with_its_name() -> None:
    with Lamina(**SMALL, max_restarts=0) as runtime:
        stream = runtime.stream(PROMPTS[0], ENDLESS)
        next(stream)
        workers = {child.pid: " ".join(child.cmdline()) for child in psutil.Process().children()}
        os.kill(next(pid for pid, line in sorted(workers.items())[-2:] if "compute" in line), signal.SIGKILL)
        final = list(stream)[-1]
        assert final.outputs[0].finish_reason is FinishReason.ERROR
        assert "compute0" in (final.error or "")
        with pytest.raises(EngineDeadError, match="compute0"):
            runtime.generate("x", GREEDY)


SCRIPT = """
import psutil, sys
from lamina import Lamina, SamplingParams
runtime = Lamina(memory="cpu:1", dtype="float32", threads=1, kv_cache_memory_bytes=2**25)
print(*(child.pid for child in psutil.Process().children()), flush=True)
runtime.generate("x", SamplingParams(max_tokens=2))
{end}
"""


@pytest.mark.slow  # tests/runtime/test_faults.py kills an engine's process
@pytest.mark.parametrize(("end", "sent"), [("", None), ("sys.stdin.read()", signal.SIGKILL)])
def test_no_process_outlives_a_script(end: str, sent: signal.Signals | None) -> None:
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as script:
        assert script.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
        assert len(workers) == 2
        if sent is not None:
            script.send_signal(sent)
        assert psutil.wait_procs(workers, END_S)[1] == []


FORK = """
import os
from lamina import EngineDeadError, Lamina, SamplingParams
with Lamina(dtype="float32", threads=1, kv_cache_memory_bytes=2**25) as runtime:
    stream = runtime.stream("x", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(stream)[-1].error is None
    else:
        try:
            runtime.generate("x")
        except EngineDeadError as error:
            os._exit("fork" not in str(error))
        os._exit(1)
"""


def test_a_forked_process_is_told_that_the_engine_is_not_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_lamina_is_cheap() -> None:
    code = (
        "import lamina, sys; lamina.SamplingParams(); sys.exit('torch' in sys.modules or 'lamina.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
