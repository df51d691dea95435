"""However the engine's thread ends, every request gets its terminal state."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from lamina.cluster.conversations import Gather, Wish
from lamina.config.engine_config import EngineConfig
from lamina.control import liveness
from lamina.control.messages import Failed, Hello, SlabReady
from lamina.control.sockets import ControlClient, ControlServer
from lamina.core.errors import EngineDeadError, TransportError
from lamina.core.outputs import FinishReason, RequestOutput
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.types import AttentionSpec
from lamina.engine.engine import Engine
from lamina.models import directory
from lamina.schedule.limits import Limits
from lamina.text.tokenizer import Tokenizer
from tests.support.bare_cluster import bare_cluster
from tests.support.schedules import client
from tests.support.waiting import END_S, wait_until
from tests.support.whole_outputs import whole

PARAMS = SamplingParams(max_tokens=8, n=2)


class NoWorkers:
    """Workers that never end and can hardly be closed."""

    def __init__(self) -> None:
        self.closed = 0

    def ended(self) -> Mapping[str, str]:
        return {}

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        pass

    def wishes(self) -> list[Wish]:
        return []

    def close(self) -> None:
        self.closed += 1
        raise OSError("a worker cannot be ended")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One whose thread waits in its first turn, for ``engine.go``, and whose workers have never come up."""
    go = threading.Event()
    receive = ControlServer.receive

    def wait_first(control: ControlServer, timeout_s: float) -> object:
        assert go.wait(END_S)
        return receive(control, timeout_s)

    monkeypatch.setattr(ControlServer, "receive", wait_first)
    model = directory.find(None)
    spec = AttentionSpec(layer=0, query_heads=2, kv_heads=1, qk_dim=8, v_dim=8, scale=1.0)
    cluster = bare_cluster(["compute0"], {"memory0": 100}, [spec], Pipeline(1, 1))
    control = ControlServer(["compute0", "memory0"])
    made = Engine(EngineConfig(), model, Tokenizer(model), Limits(4, 64, 64), control, NoWorkers(), cluster)
    made.go = go.set  # type: ignore[attr-defined]
    yield made
    go.set()
    made.close()


class Caller:
    """Collects what callbacks bring."""

    def __init__(self, expected: int) -> None:
        self.finals: dict[str, RequestOutput] = {}
        self._expected = expected
        self.all_ended = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finals, "one terminal state each"
        if output.finished:
            self.finals[output.request_id] = output
            if len(self.finals) == self._expected:
                self.all_ended.set()


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError("no room"), ValueError("a bug")])
@pytest.mark.parametrize("where", ["submit", "plannable", "stop"])
def test_whatever_ends_the_thread_is_recorded_and_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    caller = Caller(4)
    for number in range(3):
        engine.submit(str(number), [5, 6, 7], PARAMS, whole(engine.tokenizer, caller), client(number, 3))
    engine.submit("deaf", [5, 6, 7], PARAMS, raising(SystemExit("the callback's own business")))
    engine.submit("last", [5, 6, 7], PARAMS, whole(engine.tokenizer, caller))
    assert engine.stats().waiting == 5
    if where == "stop":  # the engine's end fails too
        monkeypatch.setattr(engine._control, "send", raising(error))
    monkeypatch.setattr(engine._scheduler, "plannable" if where == "stop" else where, raising(error))
    engine.go()  # type: ignore[attr-defined]
    assert caller.all_ended.wait(END_S), sorted(caller.finals)
    for output in caller.finals.values():
        assert output.error is not None and type(error).__name__ in output.error
        assert [part.finish_reason for part in output.outputs] == [FinishReason.ERROR] * 2
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        engine.submit("late", [5], PARAMS, whole(engine.tokenizer, caller))
    engine.abort("1")
    engine.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and type(error).__name__ in (stats.dead or "")
    assert engine._workers.closed == 1  # type: ignore[attr-defined]
    assert engine._control._closed, "the control plane is closed although the workers could not be"


def test_closing_while_it_dies_answers_everybody_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(50)
    for number in range(50):
        engine.submit(str(number), [5, 6, 7], PARAMS, whole(engine.tokenizer, caller), client(number, 3))
    monkeypatch.setattr(engine._scheduler, "plannable", raising(SystemExit(3)))
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    engine.go()  # type: ignore[attr-defined]
    for closer in closers:
        closer.join(END_S)
    assert not any(closer.is_alive() for closer in closers)
    assert len(caller.finals) == 50 and all(output.error for output in caller.finals.values())


def test_who_waited_for_a_silent_worker_is_not_what_failed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PING_S", 0.1)
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    compute, memory = (ControlClient(engine._control.bootstraps[name]) for name in ("compute0", "memory0"))
    engine.go()  # type: ignore[attr-defined]
    wait_until(lambda: engine._control.liveness._heard.keys() == {"compute0", "memory0"})
    memory.close()
    wait_until(lambda: set(engine.stats().silent) == {"memory0"})
    compute.send(Failed("DeadlineError", "slice 3 has waited 120 s for attention", False, ""))
    wait_until(lambda: engine.stats().dead is not None)
    assert "worker memory0 has not answered for" in str(engine.stats().dead)
    compute.close()


def test_a_worker_that_falls_silent_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PING_S", 0.1)
    monkeypatch.setattr(liveness, "LOST_S", 0.5)
    control = ControlServer(["memory0"])
    gather = Gather(control, NoWorkers(), lambda worker, progress: None)
    client = ControlClient(control.bootstraps["memory0"])
    client.send(Hello("here"))
    gather.all(Hello, ["memory0"], END_S)
    client.close()
    with pytest.raises(TransportError, match="worker memory0 has not answered for"):
        gather.all(SlabReady, ["memory0"], 10 * END_S)
    control.close()
