"""Allocates arenas: anonymous files (memfd) mapped into memory. Registers pages of memory with devices.

The kernel frees an anonymous file once no process has it open or mapped, however processes end.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lamina._native import Arena as NativeArena
from lamina.core.errors import TransportError
from lamina.transport.base import Buffer, check_range

logger = logging.getLogger(__name__)

MEMFD_NAME = "lamina-arena"
PAGE = 4096
_SLOWER = "%s: messages are copied more slowly; raise the limit of locked memory (ulimit -l)"


class MappedArena:
    """Views of the memory of an ``OwnArena``, and its doorbells. Views stay valid after arena and endpoint have closed.

    Attributes:
        nbytes: size without doorbells.
        doorbells: number of doorbells.
        sequence: returns the number with which a doorbell was last rung; a native function, called for every message.
    """

    def __init__(self, native: NativeArena) -> None:
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self.sequence: Callable[[int], int] = native.sequence
        self._data = memoryview(native)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a writable view of [offset, offset + nbytes). Raises ValueError outside the arena."""
        check_range(offset, nbytes, self.nbytes)
        return self._data[offset : offset + nbytes]


@dataclass(frozen=True)
class OwnArena:
    """The file and the mapping of memory of this process into which peers write. The caller of ``allocate`` closes it.

    Attributes:
        fd: descriptor of the file; the mapping stays valid after it is closed.
        identity: random number that distinguishes the arena from a later one with the same descriptor or port.
        native: the mapping.
    """

    fd: int
    identity: int
    native: NativeArena

    def close(self) -> None:
        os.close(self.fd)


def allocate(endpoint: str, nbytes: int, doorbells: int) -> OwnArena:
    """Allocate a zeroed arena. ``endpoint`` names its owner in errors.

    Raises ValueError for sizes that are not positive; TransportError if memory cannot be mapped.
    """
    if nbytes <= 0 or doorbells <= 0:
        raise ValueError(f"an arena needs at least 1 byte and 1 doorbell; got {nbytes} bytes, {doorbells} doorbells")
    identity = secrets.randbits(64)
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, NativeArena.file_nbytes(nbytes, doorbells))
        # Sealed: shrinking it would crash processes that have it mapped (SIGBUS).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return OwnArena(fd, identity, NativeArena.create(fd, nbytes, doorbells, identity))
    except (OSError, MemoryError) as error:
        os.close(fd)
        raise TransportError(f"cannot map an arena of {nbytes} bytes for {endpoint}: {error}") from error


class Pages:
    """Registers pages of memory with a device. No page is registered twice, although ranges may share pages.

    Args:
        register: registers a run of pages, given its address and bytes.
        unregister: ends the registration of the run that begins at an address.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._known = set[int]()
        self._runs: list[tuple[int, int]] = []  # [start, stop) of each call of ``register``

    def register(self, at: int, nbytes: int) -> None:
        """Register the pages of [at, at + nbytes) that are not registered."""
        for first, count in _runs(sorted({*range(at // PAGE, -(-(at + nbytes) // PAGE))} - self._known)):
            self._register(first * PAGE, count * PAGE)
            self._runs.append((first * PAGE, (first + count) * PAGE))
            self._known.update(range(first, first + count))

    def covers(self, at: int, nbytes: int) -> bool:
        """Return whether a single registration covers all of [at, at + nbytes)."""
        return any(start <= at and at + nbytes <= stop for start, stop in self._runs)

    def cuts(self, at: int, nbytes: int) -> bool:
        """Return whether some of [at, at + nbytes) is registered, but no single registration covers all of it."""
        return not self.covers(at, nbytes) and any(start < at + nbytes and at < stop for start, stop in self._runs)

    def clear(self) -> None:
        for start, _ in self._runs:
            self._unregister(start)
        self._runs.clear()
        self._known.clear()


class HostMemory:
    """Registers host memory with a device, which then copies messages faster.

    Attributes:
        own: pages into which peers write. They stay registered until a registration fails. A copy from them must not
            span two registrations.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """Take the arguments of ``Pages``. A TransportError of ``register`` is logged: messages are then slower."""
        self._calls = register, unregister
        self.own = Pages(register, unregister)
        self._failed = False
        self._peers: dict[str, tuple[Buffer, Pages]] = {}

    def register_own(self, memory: Buffer) -> None:
        """Register memory of this process.

        If that fails, all of ``own`` is unregistered, and later calls do nothing: no copy may span registered and
        unregistered memory.
        """
        if self._failed:
            return
        try:
            self.own.register(_address(memory), memory.nbytes)
        except TransportError as error:
            logger.warning(_SLOWER, error)
            self.own.clear()
            self._failed = True

    def register_peer(self, peer: str, memory: Buffer) -> bool:
        """Register memory of a peer until ``unregister_peer``. Return whether that succeeds."""
        self.unregister_peer(peer)
        pages = Pages(*self._calls)
        try:
            pages.register(_address(memory), memory.nbytes)
        except TransportError as error:
            logger.warning(_SLOWER, error)
            pages.clear()
            return False
        self._peers[peer] = memory, pages
        return True

    def unregister_peer(self, peer: str) -> None:
        if known := self._peers.pop(peer, None):
            known[1].clear()


def _address(memory: Buffer) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each as (first, count). ``numbers`` ascend."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found
