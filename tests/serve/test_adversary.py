"""A real server under every attack of ``adversary.py``."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.serve.adversary import ATTACKS, left_behind, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def launched() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "lamina", "launch", "--port", "0", "--kv-cache-memory-bytes", str(64 << 20)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None
        yield found[0], process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_else_notices(launched: tuple[str, int], name: str) -> None:
    url, pid = launched
    outcome = run(url, [name], pid)
    assert not outcome.faults, str(outcome)
    assert left_behind(url) == []


def test_nobody_else_notices_all_at_once(launched: tuple[str, int]) -> None:
    url, pid = launched
    outcome = run(url, list(ATTACKS), pid, seconds=45)
    assert not outcome.faults, str(outcome)
    assert left_behind(url) == []
