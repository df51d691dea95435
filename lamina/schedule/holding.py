"""Requests that may not run while workers die: see ``lamina.schedule.suspects``. Pure."""

from collections.abc import Callable, Iterable

from lamina.groups import Group
from lamina.schedule.admission import Admissions
from lamina.schedule.suspects import Hold


class Holding:
    """Keeps requests that are held out of the queue. Those with KV keep it, and their seats, unless others need it."""

    def __init__(self, admissions: Admissions, drop: Callable[[Group], None]) -> None:
        """``drop`` gives up the KV of a request, and puts it back here."""
        self._admissions = admissions
        self._drop = drop
        self._hold = Hold()
        self._parked: dict[Group, None] = {}  # without KV

    def __len__(self) -> int:
        return len(self._parked)

    def may_run(self, group: Group) -> bool:
        """Whether steps may run this request."""
        return self._hold.may_run(group.request.request_id)

    def use(self, hold: Hold, waiting: Iterable[Group]) -> None:
        """Hold these from now on; ``waiting`` are those of them that wait to be admitted. Those that may run again, and
        have KV, do once requests are dealt out again."""
        self._hold = hold
        self._admissions.restrict(hold.only)
        for group in [one for one in waiting if one not in self._parked]:
            self._admissions.remove(group)
            self._parked[group] = None
        for group in [one for one in self._parked if self.may_run(one)]:
            del self._parked[group]
            self._admissions.put_back(group)

    def add(self, group: Group) -> None:
        """Queue a request, unless it has the id of a held one."""
        if group.request.request_id in self._hold.held:
            self._parked[group] = None
        else:
            self._admissions.add(group)

    def put_back(self, group: Group) -> None:
        """A request that was admitted before waits again, ahead of all others that do."""
        if self._hold.active and not self.may_run(group):
            self._parked[group] = None
        else:
            self._admissions.put_back(group)

    def remove(self, group: Group) -> None:
        """A request that waits has ended."""
        if group in self._parked:
            del self._parked[group]
        else:
            self._admissions.remove(group)

    def make_way(self, running: Iterable[Group]) -> None:
        """Drop the KV of those that are held if nothing runs because of it: what may run does not fit beside it."""
        if not self._hold.active or not self._admissions.full:
            return
        alive = [group for group in running if group.alive]
        if not any(map(self.may_run, alive)):
            for group in alive:
                self._drop(group)
