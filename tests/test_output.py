"""Output of processes that serve, whose reader may stall."""

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from lamina import output
from lamina.output import Unblocked
from tests.support.waiting import END_S

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page that is full."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"f" * 4096)
    yield reading, writing
    os.close(reading)


def test_nothing_waits_for_a_reader_and_what_is_dropped_is_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_WAITING_BYTES", 10 * len(LINE))
    stream = Unblocked(pipe[1])
    for _ in range(25):
        assert stream.write(LINE) == len(LINE)
    read = os.read(pipe[0], 4096).strip(b"f")
    deadline = time.monotonic() + END_S
    while not read.endswith(b"15 lines were dropped here, since nobody read this output\n"):
        assert time.monotonic() < deadline
        read += os.read(pipe[0], 4096)
    assert read.startswith(10 * LINE) and read.count(b"\n") == 11
    stream.write(b"later\n")
    assert os.read(pipe[0], 4096) == b"later\n"


def test_waiting_for_output_ends(pipe: tuple[int, int]) -> None:
    stream = Unblocked(pipe[1])
    stream.write(LINE)
    stream.drain(time.monotonic() + 0.05)
    reader = threading.Thread(target=lambda: os.read(pipe[0], 4096))
    reader.start()
    stream.drain(time.monotonic() + END_S)
    reader.join()
    assert os.read(pipe[0], 4096) == LINE


PROGRAM = """
import logging, sys, threading, warnings
from lamina.output import start_logging, unblock
logging.basicConfig()
unblock("stdout")
start_logging()
for number in range(100):
    logging.warning("%d %s", number, "x" * 100)
    print("x" * 100)
    print("x" * 100, file=sys.stderr)
    warnings.warn("x" * 100 + str(number))
def fail(): raise ValueError
thread = threading.Thread(target=fail)
thread.start()
thread.join()
sys.exit(3)
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_process_ends_although_nobody_reads(terminal: bool) -> None:
    reading, writing = os.openpty() if terminal else os.pipe()
    if not terminal:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=writing, stderr=writing)
    assert process.wait(END_S) == 3
    os.close(writing)
    os.close(reading)


def test_what_is_read_comes_in_order_and_whole() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.stdout == 100 * ("x" * 100 + "\n")
    logged = re.findall(r" WARNING root: (\d+) x{100}$", done.stderr, re.MULTILINE)
    assert list(map(int, logged)) == list(range(100))
    assert "ValueError" in done.stderr and "dropped" not in done.stderr
