"""The `lamina` command, and ``python -m lamina``."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C while it is imported ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lamina.cli import main as run

    run()


if __name__ == "__main__":
    main()
