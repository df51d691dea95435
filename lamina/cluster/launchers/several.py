"""Workers of this machine and of others in one cluster."""

from collections.abc import Mapping, Sequence

from lamina.cluster.gather import Wish
from lamina.cluster.launchers.local import LocalWorkers
from lamina.cluster.launchers.remote import RemoteWorkers
from lamina.cluster.launchers.supervised import SupervisedWorkers
from lamina.cluster.pool import CPU, REMOTE
from lamina.protocol.control import Bootstrap
from lamina.topology import Role

Local = LocalWorkers | SupervisedWorkers


class LocalAndRemote:
    """Starts workers here, and takes in those that are started on other machines: of kind ``REMOTE``.

    Attributes:
        local, remote: the two parts.
    """

    def __init__(self, local: Local, remote: RemoteWorkers) -> None:
        self.local, self.remote = local, remote

    def check(self, role: Role, kind: str, count: int) -> None:
        """See ``Launcher``."""
        (self.remote if kind == REMOTE else self.local).check(role, kind, count)

    def start(self, name: str, role: Role, kind: str, bootstrap: Bootstrap) -> None:
        """See ``Launcher``."""
        (self.remote if kind == REMOTE else self.local).start(name, role, kind, bootstrap)

    def default_kind(self, role: Role) -> str:
        """See ``Launcher``."""
        return CPU

    def wishes(self) -> Sequence[Wish]:
        """See ``Workers``."""
        return [wish._replace(kind=REMOTE) for wish in self.remote.wishes()]

    def ended(self) -> Mapping[str, str]:
        """See ``Workers``."""
        local, remote = self.local.ended(), self.remote.ended()
        return {**local, **remote} if remote else local

    def end(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        """See ``Workers``."""
        if worker in self.local.processes:
            self.local.end(worker)
        else:
            self.remote.end(worker, cut=cut, reason=reason)

    def kill(self, reason: str = "") -> None:
        """End all workers at once. ``reason``: for those who have started them elsewhere."""
        self.local.kill()
        self.remote.kill(reason)

    def close(self) -> None:
        """See ``Workers``."""
        self.local.close()
        self.remote.close()
