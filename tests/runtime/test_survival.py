"""Workers that are lost while requests run: every request goes on, and its output is that of an undisturbed run."""

import math
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from lamina.control import liveness
from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.launch import launch
from tests.support.running import HALF, REQUESTS, Killable, Streams, assert_same, config, survive
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

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
    assert_same(survive(wanted, [("compute0", signal.SIGKILL)], 150), undisturbed[:HALF])


def test_killed_and_stopped_memory_workers_are_noticed_as_pauses(
    checkpoint: Path, undisturbed: list[list[CompletionOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, one after another: what they had is computed again on those that are left."""
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    losses = [("memory1", signal.SIGKILL), ("memory0", signal.SIGSTOP)]
    assert_same(survive(config(checkpoint, 1, 3), losses, 150), undisturbed[:HALF])


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
def watched(self, plan, *arguments):
    for admission in plan.admitted:
        if admission.params.seed == 666:
            poisonous.update(range(admission.sequence, admission.sequence + admission.count))
    return apply(self, plan, *arguments)
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
