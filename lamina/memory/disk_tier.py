"""Copies blocks of cached sequences between a memory worker's slab and its disk, in the gaps between messages."""

import collections
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from lamina.core.errors import ConfigError
from lamina.core.steps import BLOCK, Fetch, Spill, StepPlan, blocks_of
from lamina.memory.store import KvStore

IN_MEMORY = ("tmpfs", "ramfs")


class Disk:
    """A file of ``count`` blocks of ``nbytes`` bytes. One thread reads and writes them, in the order of the calls."""

    def __init__(self, folder: str, count: int, nbytes: int) -> None:
        """Create the file in ``folder``, without a name, so that it vanishes with this process.

        Raises ConfigError if the folder cannot be used or lacks the space.
        """
        self.nbytes = nbytes
        self._file = _open(Path(folder), count * nbytes)
        self._thread = ThreadPoolExecutor(1, "lamina-disk")

    def write(self, block: int, content: bytearray) -> "Future[None]":
        """Write a block. ``content`` must not change before the future is done; the future may raise OSError."""
        return self._thread.submit(self._write, block, content)

    def read(self, block: int) -> "Future[bytearray]":
        """Read a block. The future may raise OSError."""
        return self._thread.submit(self._read, block)

    def close(self) -> None:
        """Cancel queued operations and close the file."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)

    def _write(self, block: int, content: bytearray) -> None:
        start, done = block * self.nbytes, 0
        while done < self.nbytes:
            done += os.pwrite(self._file, memoryview(content)[done:], start + done)
        os.fdatasync(self._file)  # dirty pages cannot be dropped, and a disk that cannot follow must slow us down
        os.posix_fadvise(self._file, start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def _read(self, block: int) -> bytearray:
        content, start, done = bytearray(self.nbytes), block * self.nbytes, 0
        while done < self.nbytes:
            count = os.preadv(self._file, [memoryview(content)[done:]], start + done)
            if not count:
                raise OSError(f"the file ends at byte {start + done}")
            done += count
        os.posix_fadvise(self._file, start, self.nbytes, os.POSIX_FADV_DONTNEED)
        return content


def _open(folder: Path, nbytes: int) -> int:
    if not folder.is_dir():
        raise ConfigError(f"kv_spill_dir is '{folder}', a folder that does not exist; make it first")
    if (kind := _kind_of(folder)) in IN_MEMORY:
        raise ConfigError(f"kv_spill_dir is '{folder}', which is memory ({kind}); give a folder on a disk")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ConfigError(
            f"kv_overcommit needs {nbytes} bytes in kv_spill_dir '{folder}' for each memory worker; {free} are free. "
            "Lower it, or give another folder"
        )
    try:
        number, name = tempfile.mkstemp(prefix="lamina-kv-", dir=folder)
    except OSError as error:
        raise ConfigError(f"kv_spill_dir is '{folder}', which cannot be used: {error.strerror}") from error
    os.unlink(name)
    try:
        os.posix_fallocate(number, 0, nbytes)
    except OSError as error:
        os.close(number)
        raise ConfigError(
            f"kv_overcommit needs {nbytes} bytes in kv_spill_dir '{folder}': {error.strerror}. Lower it, or give "
            "another folder"
        ) from error
    return number


def _kind_of(folder: Path) -> str:
    place, kinds = folder.resolve(), dict[Path, str]()
    with contextlib.suppress(OSError):
        kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), "")


AHEAD = 2  # disk operations of one transfer in flight
STALLED_S = 30.0  # longest time in which the disk completes nothing of a transfer

OnDone = Callable[[int, bool, str], None]
"""Called with the number of a copy or fetch, whether it is complete, and the disk's error."""


@dataclass(eq=False)
class _Transfer:
    """A copy to the disk or a fetch from it, block by block.

    Attributes:
        slots: Slots of each block.
        next: The next block to submit to the disk.
        layer: The next layer to copy of the block being filled (copies) or restored (fetches).
        moving: Disk operations in flight, oldest first.
        left: Blocks that are not done.
        since: Monotonic time of the last progress.
    """

    number: int
    sequence: int
    blocks: list[int]
    slots: list[npt.NDArray[np.int32]]
    writes: bool
    next: int = 0
    layer: int = 0
    content: bytearray | None = None
    moving: "collections.deque[Future[Any]]" = field(default_factory=collections.deque)
    left: int = 0
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.left = len(self.blocks)


class Tier:
    """Transfers between a slab and a disk. The memory worker's thread owns it, and calls ``work`` in its gaps."""

    def __init__(self, store: KvStore, disk: Disk, on_done: OnDone) -> None:
        self._store = store
        self._disk = disk
        self._on_done = on_done
        self._transfers: list[_Transfer] = []
        ends = np.cumsum([0, *(BLOCK * spec.slab_bytes_per_token(store.element) for spec in store.attentions)])
        self._layers = [slice(int(start), int(stop)) for start, stop in itertools.pairwise(ends)]

    @property
    def active(self) -> bool:
        """Whether transfers are in flight."""
        return bool(self._transfers)

    def apply(self, plan: StepPlan) -> None:
        """Begin and end the transfers of a plan, after the store has applied it.

        Copies of released or moved sequences are aborted: their slots may get other owners.
        """
        self.release([*plan.released, *(one.sequence for switch in plan.switches for one in switch.segments)])
        for spill in plan.spills:
            if spill.worker == self._store.worker:
                self._copy(spill)
        for fetch in plan.fetches:
            if fetch.worker == self._store.worker:
                self._fetch(fetch)

    def _copy(self, spill: Spill) -> None:
        held = self._held(spill.sequence)
        if not held:
            self._on_done(spill.number, False, "")  # it was evicted with the same plan
            return
        parts = [slots[place * BLOCK : (place + 1) * BLOCK].copy() for place in spill.places for slots in held]
        self._transfers.append(_Transfer(spill.number, spill.sequence, spill.blocks, parts, writes=True))

    def _held(self, sequence: int) -> list[npt.NDArray[np.int32]]:
        """Return the slots of each shard of a cached sequence, whose first segment here begins with its first token."""
        held = self._store.held
        return [self._store.slab.slots(key) for one in held.segments.get(sequence, [])[:1] for key in held.keys(one)]

    def _fetch(self, fetch: Fetch) -> None:
        held = self._held(fetch.child)
        places = range(fetch.start, len(held[0]), BLOCK)
        parts = [slots[place : place + BLOCK].copy() for place in places for slots in held]
        self._transfers.append(_Transfer(fetch.number, fetch.child, fetch.blocks, parts, writes=False))

    def release(self, sequences: Sequence[int]) -> None:
        """Abort transfers of sequences whose slots were freed."""
        for one in [one for one in self._transfers if one.sequence in sequences]:
            self._end(one, complete=False)

    def drop(self) -> None:
        """Abort all transfers."""
        self._transfers.clear()

    def work(self) -> bool:
        """Copy one layer of one block, or complete one disk operation, of the first transfer that can continue.

        Returns False if all transfers wait for the disk.
        """
        now = time.monotonic()
        for one in self._transfers:
            try:
                if self._write(one) if one.writes else self._read(one):
                    one.since = now
                    self._transfers.sort(key=lambda each: each.since)  # they take turns
                    return True
                if now - one.since > STALLED_S:
                    raise TimeoutError(f"nothing was read or written for {STALLED_S:.0f} s")
            except OSError as error:
                self._end(one, complete=False, error=f"{type(error).__name__}: {error}")
                return True
        return False

    def _write(self, one: _Transfer) -> bool:
        """Continue a copy; return whether there was progress. Raises OSError."""
        if one.moving and one.moving[0].done():
            one.moving.popleft().result()
            one.left -= 1
            if not one.left:
                self._end(one, complete=True)
            return True
        if one.next == len(one.blocks) or len(one.moving) == AHEAD:
            return False
        if one.content is None:
            one.content = bytearray(self._disk.nbytes)
        view = memoryview(one.content)[self._layers[one.layer]]
        self._store.device.read(one.layer, one.slots[one.next], view)
        one.layer += 1
        if one.layer == len(self._layers):
            one.moving.append(self._disk.write(one.blocks[one.next], one.content))
            one.next, one.layer, one.content = one.next + 1, 0, None
        return True

    def _read(self, one: _Transfer) -> bool:
        """Continue a fetch; return whether there was progress. Raises OSError."""
        if one.next < len(one.blocks) and len(one.moving) < AHEAD:
            one.moving.append(self._disk.read(one.blocks[one.next]))
            one.next += 1
            return True
        if not one.moving[0].done():
            return False
        content: bytearray = one.moving[0].result()
        view = memoryview(content)[self._layers[one.layer]]
        self._store.device.restore(one.layer, one.slots[len(one.blocks) - one.left], view)
        one.layer += 1
        if one.layer == len(self._layers):
            one.moving.popleft()
            one.layer, one.left = 0, one.left - 1
            if not one.left:
                self._end(one, complete=True)
        return True

    def _end(self, one: _Transfer, *, complete: bool, error: str = "") -> None:
        self._transfers.remove(one)
        self._on_done(one.number, complete, error)


def open_tier(
    store: KvStore, folder: str, overcommit: float, on_done: OnDone, resources: contextlib.ExitStack
) -> Tier | None:
    """Return a disk tier with which a store holds ``overcommit`` times its slab; None if that is the slab alone.

    ``resources`` closes the tier. Raises ConfigError if the folder cannot be used.
    """
    blocks = blocks_of(store.slab.capacity, overcommit)
    if not blocks:
        return None
    nbytes = BLOCK * sum(spec.slab_bytes_per_token(store.element) for spec in store.attentions)
    disk = Disk(folder, blocks, nbytes)
    resources.callback(disk.close)
    return Tier(store, disk, on_done)
