"""Other processes' use of the processor is noticed, and this process's own is not taken for theirs."""

import itertools
import subprocess
import sys
import time

import pytest

from lamina.planning.profiling import measure
from lamina.planning.profiling.measure import QUIET, Watch

SPIN_S = 0.3  # of a core
SPIN = f"import time\nwhile time.process_time() < {SPIN_S}: pass\nprint(flush=True)\ninput()"


def test_children_count_as_own_until_and_after_they_end() -> None:
    before = measure._own_seconds()
    time.sleep(0.2)
    assert measure._own_seconds() - before < SPIN_S / 2
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert measure._own_seconds() - before > 0.8 * SPIN_S  # the kernel counts ticks
        child.stdin.write(b"\n")
    assert child.returncode == 0 and measure._own_seconds() - before > 0.8 * SPIN_S


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
