"""Simulated time and the processes that live in it, as greenlets of one thread. Everything follows from one seed.

A process runs until it blocks: then the next event, in order of time, runs. Nothing else switches, so that the same
seed gives the same run. Time passes only between events, and by a microsecond whenever a process looks for something
without waiting for it: if an event is due by then, it happens before the process goes on.
"""

import contextlib
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import greenlet

POLL_S = 1e-6
MANY_POLLS = 100  # after which a poll without an event between counts as so many


class Broken(AssertionError):  # noqa: N818
    """Something that must hold did not."""


class Task:
    """A process, or a thread of one.

    Attributes:
        stopped_until: it does not run before, as after SIGSTOP.
        lag_s: it runs so much later than it could, at random.
        dead: it does nothing any more.
    """

    def __init__(self, world: "World", name: str, body: Callable[[], None], on_exit: Callable[[str], None]) -> None:
        self.name = name
        self.stopped_until = 0.0
        self.lag_s = 0.0
        self.dead = False
        self._world, self._on_exit = world, on_exit
        self._greenlet = greenlet.greenlet(lambda: self._run(body), world.hub)
        self._blocked: object | None = object()  # what it waits for; a later wait is another object
        world.call_later(0.0, self._resumption())

    def _run(self, body: Callable[[], None]) -> None:
        reason = "it has ended"
        try:
            body()
        except SystemExit as error:
            reason = f"exit status {error.code}"
        self._world.call_later(0.0, lambda: self._exited(reason))

    def _exited(self, reason: str) -> None:
        if not self.dead:
            self.dead = True
            self._on_exit(reason)

    def _resumption(self) -> Callable[[], None]:
        blocked = self._blocked

        def resume() -> None:
            if self.dead or self._blocked is not blocked:
                return
            if self._world.now < self.stopped_until:
                self._world.call_at(self.stopped_until, resume)
                return
            self._blocked = None
            self._world.switch_to(self, self._greenlet)

        return resume

    def block(self, timeout_s: float) -> None:
        """Let others run until ``wake`` or until the time is over. Called by the task itself."""
        self._blocked = object()
        self._world.call_later(max(timeout_s, POLL_S), self._resumption())
        self._world.switch_back()

    def wake(self) -> None:
        """Let the task go on, if it is blocked."""
        if self._blocked is not None and not self.dead:
            lag = self._world.random.random() * self.lag_s if self.lag_s else 0.0
            self._world.call_later(lag, self._resumption())

    def stop(self, until: float) -> None:
        """Do not let the task run before this time. A shorter stop does not end a longer one."""
        self.stopped_until = max(self.stopped_until, until)

    def kill(self) -> None:
        """End the task at once, wherever it is; may be called by any task."""
        self.dead = True
        self._world.call_later(0.0, self._unwind)

    def abandon(self) -> None:
        """Let the task do nothing any more, as a process that is killed: not even what it does when it ends."""
        self.dead = True
        self._world.abandoned.append(self._greenlet)

    def _unwind(self) -> None:
        if self._greenlet:
            self._greenlet.throw(greenlet.GreenletExit)


class World:
    """The clock and the events to come.

    Attributes:
        now: seconds.
        wall_s: by how much the wall clock is ahead of ``now``.
        random: of everything that happens by chance while the simulation runs.
        trace: one line for each thing worth telling.
        events: how many there were, and a hash of when each happened.
        abandoned: what processes that were killed have left, until ``unwind``.
    """

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.wall_s = 1.7e9
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.events = 0, 0
        self.current: Task | None = None
        self._numbers = itertools.count()
        self._polls = 0  # since the latest event
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self.abandoned: list[greenlet.greenlet] = []
        self.hub = greenlet.getcurrent()

    def tell(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - 1000:12.6f} {text}")

    def call_at(self, at: float, action: Callable[[], Any]) -> None:
        """Do something at this time, or now if that is past."""
        heapq.heappush(self._events, (max(at, self.now), next(self._numbers), action))

    def call_later(self, seconds: float, action: Callable[[], Any]) -> None:
        """Do something after so many seconds."""
        self.call_at(self.now + seconds, action)

    def block(self, timeout_s: float) -> None:
        """Block the task that runs."""
        assert self.current is not None
        self.current.block(timeout_s)

    def pass_time(self) -> None:
        """A task has looked for something: time passes, and what is due by then happens."""
        self._polls += 1
        self.now += POLL_S if self._polls < MANY_POLLS else MANY_POLLS * POLL_S
        if self.current is not None and self._events and self._events[0][0] <= self.now:
            self.block(POLL_S)

    def leap(self, seconds: float) -> None:
        """Let time pass in which nothing happens, as on a machine that is suspended."""
        self.now += seconds

    def switch_to(self, task: Task, target: "greenlet.greenlet") -> None:
        """Run a task until it blocks."""
        self.current = task
        try:
            target.switch()
        finally:
            self.current = None

    def switch_back(self) -> None:
        """Leave the task that runs."""
        self.hub.switch()

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until ``until`` is true, which is asked after each."""
        while not until():
            if not self._events:
                raise Broken("nothing is left that could happen")
            at, number, action = heapq.heappop(self._events)
            count, digest = self.events
            self.events = count + 1, hash((digest, at, number))
            self.now = max(self.now, at)
            self._polls = 0
            action()

    def unwind(self) -> None:
        """Take apart what killed processes have left, once the run is over: what they do then has no effect."""
        while self.abandoned:
            with contextlib.suppress(Exception):
                self.abandoned.pop().throw(greenlet.GreenletExit)

    @contextlib.contextmanager
    def as_clock(self) -> Iterator[None]:
        """Let ``time`` tell the simulated time."""
        with (
            mock.patch.object(time, "monotonic", lambda: self.now),
            mock.patch.object(time, "monotonic_ns", lambda: int(self.now * 1e9)),
            mock.patch.object(time, "time", lambda: self.wall_s + self.now),
        ):
            yield
