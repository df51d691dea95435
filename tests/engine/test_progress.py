"""How long a step may take: any time while a worker says that it gets on with it, and a limit without."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from lamina.cluster.conversations import Wish
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import Hello, Release, Step, StepDone, Stop, Working
from lamina.control.sockets import ControlClient, ControlServer
from lamina.core.outputs import FinishReason, RequestOutput
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.types import AttentionSpec
from lamina.engine import losses
from lamina.engine.engine import Engine
from lamina.models import directory
from lamina.schedule.limits import Limits
from lamina.text.tokenizer import Tokenizer
from tests.support.bare_cluster import bare_cluster
from tests.support.whole_outputs import whole

LIMIT_S = 1.0


class Workers:
    """Nobody ends."""

    def ended(self) -> dict[str, str]:
        return {}

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        pass

    def wishes(self) -> list[Wish]:
        return []

    def close(self) -> None:
        pass


class Scripted:
    """Both workers on the real control plane: a step takes ``seconds``, in which memory0 reports or does not."""

    def __init__(self, server: ControlServer, seconds: float, reports: bool) -> None:
        self._seconds, self._reports = seconds, reports
        self._clients = [ControlClient(server.bootstraps[name]) for name in ("compute0", "memory0")]
        for client in self._clients:
            client.send(Hello("here"))
        self._threads = [threading.Thread(target=self._compute), threading.Thread(target=self._memory)]
        for thread in self._threads:
            thread.start()

    def _compute(self) -> None:
        client = self._clients[0]
        while not isinstance(message := client.receive(20.0), Stop):
            assert isinstance(message, Step)
            if message.plan.runs:
                time.sleep(self._seconds)
            client.send(StepDone(message.plan.step, [5] * len(message.plan.drawing)))
        client.close()

    def _memory(self) -> None:
        client = self._clients[1]
        while not isinstance(message := client.receive(20.0), Stop):
            if isinstance(message, Release):
                continue
            assert isinstance(message, Step)
            until = time.monotonic() + self._seconds
            while self._reports and message.plan.runs and time.monotonic() < until:
                client.send(Working([message.plan.lane]))
                time.sleep(LIMIT_S / 5)
        client.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20.0)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer(["compute0", "memory0"])
    yield made
    made.close()


def generate(server: ControlServer, reports: bool, monkeypatch: pytest.MonkeyPatch) -> RequestOutput:
    """One token of a request whose one step takes longer than the limit."""
    monkeypatch.setattr(losses, "PROGRESS_TIMEOUT_S", LIMIT_S)
    scripted = Scripted(server, 2.5 * LIMIT_S, reports)
    greetings = 0
    while greetings < 2:
        greetings += len(list(server.receive(1.0)))
    place = directory.find(None)
    spec = AttentionSpec(layer=0, query_heads=1, kv_heads=1, qk_dim=4, v_dim=4, scale=1.0)
    cluster = bare_cluster(["compute0"], {"memory0": 100}, [spec], Pipeline(1, 1))
    engine = Engine(EngineConfig(), place, Tokenizer(place), Limits(4, 64, 64), server, Workers(), cluster)
    ends: queue.Queue[RequestOutput] = queue.Queue()
    try:
        params = SamplingParams(max_tokens=1)

        def on_output(output: RequestOutput) -> None:
            if output.finished:
                ends.put(output)

        engine.submit("0", [5, 6, 7], params, whole(engine.tokenizer, on_output))
        return ends.get(timeout=20.0)
    finally:
        engine.close()
        scripted.join()


def test_a_step_may_take_any_time_while_a_worker_gets_on_with_it(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = generate(server, True, monkeypatch)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_a_step_that_nobody_gets_on_with_ends_the_engine(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = generate(server, False, monkeypatch)
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert output.error is not None and "no worker has made progress on step" in output.error
