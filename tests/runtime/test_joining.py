"""Workers that join while requests run: they serve, and every output is that of an undisturbed run."""

import signal
from pathlib import Path

import psutil
import pytest

from lamina.errors import WorkerError
from lamina.launch import launch
from lamina.types import CompletionOutput
from tests.runtime.test_survival import (  # noqa: F401  # fixtures
    REQUESTS,
    Killable,
    Streams,
    assert_same,
    checkpoint,
    config,
    undisturbed,
    wait_for_recoveries,
    wait_until,
)
from tests.sweep import sweep

JOIN_S = 60.0

SWITCHES: dict[str, dict[str, object]] = {
    "auto": {},
    "rotational over TCP": {"lanes": 2, "pipelining": "rotational", "transport": "tcp"},
    "nothing ahead": {"plan_ahead": False},
}


@pytest.mark.parametrize("switches", sweep(SWITCHES, {"auto", "rotational over TCP"}))
def test_workers_of_both_kinds_join_and_are_lost_again(
    checkpoint: Path,  # noqa: F811
    switches: dict[str, object],
    undisturbed: list[list[CompletionOutput]],  # noqa: F811
) -> None:
    """The workers at the start are killed once others have joined."""
    workers = Killable()
    engine = launch(config(checkpoint, 1, 1, **switches), workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        joining = [engine.grow("memory", 2), engine.grow("compute")]
        assert sorted(name for each in joining for name in each.result(JOIN_S)) == ["compute1", "memory1", "memory2"]
        assert engine.topology.epoch.number == 1 and engine.stats().recoveries == 0
        streams.wait_for_tokens(streams.tokens + 60)
        for number, victim in enumerate(("memory0", "compute0")):
            workers.signal(victim, signal.SIGKILL)
            wait_for_recoveries(engine, number + 1)
        assert_same(streams.results(), undisturbed)
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert engine.stats().memory.keys() == {"memory1", "memory2"}
        pids = workers.pids
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


class Broken(Killable):
    """Workers that are started later exit at once."""

    def command(self, name: str, module: str) -> list[str]:
        return ["/bin/false"] if name not in {"memory0", "compute0"} else super().command(name, module)


def test_a_worker_that_does_not_start_is_reported_and_the_others_go_on(
    checkpoint: Path,  # noqa: F811
    undisturbed: list[list[CompletionOutput]],  # noqa: F811
) -> None:
    workers = Broken()
    engine = launch(config(checkpoint, 1, 1), workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        with pytest.raises(WorkerError, match="memory1 failed: its process exited with status 1"):
            engine.grow("memory").result(JOIN_S)
        assert_same(streams.results(), undisturbed)
        assert not engine.stats().joining and workers.pids.keys() == {"compute0", "memory0"}
    finally:
        engine.close()
