"""`lamina bench cost`: the papers' numbers beside ours, by the suite that comes with the source tree."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lamina.errors import ConfigError, LaminaError

SUITE = Path(__file__).parents[2] / "bench" / "cost" / "report.py"
REPORT = Path("lamina-cost.html")
TIMEOUT_S = 600.0


def write() -> None:
    """Write REPORT into the current directory.

    Raises:
        ConfigError: this is no source tree, matplotlib is missing, or the directory cannot be written.
        LaminaError: the suite failed, or took longer than ``TIMEOUT_S``.
    """
    from lamina.config import check_writable

    if not SUITE.is_file():
        raise ConfigError(
            f"the cost suite is not installed with the package: there is no {SUITE}. Run it from a checkout"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError("the cost suite draws with matplotlib, which is not installed: pip install 'lamina[bench]'")
    check_writable("the report", REPORT)
    try:
        done = subprocess.run([sys.executable, SUITE, "--out", REPORT], timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaminaError(
            f"{SUITE} did not end within {TIMEOUT_S:g} s; is the machine busy? Run it without a limit: "
            f"python {SUITE} --out {REPORT}"
        ) from error
    if done.returncode:
        raise LaminaError(f"{SUITE} failed with status {done.returncode}; its message is above")
