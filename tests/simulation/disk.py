"""Simulated disks of memory workers: slow, and sometimes full or broken."""

import errno
from concurrent.futures import Future
from typing import Any

from tests.simulation.world import World

BLOCK_S = 2e-3  # to read or write a block, on average


class Disks:
    """The disks of all workers.

    Attributes:
        fail: nothing can be read or written.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.fail = False

    def open(self, folder: str, count: int, nbytes: int) -> "SimulatedDisk":
        """Return a disk for one worker, as ``disk_tier.Disk``."""
        return SimulatedDisk(self, nbytes)


class SimulatedDisk:
    """One disk, as ``disk_tier.Disk``: it does one thing after another, and a block is written when its future is
    done."""

    def __init__(self, disks: Disks, nbytes: int) -> None:
        self.nbytes = nbytes
        self._disks, self._world = disks, disks.world
        self._blocks: dict[int, bytes] = {}
        self._idle_at = 0.0

    def write(self, block: int, content: bytearray) -> "Future[None]":
        """Write a block; ``content`` must not change before the future is done, which may have an OSError."""
        done = Future[None]()

        def keep() -> None:
            if self._may_go_on(done, errno.ENOSPC):
                self._blocks[block] = bytes(content)
                done.set_result(None)

        self._later(keep)
        return done

    def read(self, block: int) -> "Future[bytearray]":
        """Return a block's content; the future may have an OSError."""
        done = Future[bytearray]()

        def give() -> None:
            if self._may_go_on(done, errno.EIO):
                done.set_result(bytearray(self._blocks[block]))

        self._later(give)
        return done

    def close(self) -> None:
        """Nothing is left to close."""

    def _later(self, action: Any) -> None:
        self._idle_at = max(self._idle_at, self._world.now) + BLOCK_S * self._world.random.expovariate(1.0)
        self._world.call_at(self._idle_at, action)

    def _may_go_on(self, done: "Future[Any]", error: int) -> bool:
        if self._disks.fail:
            done.set_exception(OSError(error, "the simulated disk fails"))
        return not self._disks.fail
