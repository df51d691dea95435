"""Arenas of this process: anonymous files mapped into memory.

They have no name, so nothing is left behind however processes end.
"""

import fcntl
import os
import secrets
from dataclasses import dataclass

from lamina._native import Arena as NativeArena
from lamina.errors import TransportError
from lamina.transport.base import Buffer, check_range

MEMFD_NAME = "lamina-arena"


class MappedArena:
    """Arena of this process. Views stay valid, and keep the memory, after the endpoint has closed."""

    def __init__(self, native: NativeArena) -> None:
        self.nbytes = native.nbytes
        self.doorbells = native.doorbells
        self._data = memoryview(native)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Writable view of [offset, offset + nbytes) without copying. Raises ValueError outside the arena."""
        check_range(offset, nbytes, self.nbytes)
        return self._data[offset : offset + nbytes]


@dataclass(frozen=True)
class OwnArena:
    """Memory of this process that endpoints let peers write into. Whoever allocated it closes it.

    Attributes:
        fd: of its file; the mapping outlives it.
        identity: drawn at random, so that a later arena in the same place is told apart.
    """

    fd: int
    identity: int
    native: NativeArena

    def close(self) -> None:
        """Give back the file. Views keep their memory."""
        os.close(self.fd)


def allocate(endpoint: str, nbytes: int, doorbells: int) -> OwnArena:
    """A new arena, all zero.

    Raises ValueError for sizes that are not positive; TransportError if there is no memory, naming ``endpoint``.
    """
    if nbytes <= 0 or doorbells <= 0:
        raise ValueError(f"an arena needs bytes and doorbells; {nbytes} and {doorbells} were asked for")
    identity = secrets.randbits(64)
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, NativeArena.file_nbytes(nbytes, doorbells))
        # Nobody can shrink it under another process's feet (SIGBUS).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return OwnArena(fd, identity, NativeArena.create(fd, nbytes, doorbells, identity))
    except (OSError, MemoryError) as error:
        os.close(fd)
        raise TransportError(f"cannot map an arena of {nbytes} bytes for {endpoint}: {error}") from error
