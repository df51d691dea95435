"""Measures a burst of long contexts on a pool that grows by memory workers, by a whole replica, or not at all.

    python -m bench.runtime.burst [--model 60m] [--rounds 3] [--json FILE] [--picture FILE.svg]

One compute and two memory workers decode two short requests when a burst arrives: long contexts, several times what
their KV slots hold. Three systems serve the same requests:

  fixed     stays as it is: contexts wait for slots.
  memory    scales its memory pool by load (`--autoscale memory=2:6`).
  replicas  starts a second engine with as many workers of its own once contexts have waited for as long, and sends it
            those that still wait. It loads weights.

Printed for each: the time between tokens of the short requests and of all requests, the time to first token of the
contexts, the duration of the burst, and worker-seconds, counted from the request for a worker. All workers share this
machine's cores, so more workers add slots and no bandwidth.

In a separate run, a memory worker is added to an idle cluster: the time from the request to the first token from KV on
it, in parts (target 1 s). ``--picture`` draws both.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.models import MODELS, model_directory
from bench.runtime.burst_picture import Sample, draw
from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.scaling import WINDOWS
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch

MEMORIES, MOST_MEMORIES = 2, 6
SHORT, SHORT_PROMPT, SHORT_ANSWER = 2, 64, 400
CONTEXTS, CONTEXT, ANSWER = 16, 512, 192
SLOTS = 1280  # of a memory worker
BURST_AT = SHORT_ANSWER // 4  # tokens that each of the short requests has drawn
WAITED_S = WINDOWS["memory"].grow_s
SAMPLE_S = 0.02
TIMEOUT_S = 400.0
POLL_S = 0.002


@dataclasses.dataclass
class Stream:
    """One request, with the times of its submission and its tokens."""

    name: str
    prompt: list[int]
    tokens: int
    sent: float = 0.0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    error: str = ""
    done: bool = False

    @property
    def size(self) -> int:
        """KV slots at its end."""
        return len(self.prompt) + self.tokens


@dataclasses.dataclass(frozen=True)
class Figures:
    """One run of a system, in seconds."""

    system: str
    short_p99: float
    short_longest: float
    all_p99: float
    first_median: float
    first_longest: float
    burst_at_s: float
    burst_s: float
    compute_s: float
    memory_s: float
    samples: list[Sample]


class System:
    """Engines behind one queue. A request goes to the first engine with enough free slots, in order of arrival; with
    one engine, at once."""

    def __init__(self, config: EngineConfig, replicates: bool) -> None:
        self._config, self._replicates = config, replicates
        self.engines = [launch(config)]
        self._changed = threading.Condition()
        self._load = [0]  # KV slots of what each engine has to serve
        self._queue: deque[Stream] = deque()
        self._ended = 0
        self._waits_since: float | None = None
        self.starting: threading.Thread | None = None

    def send(self, stream: Stream) -> None:
        stream.sent = time.monotonic()
        with self._changed:
            self._queue.append(stream)
        self._dispatch()

    def _dispatch(self) -> None:
        while True:
            with self._changed:
                number = min(range(len(self.engines)), key=lambda one: self._load[one])
                room = not self._replicates or self._load[number] + (self._queue[0].size if self._queue else 0) <= (
                    0.9 * MEMORIES * SLOTS
                )
                if not self._queue or not room:
                    return
                stream = self._queue.popleft()
                self._load[number] += stream.size
            params = SamplingParams(temperature=0.0, max_tokens=stream.tokens, ignore_eos=True)
            self.engines[number].submit(stream.name, stream.prompt, params, self._reader(stream, number))

    def _reader(self, stream: Stream, number: int) -> Callable[[RequestUpdate], None]:
        def on_update(update: RequestUpdate) -> None:
            if update.tokens:
                stream.arrivals.append(time.monotonic())
            if update.finished:
                with self._changed:
                    stream.error, stream.done = update.error or "", True
                    self._load[number] -= stream.size
                    self._ended += 1
                    self._changed.notify_all()
                self._dispatch()

        return on_update

    def waiting(self) -> int:
        with self._changed:
            queued = len(self._queue)
        return queued + sum(engine.stats().waiting for engine in self.engines)

    def look(self, now: float) -> Sample:
        """Count workers and waiting requests; start a replica if they have waited for long enough."""
        waiting = self.waiting()
        self._waits_since = (self._waits_since or now) if waiting else None
        due = self._waits_since is not None and now - self._waits_since >= WAITED_S
        if self._replicates and due and self.starting is None:
            self.starting = threading.Thread(target=self._replicate)
            self.starting.start()
        workers = [name for engine in self.engines for name in engine.stats().workers]
        started = 1 if self.starting is not None and len(self.engines) == 1 else 0
        memory = sum(name.startswith("memory") for name in workers) + started * MEMORIES
        return Sample(now, len(workers) - memory + started * (1 + MEMORIES), memory, waiting)

    def _replicate(self) -> None:
        engine = launch(self._config)
        with self._changed:
            self.engines.append(engine)
            self._load.append(0)
        self._dispatch()

    def wait(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended >= count, TIMEOUT_S):
                raise SystemExit(f"error: {self._ended} of {count} requests have ended after {TIMEOUT_S:g} s")

    def close(self) -> None:
        if self.starting is not None:
            self.starting.join(TIMEOUT_S)
        for engine in self.engines:
            engine.close()


def settings(model: Path, slots: int = SLOTS) -> EngineConfig:
    shape = json.loads((model / "config.json").read_text())
    per_token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return EngineConfig(
        model=str(model),
        load_format="dummy",
        compute="cpu:1",
        memory=f"cpu:{MEMORIES}",
        kv_cache_memory_bytes=slots * per_token,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        prefix_cache=False,
    )


def run(system: str, config: EngineConfig) -> Figures:
    if system == "memory":
        config = dataclasses.replace(config, autoscale=f"memory={MEMORIES}:{MOST_MEMORIES}")
    served = System(config, replicates=system == "replicas")
    short = [Stream(f"short{one}", [5 + one] * SHORT_PROMPT, SHORT_ANSWER) for one in range(SHORT)]
    burst = [Stream(f"context{one}", [100 + one] * CONTEXT, ANSWER) for one in range(CONTEXTS)]
    samples: list[Sample] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append(served.look(time.monotonic()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        begun = time.monotonic()
        for stream in short:
            served.send(stream)
        while not all(len(stream.arrivals) >= BURST_AT for stream in short):
            if time.monotonic() > begun + TIMEOUT_S:
                raise SystemExit(f"error: the short requests have not drawn {BURST_AT} tokens within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        sent = time.monotonic()
        for stream in burst:
            served.send(stream)
        served.wait(SHORT + CONTEXTS)
    finally:
        ended.set()
        watcher.join(TIMEOUT_S)
        served.close()
    if errors := [stream.error for stream in [*short, *burst] if stream.error]:
        raise SystemExit(f"error: {errors[0]}")
    over = max(stream.arrivals[-1] for stream in burst)
    firsts = [stream.arrivals[0] - stream.sent for stream in burst]
    mine, all_gaps = _gaps(short, sent, over), _gaps([*short, *burst], sent, over)
    during = [one for one in samples if begun <= one.at <= over]
    steps = [later.at - one.at for one, later in itertools.pairwise(during)]
    return Figures(
        system,
        float(np.quantile(mine, 0.99)),
        max(mine),
        float(np.quantile(all_gaps, 0.99)),
        statistics.median(firsts),
        max(firsts),
        sent - begun,
        over - sent,
        sum(one.compute * step for one, step in zip(during, steps, strict=False)),
        sum(one.memory * step for one, step in zip(during, steps, strict=False)),
        [dataclasses.replace(one, at=one.at - begun) for one in during],
    )


def _gaps(streams: Sequence[Stream], begin: float, end: float) -> list[float]:
    """Times between the updates of a request, from the begin of the burst to its end."""
    pairs = [pair for one in streams for pair in zip(one.arrivals, one.arrivals[1:], strict=False)]
    return [after - before for before, after in pairs if after >= begin and before <= end]


# -- one memory worker that joins ---------------------------------------------------------------------------------

PARTS = ("starts, imports, makes its slab", "links to the others, enters", "first token from its KV")


def join(config: EngineConfig) -> tuple[float, list[float]]:
    """Add a memory worker to an idle cluster; return the CPU seconds until it has joined, and seconds of ``PARTS``."""
    workers = LocalWorkers()
    engine = launch(config, workers=workers)
    try:
        _serve(engine, 1)
        before = engine.stats().workers.keys()
        requested = time.monotonic()
        joined = engine.scale(memory=1)
        prepared = entered = 0.0
        while not entered:
            states = engine.stats().workers
            now, done = time.monotonic(), joined.done()
            states = {name: state for name, state in states.items() if name not in before}
            starts = not states or "preparing" in states.values()
            prepared = prepared or (now if done or not starts else 0.0)
            entered = now if done else 0.0
            time.sleep(POLL_S)
        (name,) = joined.result()
        cpu = psutil.Process(workers.processes[name].pid).cpu_times()
        served = _serve(engine, MEMORIES + 1, name)  # each is placed on the worker with most room: one on the new one
    finally:
        engine.close()
    moments = (requested, prepared, entered, served)
    return cpu.user + cpu.system, [after - before for before, after in itertools.pairwise(moments)]


def _serve(engine: Engine, count: int, worker: str = "") -> float:
    """Serve short requests, all at once. Returns when the first of those with KV on ``worker`` had a token."""
    ended, arrivals = threading.Semaphore(0), list[float]()

    def on_update(update: RequestUpdate) -> None:
        if update.tokens and any(segment.worker == worker for segment in update.placement):
            arrivals.append(time.monotonic())
        if update.finished:
            ended.release()

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number in range(count):
        engine.submit(str(number), [7] * 16, params, on_update)
    for _ in range(count):
        if not ended.acquire(timeout=TIMEOUT_S):
            raise SystemExit(f"error: a request has not ended within {TIMEOUT_S:g} s")
    if worker and not arrivals:
        raise SystemExit(f"error: no request was placed on {worker}")
    return arrivals[0] if worker else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joins-only", action="store_true", help="time only the memory worker that joins")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    rounds = range(given.rounds)
    with model_directory(given.model) as model:
        config = settings(model)
        joins = [join(config) for _ in rounds]
        systems = () if given.joins_only else ("fixed", "memory", "replicas")
        in_turn = [run(system, config) for _ in rounds for system in systems]
    runs = {system: [one for one in in_turn if one.system == system] for system in systems}
    parts = {part: statistics.median(each[place] for _, each in joins) for place, part in enumerate(PARTS)}
    cpu_s, serves_s = statistics.median(cpu for cpu, _ in joins), statistics.median(sum(each) for _, each in joins)
    _print_join(parts, serves_s, cpu_s)
    medians = {system: _median(each) for system, each in runs.items()}
    if medians:
        _print(medians)
    if given.json is not None:
        found = {system: dataclasses.asdict(one) | {"samples": []} for system, one in medians.items()}
        figures = {"join_s": parts, "serves_s": serves_s, "join_cpu_s": cpu_s, "systems": found}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if given.picture is not None:
        shown = {system: each[0].samples for system, each in runs.items()}
        burst_at_s = statistics.median(one.burst_at_s for one in in_turn) if in_turn else 0.0
        given.picture.write_text(draw(parts, shown, burst_at_s))


def _print_join(parts: Mapping[str, float], serves_s: float, cpu_s: float) -> None:
    table = Table("part", "ms", title="A memory worker that joins")
    for part, seconds in parts.items():
        table.add_row(part, f"{seconds * 1e3:.0f}")
    table.add_row("all, from the request", f"{serves_s * 1e3:.0f}")
    table.add_row("CPU time of its process until it has entered", f"{cpu_s * 1e3:.0f}")
    Console().print(table)


def _median(each: Sequence[Figures]) -> Figures:
    names = [field.name for field in dataclasses.fields(Figures) if field.name not in ("system", "samples")]
    medians = {name: statistics.median(getattr(one, name) for one in each) for name in names}
    return dataclasses.replace(each[0], **medians)


def _print(medians: dict[str, Figures]) -> None:
    table = Table("what", *medians, title=f"{CONTEXTS} contexts of {CONTEXT} tokens on {MEMORIES * SLOTS} slots")
    rows: dict[str, Callable[[Figures], str]] = {
        "short requests, p99 between tokens": lambda one: f"{one.short_p99 * 1e3:.0f} ms",
        "short requests, longest": lambda one: f"{one.short_longest * 1e3:.0f} ms",
        "all, p99 between tokens": lambda one: f"{one.all_p99 * 1e3:.0f} ms",
        "contexts, median to first token": lambda one: f"{one.first_median:.1f} s",
        "contexts, longest to first token": lambda one: f"{one.first_longest:.1f} s",
        "from the burst to its last token": lambda one: f"{one.burst_s:.1f} s",
        "compute worker-seconds": lambda one: f"{one.compute_s:.1f}",
        "memory worker-seconds": lambda one: f"{one.memory_s:.1f}",
    }
    for what, value in rows.items():
        table.add_row(what, *(value(one) for one in medians.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
