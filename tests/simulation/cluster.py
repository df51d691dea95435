"""One simulated run: a cluster of the real engine and workers, clients, faults, and what must hold.

Real: bring-up, linking, the engine with its turn, placement and recovery, the pools, and each worker from its set-up
on, with its loop, links, channels, slab, attention kernels and sampler. Messages have their encoded forms.

Simulated: time, processes, the control plane's sockets, the transport (which behaves as TCP does), and the model.

Left out: GPUs. An engine that is killed is started again, as its supervisor does. Clients send requests through
frontends, or to the engine as a frontend does, and then send what has not ended once more to the next engine. The
clock of the product is replaced in the module ``time``, and the disk in ``lamina.memory.disk_tier``, not passed in.
"""

import contextlib
import importlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import msgspec

from lamina.cluster import sizing
from lamina.cluster.bringup import Cluster, Saved, bring_up, greet, take_over
from lamina.cluster.pool import CPU, CUDA
from lamina.cluster.sizing import ClusterPlan
from lamina.control.agent_messages import Start
from lamina.core.errors import LaminaError
from lamina.core.outputs import FinishReason
from lamina.core.topology import Pool, Topology
from lamina.engine.engine import Engine
from lamina.memory import disk_tier
from lamina.models import directory
from lamina.schedule.limits import Limits
from lamina.text.tokenizer import Tokenizer
from tests.simulation.checks import check_quiet, check_turn, rows_watched
from tests.simulation.clients import Clients
from tests.simulation.control import ENGINE, Processes, SimulatedServer
from tests.simulation.disk import Disks
from tests.simulation.faults import Faults
from tests.simulation.frontends import Frontends
from tests.simulation.layouts import LONGEST, layout
from tests.simulation.network import Network
from tests.simulation.points import Points, chances
from tests.simulation.scenario import Fault, Load, Scene
from tests.simulation.world import Broken, Task, World

MODEL = directory.find(None)
TOKENIZER = Tokenizer(MODEL)
RESTART_S = 1.0  # at least, from an engine's end to the start of the next one
FAULTY_S = 300.0  # at most, while faults and requests come
SETTLED_S = 20.0  # without a worker that joins or leaves, until what must hold at rest is checked
CALM_S = 240.0  # after the last fault, within which every request must end


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


@contextlib.contextmanager
def turned(knobs: Mapping[tuple[str, str], object]) -> Iterator[None]:
    """Give constants of the product other values meanwhile."""
    with contextlib.ExitStack() as patches:
        for (module, name), value in knobs.items():
            patches.enter_context(mock.patch.object(importlib.import_module(module), name, value))
        yield


class _Log(logging.Handler):
    """Tells the errors that the product logs in the trace."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.tell(f"{record.name}: {self.format(record)}")


class Simulation:
    """A run."""

    def __init__(self, seed: int, planned: Sequence[Fault], steps: int, scene: Scene | None = None) -> None:
        """Prepare a run.

        Args:
            planned: Its faults.
            steps: How many steps there are while faults and new requests come.
            scene: The cluster, what clients ask for, and rare branches. Default: what the seed has.
        """
        scene = Scene(layout(seed), Load(seed), chances(seed)) if scene is None else scene
        self.seed, self.planned, self.steps = seed, planned, steps
        self.layout = scene.layout
        self.world = World(seed)
        self.network = Network(self.world, self.layout.jitter)
        self.processes = Processes(self.network, self.layout.pace)
        self.disks = Disks(self.world)
        self.clients = Clients(self, scene.load)
        self.frontends = Frontends(self, self.layout.frontends, TOKENIZER)
        self.disturbed_at = 0.0  # until when the engine was last down or stopped, or time has leapt
        self.engine: Engine | None = None
        self.engine_task: Task | None = None
        self.failure: BaseException | None = None
        self.turns = 0  # of engines
        self._changed_at = 0.0  # when a worker was last joining or leaving, once all requests have ended
        self.aborted = set[str]()  # after the latest turn, as ``Frontends.aborted``
        self.calm = False  # no fault and no request comes any more
        self.saved = b""  # what another engine needs to take over
        self.is_down = False  # the engine was killed, and no other one has taken over yet
        self._steps_before = 0  # of engines that were killed
        self._faults = Faults(self)
        self._points = Points(seed, scene.chances)

    def run(self) -> Report:
        """Run to the end. Failures are in the report."""
        failure = trace = ""
        log = _Log(self.world)
        logging.getLogger("lamina").addHandler(log)
        with (
            self.world.as_clock(),
            mock.patch.object(disk_tier, "Disk", self.disks.open),
            turned(self.layout.knobs),
            self._points.patched(),
            self.frontends.patched(),
            rows_watched(self),
        ):
            try:
                self._run()
            except Exception as error:  # whatever fails is what the run is for
                failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
                self.world.tell(f"FAILURE {failure}")
                self.failure = error
            seconds = self.world.now - 1000
            logging.getLogger("lamina").removeHandler(log)
            self._end()
        errors = sum(FinishReason.ERROR in one.ended for one in self.clients.sent)
        done = self._steps()
        told, events = list(self.world.trace), self.world.events
        report = Report(
            done, len(self.clients.sent), errors, self._faults.happened, seconds, failure, trace, told, events
        )
        self.world.unwind()
        return report

    def _run(self) -> None:
        world = self.world
        Task(world, "launch", self._launch, lambda reason: None)
        world.run(lambda: self.engine is not None or self.failure is not None)
        begun = world.now
        for fault in self.planned:
            world.call_at(begun + fault.at, partial(self._faults.begin, fault))
        world.call_later(0.0, self.clients.request)
        until = begun + FAULTY_S
        world.run(lambda: self._steps() >= self.steps or world.now > until or self._is_over())
        self.calm = True
        world.tell("calm")
        self._faults.heal()
        self._points.end()
        until = world.now + CALM_S
        world.run(lambda: (not self.clients.open and not self.is_down) or world.now > until or self.failure is not None)
        self._raise_failure()
        if late := [one.name for one in self.clients.sent if not one.finished]:
            raise Broken(f"{', '.join(late)} have not ended within {CALM_S:g} s without faults")
        until, self._changed_at = world.now + CALM_S, world.now
        world.run(lambda: self._is_settled() or world.now > until or self.failure is not None)
        self._raise_failure()
        if self.engine is not None and self.engine._dead is None:
            check_quiet(self)

    def _is_settled(self) -> bool:
        """True once no worker has joined or left for ``SETTLED_S``, so that nothing of it is on its way, and an engine
        that took over has released the KV of requests that have not come again."""
        engine: Any = self.engine
        if engine is not None and (engine._members.pools.states or engine._scheduler._recall):
            self._changed_at = self.world.now
        return self.world.now > self._changed_at + SETTLED_S

    def _steps(self) -> int:
        now = 0 if self.engine is None or self.is_down else self.engine._steps
        return self._steps_before + now

    def _is_over(self) -> bool:
        assert self.engine is not None
        return self.failure is not None or (self.engine._dead is not None and not self.is_down)

    def _raise_failure(self) -> None:
        assert self.engine is not None
        if self.failure is not None:
            raise self.failure
        if (dead := self.engine._dead) is not None:
            raise Broken(f"the engine has stopped: {dead}")

    def _launch(self) -> None:
        """Bring the cluster up, as ``launch`` does."""
        layout = self.layout
        kinds = dict[Any, dict[str, str]]()
        kinds["compute"] = {f"compute{number}": CPU for number in range(layout.computes)}
        kinds["memory"] = {f"memory{number}": CPU for number in range(layout.memories)}
        names = [name for each in kinds.values() for name in each]
        server = SimulatedServer(self.network, self.processes, names)
        self.processes.server = server
        for role, each in kinds.items():
            for name in each:
                self.processes.start(Start(role, CPU, server.bootstraps[name]))
        greetings = greet(server, self.processes, names, 60.0)
        plan = self._plan(kinds, greetings, layout.local)
        cluster = bring_up(server, self.processes, plan, lambda worker, progress: None)
        self.world.tell(f"{layout}, slots {dict(cluster.capacities)}")
        longest = min(LONGEST, cluster.topology.most_tokens)
        self._begin(server, cluster, replace(plan.limits, max_model_len=longest))

    def _take_over(self) -> None:
        """Start another engine with the workers of the one that was killed, as ``launch`` does."""
        self.world.block(RESTART_S * (1 + self.world.random.random()))
        saved = msgspec.msgpack.decode(self.saved, type=Saved)
        plan = saved.restore(self._plan(saved.kinds(), saved.greetings, saved.compute_setup.local))
        server = SimulatedServer(self.network, self.processes, sorted(saved.topology.names))
        self.processes.server = server
        for name in self.processes.living:
            self.world.call_later(self.world.random.random(), partial(self._reconnect, server, name))
        cluster = take_over(server, self.processes, plan, saved)  # type: ignore[arg-type]
        self._begin(server, cluster, saved.limits)

    def _reconnect(self, server: SimulatedServer, name: str) -> None:
        if name in self.processes.living:
            server.on_connected(name)

    def _plan(self, kinds: Any, greetings: Any, local: bool) -> ClusterPlan:
        config, eos = sizing.fit_lanes(self.layout.config, len(kinds["compute"])), [*TOKENIZER.eos_token_ids]
        plan = sizing.cluster_plan(config, MODEL, eos, kinds, greetings, is_open=False, trace=False, local=local)
        return replace(plan, pipeline=sizing.with_lending(plan.pipeline, [CUDA])) if self.layout.one_way else plan

    def _begin(self, server: SimulatedServer, cluster: Cluster, limits: Limits) -> None:
        """Start the engine."""

        def save(topology: Topology, wanted: Mapping[Pool, int]) -> None:
            assert cluster.fabric is not None
            self.saved = msgspec.msgpack.encode(Saved.from_topology(cluster.fabric, topology, wanted, limits))

        engine = Engine(
            self.layout.config,
            MODEL,
            TOKENIZER,
            limits,
            server,
            self.processes,
            cluster,
            save=save,
            thread=self._thread,  # type: ignore[arg-type]
        )
        self.frontends.serve(engine)
        engine.observe_turns(self._after_turn)
        self.engine, self.is_down = engine, False
        self.disturb(self.world.now)

    def disturb(self, until: float) -> None:
        """Expect no answers in time until then, or longer if an earlier disturbance lasts longer."""
        self.disturbed_at = max(self.disturbed_at, until)

    def kill_engine(self) -> None:
        """Kill the engine's process and start another one."""
        assert self.engine is not None and self.engine_task is not None
        self.is_down = True
        self._steps_before += self.engine._steps
        self.engine_task.abandon()
        self.frontends.drop_engine()
        self.processes.server.close()
        Task(self.world, "restart", self._restart, lambda reason: None)

    def _restart(self) -> None:
        """Start another engine, with other workers if those that are left cannot serve; clients ask again."""
        start = self._take_over
        try:
            while self.is_down:
                undisturbed = self.calm
                try:
                    start()
                except (LaminaError, OSError) as error:
                    self.world.tell(f"all workers start again: {error}")
                    self.world.block(RESTART_S)
                    if undisturbed and start == self._launch:
                        raise
                    self.processes.start_again()
                    start = self._launch
        except Exception as error:  # whatever fails is what the run is for
            self.failure = self.failure or error
        self.clients.send_again()

    def _after_turn(self) -> None:
        self.turns += 1
        assert self.engine is not None
        self._faults.on_turn(self.engine)
        try:
            check_turn(self)
        except Broken as broken:
            self.failure = self.failure or broken
            raise

    def _thread(self, run: Callable[[], None]) -> "_Thread":
        return _Thread(self, run)

    def _end(self) -> None:
        """End everything that is left, whatever state it is in."""
        for process in list(self.processes.all.values()):
            process.exit("the simulation is over")
        if self.engine_task is not None:
            self.engine_task.kill()
        self.frontends.close()
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
