"""Workers that are lost while requests run: every request goes on, and its output is that of an undisturbed run."""

import dataclasses
import itertools
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.control import liveness
from lamina.core.types import CompletionOutput, DType, RequestOutput, SamplingParams, StructuredOutputs
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate, Whole
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, served
from tests.support.sweep import sweep

END_S = 60.0
Prompt = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    write_prepared(served("llama"), place)
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
        max_restarts=0,
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
        SamplingParams(seed=11, n=2, structured_outputs=StructuredOutputs(regex="([\u4e03-\u4e20][\u4e21-\u4e50])+")),
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
            whole.append_update(update)
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

    def wait(self) -> list[RequestOutput]:
        with self._changed:
            assert self._changed.wait_for(self._ended, END_S), f"{len(self.outputs)} of {self._wanted}"
        return [self.outputs[str(number)] for number in range(self._wanted)]

    def results(self) -> list[list[CompletionOutput]]:
        outputs = self.wait()
        assert not [output.error for output in outputs if output.error]
        return [output.outputs for output in outputs]


class Killable(LocalWorkers):
    """Workers that a test can kill or stop."""

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}


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


SWITCHES: dict[str, dict[str, object]] = {
    "auto": {},
    "rotational over TCP": {"lanes": 3, "pipelining": "rotational", "transport": "tcp"},
    "fixed": {"lanes": 2, "pipelining": "fixed"},
    "nothing ahead": {"plan_ahead": False},
}


@pytest.mark.parametrize("switches", sweep(SWITCHES, {"rotational over TCP"}))
def test_a_killed_compute_worker_is_noticed_as_a_pause(
    checkpoint: Path, switches: dict[str, object], undisturbed: list[list[CompletionOutput]]
) -> None:
    wanted = config(checkpoint, 2, 2, **switches)
    assert_same(survive(wanted, [("compute0", signal.SIGKILL)], 150), undisturbed)


def test_killed_and_stopped_memory_workers_are_noticed_as_pauses(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, one after another: what they had is computed again on those that are left."""
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    losses = [("memory1", signal.SIGKILL), ("memory0", signal.SIGSTOP)]
    assert_same(survive(config(checkpoint, 1, 3), losses, 150), undisturbed)


CUT_OFF = """
import sys
from lamina.core.errors import PeerLostError
from lamina.memory import store, worker
serve, calls = store.KvStore.serve, []
def cut_off(*arguments):
    calls.append(1)
    if len(calls) == 40:
        raise PeerLostError("compute0", "its network is not there")
    return serve(*arguments)
store.KvStore.serve = cut_off
worker.main()
"""


class CutOff(Killable):
    """Memory worker 1 loses its link to compute worker 0, while both go on running."""

    def command(self, name: str, module: str) -> list[str]:
        return [sys.executable, "-P", "-c", CUT_OFF] if name == "memory1" else super().command(name, module)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_of_two_workers_that_cannot_reach_each_other_one_is_given_up(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]], transport: str
) -> None:
    engine = launch(config(checkpoint, 1, 2, transport=transport), workers=CutOff())
    try:
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        stats = engine.stats()
        assert stats.recoveries == 1 and stats.memory.keys() == {"memory0"}
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_many_losses_some_at_the_same_time(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one worker of each pool, in any order; the next may be lost while the epoch still ends."""
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    draw = random.Random(seed)
    victims = draw.sample([*(f"memory{index}" for index in range(4)), "compute0", "compute1"], 6)
    victims.remove(next(name for name in victims if name.startswith("memory")))
    workers = Killable()
    rotational: dict[str, object] = {"lanes": 4, "pipelining": "rotational", "transport": "tcp"}
    choices: list[dict[str, object]] = [{}, rotational, {"plan_ahead": False}]
    switches = draw.choice(choices)
    engine = launch(config(checkpoint, 3, 4, **switches), workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS)
        for victim in victims:
            streams.wait_for_tokens(streams.tokens + draw.randrange(120))
            workers.signal(victim, signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL)
            time.sleep(draw.choice([0.0, 0.0, 0.005, 0.05, 1.0]))
        assert_same(streams.results(), undisturbed)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert engine.stats().dead is None
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


POISON = """
import os
import signal
from lamina.memory import store, worker
apply, serve, poisonous = store.KvStore.apply, store.KvStore.serve, set()
def watched(self, plan):
    for admission in plan.admitted:
        if admission.params.seed == 666:
            poisonous.update(range(admission.sequence, admission.sequence + admission.count))
    return apply(self, plan)
def deadly(self, layer, step, *arguments):
    if any(one.sequence in poisonous and one.stop > 12 for one in step.plan.sequences):
        os.kill(os.getpid(), signal.SIGKILL)
    return serve(self, layer, step, *arguments)
store.KvStore.apply, store.KvStore.serve = watched, deadly
worker.main()
"""


class Mortal(Killable):
    """Memory workers that die of position 12 of any request with seed 666."""

    def command(self, name: str, module: str) -> list[str]:
        poisoned = [sys.executable, "-P", "-c", POISON]
        return poisoned if name.startswith("memory") else super().command(name, module)


def test_a_request_that_makes_workers_die_is_ended_alone(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]]
) -> None:
    """More workers die of it than may be restarted: those deaths are accounted for."""
    poison = [5] * 8, SamplingParams(seed=666, max_tokens=20, ignore_eos=True)
    workers = Mortal()
    engine = launch(config(checkpoint, 1, 2, max_restarts=2), workers=workers)
    try:
        outputs = Streams(engine, [*REQUESTS[:7], poison]).wait()
        error = outputs[-1].error or ""
        assert "while it ran nothing but this request" in error and "was ended by signal 9" in error
        assert not [output.error for output in outputs[:-1] if output.error]
        assert_same([output.outputs for output in outputs[:-1]], undisturbed[:7])
        assert 3 <= engine.stats().recoveries <= math.ceil(math.log2(8)) + 4
        wait_until(lambda: len(engine.stats().memory) == 2, "a worker is not replaced")
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()
