"""Smoke tests of the transport's benchmarks: they run and report figures, which mean nothing in such short runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN_S = 120.0


def figures(tmp_path: Path, program: str, *arguments: str) -> Any:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"bench.transport.{program}", *arguments, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("bulk", ["prompts", pytest.param("moves", marks=pytest.mark.slow)])
def test_decode_beside_bulk(tmp_path: Path, bulk: str) -> None:
    (result,) = figures(tmp_path, "bulk", "--transports", "shm", "--bulk", bulk, "--rounds", "100")
    assert 0 < result["alone_p50"] <= result["alone_p99"]
    assert 0 < result["beside_p50"] <= result["beside_p99"]
    assert result["bulk_gigabytes_per_s"] > 0


@pytest.mark.slow
def test_doorbells(tmp_path: Path) -> None:
    trips = figures(tmp_path, "doorbell", "--rounds", "50")["round_trips"]
    assert {trip["by"] for trip in trips} >= {"Python"}
    assert all(0 < trip["p50_us"] <= trip["p99_us"] for trip in trips)


def test_beside_other_programs(tmp_path: Path) -> None:
    results = figures(tmp_path, "transport", "--transports", "shm", "--sizes", "64", "--seconds", "0.01")
    assert results and all(result["transport"] == "shm" and result["gigabytes_per_s"] > 0 for result in results)
