"""Lowers slices to a device: fused kernels, packed weights and native programs. Caches the result."""

from lamina.lowering.lowered import LoweredModel, LoweredSlice, Target, lower
from lamina.lowering.program import Workspace

__all__ = ["LoweredModel", "LoweredSlice", "Target", "Workspace", "lower"]
