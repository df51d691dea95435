"""`lamina bench cost`: runs the cost suite of the source tree, which compares our numbers with the papers'."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lamina.errors import ConfigError, LaminaError

SUITE = Path(__file__).parents[2] / "bench" / "cost" / "report.py"
REPORT = Path("lamina-cost.html")
TIMEOUT_S = 600.0


def write() -> None:
    """Write the report to ``REPORT`` in the current directory.

    Raises:
        ConfigError: this is not a source tree, matplotlib is missing, or the directory is not writable.
        LaminaError: the suite failed or took longer than ``TIMEOUT_S``.
    """
    from lamina.config import check_writable
    from lamina.observe.progress import waiting

    if not SUITE.is_file():
        raise ConfigError(
            f"the cost suite is not part of the installed package: {SUITE} does not exist. Run it from a checkout"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError("the cost suite needs matplotlib, which is not installed: pip install matplotlib")
    check_writable("the report", REPORT)
    try:
        with waiting("Comparing with the papers"):
            done = subprocess.run([sys.executable, SUITE, "--out", REPORT], timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaminaError(
            f"{SUITE} did not finish within {TIMEOUT_S:g} s; is the machine busy? Run it without a time limit: "
            f"python {SUITE} --out {REPORT}"
        ) from error
    if done.returncode:
        raise LaminaError(f"{SUITE} failed with status {done.returncode}; its message is above")
