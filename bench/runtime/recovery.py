"""Measures the pause of streams when a memory worker dies, joins or leaves, and when the engine dies.

    python -m bench.runtime.recovery [--model 60m] [--rounds 3] [--json FILE]

One compute and four memory workers; requests of 256 prompt tokens decode when one memory worker is killed. Printed: the
time from the kill until steps are planned again (detection and fencing, target 1 s); the longest pause of any stream;
the tokens that are computed again, and their time at the rate at which this run computed its prompts.

In a second run, a memory worker joins, and then one leaves. Printed: how long each takes from the request until it is
done; and the pause it adds: the longest gap of a stream around the moment at which the members change, beside the
longest in as much time just before the change was requested (targets 50 ms and 100 ms). While the process of the joiner
starts it competes with the others for cores, which the second line shows.

In a third run, a server with one frontend streams over HTTP, and the process of its engine is killed. Printed: the
longest pause that a client sees (target 3 s, with the workers' weights kept); the tokens that are computed again; and
their time at the rate at which this run computed its prompts.
"""

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.models import MODELS, model_directory
from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch

REQUESTS, PROMPT, GENERATED = 16, 256, 192
KILL_AFTER = 32  # tokens of every stream
MEMORIES = 4
LONG = 1500  # generated tokens of a stream during which workers join and leave
WINDOW_S = 1.0
TIMEOUT_S = 300.0
POLL_S = 0.001


@dataclasses.dataclass(frozen=True)
class Figures:
    """One round, in seconds and tokens."""

    fenced_s: float
    pause_s: float
    usual_gap_s: float
    recomputed: int
    floor_s: float


@dataclasses.dataclass(frozen=True)
class Change:
    """A join or leave, in seconds: its duration (``took_s``), and the longest gaps of streams before the request
    (``before_s``), during the change (``meanwhile_s``) and when the members changed (``around_s``)."""

    took_s: float
    before_s: float
    meanwhile_s: float
    around_s: float


@dataclasses.dataclass(frozen=True)
class Restart:
    """The restart of a killed engine, in seconds and tokens."""

    pause_s: float
    usual_gap_s: float
    recomputed: int
    floor_s: float


class Streams:
    """The arrival times of every request's tokens."""

    def __init__(self, engine: Engine, generated: int = GENERATED) -> None:
        self.arrivals: list[list[float]] = [[] for _ in range(REQUESTS)]
        self.begun = time.monotonic()
        self.errors: list[str] = []
        self._changed, self._left = threading.Condition(), REQUESTS
        params = SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True)
        for number in range(REQUESTS):
            engine.submit(str(number), [5 + number] * PROMPT, params, self._on_update)

    def _on_update(self, update: RequestUpdate) -> None:
        with self._changed:
            if update.tokens:
                self.arrivals[int(update.request.request_id)].append(time.monotonic())
            self._left -= update.finished
            if update.error:
                self.errors.append(update.error)
            self._changed.notify_all()

    def wait(self, tokens: int) -> None:
        """Wait until every stream has had ``tokens`` updates, or has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: min(map(len, self.arrivals)) >= tokens or not self._left, TIMEOUT_S):
                raise SystemExit(f"error: after {TIMEOUT_S:g} s, {self._left} of {REQUESTS} requests have not ended")

    def wait_beyond(self, moment: float) -> None:
        """Wait until every stream has had an update after ``moment``, or all have ended."""
        with self._changed:
            told = self._changed.wait_for(
                lambda: not self._left or min(arrivals[-1] for arrivals in self.arrivals) > moment, TIMEOUT_S
            )
        if not told:
            raise SystemExit(f"error: a stream has had no update for {TIMEOUT_S:g} s")

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest gap between two updates of a stream that overlaps [begin, end]."""
        with self._changed:
            pairs = [pair for arrivals in self.arrivals for pair in itertools.pairwise(arrivals)]
        return max((after - before for before, after in pairs if after >= begin and before <= end), default=0.0)


def changes(model: Path) -> tuple[Change, Change]:
    """A memory worker joins, and one leaves."""
    engine = launch(EngineConfig(model=str(model), load_format="dummy", memory=f"cpu:{MEMORIES}"))
    try:
        streams = Streams(engine, generated=LONG)
        streams.wait(KILL_AFTER)
        figures = [change(engine, streams, memory) for memory in (1, -1)]
    finally:
        engine.close()
    return figures[0], figures[1]


def change(engine: Engine, streams: Streams, memory: int) -> Change:
    time.sleep(WINDOW_S)
    asked = time.monotonic()
    engine.scale(memory=memory).result(TIMEOUT_S)
    done = time.monotonic()
    streams.wait_beyond(done + WINDOW_S / 2)
    around = streams.longest_gap(done - WINDOW_S / 2, done + WINDOW_S / 2)
    return Change(
        done - asked,
        streams.longest_gap(asked - WINDOW_S, asked),
        streams.longest_gap(asked, done),
        around,
    )


def one_round(model: Path) -> Figures:
    workers = LocalWorkers()
    engine = launch(
        EngineConfig(model=str(model), load_format="dummy", memory=f"cpu:{MEMORIES}", max_restarts=0), workers=workers
    )
    try:
        streams = Streams(engine)
        streams.wait(1)
        prefill_s = max(arrivals[0] for arrivals in streams.arrivals) - streams.begun
        streams.wait(KILL_AFTER)
        killed = time.monotonic()
        workers.processes["memory0"].kill()
        deadline = killed + TIMEOUT_S
        while engine.stats().recoveries == 0:
            if time.monotonic() > deadline:
                raise SystemExit(f"error: no recovery within {TIMEOUT_S:g} s of the kill")
            time.sleep(POLL_S)
        fenced_s = time.monotonic() - killed
        streams.wait(GENERATED)
        stats = engine.stats()
    finally:
        engine.close()
    if streams.errors:
        raise SystemExit(f"error: {len(streams.errors)} requests failed: {streams.errors[0]}")
    gaps = [
        (after - before, after >= killed)
        for arrivals in streams.arrivals
        for before, after in itertools.pairwise(arrivals)
    ]
    usual = statistics.median(gap for gap, _ in gaps)
    pause = max(gap for gap, late in gaps if late)
    floor = stats.recomputed * prefill_s / (REQUESTS * PROMPT)
    return Figures(fenced_s, pause, usual, stats.recomputed, floor)


def read_stream(url: str, number: int, arrivals: list[float], errors: list[str]) -> None:
    """One client of a server; notes when tokens come, of which an event may bring several."""
    body = {"prompt": [5 + number] * PROMPT, "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True}
    body["logprobs"] = 0  # which names every token, also those without text of their own
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    errors.append(line)
                    return
                for choice in event["choices"]:
                    arrivals.extend([time.monotonic()] * len(choice["logprobs"]["tokens"]))


def restart(model: Path) -> Restart:
    command = [sys.executable, "-m", "lamina", "launch", "--port", "0", "--model", str(model), "--load-format", "dummy"]
    with subprocess.Popen([*command, "--memory", f"cpu:{MEMORIES}"], stdout=subprocess.PIPE, text=True) as server:
        try:
            found = re.search(r"http://[0-9.:]+", server.stdout.readline() if server.stdout is not None else "")
            if found is None:
                raise SystemExit("error: the server has not started")
            return _restarted(found[0], psutil.Process(server.pid))
        finally:
            server.terminate()


def _restarted(url: str, server: psutil.Process) -> Restart:
    children = server.children(recursive=True)
    engine = next(one for one in children if "lamina.serve.engine_process" in one.cmdline())
    workers = {one.pid for one in children if {"lamina.compute", "lamina.memory.worker"} & set(one.cmdline())}
    arrivals: list[list[float]] = [[] for _ in range(REQUESTS)]
    errors: list[str] = []
    begun = time.monotonic()
    clients = [
        threading.Thread(target=read_stream, args=(url, number, arrivals[number], errors)) for number in range(REQUESTS)
    ]
    for client in clients:
        client.start()
    while min(map(len, arrivals)) < KILL_AFTER:
        if errors or time.monotonic() > begun + TIMEOUT_S:
            raise SystemExit(f"error: the streams do not go on: {errors[:1]}")
        time.sleep(POLL_S)
    prefill_s = max(each[0] for each in arrivals) - begun
    killed = time.monotonic()
    recomputed = REQUESTS * PROMPT + sum(map(len, arrivals))
    engine.kill()
    for client in clients:
        client.join(TIMEOUT_S)
    if errors or min(map(len, arrivals)) < GENERATED:
        counts = sorted(map(len, arrivals))
        raise SystemExit(f"error: streams have ended with {counts} of {GENERATED} tokens: {errors[:1]}")
    if not workers <= {one.pid for one in server.children(recursive=True)}:
        raise SystemExit("error: workers have been started again")
    gaps = [pair for each in arrivals for pair in itertools.pairwise(each)]
    pause = max(after - before for before, after in gaps if after >= killed)
    usual = statistics.median(after - before for before, after in gaps)
    return Restart(pause, usual, recomputed, recomputed * prefill_s / (REQUESTS * PROMPT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with model_directory(given.model) as model:
        rounds = [one_round(model) for _ in range(given.rounds)]
        changed = [changes(model) for _ in range(given.rounds)]
        restarted = [restart(model) for _ in range(given.rounds)]
    table = Table(title=f"A memory worker of 1 + {MEMORIES} is killed: {given.model}, {REQUESTS} streams")
    table.add_column("what")
    for heading in ("median", "worst"):
        table.add_column(heading, justify="right")
    for what, values, unit in (
        ("until steps are planned again", [one.fenced_s * 1e3 for one in rounds], "ms"),
        ("longest pause of a stream", [one.pause_s * 1e3 for one in rounds], "ms"),
        ("usual time between tokens", [one.usual_gap_s * 1e3 for one in rounds], "ms"),
        ("tokens computed again", [float(one.recomputed) for one in rounds], ""),
        ("their time at the prompts' rate", [one.floor_s * 1e3 for one in rounds], "ms"),
    ):
        table.add_row(what, *(f"{value:.0f} {unit}".strip() for value in (statistics.median(values), max(values))))
    Console().print(table)
    for what, each in (("joins", [one for one, _ in changed]), ("leaves", [one for _, one in changed])):
        Console().print(_table(f"A memory worker {what}: {given.model}, {REQUESTS} streams", each))
    table = Table(title=f"The engine of a server is killed: {given.model}, {REQUESTS} streams over HTTP")
    table.add_column("what")
    for heading in ("median", "worst"):
        table.add_column(heading, justify="right")
    for what, values, unit in (
        ("longest pause of a stream", [one.pause_s * 1e3 for one in restarted], "ms"),
        ("usual time between tokens", [one.usual_gap_s * 1e3 for one in restarted], "ms"),
        ("tokens computed again", [float(one.recomputed) for one in restarted], ""),
        ("their time at the prompts' rate", [one.floor_s * 1e3 for one in restarted], "ms"),
    ):
        table.add_row(what, *(f"{value:.0f} {unit}".strip() for value in (statistics.median(values), max(values))))
    Console().print(table)
    if given.json is not None:
        again = [dataclasses.asdict(one) for one in restarted]
        lost = [dataclasses.asdict(one) for one in rounds]
        joined, left = ([dataclasses.asdict(pair[place]) for pair in changed] for place in (0, 1))
        given.json.write_text(
            json.dumps({"lost": lost, "joined": joined, "left": left, "restarted": again}, indent=2) + "\n"
        )


def _table(title: str, changed: list[Change]) -> Table:
    table = Table(title=title)
    table.add_column("what")
    for heading in ("median", "worst"):
        table.add_column(heading, justify="right")
    for what, values in (
        ("from the request until it is done", [one.took_s for one in changed]),
        ("longest gap of a stream meanwhile", [one.meanwhile_s for one in changed]),
        ("longest gap when the members change", [one.around_s for one in changed]),
        ("longest gap before", [one.before_s for one in changed]),
    ):
        table.add_row(what, *(f"{value * 1e3:.0f} ms" for value in (statistics.median(values), max(values))))
    return table


if __name__ == "__main__":
    main()
