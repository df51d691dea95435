"""Change one operator at a time and run the tests: ``python -m tools.mutants lamina/schedule lamina/kv --count 40``.

Each mutant is made in a copy of the tree. The tests first run without a mutant, which records the functions that each
one calls. For a mutant, tests that call its function run first, the shortest first, then all others. A mutant that no
test kills shows what no test looks at, or is equal to the original. A session that a test hangs in counts as killed.
``--simulate 10`` runs seeds 1 to 10 of the simulated cluster (``tests.simulation``) instead of tests.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.called_functions import RECORD, ROOT

LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", ".git", ".venv", "build", "site", ".hypothesis", ".mypy_cache", ".*_cache"
)
LIMIT_S = 900.0  # for the tests of one mutant
NO_TESTS = 5  # exit status of pytest if all tests are deselected
PYTEST = ["pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
DIRECT_IMPORTS = """\
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""  # else an editable installation decides where the product is imported from
SWAPS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.And: "or",
    ast.Or: "and",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A change of a file: the text between two offsets is replaced."""

    path: Path
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        """Return the changed file."""
        return source[: self.start] + self.text + source[self.stop :]


def mutants(path: Path, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a file: one operator, call or condition of a function is another one."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def start(node: ast.expr | ast.stmt) -> int:
        return starts[node.lineno - 1] + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())

    def stop(node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.end_lineno - 1] + len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode())

    def between(left: ast.expr, right: ast.expr, operator: object) -> Iterator[Mutant]:
        new = SWAPS.get(type(operator))
        gap = source[stop(left) : start(right)]
        if new is not None and "(" not in gap and ")" not in gap and "#" not in gap:
            begin = stop(left) + len(gap) - len(gap.lstrip())
            yield Mutant(path, begin, begin + len(gap.strip()), new)

    functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    for node in (node for one in functions for statement in one.body for node in ast.walk(statement)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator)
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator)
            case ast.BoolOp(op=operator, values=[left, right]):
                yield from between(left, right, operator)
            case ast.UnaryOp(op=ast.Not()):
                yield Mutant(path, start(node), start(node) + len("not "), "")
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield Mutant(path, start(node.func), stop(node.func), CALLS[name])
            case ast.AugAssign(op=ast.Add() | ast.Sub(), target=target, value=value):
                yield Mutant(path, stop(target), start(value), " -= " if isinstance(node.op, ast.Add) else " += ")
            case ast.Expr(value=ast.Call()):
                yield Mutant(path, start(node), stop(node), "None")
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                yield Mutant(path, start(node), stop(node), str(number + 1))


@dataclass(frozen=True)
class Test:
    """A test, the seconds that it took, and the functions that it called: file, first and last line of each."""

    name: str
    seconds: float
    functions: list[tuple[str, int, int]]

    def calls(self, path: Path, line: int) -> bool:
        """Return whether the test called the function that has a line."""
        return any(file == str(path) and first <= line <= last for file, first, last in self.functions)


def recorded(file: Path) -> list[Test]:
    """Return the tests that ``tools.called_functions`` recorded, the shortest first."""
    found = [Test(*json.loads(line)) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda test: test.seconds)


def nearest_first(tests: Sequence[Test], path: Path, line: int, every: Sequence[str]) -> list[list[str]]:
    """Return the command that runs the tests of the function that has a line, and the one that runs all others.

    pytest deselects by the beginnings of names. So a test whose name is the beginning of another one's runs twice.
    """
    near = [test.name for test in tests if test.calls(path, line)]
    if not near:
        return [[*every]]
    others = {test.name for test in tests}.difference(near)
    whole = [name for name in near if not any(other.startswith(name) for other in others)]
    return [[*PYTEST, *near], [*every, *(f"--deselect={name}" for name in whole)]]


def simulation(seeds: int) -> list[str]:
    """Return the command that runs so many seeds of the simulated cluster."""
    return ["tests.simulation", "--seed", "1", "--runs", str(seeds), "--steps", "200", "--no-shrink"]


def copy_tree(copy: Path) -> None:
    """Copy this tree, with the native module that this process imports.

    Raises RuntimeError if Python does not import the product from the copy, so that all mutants would survive.
    """
    from lamina import _native

    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    native = Path(_native.__file__ or "")
    shutil.copy(native, copy / "lamina" / native.name)
    (copy / "sitecustomize.py").write_text(DIRECT_IMPORTS)
    program = "import lamina._native; print(lamina._native.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, env=_environment(copy), capture_output=True, text=True, check=False
    )
    if not done.stdout.startswith(str(copy.resolve())):
        raise RuntimeError(f"the product is not imported from {copy}: {done.stdout or done.stderr}")


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}


def run_mutant(mutant: Mutant, copy: Path, commands: Iterable[Sequence[str]]) -> str | None:
    """Run modules with arguments for a mutant in a copy of the tree. Returns what fails first; None if nothing does."""
    file = copy / mutant.path
    source, times = file.read_text(), file.stat()
    file.write_text(mutant.apply(source))
    try:
        return next(filter(None, (run(copy, command, PYTHONDONTWRITEBYTECODE="1") for command in commands)), None)
    finally:
        file.write_text(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled code is right again
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # else examples that failed kill later mutants


def run(copy: Path, command: Sequence[str], **variables: str) -> str | None:
    """Run a module with arguments in a copy of the tree. Returns what fails; None if nothing does."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=copy,
            env=_environment(copy) | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [done.stdout[-100:]])[0] if done.returncode not in (0, NO_TESTS) else None


def main() -> int:
    """Run the command line; the exit status is 1 if a mutant survived, 2 if the unchanged tree fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders or files of the product")
    parser.add_argument("--tests", nargs="+", default=["tests/schedule", "tests/kv"], help="folders of the tests")
    parser.add_argument("--simulate", type=int, metavar="N", help="run N seeds of the simulated cluster, not tests")
    parser.add_argument("--count", type=int, default=40, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="selects the mutants")
    options = parser.parse_args()
    files = [
        file for one in options.folders for file in ([ROOT / one] if one.endswith(".py") else (ROOT / one).glob("*.py"))
    ]
    paths = sorted(file.relative_to(ROOT) for file in files)
    sources = {path: (ROOT / path).read_text() for path in paths}
    found = [mutant for path, source in sources.items() for mutant in mutants(path, source)]
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    survived = 0
    with tempfile.TemporaryDirectory(prefix="lamina-mutants-") as folder:
        copy = Path(folder, "tree")
        copy_tree(copy)
        every = [*PYTEST, *options.tests]
        whole = simulation(options.simulate) if options.simulate else [*every, "-p", "tools.called_functions"]
        if (failure := run(copy, whole)) is not None:
            print(f"the tree fails without a mutant: {failure}")
            return 2
        tests = [] if options.simulate else recorded(copy / RECORD.name)
        for number, mutant in enumerate(chosen):
            source, begun = sources[mutant.path], time.perf_counter()
            line = source.count("\n", 0, mutant.start) + 1
            commands = [whole] if options.simulate else nearest_first(tests, mutant.path, line, every)
            killer = run_mutant(mutant, copy, commands)
            survived += killer is None
            print(
                f"{number} {mutant.path}:{line} {time.perf_counter() - begun:.0f} s {killer or 'SURVIVED'}", flush=True
            )
            if killer is None:
                changed = mutant.apply(source).splitlines()
                diff = difflib.unified_diff(source.splitlines(), changed, n=0, lineterm="")
                print("\n".join(list(diff)[3:]), flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed, of {len(found)} mutants in all")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
