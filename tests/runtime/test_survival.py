"""Workers that are lost while requests run: every request goes on, and its output is that of an undisturbed run."""

import dataclasses
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from lamina.cluster.launchers.local import LocalWorkers
from lamina.config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate, Whole
from lamina.launch import launch
from lamina.protocol import liveness
from lamina.types import CompletionOutput, DType, RequestOutput, SamplingParams
from tests.random_models import SERVED_VOCABULARY, served, write_checkpoint

END_S = 60.0
Prompt = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    write_checkpoint(served("llama"), place)
    return place


def config(checkpoint: Path, compute: int, memory: int, **settings: object) -> EngineConfig:
    """Prompts take several chunks, and a memory worker holds a few requests."""
    base = EngineConfig(
        model=str(checkpoint),
        compute=f"cpu:{compute}",
        memory=f"cpu:{memory}",
        dtype=DType.FLOAT32,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=1_000_000,
    )
    return dataclasses.replace(base, **settings)  # type: ignore[arg-type]


def prompts(count: int, seed: int) -> list[Prompt]:
    """Requests of every kind: greedy and seeded, several completions, penalties, logprobs, stops."""
    draw = random.Random(seed)
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, seed=7, n=3),
        SamplingParams(temperature=0.8, seed=8, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, n=2),
        SamplingParams(temperature=1.0, seed=9, top_p=0.9, stop_token_ids=[11, 12, 13]),
        SamplingParams(temperature=0.7, seed=10, logprobs=0, max_tokens=20, min_tokens=20),
    ]
    return [
        (
            [draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([1, 5, 30, 60]))],
            dataclasses.replace(kinds[number % len(kinds)], max_tokens=draw.choice([20, 40, 60]), ignore_eos=True),
        )
        for number in range(count)
    ]


class Streams:
    """All requests at once; counts what arrives, and keeps the outputs."""

    def __init__(self, engine: Engine, requests: Sequence[Prompt]) -> None:
        self.outputs: dict[str, RequestOutput] = {}
        self.tokens = 0
        self._changed = threading.Condition()
        self._wanted = len(requests)
        for number, (prompt, params) in enumerate(requests):
            engine.submit(str(number), prompt, params, self._reader(engine))

    def _reader(self, engine: Engine) -> Callable[[RequestUpdate], None]:
        whole = Whole(engine.tokenizer)

        def on_update(update: RequestUpdate) -> None:
            tokens = update.tokens
            whole.add(update)
            with self._changed:
                self.tokens += tokens
                if update.finished:
                    assert update.request.request_id not in self.outputs
                    self.outputs[update.request.request_id] = whole.output()
                self._changed.notify_all()

        return on_update

    def wait_for_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.tokens >= count or self._ended(), END_S), self.tokens

    def _ended(self) -> bool:
        return len(self.outputs) == self._wanted

    def results(self) -> list[list[CompletionOutput]]:
        with self._changed:
            assert self._changed.wait_for(self._ended, END_S), f"{len(self.outputs)} of {self._wanted}"
        outputs = [self.outputs[str(number)] for number in range(self._wanted)]
        assert not [output.error for output in outputs if output.error]
        return [output.outputs for output in outputs]


class Killable(LocalWorkers):
    """Workers that a test can kill or stop."""

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}


REQUESTS = prompts(24, 1)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> list[list[CompletionOutput]]:
    """The outputs of ``REQUESTS`` when nothing happens, which do not depend on the number of workers."""
    engine = launch(config(checkpoint, 1, 1))
    try:
        return Streams(engine, REQUESTS).results()
    finally:
        engine.close()


def assert_same(got: list[list[CompletionOutput]], expected: list[list[CompletionOutput]]) -> None:
    """Equal, but for the rounding of log probabilities: other rows in a step add up in another order."""
    for mine, theirs in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert dataclasses.replace(mine, logprobs=None) == dataclasses.replace(theirs, logprobs=None)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
            assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-3)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def wait_for_recoveries(engine: Engine, count: int) -> None:
    wait_until(lambda: engine.stats().recoveries >= count, f"recovery {count}")


def survive(
    settings: EngineConfig, losses: Sequence[tuple[str, signal.Signals]], every: int
) -> list[list[CompletionOutput]]:
    """The outputs of a run that loses these workers one after another, each after ``every`` more tokens."""
    workers = Killable()
    engine = launch(settings, workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS)
        for number, (victim, how) in enumerate(losses):
            streams.wait_for_tokens((number + 1) * every)
            workers.signal(victim, how)
            wait_for_recoveries(engine, number + 1)
        results = streams.results()
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        stats = engine.stats()
        assert stats.recoveries == len(losses) and stats.dead is None
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
    return results


@pytest.mark.parametrize(
    "settings",
    [{}, {"lanes": 3, "pipelining": "rotational"}, {"lanes": 2, "pipelining": "fixed"}],
    ids=["auto", "rotational", "fixed"],
)
def test_a_killed_compute_worker_is_noticed_as_a_pause(
    checkpoint: Path, settings: dict[str, object], undisturbed: list[list[CompletionOutput]]
) -> None:
    wanted = config(checkpoint, 2, 1, **settings)
    assert_same(survive(wanted, [("compute0", signal.SIGKILL)], 150), undisturbed)


def test_killed_and_stopped_memory_workers_are_noticed_as_pauses(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, one after another: what they had is computed again on those that are left."""
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    losses = [("memory1", signal.SIGKILL), ("memory0", signal.SIGSTOP)]
    assert_same(survive(config(checkpoint, 1, 3), losses, 150), undisturbed)
