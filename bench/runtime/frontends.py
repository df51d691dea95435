"""CPU time of the engine's process per streamed token, with HTTP in that process and in frontend processes.

    python -m bench.runtime.frontends [--streams 256] [--step-ms 50] [--seconds 8] [--rounds 3] [--frontends 0,1,2]

The engine, its control plane, the frontends and HTTP are real; the workers are scripted: a step takes ``--step-ms`` and
draws a token for every stream. ``--streams`` clients in a process of their own read server-sent events; in the second
run of each arrangement, 16 others ask for as much and read nothing. 0 frontends: HTTP in the engine's process.

Printed: CPU time of the engine's process and of all frontends per streamed token, streamed tokens per second as a share
of the workers' tokens, and times between the events of a stream. "Streams/core" is the number of streams that one
frontend's core serves at this rate.

First, the engine alone: workers reply at once, and a process discards the tokens that a frontend would receive.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
import zmq
from rich.console import Console
from rich.table import Table

from bench.runtime.control import scripted
from lamina.config.server_config import ServerConfig
from lamina.control.agent_messages import Serving
from lamina.control.frontend_messages import FrontendBootstrap, FrontendHello, Resume, Submit, pack_tokens
from lamina.core.sampling import SamplingParams
from lamina.core.types import NOBODY
from lamina.engine.engine import Engine
from lamina.engine.frontends import Frontends
from lamina.models.directory import find
from lamina.serve.frontend_processes import FrontendProcesses
from lamina.serve.server import bind, serve

TOKENS = 4000
SLOW = 16
START_S = 120.0
WARM_UP_S = 2.0
FEWEST_STEPS = 50


@dataclass(frozen=True)
class Cost:
    """CPU microseconds per streamed token, and what clients see."""

    engine_us: float
    frontends_us: float
    delivered: float  # of the tokens that the workers drew
    tokens_per_s: float
    gap_median_ms: float
    gap_p99_ms: float


def read_streams(port: int, streams: int, slow: int, pipe: Connection) -> None:
    """The clients: open all streams, then answer every "count" with the events and gaps since the last one."""
    body = json.dumps({"prompt": "def f", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    import selectors

    ready = selectors.DefaultSelector()
    last: dict[socket.socket, float] = {}
    unread = []
    for number in range(streams + slow):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        if number < streams:
            ready.register(client, selectors.EVENT_READ)
        else:
            unread.append(client)
    ready.register(pipe, selectors.EVENT_READ)
    events, gaps = 0, list[float]()
    while True:
        for key, _ in ready.select():
            if key.fileobj is pipe:
                if pipe.recv() == "end":
                    return
                pipe.send((len(last), events, gaps))
                events, gaps = 0, []
                continue
            client = key.fileobj  # type: ignore[assignment]
            received, now = client.recv(1 << 16), time.monotonic()
            if not received:
                ready.unregister(client)
            count = received.count(b"data: ")
            if count:
                events += count
                gaps.append(now - last.get(client, now))
                last[client] = now


def drive(engine: Engine, port: int, streams: int, slow: int, seconds: float, found: list[Cost]) -> None:
    """Run the clients, measure, and tell the server to stop."""
    ours, theirs = multiprocessing.Pipe()
    clients = get_context("spawn").Process(target=read_streams, args=(port, streams, slow, theirs), daemon=True)
    clients.start()
    try:
        found.append(_measure(engine, streams, seconds, ours))
    finally:
        clients.kill()
        os.kill(os.getpid(), signal.SIGTERM)


def _measure(engine: Engine, streams: int, seconds: float, clients: Any) -> Cost:
    def count() -> tuple[int, int, list[float]]:
        clients.send("count")
        answer: tuple[int, int, list[float]] = clients.recv()
        return answer

    deadline = time.monotonic() + START_S
    while count()[0] < streams:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {streams} streams began within {START_S:.0f} s: {engine.stats()}")
        time.sleep(0.1)
    time.sleep(WARM_UP_S)
    frontends = [p for p in psutil.Process().children() if "lamina.serve" in " ".join(p.cmdline())]
    count()
    begun, spent, steps = time.monotonic(), time.process_time(), engine.stats().steps
    others = _spent(frontends)
    time.sleep(seconds)
    _, events, gaps = count()
    elapsed, spent, others = time.monotonic() - begun, time.process_time() - spent, _spent(frontends) - others
    drawn = streams * (engine.stats().steps - steps)
    gaps.sort()
    return Cost(
        1e6 * spent / events,
        1e6 * others / events,
        events / drawn,
        events / elapsed,
        1e3 * statistics.median(gaps),
        1e3 * gaps[len(gaps) * 99 // 100],
    )


def _spent(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(frontends: int, streams: int, slow: int, step_s: float, seconds: float) -> Cost:
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server raises it again at its end
    found: list[Cost] = []
    sequences = streams + slow
    with (
        bind("127.0.0.1", 0) as listener,
        FrontendProcesses(ServerConfig(frontends=frontends), find(None).path, listener) as processes,
        scripted((1, 1), sequences, 2 * sequences * TOKENS, step_s) as (engine, _),
    ):
        port = listener.getsockname()[1]
        driver = threading.Thread(target=drive, args=(engine, port, streams, slow, seconds, found))
        if frontends:
            with InThisProcess(engine, processes.folder) as owner:
                processes.serve(owner, driver.start)
        else:
            serve(engine, listener, driver.start)
        driver.join()
    return found[0]


class InThisProcess:
    """Implements ``lamina.serve.frontend_processes.Owner`` for an engine in this process."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.lost_frontends: dict[str, str] = {}
        self.gave_up = False
        self._engine = engine
        self._room = Frontends(engine, folder, os.getpid(), on_lost=self.lost_frontends.__setitem__)
        self.serving: Serving | None = Serving(self._room.bootstrap, "")

    @property
    def dead(self) -> str | None:
        return self._engine.dead

    @property
    def beats(self) -> int:
        return time.monotonic_ns()

    def on_frontend_exit(self, frontend: str) -> None:
        """See ``Frontends``."""
        self._room.on_frontend_exit(frontend)

    def kill_engine(self) -> None:
        """Not while this process runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._room.close()


def discard(bootstrap: FrontendBootstrap, streams: int) -> None:
    """The body of a process that stands for a frontend: submits requests and reads what comes, as bytes."""
    context = zmq.Context()
    requests, answers = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for dealer, address in ((requests, bootstrap.requests), (answers, bootstrap.answers)):
        dealer.identity, dealer.rcvhwm = bootstrap.name.encode(), 0
        dealer.connect(address)
    while not answers.poll(20):
        requests.send(msgspec.msgpack.encode(FrontendHello()))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    requests.send(msgspec.msgpack.encode(Resume(0, [])))
    submit = Submit(0, [pack_tokens([5, 6])] * streams, [params], NOBODY, list(range(streams)))
    requests.send(msgspec.msgpack.encode(submit))
    while True:
        answers.recv()


def engine_alone(streams: int, seconds: float) -> float:
    """CPU microseconds of the engine's process per token that it sends."""
    with tempfile.TemporaryDirectory() as folder, scripted((1, 1), streams, 2 * streams * TOKENS) as (engine, _):
        room = Frontends(engine, Path(folder), os.getpid())
        bootstrap = msgspec.structs.replace(room.bootstrap, name="0")
        reader = get_context("spawn").Process(target=discard, args=(bootstrap, streams), daemon=True)
        reader.start()
        deadline = time.monotonic() + START_S
        while engine.stats().running < streams or engine.stats().steps < FEWEST_STEPS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {streams} requests run: {engine.stats()}")
            time.sleep(0.05)
        begun, spent, steps = time.monotonic(), time.process_time(), engine.stats().steps
        while time.monotonic() < begun + seconds and engine.stats().running == streams:
            time.sleep(0.05)
        spent, steps = time.process_time() - spent, engine.stats().steps - steps
        reader.kill()
        engine.close()
        room.close()
    return 1e6 * spent / (steps * streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, of each arrangement and round")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are printed")
    parser.add_argument("--frontends", default="0,1,2")
    options = parser.parse_args()
    step_s = options.step_ms / 1e3
    alone = []
    for _ in range(options.rounds):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            alone.append(fresh.submit(engine_alone, options.streams, options.seconds).result())
    print(f"engine alone: {statistics.median(alone):.1f} us/token")
    arrangements = [(int(each), slow) for each in options.frontends.split(",") for slow in (0, SLOW)]
    found: dict[tuple[int, int], list[Cost]] = {each: [] for each in arrangements}
    for _ in range(options.rounds):
        for frontends, slow in arrangements:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                cost = fresh.submit(measure, frontends, options.streams, slow, step_s, options.seconds).result()
                found[frontends, slow].append(cost)
    table = Table(title=f"{options.streams} streams, a token each every {options.step_ms:.0f} ms")
    columns = ("frontends", "not reading", "engine us/token", "frontends us/token", "delivered", "tokens/s", "gap ms")
    for column in (*columns, "p99 ms", "streams/core"):
        table.add_column(column, justify="right")
    for (frontends, slow), costs in found.items():
        engine, others, delivered, rate, gap, p99 = (
            statistics.median(getattr(cost, name) for cost in costs) for name in Cost.__annotations__
        )
        busy = others if frontends else engine
        table.add_row(
            *(str(frontends), str(slow), f"{engine:.1f}", f"{others:.1f}", f"{delivered:.2f}", f"{rate:.0f}"),
            *(f"{gap:.1f}", f"{p99:.0f}", f"{1e6 * step_s / busy:.0f}"),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
