"""Makes slices fast on a device: fused kernels, packed weights and native programs; and stores the result."""

from lamina.lowering.lowered import LoweredModel, LoweredSlice, Target, lower
from lamina.lowering.program import Workspace

__all__ = ["LoweredModel", "LoweredSlice", "Target", "Workspace", "lower"]
