"""Mutants are changes of one operator each, of code that still parses."""

import ast
import inspect
import json
from pathlib import Path

from tools.called_functions import ROOT, lines_of
from tools.mutants import PYTEST, mutants, nearest_first, recorded

SOURCE = '''\
LIMIT = 3  # no function


def find(values, limit):
    """Return 1 + 2."""
    total = 0
    for value in values:  # 1 < 2
        if value < limit and not value == 2:
            total += min(value, limit)
    log(total)
    return total
'''


def test_a_mutant_differs_by_one_operator() -> None:
    made = [one.apply(SOURCE) for one in mutants(Path("file.py"), SOURCE)]
    changed = [
        (before.strip(), after.strip())
        for text in made
        for before, after in zip(SOURCE.splitlines(), text.splitlines(), strict=True)
        if before != after
    ]
    condition, sum_ = "if value < limit and not value == 2:", "total += min(value, limit)"
    assert sorted(changed) == sorted(
        [
            ("total = 0", "total = 1"),
            (condition, "if value < limit or not value == 2:"),
            (condition, "if value <= limit and not value == 2:"),
            (condition, "if value < limit and value == 2:"),
            (condition, "if value < limit and not value != 2:"),
            (condition, "if value < limit and not value == 3:"),
            (sum_, "total -= min(value, limit)"),
            (sum_, "total += max(value, limit)"),
            ("log(total)", "None"),
        ]
    )


def test_all_mutants_of_a_module_parse() -> None:
    path = ROOT / "lamina/schedule/growth.py"
    source = path.read_text()
    made = {one.apply(source) for one in mutants(path, source)}
    assert len(made) > 50 and source not in made
    for text in made:
        ast.parse(text)


def test_tests_are_chosen_by_the_functions_that_they_called(tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(mutants)
    span = lines_of(mutants.__code__)
    assert span == ("tools/mutants.py", first, first + len(lines) - 1)
    assert lines_of(compile("x = 1", str(ROOT / "tools/mutants.py"), "exec")) is None
    assert lines_of(inspect.getsourcelines.__code__) is None
    file = tmp_path / "record"
    file.write_text(
        "".join(json.dumps([name, seconds, [span]]) + "\n" for name, seconds in (("long", 2.0), ("short", 1.0)))
    )
    short, long = recorded(file)
    assert (short.name, long.name) == ("short", "long")
    path = Path("tools/mutants.py")
    assert short.calls(path, first) and short.calls(path, first + len(lines) - 1)
    assert not short.calls(path, first - 1) and not short.calls(path, first + len(lines))
    assert not short.calls(Path("tools/other.py"), first)


def test_all_tests_run_although_pytest_deselects_by_the_beginnings_of_names(tmp_path: Path) -> None:
    file, every = tmp_path / "record", [*PYTEST, "tests"]
    called = {"t.py::one": "a.py", "t.py::two": "a.py", "t.py::one_more": "b.py"}
    file.write_text("".join(json.dumps([name, 1.0, [(path, 1, 9)]]) + "\n" for name, path in called.items()))
    first, others = nearest_first(recorded(file), Path("a.py"), 5, every)
    assert first[len(PYTEST) :] == ["t.py::one", "t.py::two"]
    assert others == [*every, "--deselect=t.py::two"]
    assert nearest_first(recorded(file), Path("a.py"), 10, every) == [every]
