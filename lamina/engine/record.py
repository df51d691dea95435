"""The members as an engine may save them for the one after it: all of them are linked with each other. Pure."""

from collections.abc import Callable, Collection

from lamina.topology import Topology


class Record:
    """Follows the members; saves them when they change.

    A worker that joins is left out until all others have applied the change, and a worker that leaves from before they
    are told: an engine that takes over ends such workers, which is a loss like any other.
    """

    def __init__(self, topology: Topology, save: Callable[[Topology], None]) -> None:
        self._topology, self._save = topology, save
        self._pending: tuple[int, Topology] | None = None  # a change that has not been applied by all, and its number
        self._waiting = set[str]()
        save(topology)

    def change(self, number: int, topology: Topology) -> None:
        """Change ``number`` is about to be sent to all members of ``topology``."""
        if left := self._topology.names - topology.names:
            self._leave_out(left)
        self._pending, self._waiting = (number, topology), set(topology.names)

    def note_changed(self, worker: str, number: int) -> None:
        """A member has applied a change, and all before it."""
        if self._pending is None or number < self._pending[0]:
            return
        self._waiting.discard(worker)
        if not self._waiting:
            self.settle(self._pending[1])

    def lose(self, lost: Collection[str]) -> None:
        """Members are lost, and the others are about to be told of the next epoch, as which this counts even if none of
        the lost has been saved. ``settle`` comes once they are in it."""
        self._pending = None
        self._leave_out(lost)

    def settle(self, topology: Topology) -> None:
        """These are the members, to all of them."""
        self._pending = None
        self._topology = topology
        self._save(topology)

    def _leave_out(self, names: Collection[str]) -> None:
        self._topology = self._topology.without(names)
        self._save(self._topology)
