"""Lowers slices to a device: fused kernels, packed weights and native programs."""

from lamina.lowering.cpu_slices import LoweredModel, LoweredSlice, Target, lower
from lamina.lowering.native_program import Workspace

__all__ = ["LoweredModel", "LoweredSlice", "Target", "Workspace", "lower"]
