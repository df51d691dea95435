"""The shared-memory transport between processes of one machine. Implements ``transport.base.Endpoint``.

An arena is an anonymous file that peers open through ``/proc/<pid>/fd/<n>``. Layout, doorbells and waits are native
(``native/transport``).
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
from lamina.transport.base import Fetch, Part, Peer, Target, check_fetch, deadline_error
from lamina.transport.endpoint import SPIN_S, ArenaEndpoint, Own
from lamina.transport.listener import PROTOCOL, ArenaDescriptor, decode


class ShmDescriptor(ArenaDescriptor, array_like=True, frozen=True):
    """Where to find an arena. ``start_time`` (clock ticks since boot) distinguishes processes with the same id."""

    pid: int
    start_time: int
    fd: int


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        after_name = stat.read().rpartition(b")")[2]  # a name may contain blanks and parentheses
    return int(after_name.split()[19])  # field 22 of proc(5), the 20th after the name


def host() -> str:
    """Return an identifier that is equal for processes of one machine and PID namespace, which can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class ShmPeer:
    """A mapped remote arena and a handle on its process."""

    def __init__(self, descriptor: ShmDescriptor, native: NativeArena, pidfd: int) -> None:
        self.name = descriptor.name
        self.pid = descriptor.pid
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self.native = native
        self.pidfd = pidfd


@dataclass(frozen=True)
class _Own(Own):
    waiter: ShmWaiter


class ShmEndpoint(ArenaEndpoint[_Own, ShmPeer]):
    """One worker's end of the data plane in shared memory. ``spin_s`` is that of ``Options``."""

    def __init__(self, name: str, *, spin_s: float = SPIN_S) -> None:
        super().__init__(name)
        self.spin_s = spin_s

    def descriptor(self) -> bytes:
        arena, pid = self._registered().arena, os.getpid()
        where = arena.identity, pid, _start_time(pid), arena.fd
        return msgspec.msgpack.encode(ShmDescriptor("shm", PROTOCOL, self.name, *where))

    def connect(self, descriptor: bytes, timeout_s: float) -> ShmPeer:
        own = self._registered()
        peer = _open(decode(descriptor, "shm", ShmDescriptor))
        self._peers[id(peer)] = peer
        own.waiter.watch(peer.native, peer.pidfd)
        return peer

    def disconnect(self, peer: Peer) -> None:
        known = self._connected(peer)
        self._registered().waiter.forget(list(self._peers).index(id(known)))
        del self._peers[id(known)]
        os.close(known.pidfd)

    def disconnect_for_good(self, peer: Peer) -> None:
        self.disconnect(peer)

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        known = self._connected(peer)
        try:
            known.native.write(offset, data)
        except ConnectionResetError:
            raise _lost(known) from None

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        known = self._connected(peer)
        try:
            known.native.ring(doorbell, sequence)
        except ConnectionResetError:
            raise _lost(known) from None

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        known = self._connected(peer)
        try:
            known.native.post(offset, nbytes, parts, doorbell, sequence)
        except ConnectionResetError:
            raise _lost(known) from None

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        """Copy in the calling thread; the doorbell has rung when this returns."""
        own, known = self._registered().arena.native, self._connected(peer)
        check_fetch(fetch, known.nbytes, own.nbytes, own.doorbells)
        if known.native.gone:
            raise _lost(known)
        own.write(fetch.to, memoryview(known.native)[fetch.offset : fetch.offset + fetch.nbytes])
        own.ring(fetch.doorbell, fetch.sequence)

    def wait(self, targets: Sequence[Target], timeout_s: float) -> int:
        own = self._registered()
        try:
            return own.waiter.wait(targets, timeout_s, self.spin_s)
        except TimeoutError:
            reached = [own.arena.native.sequence(doorbell) for doorbell, _ in targets]
            raise deadline_error(self.name, targets, reached, timeout_s) from None
        except ConnectionResetError as error:
            raise _lost(list(self._peers.values())[error.args[0]]) from None

    def _open(self, arena: OwnArena) -> _Own:
        return _Own(arena, ShmWaiter(arena.native))

    def _leave(self, own: _Own) -> None:
        own.arena.native.mark_gone()
        for peer in self._peers.values():
            peer.native.nudge()
            os.close(peer.pidfd)


def _open(where: ShmDescriptor) -> ShmPeer:
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


def _map(where: ShmDescriptor) -> NativeArena:
    path = f"/proc/{where.pid}/fd/{where.fd}"
    if f"memfd:{MEMFD_NAME}" not in os.readlink(path):  # opening another kind of file could have side effects
        raise ValueError(f"{path} is not an arena")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return NativeArena.open(fd, where.identity)
    finally:
        os.close(fd)


def _lost(peer: ShmPeer) -> PeerLostError:
    return PeerLostError(peer.name, f"process {peer.pid} has exited or closed its endpoint")
