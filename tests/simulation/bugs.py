"""Put faults of this repository's history back, one at a time: ``python -m tests.simulation.bugs``.

Each of them undoes one fix in a process that imports the product (``python -m tests.simulation --bug NAME``). The
simulation runs there, seed after seed, until a run fails. Faults that it does not find show what it leaves out.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Bug:
    """A fault, put back by the replacement of ``fixed`` by ``broken`` in a file.

    Attributes:
        what: What went wrong.
        commit: What has fixed it.
    """

    name: str
    what: str
    commit: str
    path: str
    fixed: str
    broken: str

    def put_back(self, text: str) -> str:
        """Return the text of the file with the fault. Raises ValueError if the fix has moved."""
        if (count := text.count(self.fixed)) != 1:
            raise ValueError(
                f"{self.path} has the fix of {self.name} ({self.commit}) {count} times: say what undoes it"
            )
        return text.replace(self.fixed, self.broken)


BUGS = [
    Bug(
        "abort_forgotten",
        "A request that was aborted while the engine was down runs to its end in the next engine.",
        "79ba1412",
        "lamina/engine/remote_engine.py",
        """\
            if aborted := [one.request for one in unfinished if self._asked[one.request].aborted]:
                self._requests.send(self._encoder.encode(Abort(aborted)))
""",
        "",
    ),
    Bug(
        "aborted_twice",
        "Aborting a request twice while its last step runs ends the engine.",
        "99b6f8bf",
        "lamina/engine/engine.py",
        """\
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._scheduler.abort(request_id, suspect)
""",
        """\
        tracked = self._tracked[request_id]
        if tracked is not None:
            self._scheduler.abort(request_id, suspect)
""",
    ),
    Bug(
        "admitted_twice",
        "A request that is preferred stays in the queue, and is admitted twice.",
        "e9878b07",
        "lamina/schedule/admission.py",
        """\
                self._skip(neediest)
""",
        """\
                self._skipped[neediest] = self._steps
""",
    ),
    Bug(
        "ended_before_forks",
        "A first completion that has ended is released before the others are forked from it.",
        "2f735064",
        "lamina/schedule/lane.py",
        """\
        ended = [(group, completion) for group, completion in self.ending if not group.is_forked_from(completion)]
""",
        """\
        ended = list(self.ending)
""",
    ),
    Bug(
        "fence_open",
        "A worker begins the next epoch before its peers have rung, and reads messages of the last one.",
        "41e4c148",
        "lamina/worker/loop.py",
        """\
            self._links.ring(peer, _ring_value(self.epoch))
""",
        """\
            self._links.ring(peer, _ring_value(self.epoch))
        self._missing = []
""",
    ),
    Bug(
        "forgotten_unforked",
        "After an epoch, a request is forgotten because completions that were not forked yet had a home that was lost.",
        "805139e3",
        "lamina/schedule/recipients.py",
        """\
            if known.admission is not None and sequence not in lengths:
                known.place([], [])
            elif known.admission is None and sequence in lengths and not topology.names.issuperset(known.homes):
""",
        """\
            if known.admission is None and sequence in lengths and not topology.names.issuperset(known.homes):
""",
    ),
    Bug(
        "forks_undone",
        "Completions whose forks the end of an epoch undid keep the step that they waited for.",
        "269307ed",
        "lamina/schedule/lane.py",
        """\
        for completion in group.completions:  # steps are counted from 0 again
            completion.until = 0
""",
        """\
        group.completions[0].until = 0
""",
    ),
    Bug(
        "kept_after_release",
        "The prefix cache keeps the prompt of a first completion that has been released.",
        "05440609",
        "lamina/kv/prefix_cache.py",
        """\
        if first.released or first.dropped or self._is_leaving(first):
""",
        """\
        if first.dropped or self._is_leaving(first):
""",
    ),
    Bug(
        "leaves_empty_pool",
        "A worker leaves while the other pool has no worker.",
        "05b38d93",
        "lamina/engine/pools.py",
        """\
            if self.topology.lacks(leavers) is not None:
                continue  # a topology has members of both roles when one leaves: those that were lost come back first
""",
        "",
    ),
    Bug(
        "leaves_while_joining",
        "A worker leaves while another one is linked but has not entered, whose links are forgotten.",
        "05b38d93",
        "lamina/engine/changes.py",
        """\
        return self._current is not None
""",
        """\
        current = self._current
        return current is not None and current.stage is JoinStage.LINKING
""",
    ),
    Bug(
        "lender_deaf",
        "A replica that lends memory reads neither plans nor requests of others during its own steps.",
        "68db6ff7",
        "lamina/compute/lending.py",
        """\
        return bool(self._mail.lenders) or self.is_busy
""",
        """\
        return self.is_busy
""",
    ),
    Bug(
        "segments_unsorted",
        "Segments of a sequence are not listed by first token, so that forks of split heads lose KV.",
        "c19edcd0",
        "lamina/core/segments.py",
        """\
    return sorted([*ended, new], key=lambda one: one.tokens[0])
""",
        """\
    return [*ended, new]
""",
    ),
    Bug(
        "slot_never_freed",
        "A reply stays in its slot after it has been read.",
        "7b17d3a8",
        "lamina/compute/exchange.py",
        """\
        for arrival in self._unread:
""",
        """\
        for arrival in self._unread[1:]:
""",
    ),
    Bug(
        "windows_forget_early",
        "Layers with a window forget tokens of a step that attends to nothing before it has ended.",
        "8b541347",
        "lamina/memory/holdings.py",
        """\
        for sequence, start in step_starts(steps, self._end).items():
""",
        """\
        attends = [one for rows, _ in steps for one in (*rows.attends, *dict(rows.further).values())]
        for sequence, start in {(one.sequence, one.start) for one in attends}:
""",
    ),
]

FOUND = [
    Bug(
        "leaves_with_moves",
        "A worker leaves whose KV moves for a request that has ended, and the target has not been told of that end.",
        "ea4358f9",
        "lamina/engine/members.py",
        """\
        for worker, sequences in self.recipients.overdue(math.inf):  # ends moves from and to workers that leave
            self.tell([worker], Release(sequences))
""",
        "",
    ),
    Bug(
        "grows_unknown",
        "A sequence grows in a plan that does not run it, on a replica that does not know it.",
        "ec007eea",
        "lamina/compute/sequences.py",
        """\
            if segment.sequence in self.segments:  # else the step leaves it out; a plan that runs it admits it
                self.segments[segment.sequence] = grown(self.segments[segment.sequence], segment)
""",
        """\
            self.segments[segment.sequence] = grown(self.segments[segment.sequence], segment)
""",
    ),
    Bug(
        "plans_for_lost",
        "A plan puts KV on a replica that has died before it became a member, and to which no channel is left.",
        "54c6b90f",
        "lamina/compute/worker.py",
        "        if self._fence.lost:  #",
        "        if False:  #",
    ),
    Bug(
        "draws_released",
        "A rank that waits for its last sum of a step forgets sequences for which it has yet to draw.",
        "39c46c92",
        "lamina/compute/worker.py",
        """\
        return any(not told.isdisjoint((one.sequence, *one.draws)) for one in self._computing)
""",
        """\
        return False
""",
    ),
    Bug(
        "keeps_dropped",
        "The prefix cache keeps what a leaving worker dropped as an epoch ended, because the worker stays after all.",
        "f4bb207f",
        "lamina/schedule/lane.py",
        """\
            completion.dropped = not group.is_forked_from(completion)
""",
        """\
            completion.dropped = False
""",
    ),
    Bug(
        "left_unreached",
        "A member that loses the link to a worker, and does not know yet that it has left, runs no step any more.",
        "bf7da0dc",
        "lamina/engine/losses.py",
        """\
            self._cut[worker] = f"{reporter}: {reason}"
""",
        """\
            pass
""",
    ),
    Bug(
        "joins_unlinked",
        "A replica sends its context to a new one that died before it became a member.",
        "253de71e",
        "lamina/worker/loop.py",
        """\
            self._fence.check_links()
""",
        "",
    ),
]
"""Faults that the simulation has found (``tests.simulation.cases`` brings some of them about)."""


def named(name: str) -> Bug:
    """Return a fault by its name. Raises ValueError for an unknown name."""
    if (found := next((bug for bug in (*BUGS, *FOUND) if bug.name == name), None)) is None:
        raise ValueError(f"no fault is called {name}; there are {', '.join(bug.name for bug in (*BUGS, *FOUND))}")
    return found


def main() -> int:
    """Run the command line; the exit status is 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of faults. Default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="time of a core for each fault")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    options = parser.parse_args()
    chosen = [named(name) for name in options.names] or BUGS
    found = 0
    for bug in chosen:
        begun = time.perf_counter(), _used()
        failure = _search(bug, options.seed, options.steps, options.seconds)
        found += failure is not None
        took = f"{time.perf_counter() - begun[0]:.0f} s ({_used() - begun[1]:.0f} s of a core)"
        print(f"{bug.name:22} {took:26} {failure or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


def _used() -> float:
    """Return the seconds of processor time of all runs so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_with(bug: Bug) -> None:
    """Let this process import the product with a fault. Its file must not have been imported yet."""
    get_code, file = SourceFileLoader.get_code, (ROOT / bug.path).resolve()

    def broken(loader: Any, fullname: str) -> CodeType | None:
        if Path(loader.path).resolve() != file:
            return get_code(loader, fullname)
        return compile(bug.put_back(file.read_text()), loader.path, "exec", dont_inherit=True)

    mock.patch.object(SourceFileLoader, "get_code", broken).start()


def _search(bug: Bug, seed: int, steps: int, seconds: float) -> str | None:
    """Return how a run fails with this fault, and does not without it; None if none does in time."""
    deadline, first = _used() + seconds, seed
    while (left := deadline - _used()) > 0:
        limits = ["--runs", "1000000", "--core-seconds", str(left), "--bug", bug.name]
        found = _failure(first, steps, limits)
        if found is None:
            return None
        failing, failure = found
        if _failure(failing, steps, ["--runs", "1"]) is None:
            return f"{failing - seed + 1} runs, seed {failing}: {failure}"
        print(f"seed {failing} fails without a fault put back, too: {failure}", flush=True)
        first = failing + 1
    return None


def _failure(seed: int, steps: int, options: Sequence[str]) -> tuple[int, str] | None:
    """Run the simulation. Returns the seed that fails, and how; None if none does."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [*command, *options, "--no-shrink"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return None
    lines = done.stdout.splitlines()
    seeds = [int(line.split()[1]) for line in lines if line.startswith("seed ")]
    return seeds[-1] if seeds else seed, next((one for one in lines if one.startswith("FAILED")), done.stderr[-300:])


if __name__ == "__main__":
    sys.exit(main())
