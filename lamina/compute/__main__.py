"""Runs the process of a compute worker, ``python -m lamina.compute``, with a faster start and exit."""

import logging
import os
import sys
from typing import NoReturn

from lamina.compute.late_imports import before_imports
from lamina.output import drain
from lamina.worker.process import read_bootstrap


def end_process(status: int) -> NoReturn:
    """Exit without destroying Python's objects, which would take a second. All shared resources have been freed."""
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
