"""Which requests have KV on which memory worker. Pure."""

from collections.abc import Callable, Mapping

from lamina.core.requests import Group
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache


class Residents:
    """The requests with KV on each memory worker, and the memory workers of each request."""

    def __init__(
        self, placement: Placement, prefixes: PrefixCache, reserved: Callable[[Group], Mapping[str, int]]
    ) -> None:
        """``reserved``: returns the tokens reserved for a request, by worker, without those that it shares."""
        self._placement = placement
        self._prefixes = prefixes
        self._reserved = reserved
        self._groups: dict[str, dict[Group, None]] = {worker: {} for worker in placement.capacities}
        self._workers: dict[Group, set[str]] = {}

    def update(self, group: Group) -> None:
        """Record the workers of a request that has been placed, or whose segments have changed."""
        workers = group.workers
        for worker in self._workers.get(group, set()) - workers:
            self._groups.get(worker, {}).pop(group, None)  # the worker may have left
        for worker in workers:
            self._groups[worker][group] = None
        self._workers[group] = workers

    def forget_request(self, group: Group) -> None:
        """Forget a request whose KV has been released."""
        for worker in self._workers.pop(group) & self._groups.keys():
            del self._groups[worker][group]

    def on_places_changed(self) -> None:
        """Adapt to the places of the placement. No live request may be on another one."""
        self._groups = {worker: self._groups.get(worker, {}) for worker in self._placement.capacities}
        self._workers = {group: workers & self._groups.keys() for group, workers in self._workers.items()}

    def holders(self, worker: str) -> dict[Group, int]:
        """Return the live requests with KV on ``worker``, and the tokens that each would free there."""
        return {group: self._freed(group, worker) for group in self._groups[worker] if self._holds(group, worker)}

    def _holds(self, group: Group, worker: str) -> bool:
        shared = any(node.worker == worker for node in self._prefixes.path(group))
        return bool(group.alive and (shared or self._reserved(group).get(worker)))

    def _freed(self, group: Group, worker: str) -> int:
        return self._reserved(group).get(worker, 0) + self._prefixes.exclusive(group, worker)

    def is_empty(self, worker: str) -> bool:
        """Return whether nothing is on a worker, or on its way there."""
        return not any(
            self._groups[place] or self._placement.idle[place] or self._placement.reserved[place]
            for place in self._placement.touching([worker])
        )
