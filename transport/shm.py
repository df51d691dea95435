"""The shared-memory transport between processes of one machine. Implements ``transport.base.Endpoint``.

An arena is an anonymous file that peers open through ``/proc/<pid>/fd/<n>``. Layout, doorbells and the wait are
native (``native/transport``).
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lamina._native import Arena as NativeArena
from lamina._native import ShmWaiter
from lamina.core.errors import PeerLostError, TransportError
from lamina.transport.arena import MEMFD_NAME, OwnArena
from lamina.transport.base import Fetch, Part, Peer, check_fetch, deadline_error
from lamina.transport.endpoint import SPIN_S, ArenaEndpoint

PROTOCOL = 1


class Descriptor(msgspec.Struct, array_like=True, frozen=True):
    """Where to find an arena.

    Process ids and file descriptors are reused: ``start_time`` (clock ticks since boot) tells a process from a later
    one with its id, and the random ``identity`` an arena from a later one with its file descriptor.
    """

    protocol: int
    name: str
    pid: int
    start_time: int
    fd: int
    identity: int


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        after_name = stat.read().rpartition(b")")[2]  # a name may contain blanks and parentheses
    return int(after_name.split()[19])  # field 22 of proc(5), the 20th after the name


def host() -> str:
    """Equal for processes that can open each other's arenas: same boot of a machine, same PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class ShmPeer:
    """A mapped remote arena and a handle on its process."""

    def __init__(self, descriptor: Descriptor, native: NativeArena, pidfd: int) -> None:
        self.name = descriptor.name
        self.pid = descriptor.pid
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self.native = native
        self.pidfd = pidfd
        self.endpoint: ShmEndpoint | None = None  # that is connected to it


@dataclass(frozen=True)
class _Own:
    arena: OwnArena
    waiter: ShmWaiter


class ShmEndpoint(ArenaEndpoint[_Own, ShmPeer]):
    """One worker's end of the data plane in shared memory.

    Args:
        name: this endpoint's name in peers' errors.
        spin_s: see ``Options``.
    """

    def __init__(self, name: str, *, spin_s: float = SPIN_S) -> None:
        super().__init__(name)
        self.spin_s = spin_s

    def descriptor(self) -> bytes:
        """Return what a peer needs to connect to this endpoint's arena. Raises TransportError before ``register``."""
        arena = self._registered().arena
        pid = os.getpid()
        return msgspec.msgpack.encode(Descriptor(PROTOCOL, self.name, pid, _start_time(pid), arena.fd, arena.identity))

    def connect(self, descriptor: bytes, timeout_s: float) -> ShmPeer:
        """Open a peer's arena for writing; does not block. Raises TransportError, PeerLostError."""
        own = self._registered()
        try:
            where = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"not the descriptor of a shared-memory endpoint: {error}") from error
        if where.protocol != PROTOCOL:
            raise TransportError(
                f"{where.name} speaks version {where.protocol} of shared memory, this process {PROTOCOL}; "
                "run the same release of lamina in all workers"
            )
        peer = _open(where)
        peer.endpoint = self
        self._peers.append(peer)
        own.waiter.watch(peer.native, peer.pidfd)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; from now on its loss does not interrupt waits."""
        known = self._connected(peer)
        index = self._peers.index(known)
        self._registered().waiter.forget(index)
        del self._peers[index]
        known.endpoint = None
        os.close(known.pidfd)

    def disconnect_for_good(self, peer: Peer) -> None:
        """``disconnect``. A process keeps its mapping of this arena: it must have ended, or it can still write."""
        self.disconnect(peer)

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        """Copy ``data`` into the peer's arena at ``offset``. Raises ValueError outside the arena, PeerLostError."""
        native = self._connected(peer).native
        try:
            native.write(offset, data)
        except ConnectionResetError:
            raise _lost(peer) from None

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        """Set the peer's doorbell to ``sequence`` after all earlier writes to that peer, and wake its waiter."""
        native = self._connected(peer).native
        try:
            native.ring(doorbell, sequence)
        except ConnectionResetError:
            raise _lost(peer) from None

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Write the parts one after another into the peer's [offset, offset + nbytes), then ring."""
        native = self._connected(peer).native
        try:
            native.post(offset, nbytes, parts, doorbell, sequence)
        except ConnectionResetError:
            raise _lost(peer) from None

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Read bytes of the peer's arena into one's own, then ring one's own doorbell.

        The calling thread copies; the doorbell has rung when it returns.
        """
        own, theirs = self._registered().arena.native, self._connected(peer).native
        check_fetch(fetch, theirs, own)
        if theirs.gone:
            raise _lost(peer)
        own.write(fetch.to, memoryview(theirs)[fetch.offset : fetch.offset + fetch.nbytes])
        own.ring(fetch.doorbell, fetch.sequence)

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float) -> int:
        """Wait until one of this endpoint's doorbells has reached its target; ``targets`` are (doorbell, sequence)."""
        own = self._registered()
        try:
            return own.waiter.wait(targets, timeout_s, self.spin_s)
        except TimeoutError:
            reached = [own.arena.native.sequence(doorbell) for doorbell, _ in targets]
            raise deadline_error(self.name, targets, reached, timeout_s) from None
        except ConnectionResetError as error:
            raise _lost(self._peers[error.args[0]]) from None

    def _open(self, arena: OwnArena) -> _Own:
        return _Own(arena, ShmWaiter(arena.native))

    def _leave(self, own: _Own) -> None:
        own.arena.native.mark_gone()
        for peer in self._peers:
            peer.native.nudge()
            peer.endpoint = None
            os.close(peer.pidfd)

    def _connected(self, peer: Peer) -> ShmPeer:
        if not isinstance(peer, ShmPeer) or peer.endpoint is not self:
            raise TransportError(f"endpoint {self.name} is not connected to {peer.name}")
        return peer


def _open(where: Descriptor) -> ShmPeer:
    """Map the arena of another process, after checking that the process id has not been reused."""
    try:
        pidfd = os.pidfd_open(where.pid)
    except ProcessLookupError as error:
        raise PeerLostError(
            where.name,
            f"process {where.pid} is not visible here ({error.strerror}); shared memory needs workers on one machine, "
            "in one PID namespace",
        ) from error
    except OSError as error:
        raise TransportError(f"cannot monitor {where.name} in process {where.pid}: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, pidfd)
        try:
            # Checked after pidfd_open: if the id belongs to the right process now, the pidfd refers to that process.
            if _start_time(where.pid) != where.start_time:
                raise PeerLostError(where.name, f"process id {where.pid} now belongs to another process")
            native = _map(where)
        except (FileNotFoundError, ProcessLookupError, ValueError) as error:
            raise PeerLostError(where.name, f"process {where.pid} has exited or closed its endpoint") from error
        except (OSError, MemoryError) as error:
            raise TransportError(f"cannot open the arena of {where.name} in process {where.pid}: {error}") from error
        undo.pop_all()
    return ShmPeer(where, native, pidfd)


def _map(where: Descriptor) -> NativeArena:
    path = f"/proc/{where.pid}/fd/{where.fd}"
    if f"memfd:{MEMFD_NAME}" not in os.readlink(path):  # opening another kind of file could have side effects
        raise ValueError(f"{path} is not an arena")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return NativeArena.open(fd, where.identity)
    finally:
        os.close(fd)


def _lost(peer: Peer) -> PeerLostError:
    pid = f"process {peer.pid}" if isinstance(peer, ShmPeer) else "its process"
    return PeerLostError(peer.name, f"{pid} has exited or closed its endpoint")
