"""Engines, and last workers of a pool, that die: callers hear of it, and no process or shared memory is left."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cluster import local_workers
from lamina.cluster.local_workers import LocalWorkers
from lamina.compute.split_cache import prepare
from lamina.config.engine_config import EngineConfig
from lamina.control import liveness
from lamina.core.errors import ConfigError, EngineDeadError, ModelError, RequestError, WorkerError
from lamina.core.outputs import FinishReason, RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.models import directory
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import served
from tests.support.running import LONG, named_memory, worker_processes
from tests.support.waiting import wait_until
from tests.support.whole_outputs import whole


def config(checkpoint: Path, memory: str = "cpu:2") -> EngineConfig:
    """Lost workers are not replaced: the engine ends with the last one of a pool."""
    return EngineConfig(model=str(checkpoint), compute="cpu:1", memory=memory, dtype=DType.FLOAT32, max_restarts=0)


@pytest.mark.parametrize(
    ("module", "victim"),
    [("lamina.compute#", "compute0"), pytest.param("lamina.memory.worker#", "memory0", marks=pytest.mark.slow)],
)
def test_the_last_worker_of_a_pool_killed_ends_every_request_with_an_error(
    checkpoint: Path, tmp_path: Path, module: str, victim: str
) -> None:
    timeline = tmp_path / "trace.json"
    engine = launch(dataclasses.replace(config(checkpoint, "cpu:1"), trace=str(timeline)))
    outputs: list[RequestOutput] = []
    started, ended = threading.Event(), threading.Event()

    def on_output(output: RequestOutput) -> None:
        started.set()
        if output.finished:
            outputs.append(output)
            if len(outputs) == 40:
                ended.set()

    workers = worker_processes()
    for index in range(40):
        engine.submit(str(index), [5, 6, 7], LONG, whole(engine.tokenizer, on_output))
    assert started.wait(60)
    next(process for name, process in workers.items() if name.startswith(module)).kill()
    assert ended.wait(30), f"{len(outputs)} of 40 requests ended"
    failed = [output for output in outputs if output.outputs[0].finish_reason is FinishReason.ERROR]
    why = rf"worker {victim} is gone: its process was ended by signal 9"
    assert failed and all(output.error and re.search(why, output.error) for output in failed)
    with pytest.raises(EngineDeadError, match=why):
        engine.submit("late", [5], LONG, whole(engine.tokenizer, on_output))
    engine.close()
    told = {event["args"]["name"] for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "M"}
    assert "engine" in told, "what those that are left did is known"
    assert not [process for process in workers.values() if process.is_running()]


SLOW_MEMORY_WORKER = """
import ctypes
from lamina.memory import store, worker
serve, holding_the_lock, calls = store.KvStore.serve, ctypes.PyDLL(None), []
def slow(*arguments):
    calls.append(1)
    if len(calls) == 1:
        holding_the_lock.sleep(4)
    return serve(*arguments)
store.KvStore.serve = slow
worker.main()
"""


class SlowWorkers(LocalWorkers):
    """Memory workers whose first attention takes 4 s of native code that holds Python's lock."""

    def command(self, name: str, module: str) -> list[str]:
        slow = [sys.executable, "-P", "-c", SLOW_MEMORY_WORKER]
        return slow if name.startswith("memory") else super().command(name, module)

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def running(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is None]


def test_a_slow_worker_is_waited_for_and_a_stopped_one_is_named_and_given_up(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.5)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    monkeypatch.setattr(local_workers, "STOP_TIMEOUT_S", 1.0)  # the stopped one does not end by itself
    workers = SlowWorkers()
    engine = launch(config(checkpoint, "cpu:1"), workers=workers)
    finals: list[RequestUpdate] = []
    drawing = threading.Event()

    def on_output(output: RequestUpdate) -> None:
        drawing.set()
        if output.finished:
            finals.append(output)

    engine.submit("slow", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True), on_output)
    silent: set[str] = set()

    def ended() -> bool:
        silent.update(engine.stats().silent)
        return bool(finals)

    wait_until(ended, "the slow step never ended", 60)
    assert finals.pop().error is None and not silent
    drawing.clear()
    for index in range(40):
        engine.submit(str(index), [5, 6, 7], LONG, on_output)
    assert drawing.wait(60)
    workers.stop("memory0")
    wait_until(lambda: "memory0" in engine.stats().silent, "nobody noticed", 20)
    assert engine.stats().dead is None
    wait_until(lambda: len(finals) == 40, f"{len(finals)} of 40 requests ended", 20)
    failed = [output for output in finals if output.error]
    assert failed and all("worker memory0 has not answered for 3 s" in str(output.error) for output in failed)
    engine.close()
    assert not workers.running()


SCRIPT = """
import sys, threading
from lamina.launch import launch
from lamina.models import directory
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
engine = launch(EngineConfig(model=sys.argv[1], compute="cpu:1", memory="cpu:2", dtype=DType.FLOAT32))
print("ready", flush=True)
for index in range(50):
    engine.submit(str(index), [5, 6, 7], SamplingParams(max_tokens=110, ignore_eos=True), lambda output: None)
try:
    threading.Event().wait(60)
finally:
    engine.close()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_workers_end_with_their_engine_however_it_ends(checkpoint: Path, how: signal.Signals) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    workers = list(worker_processes(psutil.Process(engine.pid)).values())
    assert len(workers) == 3
    assert not set().union(*map(named_memory, [psutil.Process(engine.pid), *workers]))
    if how is signal.SIGINT:
        os.killpg(engine.pid, how)  # what a terminal's Ctrl-C does: the whole group gets it
    else:
        engine.kill()
    engine.wait(20)
    engine.stdout.close()
    wait_until(lambda: not any(worker.is_running() for worker in workers), f"{workers} outlived their engine", 10)


def test_a_worker_that_cannot_load_says_why_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises((ModelError, WorkerError), match=r"model\.safetensors"):
        launch(config(tmp_path))
    assert not worker_processes()


@pytest.mark.slow
def test_more_compute_workers_than_slices_cannot_take_turns(tmp_path: Path) -> None:
    write_prepared(served("llama", layers=1), tmp_path)
    with pytest.raises(ConfigError, match="2 slices, too few for 3 compute workers"):
        launch(dataclasses.replace(config(tmp_path), compute="cpu:3", lanes=4, pipelining="rotational"))
    assert not worker_processes()


def test_broken_logits_end_their_own_request_alone(tmp_path: Path) -> None:
    model: Any = write_prepared(served("llama"), tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    model.save_pretrained(tmp_path)
    engine = launch(config(tmp_path))
    finals: dict[str, RequestOutput] = {}
    ended = threading.Event()

    def on_output(output: RequestOutput) -> None:
        if output.finished:
            finals[output.request_id] = output
            if len(finals) == 3:
                ended.set()

    for name, prompt in {"good": [5, 6], "broken": [5, 50], "other": [7, 8, 9]}.items():
        engine.submit(
            name,
            prompt,
            SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0, n=2),
            whole(engine.tokenizer, on_output),
        )
    assert ended.wait(60)
    assert [finals[name].outputs[0].finish_reason for name in ("good", "broken", "other")] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert "NaN" in (finals["broken"].error or "")
    wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use", 10)
    engine.close()


def write_smaller(checkpoint: Path, place: Path) -> Path:
    """The model with rows for 100 tokens; its tokenizer still knows 160."""
    settings = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 100}
    smaller = place / "model"
    smaller.mkdir()
    for file in checkpoint.iterdir():
        (smaller / file.name).write_bytes(file.read_bytes())
    (smaller / "config.json").write_text(json.dumps(settings))
    prepare(directory.find(str(smaller)), DType.FLOAT32, lambda: None)
    return smaller


def test_tokens_the_model_has_no_row_for_are_refused_and_modules_of_the_users_folder_are_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a stray file was imported')")
    monkeypatch.chdir(tmp_path)
    smaller = write_smaller(checkpoint, tmp_path)
    engine = launch(dataclasses.replace(config(smaller), load_format="dummy"))
    with pytest.raises(
        RequestError, match=r"100 is outside the vocabulary of 100 tokens; the tokenizer has it \('\u4e64'"
    ):
        engine.submit("r", [5, 100], LONG, lambda output: None)
    assert engine.stats().dead is None
    engine.close()


def test_ids_without_a_token_are_taken_where_the_embedding_has_rows(checkpoint: Path, tmp_path: Path) -> None:
    """A vocabulary with holes, and an embedding with rows beyond it, as of models padded for their devices."""
    place = write_smaller(checkpoint, tmp_path)
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: token for word, token in words.items() if token < 40 or 50 < token < 80}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    config_file = place / "config.json"
    settings = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({key: value for key, value in settings.items() if key != "vocab_size"}))
    settings_of = AutoConfig.from_pretrained(place)
    assert settings_of.vocab_size == 32000  # what transformers takes where the config says nothing
    engine = launch(dataclasses.replace(config(place), load_format="dummy"))
    ended, outputs = threading.Event(), list[RequestOutput]()

    def on_output(output: RequestOutput) -> None:
        outputs.append(output)
        if output.finished:
            ended.set()

    engine.submit(
        "r", [45, 79, 80, 31_999], dataclasses.replace(LONG, max_tokens=3), whole(engine.tokenizer, on_output)
    )
    assert ended.wait(60)
    assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
    for token in (32_000, -1, 2**40):
        with pytest.raises(RequestError, match=f"{token} is outside the vocabulary of 32000 tokens; use ids"):
            engine.submit("s", [5, token], LONG, lambda output: None)
    engine.close()


@pytest.mark.slow
def test_bench_draws_tokens_that_the_model_has(checkpoint: Path, tmp_path: Path) -> None:
    smaller = write_smaller(checkpoint, tmp_path)
    bench = ["bench", "--model", str(smaller), "--dtype", "float32", "--load-format", "dummy"]
    bench += ["--batch", "2", "--context", "40", "--tokens", "8"]
    CliRunner().invoke(app, bench, catch_exceptions=False)  # draws its prompts from the 100
