"""Put faults of this repository's history back, one at a time: ``python -m tests.simulation.bugs``.

Each patch in this folder undoes one fix in a copy of the tree. The simulation runs there, seed after seed, until a run
fails. Faults that it does not find show what it leaves out.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
PARTS = ("lamina", "splitter", "transport", "tests/simulation")


def main() -> int:
    """Run the command line; the exit status is 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of patches, without .patch. Default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="wall time for each fault")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    options = parser.parse_args()
    patches = sorted(Path(__file__).parent.glob("*.patch"))
    chosen = [patch for patch in patches if not options.names or patch.stem in options.names]
    found = 0
    for patch in chosen:
        begun = time.perf_counter(), _used()
        failure = _put_back(patch, options.seed, options.steps, options.seconds)
        found += failure is not None
        took = f"{time.perf_counter() - begun[0]:.0f} s ({_used() - begun[1]:.0f} s of a core)"
        print(f"{patch.stem:22} {took:26} {failure or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


def _used() -> float:
    """Return the seconds of processor time of all runs so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _put_back(patch: Path, seed: int, steps: int, seconds: float) -> str | None:
    """Return how a run fails with this fault; None if none does in time."""
    with tempfile.TemporaryDirectory(prefix="lamina-bug-") as folder:
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, Path(folder, part), symlinks=True, ignore=ignored)
        apply(patch, Path(folder))
        command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--steps", str(steps)]
        command += ["--runs", "1000000", "--seconds", str(seconds), "--no-shrink"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not done.returncode:
            return None
        seeds = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        failure = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), done.stderr[-300:])
        return f"{len(seeds)} runs, {seeds[-1] if seeds else 'no seed'}: {failure}"


def apply(patch: Path, folder: Path) -> None:
    """Apply a patch to the tree in ``folder``. Raises RuntimeError if it is not of this tree any more."""
    done = subprocess.run(["patch", "-p1", "-i", str(patch)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{patch.name} does not apply: {done.stdout}{done.stderr}Undo the fix that it names anew")


if __name__ == "__main__":
    sys.exit(main())
