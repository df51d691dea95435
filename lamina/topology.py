"""Who takes part in a cluster: members, replicas and lanes, from one epoch to the next. Pure and immutable.

Engine, workers and simulator learn of a change by ``apply(topology)``; each change makes the next epoch. Messages of an
earlier epoch are never taken for messages of a later one: see ``protocol.fence``.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from lamina.pipeline import Pipeline

Role = Literal["compute", "memory"]


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A period with the same members: number ``number``, from 1, of the engine's ``incarnation``.

    Links count messages from the number on: an engine that takes over workers must go on from their last one.
    """

    incarnation: int
    number: int

    @property
    def next(self) -> "Epoch":
        """The epoch after this one."""
        return Epoch(self.incarnation, self.number + 1)


FIRST = Epoch(0, 1)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker: its name, which is never used again, the kind of its device, its host and its token slots (memory)."""

    name: str
    role: Role
    kind: str
    host: str
    capacity: int = 0


class Topology(msgspec.Struct, frozen=True):
    """The members of one epoch. The compute workers, in order, are the replicas of ``pipeline``."""

    epoch: Epoch
    members: tuple[Member, ...]
    pipeline: Pipeline

    @property
    def names(self) -> frozenset[str]:
        """All members."""
        return frozenset(member.name for member in self.members)

    @property
    def computes(self) -> tuple[str, ...]:
        """The compute workers, by their number as replicas."""
        return tuple(member.name for member in self.members if member.role == "compute")

    @property
    def capacities(self) -> dict[str, int]:
        """Token slots by memory worker."""
        return {member.name: member.capacity for member in self.members if member.role == "memory"}

    def lacks(self, lost: Collection[str]) -> Role | None:
        """The role that has no member once these are lost; None if both have."""
        left = {member.role for member in self.members if member.name not in lost}
        return next((role for role in ("compute", "memory") if role not in left), None)

    def without(self, lost: Collection[str]) -> "Topology":
        """The next epoch, without these members. Raises ValueError if a role would have no member."""
        if role := self.lacks(lost):
            raise ValueError(f"no {role} worker is left without {', '.join(lost)}")
        members = tuple(member for member in self.members if member.name not in lost)
        replicas = sum(member.role == "compute" for member in members)
        pipeline = self.pipeline if replicas == self.pipeline.replicas else self.pipeline.with_replicas(replicas)
        return Topology(self.epoch.next, members, pipeline)
