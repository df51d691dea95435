"""One simulated run: a cluster of the real engine and workers, clients, faults, and what must hold.

Real: bring-up, linking, the engine with its turn, placement and recovery, the pools, and each worker from its set-up
on, with its loop, links, channels, slab, attention kernels and sampler. Messages have their encoded forms.

Simulated: time, processes, the control plane's sockets, the transport (which behaves as TCP does), and the model.

Left out: frontends, an engine that restarts, disks, replicas of several ranks or stages, GPUs. The clock
of the product is replaced in the module ``time``, not passed in.
"""

import logging
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lamina.cluster import sizing
from lamina.cluster.bringup import bring_up, greet
from lamina.config.engine_config import EngineConfig
from lamina.control.agent_messages import Start
from lamina.core.errors import LaminaError
from lamina.core.types import Client, FinishReason, Partition, SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import TokenUpdate
from lamina.models import directory
from lamina.text.tokenizer import Tokenizer
from tests.simulation.checks import check_quiet, check_turn
from tests.simulation.control import ENGINE, Processes, SimulatedServer
from tests.simulation.model import VOCABULARY, expected
from tests.simulation.network import Network
from tests.simulation.world import Broken, Task, World

MODEL = directory.find(None)
TOKENIZER = Tokenizer(MODEL)
REQUESTS_S = 0.25  # between two requests, on average
FAULTS_S = 0.7  # between two faults, on average
CALM_S = 240.0  # after the last fault, within which every request must end
LONGEST = 160
MOST_OPEN = 16  # requests: clients wait while there are so many


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: what, when, for how long, and a number that selects its victim."""

    number: int
    at: float
    kind: str
    seconds: float
    choice: float


@dataclass
class Sent:
    """A request of a client, and what has come back."""

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    abort_at: float | None
    drawn: list[list[int]]
    ended: list[FinishReason | None]
    error: str | None = None
    finished: bool = False

    @property
    def name(self) -> str:
        return f"request{self.number}"


@dataclass
class Layout:
    """The cluster of a run. ``local``: compute workers hold KV."""

    computes: int
    memories: int
    local: bool
    config: EngineConfig


def layout(seed: int) -> Layout:
    """Return the cluster that a seed has."""
    chance = random.Random(f"layout {seed}")
    computes, memories = chance.choice([1, 1, 2, 3]), chance.choice([1, 2, 2, 3])
    partition: Partition = chance.choice(["auto", "auto", "token", "request", "head"])
    longest = chance.choice([None, None, 40])
    local = chance.random() < 0.3
    if local:
        memories, partition = memories - 1, "auto" if partition == "head" else partition
    pools = ["local"] * local + [f"cpu:{memories}"] * (memories > 0)
    config = EngineConfig(
        compute=f"cpu:{computes}",
        memory=",".join(pools),
        transport="tcp",
        threads=1,
        kv_cache_memory_bytes=chance.choice([150_000, 250_000, 500_000]),
        kv_tokens_per_worker=None if partition == "request" else longest,
        max_num_seqs=chance.choice([4, 8]),
        max_num_batched_tokens=chance.choice([16, 32, 64]),
        max_model_len=LONGEST,
        partition=partition,
        lanes=computes * chance.choice([1, 2]),
        pipelining=chance.choice(["fixed", "auto"]),
        prefix_cache=chance.choice([True, True, False]),
        plan_ahead=chance.choice([True, True, False]),
        balance=chance.choice(["auto", "off"]),
        max_restarts=1000,
        generation_config="none",
    )
    return Layout(computes, memories, local, config)


KINDS: dict[str, float] = {
    "kill": 3.0,
    "stop": 2.0,
    "lag": 1.0,
    "block": 1.0,
    "part": 1.0,
    "slow": 1.0,
    "join": 1.0,
    "leave": 1.0,
    "pause": 1.0,
    "refuse": 0.5,
}
"""Kinds of faults, and how often each comes."""


def faults(seed: int, seconds: float) -> list[Fault]:
    """Return the faults that a seed has within so many seconds."""
    chance = random.Random(f"faults {seed}")
    found, at = list[Fault](), 0.0
    while at < seconds:
        at += chance.expovariate(1 / FAULTS_S)
        kind = chance.choices([*KINDS], [*KINDS.values()])[0]
        found.append(Fault(len(found), at, kind, chance.choice([0.02, 0.2, 1.0, 3.0, 8.0, 20.0]), chance.random()))
    return found


@dataclass
class Report:
    """What a run did.

    Attributes:
        errors: Requests that ended in an error, as they may.
        happened: Numbers of the faults that happened.
        seconds: Simulated time.
        failure: What did not hold; empty if everything did.
        events: How many there were, and a hash of when each happened.
    """

    steps: int
    requests: int
    errors: int
    happened: Sequence[int]
    seconds: float
    failure: str
    traceback: str
    trace: Sequence[str]
    events: tuple[int, int]


class _Log(logging.Handler):
    """Tells the errors that the product logs in the trace."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.tell(f"{record.name}: {self.format(record)}")


class Simulation:
    """A run. ``planned``: its faults. ``steps``: how many steps there are while faults and new requests come."""

    def __init__(self, seed: int, planned: Sequence[Fault], steps: int) -> None:
        self.seed, self.planned, self.steps = seed, planned, steps
        self.layout = layout(seed)
        self.world = World(seed)
        self.network = Network(self.world)
        self.processes = Processes(self.network)
        self.sent: list[Sent] = []
        self._open = 0  # of them
        self.engine: Engine | None = None
        self.engine_task: Task | None = None
        self.failure: BaseException | None = None
        self.calm = False  # no fault and no request comes any more
        self._load = random.Random(f"load {seed}")
        self._happened: list[int] = []
        self._prefixes = [self._tokens(self._load.randint(8, 60)) for _ in range(3)]

    def run(self) -> Report:
        """Run to the end. Failures are in the report."""
        failure = trace = ""
        log = _Log(self.world)
        logging.getLogger("lamina").addHandler(log)
        with self.world.as_clock():
            try:
                self._run()
            except Exception as error:  # whatever fails is what the run is for
                failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
                self.world.tell(f"FAILURE {failure}")
                self.failure = error
            seconds = self.world.now - 1000
            logging.getLogger("lamina").removeHandler(log)
            self._end()
        errors = sum(FinishReason.ERROR in one.ended for one in self.sent)
        done = 0 if self.engine is None else self.engine._steps
        told, events = self.world.trace, self.world.events
        return Report(done, len(self.sent), errors, self._happened, seconds, failure, trace, told, events)

    def _run(self) -> None:
        world = self.world
        Task(world, "launch", self._launch, lambda reason: None)
        world.run(lambda: self.engine is not None or self.failure is not None)
        begun = world.now
        for fault in self.planned:
            world.call_at(begun + fault.at, partial(self._happen, fault))
        world.call_later(0.0, self._request)
        world.run(lambda: self._steps() >= self.steps or self._is_over())
        self.calm = True
        world.tell("calm")
        self._heal()
        until = world.now + CALM_S
        world.run(lambda: not self._open or world.now > until or self._is_over())
        self._raise_failure()
        if late := [one.name for one in self.sent if not one.finished]:
            raise Broken(f"{', '.join(late)} have not ended within {CALM_S:g} s without faults")
        until = world.now + 20.0
        world.run(lambda: world.now > until or self._is_over())
        self._raise_failure()
        check_quiet(self)

    def _steps(self) -> int:
        assert self.engine is not None
        return self.engine._steps

    def _is_over(self) -> bool:
        assert self.engine is not None
        return self.failure is not None or self.engine._dead is not None

    def _raise_failure(self) -> None:
        assert self.engine is not None
        if self.failure is not None:
            raise self.failure
        if (dead := self.engine._dead) is not None:
            raise Broken(f"the engine has stopped: {dead}")

    def _launch(self) -> None:
        """Bring the cluster up, as ``launch`` does."""
        config, kinds = self.layout.config, dict[Any, dict[str, str]]()
        kinds["compute"] = {f"compute{number}": "cpu" for number in range(self.layout.computes)}
        kinds["memory"] = {f"memory{number}": "cpu" for number in range(self.layout.memories)}
        names = [name for each in kinds.values() for name in each]
        server = SimulatedServer(self.network, self.processes, names)
        self.processes.server = server
        for role, each in kinds.items():
            for name in each:
                self.processes.start(Start(role, "cpu", server.bootstraps[name]))
        greetings = greet(server, self.processes, names, 60.0)
        plan = sizing.cluster_plan(
            config,
            MODEL,
            [*TOKENIZER.eos_token_ids],
            kinds,
            greetings,
            is_open=False,
            trace=False,
            local=self.layout.local,
        )
        cluster = bring_up(server, self.processes, plan, lambda worker, progress: None)
        limits = replace(plan.limits, max_model_len=min(LONGEST, cluster.topology.most_tokens))
        self.world.tell(f"{self.layout.computes} + {self.layout.memories} workers, slots {dict(cluster.capacities)}")
        engine = Engine(
            config,
            MODEL,
            TOKENIZER,
            limits,
            server,
            self.processes,
            cluster,
            thread=self._thread,  # type: ignore[arg-type]
        )
        engine.after_turn = self._after_turn
        self.engine = engine

    def _after_turn(self) -> None:
        try:
            check_turn(self)
        except Broken as broken:
            self.failure = self.failure or broken
            raise

    def _thread(self, run: Callable[[], None]) -> "_Thread":
        return _Thread(self, run)

    # -- clients

    def _tokens(self, count: int) -> list[int]:
        return [self._load.randrange(VOCABULARY) for _ in range(count)]

    def _request(self) -> None:
        """A client sends a request, and the next one comes later."""
        if self.calm or self.engine is None:
            return
        chance = self._load
        self.world.call_later(chance.expovariate(1 / REQUESTS_S), self._request)
        if self._open >= MOST_OPEN:
            return
        prompt = list(chance.choice(self._prefixes)) if chance.random() < 0.5 else []
        prompt += self._tokens(chance.choice([1, 5, 20, 60]))
        limit = self.engine.max_model_len
        params = SamplingParams(
            n=chance.choice([1, 1, 1, 2, 3]),
            max_tokens=chance.choice([1, 2, 5, 20, 60]),
            temperature=chance.choice([0.0, 1.0, 1.0]),
            stop_token_ids=[chance.randrange(VOCABULARY)],
            ignore_eos=True,
        )
        prompt = prompt[: max(1, limit - (params.max_tokens or 0) - 1)]
        abort_at = chance.uniform(0.0, 2.0) if chance.random() < 0.15 else None
        number = len(self.sent)
        sent = Sent(
            number, prompt, params, chance.getrandbits(32), abort_at, [[] for _ in range(params.n)], [None] * params.n
        )
        client = Client(f"client{number % 3}", f"client{number % 3}")
        try:
            self.engine.submit_tokens(
                sent.name, prompt, params, lambda update: self._on_tokens(sent, update), client, sent.seed
            )
        except LaminaError as error:
            self.world.tell(f"{sent.name} is refused: {error}")
            return
        self.sent.append(sent)
        self._open += 1
        self.world.tell(f"{sent.name} comes: {len(prompt)} tokens, {params.n} x {params.max_tokens}")
        if abort_at is not None:
            for again in range(chance.choice([1, 2])):
                self.world.call_later(abort_at + 0.01 * again, partial(self.engine.abort, sent.name))

    def _on_tokens(self, sent: Sent, update: TokenUpdate) -> None:
        try:
            self._take(sent, update)
        except Broken as failure:  # the engine survives what its callers raise
            self.failure = self.failure or failure

    def _take(self, sent: Sent, update: TokenUpdate) -> None:
        if sent.finished:
            raise Broken(f"{sent.name} is told more after its end")
        for part in update.completions:
            if sent.ended[part.index] is not None:
                raise Broken(f"completion {part.index} of {sent.name} goes on after its end")
            sent.drawn[part.index] += part.token_ids
            sent.ended[part.index] = part.finish_reason
        if update.finished:
            sent.finished, sent.error = True, update.error
            self._open -= 1
            self.world.tell(f"{sent.name} ends: {', '.join(str(one) for one in sent.ended)} {update.error or ''}")
            self._judge(sent)

    def _judge(self, sent: Sent) -> None:
        """The tokens must be those of the plain function."""
        for index, (drawn, reason) in enumerate(zip(sent.drawn, sent.ended, strict=True)):
            wanted = expected(sent.prompt, sent.params, sent.seed, index)
            if reason is None:
                raise Broken(f"completion {index} of {sent.name} has no finish reason")
            whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            if (drawn != wanted) if whole else (drawn != wanted[: len(drawn)]):
                at = next(
                    (place for place, pair in enumerate(zip(drawn, wanted, strict=False)) if pair[0] != pair[1]),
                    len(drawn),
                )
                raise Broken(
                    f"completion {index} of {sent.name}, {len(sent.prompt)} tokens of prompt, ends with {reason} after "
                    f"{len(drawn)} tokens of {len(wanted)}; token {at} is the first that is wrong"
                )
            if reason is FinishReason.ABORT and sent.abort_at is None:
                raise Broken(f"{sent.name} was aborted, and nobody asked for that")
            if reason is FinishReason.ERROR and not self._may_fail(sent.error or ""):
                raise Broken(f"{sent.name} ends in an error: {sent.error}")

    def _may_fail(self, error: str) -> bool:
        """Errors that are right: too few workers are left, or workers died again and again with this request."""
        return "may need" in error or "is not run again" in error or "not fit" in error

    # -- faults

    def _happen(self, fault: Fault) -> None:
        if self.calm:
            return
        self._happened.append(fault.number)
        living = self.processes.living
        names = sorted(living)
        world, network = self.world, self.network

        def pick(among: Sequence[str]) -> str:
            return among[int(fault.choice * len(among))]

        def later(action: Callable[[], object]) -> None:
            world.call_later(fault.seconds, action)

        ways = [(a, b) for a in [*names, ENGINE] for b in [*names, ENGINE] if a != b]
        way = ways[int(fault.choice * len(ways))] if ways else (ENGINE, ENGINE)
        match fault.kind:
            case "kill" if names:
                world.tell(f"FAULT kill {pick(names)}")
                living[pick(names)].exit("killed by signal 9")
            case "stop" if names:
                world.tell(f"FAULT stop {pick(names)} for {fault.seconds:g} s")
                living[pick(names)].task.stopped_until = world.now + fault.seconds
            case "lag" if names:
                task = living[pick(names)].task
                world.tell(f"FAULT {task.name} is slow for {fault.seconds:g} s")
                task.lag_s = 0.02
                later(lambda: setattr(task, "lag_s", 0.0))
            case "block":
                world.tell(f"FAULT nothing gets from {way[0]} to {way[1]} for {fault.seconds:g} s")
                network.block(*way)
                later(lambda: network.unblock(*way))
            case "part":
                world.tell(f"FAULT {way[0]} and {way[1]} are apart for {fault.seconds:g} s")
                for one in (way, way[::-1]):
                    network.block(*one)
                    later(partial(network.unblock, *one))
            case "slow":
                world.tell(f"FAULT messages from {way[0]} to {way[1]} are slow for {fault.seconds:g} s")
                network.slow_down(*way, fault.choice)
                later(lambda: network.slow_down(*way, 0.0))
            case "pause" if self.engine_task is not None:
                world.tell(f"FAULT stop the engine for {fault.seconds:g} s")
                self.engine_task.stopped_until = world.now + fault.seconds
            case "refuse":
                world.tell(f"FAULT no process can be started for {fault.seconds:g} s")
                self.processes.refuses = True
                later(lambda: setattr(self.processes, "refuses", False))
            case "join" | "leave":
                self._scale(fault)

    def _scale(self, fault: Fault) -> None:
        assert self.engine is not None
        count = 1 if fault.kind == "join" else -1
        role = "compute" if fault.choice < 0.4 else "memory"
        self.world.tell(f"FAULT scale {role} by {count:+d}")
        try:
            future = self.engine.scale(**{role: count})
        except LaminaError as error:
            self.world.tell(f"scale: {error}")
            return
        future.add_done_callback(
            lambda done: self.world.tell(f"scaled {role} {count:+d}: {done.exception() or done.result()}")
        )

    def _heal(self) -> None:
        for way in list(self.network._blocked):
            self.network.unblock(*way)
        for way in list(self.network._slow):
            self.network.slow_down(*way, 0.0)
        self.processes.refuses = False
        for process in self.processes.living.values():
            process.task.lag_s = 0.0
            process.task.stopped_until = min(process.task.stopped_until, self.world.now)
        if self.engine_task is not None:
            self.engine_task.stopped_until = min(self.engine_task.stopped_until, self.world.now)

    def _end(self) -> None:
        """End everything that is left, whatever state it is in."""
        for process in list(self.processes.all.values()):
            process.exit("the simulation is over")
        if self.engine_task is not None:
            self.engine_task.kill()
        until = self.world.now + 1.0
        self.world.run(lambda: self.world.now > until or not self.world._events)


class _Thread:
    """The engine's thread, as a task."""

    def __init__(self, simulation: Simulation, run: Callable[[], None]) -> None:
        self._simulation, self._run = simulation, run
        self.task: Task | None = None

    def start(self) -> None:
        self.task = self._simulation.engine_task = Task(self._simulation.world, ENGINE, self._run, lambda reason: None)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.dead

    def join(self, timeout: float) -> None:
        """Nothing joins it."""
