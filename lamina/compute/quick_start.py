"""Makes a compute worker's process start and end faster."""

import gc
import logging
import os
import sys
from typing import NoReturn

from lamina.output import drain, quiet_imports

_UNUSED = ("PIL", "scipy", "sklearn")
_UNUSED_ON_CPU = ("triton", "torchao")


def before_imports(device: str = "cpu") -> None:
    """Make importing torch and transformers cheaper. Call it before either is imported, in a process of its own.

    If installed, packages that a text decoder on ``device`` never uses cost half a second to import: this hides them.
    And both libraries make a million objects that live as long as the process; scanning them for garbage again and
    again takes a fifth of the start, so collection is off until ``once_set_up``.
    """
    gc.disable()
    for package in (*_UNUSED, *(_UNUSED_ON_CPU if device == "cpu" else ())):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None makes an import fail
    quiet_imports()


def once_set_up() -> None:
    """Collect garbage again, but only of objects made from now on: splitting a model leaves next to none."""
    gc.freeze()
    gc.enable()


def end_process(status: int) -> NoReturn:
    """Exit at once. Everything a worker holds has been freed; taking apart a million objects takes a second."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    drain()
    os._exit(status)
