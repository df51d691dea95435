"""Allocates huge-page host memory for KV slabs and packed weights."""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_PARTS = 8  # a call of ``PagesAhead.prepare`` provides this part of the missing pages
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` zeroed bytes, aligned to huge pages, which are requested; unmapped with the last view.

    With 4 KiB pages, scattered reads of a slab spend their time in page-table walks. Pages are allocated when they are
    first written; a kernel built without huge pages provides small ones.

    Raises:
        ValueError: ``nbytes`` is not positive.
        OSError: The address space cannot be mapped.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes is {nbytes}; give a positive number of bytes")
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # only advice; EINVAL if the kernel has no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(mapping, np.uint8)
    start = -buffer.ctypes.data % HUGE_PAGE_BYTES
    return buffer[start : start + nbytes]


class PagesAhead:
    """Makes pages of arrays resident shortly before they are written, a few with each call.

    The rows of all arrays are written in the same order, so that all arrays need a new page at about the same time. The
    kernel provides a page of 2 MiB when it is first written: that took 0.4 ms, and 7 ms where a virtual machine had to
    get it from its host. A step that waited for a page of each array would take many times as long.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """``arrays``: results of ``allocate``, by row."""
        self._arrays = [(one.ctypes.data, one.strides[0], one.nbytes) for one in arrays]
        self._ends = [0] * len(arrays)  # by array: pages that are resident, or are being written
        self._enough = -1  # most rows that need no further page

    def prepare(self, rows: int) -> None:
        """Make a part of the pages resident that are needed next, the first ``rows`` rows being in use: of each array
        the page of the next row, and the page after it."""
        if rows <= self._enough:
            return
        missing = list[tuple[float, int, int]]()  # pages: the row where each begins, its array and number
        for place, (_, row_nbytes, nbytes) in enumerate(self._arrays):
            begun, most = rows * row_nbytes // HUGE_PAGE_BYTES, -(-nbytes // HUGE_PAGE_BYTES)
            self._ends[place] = max(self._ends[place], min(begun, most))
            pages = range(self._ends[place], min(begun + 2, most))
            missing += [(page * HUGE_PAGE_BYTES / row_nbytes, place, page) for page in pages]
        missing.sort()
        part = -(-len(missing) // _PARTS)
        for _, place, page in missing[:part]:
            start, _, nbytes = self._arrays[place]
            begin = page * HUGE_PAGE_BYTES
            make_resident(start + begin, min(HUGE_PAGE_BYTES, nbytes - begin))
            self._ends[place] = page + 1
        if part == len(missing):
            self._enough = min(map(self._most_rows, self._arrays, self._ends), default=0)

    def _most_rows(self, array: tuple[int, int, int], end: int) -> int:
        """Return the most rows in use that need no page of an array from page ``end`` on."""
        _, row_nbytes, nbytes = array
        if end * HUGE_PAGE_BYTES >= nbytes:
            return nbytes // row_nbytes
        return ((end - 1) * HUGE_PAGE_BYTES - 1) // row_nbytes


def make_resident(start: int, nbytes: int) -> None:
    """Let the kernel provide the pages of mapped memory at address ``start`` now; their contents stay.

    Kernels before Linux 5.14 refuse, and provide a page when it is first written.
    """
    _madvise(start, nbytes, _POPULATE_WRITE)
