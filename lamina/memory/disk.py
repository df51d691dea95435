"""A file on a memory worker's disk, read and written beside the thread that serves attention.

Not a memory mapping: a page fault would block the thread that runs attention. The file's pages leave the page cache
as soon as they have been written or read, so that what is on the disk does not fill the memory as well.
"""

import contextlib
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

from lamina.errors import ConfigError

IN_MEMORY = ("tmpfs", "ramfs")


class Disk:
    """Blocks of ``nbytes`` bytes each. One thread reads and writes them, in the order of the calls."""

    def __init__(self, folder: str, count: int, nbytes: int) -> None:
        """Make a file of ``count`` blocks in ``folder``. It has no name: it is gone when this process ends, however it
        ends. Raises ConfigError if the folder cannot be used or lacks the space."""
        self.nbytes = nbytes
        self._file = _open(Path(folder), count * nbytes)
        self._thread = ThreadPoolExecutor(1, "lamina-disk")

    def write(self, block: int, content: bytearray) -> "Future[None]":
        """Write a block; ``content`` must not change before the future is done, which may have an OSError."""
        return self._thread.submit(self._write, block, content)

    def read(self, block: int) -> "Future[bytearray]":
        """A block's content; the future may have an OSError."""
        return self._thread.submit(self._read, block)

    def close(self) -> None:
        """Close the file; writes that wait are cancelled."""
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
    """A new file without a name, with space for ``nbytes`` bytes. Raises ConfigError."""
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
    """The type of the file system that a folder is on."""
    place, kinds = folder.resolve(), dict[Path, str]()
    with contextlib.suppress(OSError):
        kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), "")
