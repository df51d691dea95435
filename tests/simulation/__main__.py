"""Run simulations: ``python -m tests.simulation --seed N --steps M``.

Each run prints its seed first. A run that fails is run again with fewer and fewer faults, as long as it fails; the
shortest list of faults is printed, with the command that replays it, and the timeline is written to a file.
"""

import argparse
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.simulation.bugs import import_with, named

TIMELINES = Path("build")
SHRINK_S = 120.0  # of wall time for a shorter list of faults


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; the next runs have the next seeds")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run while faults and requests come")
    parser.add_argument("--runs", type=int, default=1, help="number of runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this wall time")
    parser.add_argument("--core-seconds", type=float, default=float("inf"), help="nor after this time of a core")
    parser.add_argument("--faults", help="numbers of the faults to keep, such as 0,3; empty: none. Default: all")
    parser.add_argument("--case", help="run this case (tests.simulation.cases), or all of them")
    parser.add_argument("--bug", help="put this fault of the history back (tests.simulation.bugs)")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a shorter list of faults")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # it decides the order of sets of names, and so what happens first
        command = [sys.executable, "-m", "tests.simulation", *arguments]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    if options.bug is not None:
        import_with(named(options.bug))
    torch.set_num_threads(1)
    logging.getLogger("lamina").propagate = False
    logging.getLogger("lamina").addHandler(logging.NullHandler())
    if options.case is not None:
        return _run_cases(options.case, options.seed)
    kept = None if options.faults is None else [int(one) for one in options.faults.split(",") if one]
    begun, totals = time.perf_counter(), [0, 0, 0, 0.0]
    for seed in range(options.seed, options.seed + options.runs):
        if time.perf_counter() - begun > options.seconds or time.process_time() > options.core_seconds:
            break
        print(f"seed {seed}", flush=True)
        report = _run(seed, options.steps, kept)
        if report.failure:
            numbers = report.happened
            if not options.no_shrink:
                numbers = shortest(report.happened, functools.partial(_failure, seed, options.steps))
                report = _run(seed, options.steps, numbers)
            _describe(seed, options.steps, numbers, report, "" if options.bug is None else f"--bug {options.bug} ")
            return 1
        for place, figure in enumerate((report.steps, report.requests, len(report.happened), report.seconds)):
            totals[place] += figure
    minutes = (time.perf_counter() - begun) / 60
    steps, requests, faults, seconds = totals
    print(f"in all: {steps} steps, {requests} requests, {faults} faults")
    print(
        f"{seconds:.0f} s simulated in {60 * minutes:.1f} s; per minute of wall time: {steps / minutes:.0f} steps, "
        f"{requests / minutes:.0f} requests, {faults / minutes:.0f} faults"
    )
    return 0


def _run_cases(name: str, seed: int) -> int:
    from tests.simulation.cases import CASES
    from tests.simulation.cluster import Simulation

    for case in CASES:
        if name not in ("all", case.name):
            continue
        report = Simulation(seed, case.faults, case.steps, case.scene).run()
        if report.failure:
            print("\n".join([*report.trace[-40:], report.traceback]))
            print(f"FAILED: case {case.name}: {report.failure}")
            return 1
        happened = f"{len(report.happened)} of {len(case.faults)} faults"
        print(f"case {case.name}: {report.steps} steps, {report.requests} requests, {happened}", flush=True)
    return 0


def _run(seed: int, steps: int, kept: Sequence[int] | None):
    from tests.simulation.cluster import Simulation
    from tests.simulation.scenario import faults

    planned = faults(seed, steps)
    if kept is not None:
        planned = [planned[number] for number in kept]
    return Simulation(seed, planned, steps).run()


def _failure(seed: int, steps: int, kept: Sequence[int]) -> str:
    return _run(seed, steps, kept).failure


def shortest(numbers: Sequence[int], fails: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """Return a list of faults with which the run still fails, of which no single one can be left out, or the best found
    within ``SHRINK_S``."""
    deadline = time.perf_counter() + SHRINK_S
    size = max(1, len(numbers) // 2)
    while size and time.perf_counter() < deadline:
        at = 0
        while at < len(numbers) and time.perf_counter() < deadline:
            fewer = [*numbers[:at], *numbers[at + size :]]
            if fails(fewer):
                numbers = fewer
            else:
                at += size
        size //= 2
    return numbers


def _describe(seed: int, steps: int, numbers: Sequence[int], report, bug: str) -> None:
    TIMELINES.mkdir(exist_ok=True)
    timeline = TIMELINES / f"simulation-{seed}.txt"
    timeline.write_text("\n".join([*report.trace, report.traceback]))
    print("\n".join(report.trace[-40:]))
    print(report.traceback)
    print(f"FAILED after {report.steps} steps: {report.failure}")
    print(f"timeline: {timeline}")
    which = ",".join(map(str, numbers))
    print(f'replay: python -m tests.simulation --seed {seed} --steps {steps} {bug}--no-shrink --faults "{which}"')


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # without taking greenlets apart that are still blocked
