"""`lamina bench transport` on one host, and with --listen and --connect as on two hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.commands import run_here

LAMINA = [sys.executable, "-m", "lamina", "bench", "transport"]
QUICK = ["--sizes", "64,5000", "--seconds", "0.01"]
RUN_S = 120.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAMINA, *arguments], capture_output=True, text=True, timeout=RUN_S, check=False)


BOTH = ("spinning", "default")
LOCAL = BOTH if len(os.sched_getaffinity(0)) > 1 else ("default",)


def check_results(file: Path, transports: list[str], waits: tuple[str, ...]) -> None:
    results = json.loads(file.read_text())
    assert [(result["transport"], result["wait"], result["nbytes"]) for result in results] == [
        (transport, wait, nbytes) for transport in transports for wait in waits for nbytes in (64, 5000)
    ]
    for result in results:
        trips = result["round_trip_us"]
        assert 0 < trips["p50"] <= trips["p90"] <= trips["p99"]
        assert result["gigabytes_per_s"] > 0


def test_between_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run(*QUICK, "--json", str(file))
    assert done.returncode == 0, done.stderr
    check_results(file, ["shm", "tcp"], LOCAL)
    assert done.stdout.count("5000") == 2 * len(LOCAL)


def test_between_a_listening_and_a_connecting_side(tmp_path: Path) -> None:
    file, secret = tmp_path / "figures.json", tmp_path / "secret"
    listening = subprocess.Popen(
        [*LAMINA, "--listen", "127.0.0.1:0", "--secret-file", str(secret)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert listening.stdout
        where = listening.stdout.readline().split("Listening on ")[1].split()[0].rstrip(".")
        quick = [*QUICK, "--connect", where, "--transports", "tcp", "--json", str(file)]
        for _ in range(2):  # it serves one after another
            done = run(*quick, "--secret-file", str(secret))
            assert done.returncode == 0, done.stderr
            check_results(file, ["tcp"], BOTH)
    finally:
        listening.kill()
        listening.communicate(timeout=RUN_S)


def test_what_cannot_be_is_refused() -> None:
    for arguments, said in (
        (["--transports", "pigeon"], "unknown transport pigeon; give shm, tcp or rdma"),
        (["--sizes", "64,big"], "give numbers from 1 to 8388608"),
        (["--connect", "127.0.0.1:5"], "give --secret-file"),
        (["--listen", "nowhere", "--secret-file", "unused"], "'nowhere' is not an address; give HOST:PORT"),
        (["--listen", "127.0.0.1:70000", "--secret-file", "unused"], "a port up to 65535"),
        (["--listen", "0.0.0.0:7000", "--secret-file", "unused"], "give the one that the other host connects to"),
        (["--connect", "no.such.host.invalid:5", "--secret-file", "unused"], "'no.such.host.invalid' does not resolve"),
        (["--connect", "[::1]:5", "--secret-file", "unused"], "'[::1]' does not resolve to an IPv4 address"),
        (["--json", "/nowhere/figures.json"], "in a folder that does not exist"),
    ):
        done = run_here("bench", "transport", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
    assert not Path("unused").exists()
