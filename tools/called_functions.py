"""Plugin of pytest that records which functions each test calls: ``pytest -p tools.called_functions``.

Every test adds a line of JSON to the file RECORD: its name, its seconds, and file, first and last line of functions.
"""

import cProfile
import functools
import inspect
import json
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "called_functions.jsonl"


@functools.cache
def lines_of(code: CodeType) -> tuple[str, int, int] | None:
    """Return file, first and last line of a function of this tree; None for modules, bodies of classes and others."""
    file = Path(code.co_filename).resolve()
    if not code.co_flags & inspect.CO_OPTIMIZED or not file.is_relative_to(ROOT):
        return None
    return str(file.relative_to(ROOT)), code.co_firstlineno, max(line for *_, line in code.co_lines() if line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record a test with its fixtures."""
    begun = time.perf_counter()
    with cProfile.Profile(builtins=False) as profile:
        result = yield
    codes = [one.code for one in profile.getstats() if isinstance(one.code, CodeType)]
    functions = [found for code in codes if (found := lines_of(code)) is not None]
    with RECORD.open("a") as file:
        print(json.dumps([item.nodeid, time.perf_counter() - begun, functions]), file=file)
    return result
