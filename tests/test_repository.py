"""Structure that people rely on when they read the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for top in ("lamina", "splitter", "transport")
    for path in (ROOT / top).rglob("*.py")
    if not path.is_relative_to(ROOT / "lamina/splitter") and not path.is_relative_to(ROOT / "lamina/transport")
)
TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(body: list[ast.stmt], owner: str = "") -> list[str]:
    """Public classes, functions and methods without a docstring; an override of a library's method needs none."""
    found = []
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if any(ast.unparse(decorator) in ("override", "typing.override") for decorator in node.decorator_list):
            continue
        if ast.get_docstring(node) is None:
            found.append(owner + node.name)
        if isinstance(node, ast.ClassDef):
            found += undocumented(node.body, f"{node.name}.")
    return found


@pytest.mark.parametrize("file", SOURCES)
def test_source_file_is_short_and_documented(file: str) -> None:
    source = (ROOT / file).read_text()
    lines = len(source.splitlines())
    assert lines <= 500, f"{file} has {lines} lines; split it at its ideas"
    module = ast.parse(source)
    assert not source or ast.get_docstring(module), f"{file} does not say what it is for"
    assert not undocumented(module.body)


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
