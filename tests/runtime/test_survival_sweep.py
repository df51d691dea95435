"""Workers are killed, stopped and cut off again and again under 32 streams; every output is that of an undisturbed run.

Half an hour with 120 kills and 20 stops or partitions, each after the last has recovered, and another half hour with 70
pairs that overlap. ``LAMINA_SURVIVAL_LOSSES``, ``LAMINA_SURVIVAL_S`` and ``LAMINA_SURVIVAL_SEED`` choose a smaller or
another one, with other settings of the engine: 23 losses in 300 s are a sixth of it.
"""

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamina.control import liveness
from lamina.core.outputs import CompletionOutput
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate, UpdateSum
from lamina.launch import launch
from tests.support.running import Killable, Prompt, Streams, assert_same, config, prompts
from tests.support.waiting import END_S, wait_until

LOSSES = int(os.environ.get("LAMINA_SURVIVAL_LOSSES", "140"))
LENGTH_S = float(os.environ.get("LAMINA_SURVIVAL_S", "1800"))
SEED = int(os.environ.get("LAMINA_SURVIVAL_SEED", "10"))
KILLED = 6 / 7  # of the losses
STREAMS, DISTINCT = 32, 64
SWITCHES: list[dict[str, object]] = [
    {},
    {"lanes": 3, "pipelining": "rotational", "transport": "tcp"},
    {"lanes": 2, "pipelining": "fixed"},
    {"plan_ahead": False, "kv_cache_memory_bytes": 400_000},  # hardly room for all: requests move and give way
    {"partition": "head"},
]
SIZES = {"prefill": 0, "compute": 2, "memory": 3}
LONGEST_S = 2 * END_S  # for a request, losses and all
SPARE_FDS = 8  # of a process, for what comes and goes

CUT_OFF = """
import signal
from lamina.core.errors import PeerLostError
from lamina.memory import worker
serve, cut = worker.MemoryWorker._serve_once, []
def cut_off(self):
    if cut and self._channels:
        cut.clear()
        raise PeerLostError(next(iter(self._channels)), "its network is not there")
    return serve(self)
worker.MemoryWorker._serve_once = cut_off
signal.signal(signal.SIGUSR1, lambda *_: cut.append(True))
worker.main()
"""


class Partitionable(Killable):
    """Memory workers that lose a link, to a peer that runs on, when they get SIGUSR1.

    Attributes:
        seen: every process there ever was, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def command(self, name: str, module: str) -> list[str]:
        cut_off = [sys.executable, "-P", "-c", CUT_OFF]
        return cut_off if name.startswith("memory") else super().command(name, module)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.seen |= self.pids
        super().signal(name, number)


class Load:
    """Keeps ``STREAMS`` requests running, of ``DISTINCT`` different ones, and compares every output."""

    def __init__(self, engine: Engine, requests: Sequence[Prompt], expected: list[list[CompletionOutput]]) -> None:
        self._engine, self._requests, self._expected = engine, requests, expected
        self._changed = threading.Condition()
        self._running, self._goes_on = dict[int, float](), True  # by number, when it began
        self.ended = 0
        self.faults: list[str] = []
        for _ in range(STREAMS):
            self._submit()

    def wait_for_another(self, what: str) -> None:
        """Until one more request has ended; ``what`` if none does."""
        ended = self.ended
        wait_until(lambda: self.ended > ended, what)

    def check(self) -> None:
        """No output differs, and no request has run for very long, whatever the others do."""
        assert not self.faults, self.faults[:3]
        with self._changed:
            number, begun = min(self._running.items(), key=lambda one: one[1])
        assert time.monotonic() < begun + LONGEST_S, f"request {number} has not ended within {LONGEST_S:.0f} s"

    def _submit(self) -> None:
        with self._changed:
            number = self.ended + len(self._running)
            self._running[number] = time.monotonic()
        prompt, params = self._requests[number % DISTINCT]
        whole = UpdateSum(self._engine.tokenizer)

        def on_update(update: RequestUpdate) -> None:
            whole.append_update(update)
            if update.finished:
                output = whole.output()
                self._note(number, output.error, output.outputs)

        self._engine.submit(str(number), prompt, params, on_update)

    def _note(self, number: int, error: str | None, outputs: list[CompletionOutput]) -> None:
        try:
            assert error is None, error
            assert_same([outputs], [self._expected[number % DISTINCT]])
        except AssertionError as fault:
            self.faults.append(f"request {number}: {fault}")
        with self._changed:
            self.ended += 1
            del self._running[number]
            goes_on = self._goes_on
            self._changed.notify_all()
        if goes_on:
            self._submit()

    def stop(self) -> None:
        """Wait until what runs has ended."""
        with self._changed:
            self._goes_on = False
            assert self._changed.wait_for(lambda: not self._running, END_S), (
                f"requests {[*self._running]} have not ended"
            )


def strike(workers: Killable, engine: Engine, how: signal.Signals, draw: random.Random) -> str:
    """Kill or stop a member, or cut a memory worker off (SIGUSR1)."""
    names = [*engine.topology.memories, *(() if how is signal.SIGUSR1 else engine.topology.computes)]
    victim = draw.choice([name for name in names if name in workers.pids])
    workers.signal(victim, how)
    return victim


def lose(workers: Killable, engine: Engine, how: Sequence[signal.Signals], draw: random.Random) -> str:
    """Let one or two overlapping losses happen, and wait until the pools are whole again. Returns what happened."""
    before, happened, gone = engine.stats().recoveries, [], set[str]()
    for number, one in enumerate(how):
        time.sleep(draw.choice([0.0, 0.005, 0.05, 0.3, 1.0]) if number else 0.0)
        victim = strike(workers, engine, one, draw)
        happened.append(f"{one.name} of {victim}")
        if one is not signal.SIGUSR1:  # of two that cannot reach each other, either may be given up
            gone.add(victim)
    what = ", ".join(happened)

    def recovered() -> bool:
        steady = {"serving"} == {*engine.stats().workers.values()} and engine.topology.sizes == SIZES
        return steady and engine.stats().recoveries > before and not gone & engine.topology.names

    wait_until(lambda: recovered() or engine.stats().dead, what)
    assert engine.stats().dead is None, (what, engine.stats().dead)
    return what


def descriptors(workers: Killable) -> Mapping[str, int]:
    """How many files each process has open."""
    return {name: psutil.Process(pid).num_fds() for name, pid in {"engine": os.getpid(), **workers.pids}.items()}


@pytest.mark.slow
@pytest.mark.timeout(3 * LENGTH_S + 300)
@pytest.mark.parametrize("together", [1, 2], ids=["apart", "pairs"])
def test_no_loss_changes_an_output_however_many_there_are(
    checkpoint: Path,
    together: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "PING_S", 0.2)
    monkeypatch.setattr(liveness, "LOST_S", 3.0)
    monkeypatch.setattr(liveness, "MOST_WAIT_S", 0.01)
    draw, requests, workers = random.Random(SEED), prompts(DISTINCT, 2), Partitionable()
    engine = launch(config(checkpoint, 1, 1, kv_cache_memory_bytes=4_000_000))
    try:
        expected = Streams(engine, requests).results()
    finally:
        engine.close()
    killed = round(LOSSES * KILLED)
    kinds = [signal.SIGKILL] * killed + draw.choices([signal.SIGSTOP, signal.SIGUSR1], k=LOSSES - killed)
    draw.shuffle(kinds)
    losses = [kinds[place : place + together] for place in range(0, LOSSES, together)]
    more: dict[str, Any] = {"max_num_seqs": STREAMS, "max_restarts": 100_000} | SWITCHES[SEED % len(SWITCHES)]
    settings = config(checkpoint, *SIZES.values(), **more)
    engine = launch(settings, workers=workers)
    at_first = descriptors(workers)
    try:
        load = Load(engine, requests, expected)
        begun = time.monotonic()
        for number, how in enumerate(losses):
            time.sleep(max(0.0, begun + LENGTH_S * number / len(losses) - time.monotonic()))
            at = time.monotonic()
            what = lose(workers, engine, how, draw)
            took = time.monotonic() - at
            load.wait_for_another(f"no request ends after {what}")
            print(f"{at - begun:.1f} s: {what}: whole after {took:.1f} s; {load.ended} requests", flush=True)
            load.check()
        load.stop()
        assert not load.faults
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        fabric = engine.cluster.fabric
        assert fabric is not None and fabric.offers.keys() == engine.topology.names == workers.pids.keys()
        assert {*itertools.chain(*fabric.links)} == engine.topology.names
        at_last = descriptors(workers)
        print(at_first, at_last, f"{time.monotonic() - begun:.0f} s")
        assert at_last["engine"] <= at_first["engine"] + SPARE_FDS
    finally:
        engine.close()
    assert not [name for name, pid in workers.seen.items() if psutil.pid_exists(pid)]
