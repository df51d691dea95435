"""Structure that people rely on when they read the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@pytest.mark.parametrize("file", TESTS)
def test_test_file_has_a_test(file: str) -> None:
    module = ast.parse((ROOT / file).read_text())
    names = [node.name for node in ast.walk(module) if isinstance(node, Definition)]
    names += [
        target.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert any(name.startswith(("test_", "Test")) for name in names)
