"""Entry point of the ``lamina`` command and of ``python -m lamina``."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C during its slow imports ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lamina.cli import main as run

    run()


if __name__ == "__main__":
    main()
