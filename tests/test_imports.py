"""Which room may import which, read from the source, including imports inside functions and under TYPE_CHECKING."""

import ast
import fnmatch
import functools
import graphlib
import itertools
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

# A room imports its own level and those above it in this list. "lamina" is lamina/__init__.py, the public names.
LEVELS = (
    {"core", "_native"},
    {"config", "output"},
    {"transport", "splitter", "kernels", "models"},
    {"control", "dataplane", "lowering", "kv", "text"},
    {"worker"},
    {"schedule", "compute", "memory"},
    {"cluster"},
    {"engine"},
    {"observe"},
    {"launch"},
    {"sdk", "serve", "lamina", "planning"},
    {"cli", "__main__"},
)

# Package -> the files that may import it.
ONLY_IN = {
    "lamina.planning": ("lamina/planning/*.py", "lamina/cli/*.py"),  # nothing that serves waits for a plan
    "torch.fx": ("splitter/*.py", "lamina/lowering/*.py"),
    "networkx": ("splitter/cut.py", "lamina/kv/balancing.py"),  # the min cut; cycles of debts
    "ray": ("lamina/cluster/ray*.py",),
    "pyverbs": ("transport/rdma/*.py",),
    "cupy": ("*cuda*.py", "*triton*.py", "*gpu*.py", "transport/device/*.py"),
    "triton": ("*cuda*.py", "*triton*.py", "*gpu*.py"),
    "torchao": ("lamina/lowering/weight_forms.py",),
}

# Usable, and testable, with the nouns and settings alone.
GROUND = LEVELS[0] | LEVELS[1]
STAND_ALONE = ("splitter", "transport")

# Absent on most machines: what imports one of these at its top is itself imported inside functions only.
OPTIONAL = {"ray", "pyverbs", "cupy", "triton", "torchao"}

# Started often or by processes that need no model: these must not wait for the heavy packages.
LIGHT = (
    "lamina",
    "lamina.core.sampling",
    "lamina.core.types",
    "lamina.cli",
    "lamina.memory.slab",
    "lamina.text.tokenizer",
    "lamina.kernels.attention",
)
# Started by everybody who has started the same model before.
LIGHT_BUT_FOR_TORCH = ("lamina.compute.worker",)
HEAVY = {"torch", "transformers", "networkx", "pydantic", "yaml", *OPTIONAL}
# Started in the middle of a burst, and expected within a second: imports are most of that.
QUICK = "lamina.memory.worker"
SLOW = HEAVY | {"asyncio", "importlib.metadata"}
# Starts the workers, whose imports take longer than the engine's: imports the engine while they do so.
STARTS_WORKERS = "lamina.sdk"
ENGINE = HEAVY | {"asyncio", "rich", "lamina.engine.engine", "lamina.cluster.bringup"}


@dataclass(frozen=True)
class Import:
    """One imported name; ``deferred`` if importing the file does not run it."""

    file: str
    line: int
    importer: str
    target: str
    deferred: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def module_name(file: str) -> str:
    """splitter/cut.py -> lamina.splitter.cut; lamina/cli/__init__.py -> lamina.cli."""
    parts = Path(file).with_suffix("").parts
    parts = parts if parts[0] == "lamina" else ("lamina", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """lamina.splitter.cut -> splitter."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "lamina"


def read_imports(file: str, source: str) -> Iterator[Import]:
    """All imports of one file, with ``from a import b`` as a.b."""
    importer = module_name(file)
    package = importer if file.endswith("__init__.py") else importer.rpartition(".")[0]

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, importer, alias.name, deferred)
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*ancestors, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(file, node.lineno, importer, f"{base}.{alias.name}", deferred)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deferred or in_function or for_types)

    yield from visit(ast.parse(source), False)


def source_files() -> list[str]:
    """Paths from the root; lamina/splitter and lamina/transport are symlinks and are not entered twice."""
    return sorted(
        str((Path(folder) / name).relative_to(ROOT))
        for top in ("lamina", "splitter", "transport")
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if name.endswith(".py")
    )


MODULES = {module_name(file) for file in source_files()} | {"lamina._native"}


@functools.cache  # not at import: every process that runs tests imports this file
def imports() -> list[Import]:
    """Those of all our files."""
    return [found for file in source_files() for found in read_imports(file, (ROOT / file).read_text())]


def our_module(target: str) -> str | None:
    """The module of ours that holds ``target``, which may be a name in it; None if it is not ours."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target or None


def ours() -> list[tuple[Import, str]]:
    """Imports of our own modules."""
    return [(found, module) for found in imports() if (module := our_module(found.target)) is not None]


def is_in_package(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def test_every_room_has_a_level() -> None:
    rooms = {room(module) for module in MODULES}
    assert rooms <= set().union(*LEVELS), "a new room: give it a place in LEVELS and in ARCHITECTURE.md"


def test_imports_go_down() -> None:
    level = {name: height for height, names in enumerate(LEVELS) for name in names}
    upward = [str(found) for found, module in ours() if level[room(module)] > level[room(found.importer)]]
    assert not upward


@pytest.mark.parametrize("unit", [room, str], ids=["rooms", "modules"])
def test_no_cycles(unit: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {}
    for found, module in ours():
        if unit(found.importer) != unit(module):
            graph.setdefault(unit(found.importer), set()).add(unit(module))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", ONLY_IN)
def test_package_is_imported_only_where_it_belongs(package: str) -> None:
    strays = [
        str(found)
        for found in imports()
        if is_in_package(found.target, package)
        and not any(fnmatch.fnmatch(found.file, pattern) for pattern in ONLY_IN[package])
    ]
    assert not strays, f"{package} belongs in {ONLY_IN[package]}"


def test_optional_packages_are_imported_only_when_used() -> None:
    at_top = [found for found in imports() if not found.deferred]
    special = {found.importer for found in at_top for package in OPTIONAL if is_in_package(found.target, package)}
    eager = [str(found) for found in at_top if our_module(found.target) in special and found.importer not in special]
    assert not eager, f"import {sorted(special)} inside the function that uses it"


def required(extras: bool) -> set[str]:
    """The packages that pyproject.toml requires, also of the extras that users choose."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = [each for name, each in project["optional-dependencies"].items() if name not in ("dev", "docs")]
    wanted = [*project["dependencies"], *(itertools.chain(*chosen) if extras else ())]
    return {canonicalize_name(Requirement(one).name) for one in wanted}


def test_packages_are_required_by_ours_or_by_what_ours_require() -> None:
    """A package that is here for the tests alone, or by chance, is missing where users install Lamina."""
    allowed = required(extras=True)
    for package in required(extras=False):
        for text in metadata.requires(package) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                allowed.add(canonicalize_name(requirement.name))
    homes = metadata.packages_distributions()
    strays = [
        str(found)
        for found in imports()
        if (top := found.target.split(".")[0]) not in {"lamina", "_typeshed", *sys.stdlib_module_names, *OPTIONAL}
        and allowed.isdisjoint(map(canonicalize_name, homes.get(top, [])))
    ]
    assert not strays, "name the package in pyproject.toml"


def test_imports_are_absolute_and_of_one_copy() -> None:
    strays = [str(found) for found in imports() if found.target.split(".")[0] in ("splitter", "transport")]
    assert not strays, "say lamina.splitter and lamina.transport"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ((QUICK,), SLOW),
        ((STARTS_WORKERS,), ENGINE),
        (LIGHT, HEAVY),
        (LIGHT_BUT_FOR_TORCH, HEAVY - {"torch"}),
    ],
)
def test_light_modules_stay_light(modules: tuple[str, ...], heavy: set[str]) -> None:
    """None of them imports what is heavy, so that all in one process do not either."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({heavy!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("alone", STAND_ALONE)
def test_room_imports_without_other_rooms(alone: str) -> None:
    modules = sorted(module for module in MODULES if room(module) == alone)
    code = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        part, _, rest = name.partition(".")
        if part == "lamina" and rest and rest.split(".")[0] not in {GROUND | {alone}!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
for module in {modules!r}:
    importlib.import_module(module)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("alone", STAND_ALONE)
def test_rooms_tests_use_no_other_room(alone: str) -> None:
    files = sorted((ROOT / "tests" / alone).glob("*.py"))
    found = [item for file in files for item in read_imports(str(file.relative_to(ROOT)), file.read_text())]
    strays = [
        str(item) for item in found if (module := our_module(item.target)) and room(module) not in GROUND | {alone}
    ]
    assert files and not strays


def test_the_reader_sees_every_kind_of_import() -> None:
    source = """
import torch.fx
from torch import fx
from lamina.core.types import DType
from . import cut
from ..core.errors import ModelError
if TYPE_CHECKING:
    import ray
async def later():
    with lock:
        import triton.language as tl
"""
    found = [(item.target, item.deferred) for item in read_imports("splitter/example.py", source)]
    assert found == [
        ("torch.fx", False),
        ("torch.fx", False),
        ("lamina.core.types.DType", False),
        ("lamina.splitter.cut", False),
        ("lamina.core.errors.ModelError", False),
        ("ray", True),
        ("triton.language", True),
    ]
    assert our_module("lamina.core.types.DType") == "lamina.core.types"
    assert our_module("torch.fx") is None
