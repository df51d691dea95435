"""Rooms that decide have no hidden ring: objects get their collaborators as arguments, and nobody assigns to them."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "lamina"
FILES = sorted(file for room in ("schedule", "kv", "engine") for file in (ROOT / room).glob("*.py"))
SOCKETS = {"self._context.socket"}  # whose options are attributes


def records(trees: list[ast.Module]) -> set[str]:
    """Return the names of dataclasses, which are values: their owner changes their fields."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {one.name for one in classes if any("dataclass" in ast.unparse(each) for each in one.decorator_list)}


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign):
        return [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def assigned(source: str, values: set[str]) -> Iterator[str]:
    """Yield the assignments to attributes, or to their items, of a constructor's parameters or of an object's own
    attributes, unless those are ``values`` that the class has made."""
    for one in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        given, made = set[str](), set[str]()
        for begin in (each for each in one.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"):
            given = {argument.arg for argument in (*begin.args.args, *begin.args.kwonlyargs)} - {"self"}
            for node in (node for node in ast.walk(begin) if isinstance(node, ast.Assign)):
                if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in values:
                    made |= {ast.unparse(target) for target in node.targets}
            yield from held_by(begin, given)
        holders = {ast.unparse(each) for each in ast.walk(one) if isinstance(each, ast.Attribute)} - made
        yield from held_by(one, {each for each in holders if each.startswith("self.")})


def held_by(tree: ast.AST, holders: Collection[str]) -> Iterator[str]:
    """Yield the assignments to attributes of these expressions, or to items of such attributes."""
    for target in (target for node in ast.walk(tree) for target in targets(node)):
        part = target
        while isinstance(part, ast.Subscript):
            part = part.value
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) in holders:
            yield ast.unparse(target)


def test_nobody_assigns_to_a_collaborator() -> None:
    values = records([ast.parse(file.read_text()) for file in FILES]) | SOCKETS
    found = {f"{file.name}: {one}" for file in FILES for one in assigned(file.read_text(), values)}
    assert not found, "pass the collaborator in, return the decision, or call a method"


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self, b):\n  b.hook = self.run",
        "class A:\n def run(self):\n  self._b.hook = self.run",
        "class A:\n def run(self):\n  self._b.count += 1",
        "class A:\n def run(self):\n  self._b.counts['a'] -= 1",
        "class A:\n def run(self):\n  self._b.x, self._b.y = 1, 2",
    ],
)
def test_assignments_to_collaborators_are_found(source: str) -> None:
    assert list(assigned(source, set()))
