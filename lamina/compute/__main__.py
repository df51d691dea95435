"""The process of a compute worker, ``python -m lamina.compute``, which starts and ends faster than by default."""

import gc
import logging
import os
import sys
from typing import NoReturn

from lamina.output import drain, quiet_imports
from lamina.worker.process import read_bootstrap

_UNUSED = ("PIL", "scipy", "sklearn")
_UNUSED_ON_CPU = ("triton", "torchao")


def before_imports(device: str = "cpu") -> None:
    """Make importing torch and transformers cheaper. Call it before either is imported, in a process of its own.

    If installed, packages that a text decoder on ``device`` never uses cost half a second to import: this hides them.
    And both libraries make a million objects that live as long as the process; scanning them for garbage again and
    again takes a fifth of the start, so collection is off until the worker is set up.
    """
    gc.disable()
    for package in (*_UNUSED, *(_UNUSED_ON_CPU if device == "cpu" else ())):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None makes an import fail
    quiet_imports()


def end_process(status: int) -> NoReturn:
    """Exit at once. Everything a worker holds has been freed; taking apart a million objects takes a second."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    drain()
    os._exit(status)


def main() -> NoReturn:
    """Run the worker that the bootstrap on standard input describes."""
    bootstrap = read_bootstrap()
    before_imports(bootstrap.device)

    from lamina.compute.worker import main as run

    try:
        run(bootstrap)
    except SystemExit:  # its reason has been reported
        end_process(1)
    end_process(0)


if __name__ == "__main__":
    main()
