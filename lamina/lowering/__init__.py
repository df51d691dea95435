"""Makes slices fast on a device: fused kernels, packed weights and native programs; and stores the result."""

from lamina.lowering.lowered import LoweredModel, LoweredSlice, lower
from lamina.lowering.program import Room

__all__ = ["LoweredModel", "LoweredSlice", "Room", "lower"]
