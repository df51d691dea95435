"""Workers that join, leave and are replaced while requests run: every output is that of an undisturbed run."""

import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lamina.core.errors import ConfigError, RequestError, WorkerError
from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.random_models import SERVED_VOCABULARY
from tests.support.running import REQUESTS, Killable, Prompt, Streams, assert_same, config, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import END_S, wait_until

SWITCHES: dict[str, dict[str, object]] = {
    "auto": {},
    "rotational over TCP": {"lanes": 2, "pipelining": "rotational", "transport": "tcp"},
    "nothing ahead": {"plan_ahead": False},
}
LEAVING: dict[str, dict[str, object]] = {
    "auto": {},
    "rotational over TCP": {"lanes": 3, "pipelining": "rotational", "transport": "tcp"},
    "fixed": {"lanes": 4, "pipelining": "fixed"},
    "several segments": {"kv_tokens_per_worker": 16},
    "divided by tokens": {"partition": "token"},
}


@pytest.mark.parametrize("switches", sweep(SWITCHES, {"auto"}))
def test_workers_of_both_kinds_join_and_are_lost_again(
    checkpoint: Path,
    switches: dict[str, object],
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """The workers at the start are killed once others have joined."""
    workers = Killable()
    engine = launch(config(checkpoint, 1, 1, **switches), workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        joining = [engine.scale(memory=2), engine.scale(compute=1)]
        assert sorted(name for each in joining for name in each.result(END_S)) == ["compute1", "memory1", "memory2"]
        assert engine.topology.epoch.number == 1 and engine.stats().recoveries == 0
        assert_same(streams.results(), undisturbed)
        streams = Streams(engine, REQUESTS)  # many: a single one would be taken for what workers die of
        streams.wait_for_tokens(60)
        for number, victim in enumerate(("memory0", "compute0")):
            workers.signal(victim, signal.SIGKILL)
            wait_for_recoveries(engine, number + 1)
        assert_same(streams.results(), undisturbed)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert engine.stats().memory.keys() == {"memory1", "memory2"}
        pids = workers.pids
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


class Broken(Killable):
    """Workers that are started later exit at once."""

    def __init__(self, *more: str) -> None:
        """``more``: of those at the start."""
        super().__init__()
        self._first = {"memory0", "compute0", *more}

    def command(self, name: str, module: str) -> list[str]:
        return super().command(name, module) if name in self._first else ["/bin/false"]


def test_a_worker_that_does_not_start_is_reported_and_the_others_go_on(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    workers = Broken()
    engine = launch(config(checkpoint, 1, 1), workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        with pytest.raises(WorkerError, match="memory1 failed: its process exited with status 1"):
            engine.scale(memory=1).result(END_S)
        assert_same(streams.results(), undisturbed)
        assert engine.stats().workers.keys() == workers.pids.keys() == {"compute0", "memory0"}
    finally:
        engine.close()


@pytest.mark.parametrize("switches", sweep(LEAVING, {"auto"}))
def test_workers_of_both_kinds_leave_and_what_they_hold_goes_on_elsewhere(
    checkpoint: Path,
    switches: dict[str, object],
    undisturbed: list[list[CompletionOutput]],
) -> None:
    workers = Killable()
    engine = launch(config(checkpoint, 2, 3, **switches), workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(100)
        gone = [*engine.scale(memory=-1).result(END_S), *engine.scale(memory=-1, compute=-1).result(END_S)]
        assert "compute1" in gone and len(gone) == 3
        assert not [name for name in gone if psutil.pid_exists(pids[name])]
        assert_same(streams.results(), undisturbed)
        stats = engine.stats()
        assert stats.recoveries == stats.recomputed == 0 and engine.topology.epoch.number == 1
        wait_until(lambda: engine.stats().placement.moves > 0, "nothing has moved")
        for refused, reason in (
            ({"memory": -1}, "the memory pool has 1, of which 1 must stay: 1 cannot leave"),
            ({"compute": -3}, "the compute pool has 1, of which 1 must stay: 3 cannot leave"),
        ):
            with pytest.raises(ConfigError, match=reason):
                engine.scale(**refused).result(END_S)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert len(engine.scale(memory=1).result(END_S)) == 1, "what the leavers leased is free again"
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
    finally:
        engine.close()


WHOLE: dict[str, dict[str, object]] = {
    "ranks": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "ranks with local memory": {"tensor_parallel": 2, "memory": "local"},
    "stages with local memory": {"pipeline_parallel": 2, "memory": "local"},
    "stages with both": {"pipeline_parallel": 2, "memory": "local,cpu:1", "kv_tokens_per_worker": 16},
}


@pytest.mark.parametrize("parts", sweep(WHOLE, {"ranks", "stages with local memory"}))
def test_replicas_of_several_workers_join_and_leave_as_a_whole(
    parts: dict[str, object],
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """The replica that joins decodes; then it leaves while requests run, and no process of it is left. What it holds in
    local memory is computed again by the other replica."""
    workers = Killable()
    engine = launch(replace(config(checkpoint, 2, 1, lanes=2), **parts), workers=workers)  # type: ignore[arg-type]
    try:
        streams = Streams(engine, REQUESTS)
        assert sorted(engine.scale(compute=2).result(END_S)) == ["compute2", "compute3"]
        assert engine.topology.replicas == (("compute0", "compute1"), ("compute2", "compute3"))
        assert_same(streams.results(), undisturbed)
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(100)
        pids = workers.pids
        assert sorted(engine.scale(compute=-2).result(END_S)) == ["compute2", "compute3"]
        assert [*engine.topology.replicas] == [("compute0", "compute1")]
        assert not [name for name in ("compute2", "compute3") if psutil.pid_exists(pids[name])]
        assert_same(streams.results(), undisturbed)
        with pytest.raises(ConfigError, match="the compute pool has 2, of which 2 must stay: 2 cannot leave"):
            engine.scale(compute=-2).result(END_S)
        with pytest.raises(ConfigError, match="a replica has 2 compute workers, and 1 is no multiple of that"):
            engine.scale(compute=1).result(END_S)
        stats = engine.stats()
        assert stats.recoveries == stats.recomputed == 0 and engine.topology.epoch.number == 1
        assert (stats.preempted > 0) == ("local" in str(parts.get("memory")))
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


def test_the_last_workers_of_both_pools_are_replaced_while_requests_wait(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """KV outlives the compute workers."""
    workers = Killable()
    engine = launch(config(checkpoint, 1, 1, max_restarts=2), workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        for number, victim in enumerate(("compute0", "memory0")):
            streams.wait_for_tokens(streams.tokens + 100)
            workers.signal(victim, signal.SIGKILL)
            wait_for_recoveries(engine, number + 1)
            assert (engine.stats().recomputed > 0) == (victim == "memory0")
        assert_same(streams.results(), undisturbed)
        assert engine.topology.computes == ("compute1",) and engine.stats().memory.keys() == {"memory1"}
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        pids = workers.pids
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


SMALL_BYTES = 90_000  # of KV: two memory workers together hold fewer tokens than ``model`` takes


def longer_than_a_worker(engine: Engine) -> Prompt:
    """Return a request for 1.5 times the slots of a memory worker; it may use all that there are."""
    capacity = engine.stats().memory["memory0"].capacity
    prompt = [3 + number % (SERVED_VOCABULARY - 3) for number in range(3 * capacity // 2)]
    return prompt, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@pytest.mark.slow
def test_a_request_that_comes_between_a_loss_and_the_successor_is_served_like_any(
    model: Path,
) -> None:
    workers = Killable()
    engine = launch(config(model, 1, 2, kv_cache_memory_bytes=SMALL_BYTES, max_restarts=1), workers=workers)
    try:
        request = longer_than_a_worker(engine)
        expected = Streams(engine, [request]).results()
        total = sum(memory.capacity for memory in engine.stats().memory.values())
        assert len(request[0]) + len(expected[0][0].token_ids) == total
        workers.signal("memory1", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert engine.stats().memory.keys() == {"memory0"}
        assert_same(Streams(engine, [request]).results(), expected)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_request_that_waits_for_a_successor_ends_once_there_will_be_none(model: Path) -> None:
    workers = Broken("memory1")
    engine = launch(config(model, 1, 2, kv_cache_memory_bytes=SMALL_BYTES, max_restarts=2), workers=workers)
    try:
        request = longer_than_a_worker(engine)
        capacity = engine.stats().memory["memory0"].capacity
        workers.signal("memory1", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        (output,) = Streams(engine, [request]).wait()
        assert f"the 1 memory workers that are left hold {capacity}." in (output.error or "")
        assert len(Streams(engine, [REQUESTS[0], REQUESTS[2]]).results()) == 2
        with pytest.raises(RequestError, match="Shorten the prompt"):
            Streams(engine, [request])
    finally:
        engine.close()


@pytest.mark.slow
def test_without_a_replacement_the_loss_of_the_last_worker_ends_the_engine(checkpoint: Path) -> None:
    """As many replacements exit at once as may be started."""
    workers = Broken()
    engine = launch(config(checkpoint, 1, 1, max_restarts=2), workers=workers)
    try:
        pid = workers.pids["memory0"]
        Streams(engine, REQUESTS).wait_for_tokens(20)
        workers.signal("compute0", signal.SIGKILL)
        wait_until(lambda: engine.stats().dead, "the engine goes on")
        assert "compute2 failed: its process exited with status 1" in (engine.stats().dead or "")
        wait_until(lambda: not psutil.pid_exists(pid), "a worker is left behind")
    finally:
        engine.close()
