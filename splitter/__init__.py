"""Cuts a model at its attention operators into slices (``split``)."""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "lamina.splitter":
    raise ImportError(f"import this package as lamina.splitter, not {__name__}: a second copy would not share types")

from lamina.output import quiet_imports
from lamina.splitter.split_model import Crossing, Cut, Slice, SliceOutput, SplitModel, Weight, as_numpy

quiet_imports()

if TYPE_CHECKING:
    from lamina.splitter.assemble import split

__all__ = [
    "Crossing",
    "Cut",
    "Slice",
    "SliceOutput",
    "SplitModel",
    "Weight",
    "as_numpy",
    "split",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: a worker that loads a stored split needs no transformers.
    if name != "split":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("lamina.splitter.assemble"), name)
