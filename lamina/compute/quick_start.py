"""What lets a compute worker's process start sooner."""

import atexit
import gc
import logging
import sys

_UNUSED = ("PIL", "scipy", "sklearn", "triton")


def before_imports() -> None:
    """Make importing torch and transformers cheaper. Call it before either is imported, in a process of one's own.

    Both import packages that a text decoder on a CPU never uses, if they are installed, at half a second in all: here
    they are not. And both make a million objects that live as long as the process; looking through them for garbage
    while there are ever more takes a fifth of a start, so that waits until ``once_set_up``.
    """
    gc.disable()
    for package in _UNUSED:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # to Python: it cannot be imported
    # A torch built for CUDA warns that triton is missing, for a counter of operations that nothing here uses.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)


def once_set_up() -> None:
    """Collect garbage from now on, of what is made from now on: splitting a model leaves next to none."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # an interpreter that ends takes what is frozen for leaked
