"""The pools while the engine serves: which workers join, and when they enter."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from lamina.cluster.gather import Workers
from lamina.cluster.joining import Fabric
from lamina.engine.joins import Joiner, Joins
from lamina.errors import ConfigError, LaminaError
from lamina.pipeline import Pipeline
from lamina.protocol.control import ControlServer
from lamina.protocol.messages import Changed, ToEngine
from lamina.schedule.turn import Turn
from lamina.topology import Member, Role, Topology

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Resize:
    """Workers that are to join together: ``left`` have not entered, ``done`` have. ``future`` has the names of all."""

    future: "Future[list[str]]" = field(default_factory=Future)
    left: int = 0
    done: list[str] = field(default_factory=list)

    def note(self, name: str) -> None:
        """A worker has entered."""
        self.left -= 1
        self.done.append(name)
        if not self.left and not self.future.done():
            self.future.set_result(self.done)

    def fail(self, error: LaminaError) -> None:
        """A worker has not, and will not be tried again."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            log.warning("%s", error)  # another one has failed before


class Pools:
    """Lets workers in at the boundary of a step. The engine's thread owns it."""

    def __init__(
        self,
        control: ControlServer,
        workers: Workers,
        fabric: Fabric,
        topology: Topology,
        turn: Turn,
        adopt: Callable[[Topology], None],
        unused: Callable[[], int],
    ) -> None:
        """``adopt`` makes a topology that of the whole cluster, within the epoch. ``unused``: token slots of memory
        workers."""
        self._fabric, self._turn, self._adopt = fabric, turn, adopt
        self._pipeline = topology.pipeline
        self._joins = Joins(control, workers, fabric, topology, lambda: unused() * fabric.bytes_per_token)
        self._resizes: dict[str, Resize] = {}

    def grow(self, role: Role, count: int, resize: Resize) -> None:
        """Start ``count`` more workers; they enter when they are ready. Raises ConfigError, WorkerError."""
        resize.left += count
        for _ in range(count):
            self._start(role, resize)

    def _start(self, role: Role, resize: Resize) -> None:
        def on_failed(error: LaminaError, again: bool) -> None:
            if again:
                self._start(role, resize)
            else:
                log.warning("a %s worker does not join: %s", role, error)
                resize.fail(error)

        self._resizes[self._joins.start(role, on_failed)] = resize

    def check_growth(self, topology: Topology, role: Role, count: int) -> None:
        """Raises ConfigError if so many more workers of a role cannot take part."""
        if role == "memory":
            return
        replicas = len(topology.computes) + self._joins.count("compute") + count
        slices = len(self._fabric.memory_setup.attentions) + 1
        if self._pipeline.rotates and replicas > slices:
            raise ConfigError(
                f"the model has {slices} slices, too few for {replicas} compute workers to take turns in every step; "
                f"have at most {slices} compute workers, or start with --pipelining fixed"
            )

    def take(self, worker: str, message: ToEngine) -> bool:
        """Take what a worker says of joins and changes; False if it is about something else."""
        return isinstance(message, Changed) or self._joins.take(worker, message)

    def turn(self, topology: Topology, steady: bool) -> None:
        """Let workers in that are ready. ``steady``: no epoch is ending."""
        self._joins.turn(topology, (lambda member: self._joined(topology, member)) if steady else None)
        joiner = self._joins.linked
        if joiner is None or joiner.member is None or not steady:
            return
        following = self._joined(topology, joiner.member)
        if following.pipeline != topology.pipeline and self._turn.in_flight:
            self._turn.pause()  # lanes are dealt out again, as soon as their steps have completed
            return
        self._enter(joiner, following)

    def _enter(self, joiner: Joiner, following: Topology) -> None:
        self._joins.entered(joiner)
        self._adopt(following)
        self._resizes.pop(joiner.name).note(joiner.name)

    def _joined(self, topology: Topology, member: Member) -> Topology:
        if member.role == "memory":
            return topology.joined(member, topology.pipeline)
        return topology.joined(member, self._pipeline_of(len(topology.computes) + 1))

    def _pipeline_of(self, replicas: int) -> Pipeline:
        """As at the start, but for so many replicas. No replica may be without a slice where lanes rotate."""
        pipeline = self._pipeline.with_replicas(replicas)
        slices = len(self._fabric.memory_setup.attentions) + 1
        return pipeline if replicas <= slices else pipeline.without_rotation()

    def interrupt(self, lost: str) -> None:
        """A member is lost, and the epoch ends."""
        self._joins.interrupt(lost)

    @property
    def joining(self) -> dict[str, str]:
        """How far the workers are that are to join, by name."""
        return dict(self._joins.stages)

    def close(self) -> None:
        """The engine ends."""
        self._joins.close()
