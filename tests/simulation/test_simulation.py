"""Simulated clusters serve right tokens whatever fails, and leave nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("greenlet", reason="simulated processes are greenlets: pip install greenlet")

STEPS = 250
PATCHES = Path(__file__).parent / "bugs"


def simulate(*arguments: object) -> str:
    """Run the command in a process of its own, in which the order of sets is that of every such process."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_same_seed_gives_the_same_run() -> None:
    from tests.simulation.cluster import Simulation
    from tests.simulation.scenario import faults

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


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_known_faults_can_be_put_back(patch: Path, tmp_path: Path) -> None:
    """Each patch of ``tests.simulation.bugs`` applies to this tree, so that the search for it means something."""
    from tests.simulation.bugs.__main__ import ROOT, apply

    changed = [line.removeprefix("+++ b/") for line in patch.read_text().splitlines() if line.startswith("+++ ")]
    for name in changed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    apply(patch, tmp_path)
    assert all((tmp_path / name).read_text() != (ROOT / name).read_text() for name in changed)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_seeds() -> None:
    simulate("--seed", 1000, "--runs", 10_000, "--steps", 2000, "--seconds", 1200)
