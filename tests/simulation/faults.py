"""What goes wrong in a simulated run, and the end of it."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lamina.core.errors import LaminaError
from lamina.engine.engine import Engine
from tests.simulation.control import ENGINE, Process
from tests.simulation.moments import MOMENTS
from tests.simulation.scenario import Fault

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation

YEAR_S = 3e7
LAG_S = 0.02  # by how much a slow worker is late at most, whenever it wakes up


class Faults:
    """Lets faults happen to a run.

    Attributes:
        happened: Numbers of the faults that have.
    """

    def __init__(self, run: "Simulation") -> None:
        self._run = run
        self.happened: list[int] = []
        self._waiting: list[Fault] = []  # for their moments
        self._marked: Collection[str] = ()

    def begin(self, fault: Fault) -> None:
        """Let a fault happen now, or at its moment."""
        if fault.moment:
            self._waiting.append(fault)
        else:
            self._happen(fault)

    def on_turn(self, engine: Engine) -> None:
        """Let faults happen whose moment this turn of the engine is."""
        for fault in [*self._waiting]:
            states = [MOMENTS[name](engine) for name in fault.moment]
            if all(states):
                self._waiting.remove(fault)
                marked = {name for state in states if isinstance(state, Collection) for name in state}
                self._run.world.call_later(0.0, partial(self._happen, fault, marked))

    def _happen(self, fault: Fault, marked: Collection[str] = ()) -> None:
        """Let a fault happen, unless the run is calm. ``marked``: The workers or requests that make its moment."""
        if self._run.calm:
            return
        self._marked = marked
        if fault.moment:
            self._run.world.tell(f"moment: {', '.join(fault.moment)}")
        self.happened.append(fault.number)
        act: Callable[[Fault], None] = getattr(self, f"_{fault.kind}")
        act(fault)

    def _tell(self, text: str) -> None:
        self._run.world.tell(f"FAULT {text}")

    def _later(self, fault: Fault, action: Callable[[], object]) -> None:
        self._run.world.call_later(fault.seconds, action)

    def _changing(self) -> set[str]:
        """Return the workers that make this moment what it is, or else those that join, leave or change their role."""
        if marked := self._run.processes.living.keys() & {*self._marked}:
            return marked
        pools = None if self._run.engine is None else self._run.engine._members.pools
        return set() if pools is None else pools.states.keys() & self._run.processes.living.keys()

    def _victim(self, fault: Fault) -> Process | None:
        """Return a worker: half of the time one that joins or leaves, if there is any."""
        living, changing = self._run.processes.living, sorted(self._changing())
        choice = fault.choice * 2
        names = changing if choice < 1 and changing else sorted(living)
        return living[names[int(choice % 1 * len(names))]] if names else None

    def _way(self, fault: Fault) -> tuple[str, str]:
        """Return two ends: half of the time one of them joins or leaves, if any worker does."""
        ends, changing = [*sorted(self._run.processes.living), ENGINE], self._changing()
        ways: Sequence[tuple[str, str]] = [(a, b) for a in ends for b in ends if a != b] or [(ENGINE, ENGINE)]
        choice = fault.choice * 2
        if choice < 1 and changing:
            ways = [way for way in ways if not changing.isdisjoint(way)]
        return ways[int(choice % 1 * len(ways))]

    def _kill(self, fault: Fault) -> None:
        if (victim := self._victim(fault)) is not None:
            self._tell(f"kill {victim.name}")
            victim.exit("killed by signal 9")

    def _wipe(self, fault: Fault) -> None:
        """Kill all workers of a role, as if their machine had failed."""
        role = "compute" if fault.choice < 0.5 else "memory"
        self._tell(f"kill all {role} workers")
        for victim in [one for one in self._run.processes.living.values() if one.role == role]:
            victim.exit("its machine has failed")

    def _fail(self, fault: Fault) -> None:
        if (victim := self._victim(fault)) is not None:
            self._tell(f"{victim.name} cannot allocate memory")
            victim.lacks_memory = True

    def _stop(self, fault: Fault) -> None:
        if (victim := self._victim(fault)) is not None:
            self._tell(f"stop {victim.name} for {fault.seconds:g} s")
            victim.task.stop(self._run.world.now + fault.seconds)

    def _lag(self, fault: Fault) -> None:
        if (victim := self._victim(fault)) is not None:
            self._tell(f"{victim.name} is slow for {fault.seconds:g} s")
            victim.task.lag_s = LAG_S
            self._later(fault, partial(setattr, victim.task, "lag_s", 0.0))

    def _block(self, fault: Fault) -> None:
        way = self._way(fault)
        self._tell(f"nothing gets from {way[0]} to {way[1]} for {fault.seconds:g} s")
        self._run.network.block(*way)
        self._later(fault, partial(self._run.network.unblock, *way))

    def _part(self, fault: Fault) -> None:
        way = self._way(fault)
        self._tell(f"{way[0]} and {way[1]} are apart for {fault.seconds:g} s")
        for one in (way, way[::-1]):
            self._run.network.block(*one)
            self._later(fault, partial(self._run.network.unblock, *one))

    def _slow(self, fault: Fault) -> None:
        way = self._way(fault)
        self._tell(f"messages from {way[0]} to {way[1]} are slow for {fault.seconds:g} s")
        self._run.network.slow_down(*way, fault.choice)
        self._later(fault, partial(self._run.network.slow_down, *way, 0.0))

    def _pause(self, fault: Fault) -> None:
        task = self._run.engine_task
        if task is not None and not self._run.is_down:
            self._tell(f"stop the engine for {fault.seconds:g} s")
            task.stop(self._run.world.now + fault.seconds)
            self._run.disturb(task.stopped_until)
            if self._run.frontends.task is not None:
                self._run.frontends.task.stop(task.stopped_until)

    def _crash(self, fault: Fault) -> None:
        """Kill a frontend."""
        if names := sorted(self._run.frontends.living):
            self._tell(f"kill {(name := names[int(fault.choice * len(names))])}")
            self._run.frontends.kill(name, "killed by signal 9")

    def _hang(self, fault: Fault) -> None:
        """Stop a frontend."""
        if names := sorted(self._run.frontends.living):
            self._tell(f"stop {(name := names[int(fault.choice * len(names))])} for {fault.seconds:g} s")
            self._run.frontends.living[name].loop.stop(self._run.world.now + fault.seconds)

    def _refuse(self, fault: Fault) -> None:
        self._tell(f"no process can be started for {fault.seconds:g} s")
        self._run.processes.refuses = True
        self._later(fault, partial(setattr, self._run.processes, "refuses", False))

    def _disk(self, fault: Fault) -> None:
        self._tell(f"disks fail for {fault.seconds:g} s")
        self._run.disks.fail = True
        self._later(fault, partial(setattr, self._run.disks, "fail", False))

    def _clock(self, fault: Fault) -> None:
        """Set the wall clock: up to a year forward or back."""
        jump = (fault.choice - 0.5) * 2 * YEAR_S
        self._tell(f"the wall clock jumps by {jump:.0f} s")
        self._run.world.wall_s += jump

    def _leap(self, fault: Fault) -> None:
        """Suspend all machines: all deadlines within this time are over before anybody has answered."""
        self._tell(f"nothing runs for {fault.seconds:g} s")
        self._run.world.leap(fault.seconds)
        self._run.disturb(self._run.world.now)

    def _hangup(self, fault: Fault) -> None:
        self._run.clients.hang_up(fault.choice)

    def _cut(self, fault: Fault) -> None:
        """A client ends a completion, as at a stop string: the first one of a request that makes this moment."""
        self._run.clients.cut(self._marked, fault.choice)

    def _restart(self, fault: Fault) -> None:
        """Kill the engine, if each role has a member that runs: another engine needs these."""
        run = self._run
        assert run.engine is not None
        members = run.engine.topology
        if not run.is_down and run.saved and members.lacks(members.names - run.processes.living.keys()) is None:
            self._tell("kill the engine")
            run.kill_engine()

    def _scale(self, fault: Fault) -> None:
        run = self._run
        assert run.engine is not None
        if run.is_down:
            return
        order = run.engine.topology.pipeline
        workers = {pool: 1 if pool == "memory" else order.shape_in(pool).workers for pool in fault.changes}
        changes = {pool: count * workers[pool] for pool, count in fault.changes.items()}
        told = ", ".join(f"{role} {count:+d}" for role, count in changes.items())
        self._tell(f"scale {told}")
        try:
            future = run.engine.scale(**changes)
        except LaminaError as error:
            run.world.tell(f"scale: {error}")
            return
        future.add_done_callback(lambda done: run.world.tell(f"scaled {told}: {done.exception() or done.result()}"))

    def heal(self) -> None:
        """End all faults that last."""
        run = self._run
        run.network.heal()
        run.processes.refuses = run.disks.fail = False
        for frontend in run.frontends.living.values():
            frontend.loop.end_stop()
        tasks = [process.task for process in run.processes.living.values()]
        for process in run.processes.living.values():
            process.lacks_memory = False
        tasks += [task for task in (run.engine_task, run.frontends.task) if task is not None]
        for task in tasks:
            task.lag_s = 0.0
            task.stopped_until = min(task.stopped_until, run.world.now)
