"""Inboxes: device memory into which peers write bodies of messages directly, instead of through host memory.

The reader allocates an inbox. A peer's device on the same machine opens it by its handle (CUDA IPC between GPUs); a NIC
writes into it by a key (``transport.rdma``). Headers and doorbells stay in host memory. The reader's kernels see what a
writer's kernels wrote before they ended, or before a system-wide fence. Before it reads what a NIC wrote, the reader
calls ``settle``.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np

from lamina.core.errors import TransportError
from lamina.transport.base import DeviceMemory

logger = logging.getLogger(__name__)

MEMFD_NAME = "lamina-inbox"


@dataclass(frozen=True, eq=False)
class Inbox:
    """An inbox as kernels of one device see it.

    Attributes:
        address: device address of the first byte.
        array: the inbox as uint8 [nbytes], an array of the device's library.
        settle: makes writes of NICs visible to kernels that start from now on.
    """

    address: int
    array: Any
    settle: Callable[[], None] = lambda: None

    def parts(self, count: int) -> list[Any]:
        """Return ``count`` equal parts of the array."""
        size = len(self.array) // count
        return [self.array[start : start + size] for start in range(0, count * size, size)]


@dataclass(frozen=True)
class OwnInbox:
    """An inbox of this process.

    Attributes:
        handle: handle with which another process opens the inbox.
        memory: memory of the inbox, for NICs.
        read: returns the given number of bytes from the beginning.
        close: frees the inbox once nothing refers to its array.
    """

    inbox: Inbox
    handle: bytes
    memory: DeviceMemory
    read: Callable[[int], bytes]
    close: Callable[[], None]


@dataclass(frozen=True)
class PeerInbox:
    """An inbox of another process.

    Attributes:
        write: writes bytes at the beginning; complete on return.
        close: unmaps the inbox.
    """

    inbox: Inbox
    write: Callable[[bytes], None]
    close: Callable[[], None]


class Maker(Protocol):
    """Makes inboxes of a device, and opens those of other processes.

    Attributes:
        kind: devices of the same kind may be able to open each other's inboxes.
    """

    kind: str

    def make(self, nbytes: int) -> OwnInbox:
        """Allocate a zeroed inbox. Raises TransportError if there is no memory."""

    def open(self, handle: bytes, nbytes: int) -> PeerInbox:
        """Map another process's inbox. Raises TransportError if the device cannot reach it."""


@dataclass
class Inboxes:
    """By peer: the inbox that this device reads, and the peer's inbox that it writes. One thread owns it.

    Attributes:
        fixed: True once kernels may be waiting for messages. Then no inbox is made or opened, as allocation may wait
            for kernels, and closed inboxes stay until ``retire``, as kernels may still use them.
    """

    maker: Maker
    fixed: bool = False
    _own: dict[str, OwnInbox] = field(default_factory=dict)
    _theirs: dict[str, PeerInbox] = field(default_factory=dict)
    _ended: list[OwnInbox | PeerInbox] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.maker.kind

    def make(self, peer: str, nbytes: int) -> OwnInbox | None:
        """Make an inbox for a peer; None if there is no memory."""
        if self.fixed or nbytes <= 0:
            return None
        try:
            self._own[peer] = self.maker.make(nbytes)
        except TransportError as error:
            logger.warning("messages of %s go through the host's memory: %s", peer, error)
            return None
        return self._own[peer]

    def open(self, peer: str, handle: bytes, nbytes: int, proof: bytes) -> None:
        """Open a peer's inbox and write a proof into it, if this device can reach it."""
        if self.fixed or not handle:
            return
        try:
            self._theirs[peer] = self.maker.open(handle, nbytes)
            self._theirs[peer].write(proof)
        except TransportError as error:
            logger.warning("messages to %s go through the host's memory: %s", peer, error)
            self.close_outgoing(peer)

    def proof_arrived(self, peer: str, proof: bytes) -> bool:
        """True if the inbox for a peer begins with this proof."""
        return peer in self._own and self._own[peer].read(len(proof)) == proof

    def own(self, peer: str) -> Inbox | None:
        """Return the inbox that a peer writes into, if there is one."""
        return self._own[peer].inbox if peer in self._own else None

    def theirs(self, peer: str) -> Inbox | None:
        """Return the inbox of a peer that this device writes into, if it is open."""
        return self._theirs[peer].inbox if peer in self._theirs else None

    def close_outgoing(self, peer: str) -> None:
        """Close a peer's inbox, if it was opened."""
        self._end(self._theirs.pop(peer, None))

    def close(self, peer: str) -> None:
        """Free the inbox that was made for a peer, if any. The peer must not be able to write any more."""
        self._end(self._own.pop(peer, None))

    def _end(self, one: OwnInbox | PeerInbox | None) -> None:
        if one is not None:
            self._ended.append(one)
            if not self.fixed:
                self.retire()

    def retire(self) -> None:
        """Close and free the ended inboxes, which no kernel uses."""
        while self._ended:
            self._ended.pop().close()

    def close_all(self) -> None:
        """End all inboxes, which no kernel uses."""
        for peer in list(self._theirs):
            self.close_outgoing(peer)
        for peer in list(self._own):
            self.close(peer)
        self.retire()


class SharedMaker:
    """A ``Maker`` for tests, with anonymous files in place of device memory."""

    kind = "emulated"

    def make(self, nbytes: int) -> OwnInbox:
        file = os.fdopen(os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC), "rb+")
        file.truncate(nbytes)
        inbox, handle = _mapped(file, nbytes), f"{os.getpid()} {file.fileno()}".encode()
        memory, read = _SharedMemory(inbox.address, nbytes), lambda count: bytes(inbox.array[:count])
        return OwnInbox(inbox, handle, memory, read, file.close)

    def open(self, handle: bytes, nbytes: int) -> PeerInbox:
        pid, number = map(int, handle.split())
        path = f"/proc/{pid}/fd/{number}"
        try:
            if f"memfd:{MEMFD_NAME}" not in os.readlink(path):
                raise TransportError(f"{path} is no inbox")
            with open(path, "rb+") as file:
                inbox = _mapped(file, nbytes)
        except OSError as error:
            raise TransportError(f"cannot open the inbox {path}: {error}") from error

        def write(content: bytes) -> None:
            inbox.array[: len(content)] = list(content)

        return PeerInbox(inbox, write, functools.partial(_forbid, inbox.address, nbytes))


@dataclass
class _SharedMemory:
    """``DeviceMemory`` in host memory."""

    address: int
    nbytes: int
    name: str = "emulated"

    def export(self) -> None:
        """Return None: NICs register it by its address."""


def _forbid(address: int, nbytes: int) -> None:
    """Protect memory, so that a later access ends this process, as a GPU's access to unmapped memory does."""
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0)


def _mapped(file: BinaryIO, nbytes: int) -> Inbox:
    array = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
    return Inbox(array.ctypes.data, array)
