"""Measures the engine's CPU time per step and per token as the pools grow, against the smallest cluster's.

    python -m bench.runtime.control [--batch 8] [--seconds 4] [--rounds 3] [--pools 2+8,8+64,50+200,200+800]

The engine is real: its turn, its encrypted control plane, its serialisation. The workers are scripted: another process
has all their sockets, replies at once with a token for every sequence of a step, and reports slab usage periodically.
All clusters run steps of ``--batch`` sequences, one lane per compute worker, so that only the number of workers
differs; requests of 100 to 300 tokens replace each other. "Messages" is the number that the engine sends per step: a
step cannot concern more memory workers than it has sequences.
"""

import argparse
import contextlib
import gc
import os
import random
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from lamina.cluster.bringup import Cluster
from lamina.cluster.conversations import Wish
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import (
    USAGE_S,
    Hello,
    MemorySetup,
    ModelLoaded,
    SlabUsage,
    Step,
    StepDone,
    Stop,
    ToWorker,
)
from lamina.control.sockets import HEARTBEAT, Bootstrap, ControlServer
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType, Overlap
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.models.directory import find
from lamina.schedule.limits import Limits
from lamina.text.tokenizer import Tokenizer

PROMPT = list(range(5, 21))
TOKENS = 100, 300
START_S = 120.0
WARM_UP_STEPS = 30  # of each lane: the prompts are computed by then
FEWEST_STEPS = 3000  # measured
IDLE_S = 3.0
LOOK_S = 0.1  # between two reads of memory workers' messages and heartbeats


@dataclass(frozen=True)
class Cost:
    """Engine CPU in microseconds, control messages that it sent, and its share of a core without requests."""

    us_per_step: float
    us_per_token: float
    messages_per_step: float
    steps_per_s: float
    idle_percent: float


class NoProcesses:
    """Implements ``Workers`` for scripted workers, which have no processes."""

    def ended(self) -> Mapping[str, str]:
        return {}

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        """None can be lost."""

    def wishes(self) -> list[Wish]:
        return []

    def close(self) -> None:
        """They stop when told to."""


class Counting(ControlServer):
    """Counts the messages it sends."""

    sent = 0

    def send(self, workers: Sequence[str], message: Any) -> None:
        self.sent += len(workers)
        super().send(workers, message)


class Scripted:
    """All workers, in a process of their own."""

    def __init__(self, bootstraps: Sequence[Bootstrap], step_s: float) -> None:
        """``step_s``: how long a step takes; 0: it is answered at once."""
        self._step_s = step_s
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToWorker)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(bootstraps) + 16)
        self._heartbeats = self._connect(bootstraps, HEARTBEAT)  # first: a worker that greets is watched
        self._computes = self._connect(one for one in bootstraps if one.name.startswith("compute"))
        self._memories = self._connect(one for one in bootstraps if one.name.startswith("memory"))
        for dealer, _ in (*self._computes.sockets, *self._memories.sockets):
            dealer.send(self._encoder.encode(Hello("scripted")))

    def _connect(self, bootstraps: Iterable[Bootstrap], suffix: bytes = b"") -> zmq.Poller:
        poller = zmq.Poller()
        for bootstrap in bootstraps:
            dealer = self._context.socket(zmq.DEALER)
            dealer.identity = bootstrap.name.encode() + suffix
            dealer.curve_serverkey = bootstrap.engine_key
            dealer.curve_publickey, dealer.curve_secretkey = bootstrap.public_key, bootstrap.secret_key
            dealer.linger, dealer.sndhwm, dealer.rcvhwm = 0, 0, 0
            dealer.connect(bootstrap.address)
            poller.register(dealer, zmq.POLLIN)
        return poller

    def play(self) -> None:
        """Reply until the engine says stop or ends: at once for compute workers, every ``LOOK_S`` for others."""
        looked, reported, number = time.monotonic(), time.monotonic(), 0
        parent = os.getppid()
        busy = set[Any]()  # memory workers that were told of steps since the last report
        while os.getppid() == parent:  # not left behind by a benchmark that was killed
            for dealer, payload in _arrived(self._computes, 10):
                message = self._decoder.decode(payload)
                if isinstance(message, Stop):
                    self._context.destroy(linger=0)
                    return
                if isinstance(message, Step):
                    time.sleep(self._step_s if message.plan.runs else 0.0)
                    dealer.send(self._encoder.encode(_done(message.plan)))
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                for dealer, payload in _arrived(self._heartbeats, 0):
                    dealer.send(payload)
                busy |= {dealer for dealer, _ in _arrived(self._memories, 0)}
            if now - reported >= USAGE_S:
                reported, number = now, number + 1
                usage = self._encoder.encode(SlabUsage(1000 + number, 8, float(number)))
                for dealer in busy:
                    dealer.send(usage)
                busy.clear()


def _arrived(poller: zmq.Poller, timeout_ms: int) -> Iterator[tuple[Any, bytes]]:
    for dealer, _ in poller.poll(timeout_ms):
        with contextlib.suppress(zmq.Again):
            while True:
                yield dealer, dealer.recv(zmq.NOBLOCK)


def play(bootstraps: Sequence[Bootstrap], step_s: float) -> None:
    """The body of the workers' process."""
    Scripted(bootstraps, step_s).play()


def _done(plan: StepPlan) -> StepDone:
    tokens = [100 + sequence % 100 for sequence in plan.drawing]
    return StepDone(plan.step, tokens, rows=len(tokens), busy_s=1e-3, waited_s=1e-3)


class Load:
    """``at_once`` requests at a time: each that ends is replaced by a new one."""

    def __init__(self, engine: Engine, at_once: int) -> None:
        self.tokens = 0
        self.failures = Failures()
        self._engine = engine
        self._random = random.Random(0)
        self._number = 0
        self._closed = False
        for _ in range(at_once):
            self._submit()

    def close(self) -> None:
        self._closed = True

    def _submit(self) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=self._random.randint(*TOKENS), ignore_eos=True)
        self._engine.submit(str(self._number), PROMPT, params, self._take)

    def _take(self, update: RequestUpdate) -> None:
        self.failures.note(update)
        self.tokens += len(update.completions[0].token_ids)
        if update.finished and not self._closed:
            self._submit()


def run(engine: Engine, steps: int, seconds: float) -> None:
    """Wait for this many more steps, and at least this long."""
    target, until = engine.stats().steps + steps, time.monotonic() + seconds
    while engine.stats().steps < target or time.monotonic() < until:
        if time.monotonic() > until + START_S:
            raise TimeoutError(f"{steps} steps take longer than {START_S:.0f} s: {engine.stats()}")
        time.sleep(0.25)  # asking takes the engine 2 ms with 1,000 workers


@contextlib.contextmanager
def scripted(
    pool: tuple[int, int], sequences: int, capacity: int, step_s: float = 0.0
) -> Iterator[tuple[Engine, Counting]]:
    """A real engine with so many scripted compute and memory workers, which end with it; and its control plane.

    ``sequences``: at most so many at once. ``capacity``: token slots of a memory worker.
    """
    computes, memories = pool
    compute_names = tuple(f"compute{number}" for number in range(computes))
    memory_names = tuple(f"memory{number}" for number in range(memories))
    control = Counting([*compute_names, *memory_names])
    others = get_context("spawn").Process(target=play, args=(list(control.bootstraps.values()), step_s), daemon=True)
    others.start()
    greeted, deadline = set[str](), time.monotonic() + START_S
    while len(greeted) < computes + memories:
        greeted |= {worker for worker, message in control.receive(0.1) if isinstance(message, Hello)}
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(greeted)} of {computes + memories} workers connected in {START_S:.0f} s")
    place = find(None)
    spec = AttentionSpec(layer=0, query_heads=32, kv_heads=8, qk_dim=128, v_dim=128, scale=1.0)
    pipeline = Pipeline(computes, computes)
    members = [Member(name, "compute", "cpu", "") for name in compute_names]
    members += [Member(name, "memory", "cpu", "", capacity) for name in memory_names]
    loaded = ModelLoaded([spec] * 80, DType.BFLOAT16, 0, 2048, 0)
    setup = MemorySetup(loaded.attentions, DType.BFLOAT16, capacity, 1, Overlap(), trace=False)
    cluster = Cluster(Topology(FIRST, tuple(members), pipeline), loaded, setup)
    limits = Limits(sequences, 2048, 4096)
    engine = Engine(EngineConfig(prefix_cache=False), place, Tokenizer(place), limits, control, NoProcesses(), cluster)
    try:
        yield engine, control
    finally:
        engine.close()
        others.join(10.0)
        if others.is_alive():
            others.kill()


def measure(pool: tuple[int, int], batch: int, seconds: float) -> Cost:
    computes, memories = pool
    capacity = max(4096, 4 * computes * batch * (TOKENS[1] + len(PROMPT)) // memories)
    with scripted(pool, batch * computes, capacity) as (engine, control):
        idle, begun = time.process_time(), time.monotonic()
        time.sleep(IDLE_S)
        idle = (time.process_time() - idle) / (time.monotonic() - begun)
        load = Load(engine, batch * computes)
        deadline = time.monotonic() + START_S
        while engine.stats().running < batch * computes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine.stats().running} of {batch * computes} requests run: {engine.stats()}")
            time.sleep(0.1)
        run(engine, computes * WARM_UP_STEPS, 0.0)
        gc.freeze()  # as in a server
        spent, steps, tokens, sent = time.process_time(), engine.stats().steps, load.tokens, control.sent
        begun = time.monotonic()
        run(engine, FEWEST_STEPS, seconds)
        spent, steps = time.process_time() - spent, engine.stats().steps - steps
        elapsed, tokens, sent = time.monotonic() - begun, load.tokens - tokens, control.sent - sent
        load.close()
        load.failures.check()
        return Cost(1e6 * spent / steps, 1e6 * spent / tokens, sent / steps, steps / elapsed, 100 * idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured, of each cluster and round")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are printed")
    parser.add_argument("--pools", default="2+8,8+64,50+200,200+800", help="compute+memory workers")
    options = parser.parse_args()
    pools = [(int(each.partition("+")[0]), int(each.partition("+")[2])) for each in options.pools.split(",")]
    found: dict[tuple[int, int], list[Cost]] = {pool: [] for pool in pools}
    for _ in range(options.rounds):
        for pool in pools:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                found[pool].append(fresh.submit(measure, pool, options.batch, options.seconds).result())
    table = Table(title=f"Engine CPU, steps of {options.batch} sequences")
    for column in ("compute + memory", "us/step", "ratio", "us/token", "ratio", "messages/step", "steps/s", "idle %"):
        table.add_column(column, justify="right")
    medians = {
        pool: [statistics.median(getattr(cost, name) for cost in costs) for name in Cost.__annotations__]
        for pool, costs in found.items()
    }
    first = medians[pools[0]]
    for (computes, memories), (step, token, messages, rate, idle) in medians.items():
        table.add_row(
            f"{computes} + {memories}",
            f"{step:.0f}",
            f"{step / first[0]:.2f}",
            f"{token:.1f}",
            f"{token / first[1]:.2f}",
            f"{messages:.1f}",
            f"{rate:.0f}",
            f"{idle:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
