"""The arrays in which slabs hold K and V."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lamina.types import KvElement

STORAGE: Mapping[KvElement, np.dtype[Any]] = {
    KvElement.FLOAT32: np.dtype(np.float32),
    KvElement.FLOAT16: np.dtype(np.float16),
    KvElement.BFLOAT16: np.dtype(np.uint16),  # numpy has no bfloat16: its bits
    KvElement.INT8: np.dtype(np.int8),
    KvElement.FP8: np.dtype(np.uint8),  # the bits of e4m3
}
"""The numpy type of a slab's elements, by which kernels recognise them."""
