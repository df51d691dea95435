"""The `lamina` command as people run it: what its tests share."""

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import psutil
import pytest

from lamina import cli

LAMINA = [sys.executable, "-m", "lamina"]
RUN_S = 120.0


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAMINA, *arguments], input=stdin, capture_output=True, text=True, timeout=RUN_S, check=False
    )


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``run``, but in this process: for the many commands that are refused before they start anything."""
    printed, said = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["lamina", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        status = cli._run()
    assert isinstance(status, int)
    return subprocess.CompletedProcess(sys.argv, status, printed.getvalue(), said.getvalue())


def assert_refused(done: subprocess.CompletedProcess[str], said: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert done.stdout == ""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def start(*arguments: str, stderr: int = subprocess.PIPE, **variables: str) -> Server:
    """Start a server, with these environment variables besides those of this process."""
    command, env = [*LAMINA, "launch", "--port", "0", *arguments], os.environ | variables
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://127\.0\.0\.1:\d+", line)
    if match is None:
        pytest.fail(f"{line!r}, then {process.communicate(timeout=RUN_S)}")
    return Server(process, match[0])
