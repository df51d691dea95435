"""The backend under test, Triton's interpreter or a GPU if TRITON_INTERPRET=0; ``give`` and ``take`` cross over."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lamina.core.types import KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.backend import Backend
from lamina.kernels.gpu.tilings import Choices
from tests.support import reference_attention
from tests.support.kernel_cases import Case, encode
from tests.support.kernel_codes import dequantize, quantize
from tests.support.sweep import sweep

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"


def make_backend() -> Backend:
    if not INTERPRETED:
        from lamina.kernels.gpu.cuda import Cuda

        return Cuda(0)
    from lamina.kernels.gpu.interpreter import Interpreter

    return Interpreter()


BACKEND = make_backend()


def sweep_on_device(cases: Mapping[str, Any], ordinary: Collection[str]) -> list[Any]:
    """A sweep of which a GPU always runs every case, and the slow interpreter those named unless asked for all."""
    return sweep(cases, ordinary if INTERPRETED else cases)


def give(array: npt.NDArray[Any]) -> Any:
    """A copy on the device."""
    there = BACKEND.empty(array.shape, array.dtype)
    BACKEND.upload(np.ascontiguousarray(array), there)
    return there


def take(array: Any) -> npt.NDArray[Any]:
    """A copy from the device, once everything before has run."""
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def slab_of(k: npt.NDArray[Any], v: npt.NDArray[Any], element: KvElement) -> tuple[KvSlab, Any, Any]:
    """A slab on the device that holds float32 k and v, or their bits, and what it then holds, for the oracle."""
    if not element.scaled:
        return KvSlab(element, give(k), give(v)), k, v
    (k_codes, k_scales), (v_codes, v_scales) = quantize(k, element), quantize(v, element)
    slab = KvSlab(element, give(k_codes), give(v_codes), give(k_scales), give(v_scales))
    return slab, dequantize(k_codes, k_scales, element), dequantize(v_codes, v_scales, element)


def attend(case: Case, slab: KvSlab, attention: Attention | None = None) -> tuple[Any, Any]:
    """Runs the case on the device; its slots are the page tables."""
    rows, spec = len(case.q), case.spec
    attention = attention or Attention(BACKEND, StepCapacity(len(case.segments.query_start) + 1, rows + 3), Choices(""))
    attention.upload_pairs(pair_table(case.segments))
    out = BACKEND.empty((rows, spec.query_heads, spec.v_dim), np.float32)
    lse = BACKEND.empty((rows, spec.query_heads), np.float32)
    attention.partial(give(case.q), slab, give(np.append(case.segments.slots, -1).astype(np.int32)), spec, out, lse)
    return take(out), take(lse)


def check(case: Case, element: KvElement, out: Any, lse: Any, k: Any, v: Any) -> None:
    """Compares with the oracle over the values that the slab holds and the queries as products take them.

    Products of 16 bits round weights to the 11 significant bits of float16 or the 8 of bfloat16.
    """
    bits = {KvElement.FLOAT32: 24, KvElement.FLOAT16: 11}.get(element, 8)
    product = {24: "float32", 11: "float16", 8: "bfloat16"}[bits]
    q = encode(case.q, product) if case.q.dtype == np.float32 else case.q
    wanted_out, wanted_lse = reference_attention.partial(q, k, v, case.segments, case.spec, threads=1)
    largest = np.abs(reference_attention.widen(v)).max(initial=1.0)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=largest * max(2.0 ** (1 - bits), 4e-6))
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=3e-5)
