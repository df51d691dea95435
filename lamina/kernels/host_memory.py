"""Allocates huge-page host memory for KV slabs and packed weights."""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 * 1024 * 1024


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
