"""Slices made fast on a device: fused kernels, packed weights, native programs, and how they are stored."""

from lamina.lowering.lowered import LoweredModel, LoweredSlice, lower
from lamina.lowering.program import Room

__all__ = ["LoweredModel", "LoweredSlice", "Room", "lower"]
