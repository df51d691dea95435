"""Quantised K and V as they are defined, by torch's rounding."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamina.core.types import KvElement
from lamina.kernels.segments import STORAGE

LARGEST = {KvElement.INT8: 127.0, KvElement.FP8: 448.0}


def quantize(values: npt.NDArray[Any], element: KvElement) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """The definition: codes and scales of rows [..., D], by torch's rounding."""
    peak = np.abs(values).max(-1, keepdims=True)
    factor = np.where(peak > 0, LARGEST[element] / np.where(peak > 0, peak, 1), 0)
    scaled = torch.from_numpy(values * factor).float()
    codes = scaled.round().to(torch.int8) if element is KvElement.INT8 else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy().view(STORAGE[element]), (peak[..., 0] / LARGEST[element]).astype(np.float32)


def dequantize(codes: npt.NDArray[Any], scales: npt.NDArray[np.float32], element: KvElement) -> npt.NDArray[np.float32]:
    """float32 values of codes [..., D] with scales [...]."""
    kept = torch.from_numpy(codes.view(np.uint8))
    values = kept.view(torch.int8 if element is KvElement.INT8 else torch.float8_e4m3fn).float().numpy()
    return (values * scales[..., None]).astype(np.float32)


def rounded(values: npt.NDArray[Any], element: KvElement) -> npt.NDArray[np.float32]:
    """Rows [..., D] as they are read back from a slab."""
    return dequantize(*quantize(values, element), element)
