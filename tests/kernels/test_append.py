"""Appending rows to a slab, and the slab's memory."""

import numpy as np
import pytest
import torch

from lamina import _native
from lamina.kernels.attention import append
from lamina.kernels.host_memory import HUGE_PAGE_BYTES, allocate

SLOTS = np.array([4, 0, 9, 7], np.int32)
TORCH_TYPES = {np.uint16: torch.bfloat16, np.float16: torch.float16, np.float32: torch.float32}


def slabs(dtype):
    return np.zeros((10, 2, 5), dtype), np.zeros((10, 2, 3), dtype)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("threads", [1, 2])
def test_rounds_like_torch(dtype, threads):
    rng = np.random.default_rng(0)
    slots = rng.permutation(300).astype(np.int32)
    k, v = rng.standard_normal((300, 2, 5)).astype(np.float32), rng.standard_normal((300, 2, 11)).astype(np.float32)
    k.flat[:6] = [np.inf, -np.inf, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]  # the last two are ties in bfloat16
    k_slab, v_slab = np.zeros((300, 2, 5), dtype), np.zeros((300, 2, 11), dtype)
    append(k_slab, v_slab, k, v, slots, threads)
    for slab, rows in ((k_slab, k), (v_slab, v)):
        rounded = torch.from_numpy(rows).to(TORCH_TYPES[dtype])
        np.testing.assert_array_equal(slab[slots], rounded.view(torch.from_numpy(slab).dtype).numpy())


def test_nan_stays_nan():
    k_slab, v_slab = slabs(np.uint16)
    rows = np.full((4, 2, 5), np.uint32(0x7F800001).view(np.float32))  # truncation would make it infinite
    append(k_slab, v_slab, rows, np.zeros((4, 2, 3), np.float32), SLOTS)
    assert torch.from_numpy(k_slab[SLOTS]).view(torch.bfloat16).isnan().all()


def test_copies_rows_of_the_slabs_type_and_leaves_the_others():
    k_slab, v_slab = slabs(np.uint16)
    k = np.arange(1, 41, dtype=np.uint16).reshape(4, 2, 5)
    append(k_slab, v_slab, k, np.ones((4, 2, 3), np.uint16), SLOTS)
    np.testing.assert_array_equal(k_slab[SLOTS], k)
    assert (np.delete(k_slab, SLOTS, axis=0) == 0).all()


def test_mistakes_are_named():
    k_slab, v_slab = slabs(np.uint16)
    k, v = np.ones((4, 2, 5), np.float32), np.ones((4, 2, 3), np.float32)
    with pytest.raises(ValueError, match="slots holds 10; the slab has slots 0 to 9"):
        append(k_slab, v_slab, k, v, np.array([0, 1, 2, 10], np.int32))
    with pytest.raises(ValueError, match=r"rows has shape \[3, 2, 5\]; expected \[4, 2, 5\]"):
        append(k_slab, v_slab, k[:3], v, SLOTS)
    with pytest.raises(ValueError, match="rows must hold float32 elements or the element type of slab"):
        append(k_slab, v_slab, k.astype(np.float16), v, SLOTS)
    with pytest.raises(ValueError, match=r"v is float32 of shape \(3, 2, 3\); expected .* of shape \(4, 2, 3\)"):
        append(k_slab, v_slab, k, v[:3], SLOTS)
    with pytest.raises(ValueError, match=r"v is float16 .* expected float32 or the slab's uint16"):
        append(k_slab, v_slab, k, v.astype(np.float16), SLOTS)
    with pytest.raises(ValueError, match=r"v_slab is uint16 of shape \(9, 2, 3\); give it the slots"):
        append(k_slab, v_slab[:9], k, v, SLOTS)
    with pytest.raises(ValueError, match="must be C-contiguous"):
        append(k_slab, v_slab, k, v[:, :, ::-1], SLOTS)
    v_slab.flags.writeable = False
    with pytest.raises(ValueError, match="v_slab is read-only"):
        append(k_slab, v_slab, k, v, SLOTS)
    assert (k_slab == 0).all()


def test_memory_is_zeroed_writable_and_aligned():
    memory = allocate(3 * HUGE_PAGE_BYTES + 5)
    assert memory.shape == (3 * HUGE_PAGE_BYTES + 5,) and memory.dtype == np.uint8
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory[-1] = 7
    assert memory[-1] == 7
    with pytest.raises(ValueError, match="nbytes is 0"):
        allocate(0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row_bytes", [128, 512, 640])
def test_reads_the_rows_asked_for(threads, row_bytes):
    rows = np.random.default_rng(0).integers(0, 256, (50, row_bytes), np.uint8)
    slots = np.array([3, 49, 0, 3, 17], np.int32)
    assert _native.read_rows(rows, slots, threads) == int(rows.view(np.uint64)[slots].sum())
    assert _native.read_rows(rows, slots[:0], threads) == 0
    with pytest.raises(ValueError, match="slots holds 50; the slab has slots 0 to 49"):
        _native.read_rows(rows, slots + 1, threads)
    with pytest.raises(ValueError, match="rows have 100 bytes; give a positive multiple of 64"):
        _native.read_rows(rows[:, :100].copy(), slots, threads)
