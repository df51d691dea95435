"""List method names that more than five unrelated classes define: a name that many share cannot be searched.

    python tools/method_names.py [--all]        exit status 1 if there is any

Classes are related if one inherits from the other or both from one base, if a Protocol of ours defines the method and
they have all its public members. Python's own names do not count, nor ``close()`` without arguments, which
``contextlib.closing`` calls, nor properties. ``--all`` lists private methods too.
"""

import ast
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("lamina", "splitter", "transport")
MOST = 5
Method = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Class:
    """A class of the product: where it is, what it inherits and which methods it defines, by line."""

    file: str
    name: str
    bases: tuple[str, ...]
    methods: dict[str, int] = field(hash=False)
    attributes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def read_classes(root: Path) -> list[Class]:
    """All classes under the product's directories; the symlinks in lamina/ are not entered twice."""
    found = []
    for top in TOPS:
        for path in sorted((root / top).rglob("*.py")):
            if top == "lamina" and path.relative_to(root).parts[1] in TOPS:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = tuple(ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases)
                    methods = {
                        each.name: each.lineno
                        for each in node.body
                        if isinstance(each, Method)
                        and not any(ast.unparse(one).endswith("property") for one in each.decorator_list)
                        and not (each.name == "close" and len(each.args.args) == 1)
                    }
                    attributes = frozenset(
                        target.attr if isinstance(target, ast.Attribute) else target.id
                        for each in ast.walk(node)
                        if isinstance(each, ast.Assign | ast.AnnAssign)
                        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
                        if isinstance(target, ast.Attribute | ast.Name)
                    )
                    found.append(Class(str(path.relative_to(root)), node.name, bases, methods, attributes))
    return found


def families(name: str, classes: list[Class]) -> list[list[Class]]:
    """Group the classes that define ``name``: a class is with the ancestor or the protocol that declares it."""
    by_name = defaultdict(list)
    for each in classes:
        by_name[each.name].append(each)

    def ancestors(each: Class) -> list[Class]:
        found = [each]
        for base in each.bases:
            named = [one for one in by_name.get(base, []) if one is not each]
            here = [one for one in named if one.file == each.file] or sorted(
                named, key=lambda one: -len(os.path.commonpath([one.file, each.file]))
            )
            found += ancestors(here[0]) if here else []
        return found

    def methods(each: Class) -> set[str]:
        return {member for one in ancestors(each) for member in one.methods.keys() | one.attributes}

    definers = [each for each in classes if name in each.methods]
    protocols = [each for each in definers if "Protocol" in each.bases]
    parent = {str(each): str(each) for each in definers}

    def root(key: str) -> str:
        return key if parent[key] == key else root(parent[key])

    for each in definers:
        related = [one for one in ancestors(each) if name in one.methods]
        for protocol in protocols:
            public = {member for one in ancestors(protocol) for member in one.methods if not member.startswith("_")}
            if public <= methods(each):
                related.append(protocol)
        for one in related:
            parent[root(str(each))] = root(str(one))
    groups: dict[str, list[Class]] = defaultdict(list)
    for each in definers:
        groups[root(str(each))].append(each)
    return list(groups.values())


def shared_names(root: Path, private: bool) -> dict[str, list[list[Class]]]:
    """By method name: families of classes that define it, if there are more than ``MOST``."""
    classes = read_classes(root)
    names = {method for each in classes for method in each.methods}
    wanted = [one for one in sorted(names) if not one.startswith("__") and (private or not one.startswith("_"))]
    shared = {one: groups for one in wanted if len(groups := families(one, classes)) > MOST}
    return dict(sorted(shared.items(), key=lambda item: -len(item[1])))


def main() -> int:
    root = Path(sys.argv[-1]) if len(sys.argv) > 1 and not sys.argv[-1].startswith("--") else ROOT
    shared = shared_names(root, "--all" in sys.argv)
    for name, groups in shared.items():
        print(f"{name}: {len(groups)} unrelated classes")
        for group in groups:
            print("   ", ", ".join(f"{each.file}:{each.methods[name]} {each.name}" for each in group))
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
