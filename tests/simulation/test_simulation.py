"""Simulated clusters serve right tokens whatever fails, and leave nothing behind."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("greenlet", reason="simulated processes are greenlets: pip install greenlet")

STEPS = 250


def simulate(*arguments: object) -> str:
    """Run the command in a process of its own, in which the order of sets is that of every such process."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_same_seed_gives_the_same_run() -> None:
    from tests.simulation.cluster import Simulation, faults

    first, second = (Simulation(5, faults(5, 60), 400).run() for _ in range(2))
    assert not first.failure and len(first.happened) > 3
    assert first == second


def test_what_fails_does_not_change_tokens() -> None:
    assert "per minute" in simulate("--seed", 100, "--runs", 8, "--steps", STEPS, "--no-shrink")


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault-free run of a model that differs from the plain function fails."""
    from tests.simulation import cluster, model

    wrong = model.expected
    monkeypatch.setattr(cluster, "expected", lambda *given: [*wrong(*given)[:-1], -1])
    assert "is the first that is wrong" in cluster.Simulation(5, [], 50).run().failure


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_seeds() -> None:
    simulate("--seed", 1000, "--runs", 10_000, "--steps", 2000, "--seconds", 1200)
