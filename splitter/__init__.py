"""Cuts a model at its attention operators."""

if __name__ != "lamina.splitter":
    raise ImportError(f"import this package as lamina.splitter, not {__name__}: a second copy would not share types")

from lamina.splitter.assemble import load_config, split
from lamina.splitter.capture import Weight
from lamina.splitter.lower import LoweredSlice, lower
from lamina.splitter.split_model import Crossing, Cut, Slice, SliceOutput, SplitModel
from lamina.splitter.verify import verify

__all__ = [
    "Crossing",
    "Cut",
    "LoweredSlice",
    "Slice",
    "SliceOutput",
    "SplitModel",
    "Weight",
    "load_config",
    "lower",
    "split",
    "verify",
]
