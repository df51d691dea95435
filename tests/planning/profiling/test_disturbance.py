"""Other processes' use of the processor is noticed, and this process's own is not taken for theirs."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from lamina.planning.profiling import measure
from lamina.planning.profiling.measure import QUIET, Watch

SPIN = "import time\nwhile time.monotonic() < {until}: pass"


def own_share(work: Callable[[], object]) -> float:
    """Core seconds counted as this process's own while ``work`` runs, for each second of it."""
    begun, own = time.monotonic(), measure._own_seconds()
    work()
    return (measure._own_seconds() - own) / (time.monotonic() - begun)


def test_children_count_as_own_until_and_after_they_end() -> None:
    def child() -> None:
        until = time.monotonic() + 0.4
        command = [sys.executable, "-c", SPIN.format(until=until)]
        subprocess.run(command, check=True, timeout=60)

    # On a busy machine a child gets less than its core; a process that only sleeps gets nothing.
    assert own_share(child) > 2 * own_share(lambda: time.sleep(0.2)) + 0.02


@pytest.mark.parametrize(("others", "said"), [(0.0, False), (QUIET / 2, False), (0.3, True), (1.0, True)])
def test_what_others_use_of_all_cores(monkeypatch: pytest.MonkeyPatch, others: float, said: bool) -> None:
    """In ten seconds on four cores: this process uses 8 core seconds, others their share of 40."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name, values in {"_all_seconds": (100.0, 108 + 40 * others), "_own_seconds": (5.0, 13.0)}.items():
        monkeypatch.setattr(measure, name, itertools.chain(values).__next__)
    monkeypatch.setattr("lamina.planning.profiling.measure.time.monotonic", itertools.chain((50.0, 60.0)).__next__)
    found = Watch().so_far()
    assert found.others == pytest.approx(others) and found.seconds == 10
    assert found.disturbed == said
    assert str(found) == f"other processes took {others:.0%} of this machine's processor time"
