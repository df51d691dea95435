"""Commands that the documentation and the program itself show: they exist, parse, and run where that takes seconds."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from lamina.cli import app
from lamina.models.directory import BUNDLED
from tests.support.commands import run, run_here

ROOT = Path(__file__).parents[1]
PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name / "README.md" for name in ("bench", "bench/cost", "deploy")),
]
SOURCES = sorted((ROOT / "lamina").rglob("*.py"))

OTHERS = {
    *("--local-dir", "--extra-index-url", "--index-url", "--head", "--resources", "--shm-size"),
    *(
        "--hypothesis-profile",
        "--cross-validate",
        "--kernels-alone",
        "--enable-auto-tool-choice",
        "--layout",
        "--seconds",
        "--steps",
        "--runs",
        "--only",
        "--out",
        "--sequences",
        "--tokens",
        "--threads",
        "--rounds",
    ),
}
"""Options of other programs that texts name: hf, pip, ray, docker, pytest and programs of the repository."""

SAMPLE = {"/models/my-llama": str(BUNDLED), "MODEL": str(BUNDLED)}
"""What stands for a reader's own model."""

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.0000000,{100 + second},{10 + second % 7}\n" for second in range(60)
)


class Shown(NamedTuple):
    """A command in a page. ``whole``: on a line of its own, without an omission."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: lamina {shlex.join(self.words)}"


def shown_in(text: str, page: str) -> Iterator[Shown]:
    """The `lamina` commands in a page: lines of code blocks, and inline code."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if match := re.match(r"(?:\.venv/bin/)?lamina (.*)", line):
            yield _shown(page, match[1], "..." not in line)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`(?:\.venv/bin/)?lamina ([^`]+)`", prose):
        yield _shown(page, code, whole=False)


def _shown(page: str, line: str, whole: bool) -> Shown:
    words = shlex.split(line, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    return Shown(page, tuple(word for word in words if word != "..."), whole)


@cache
def commands() -> dict[str, Any]:
    """Every command by its words, such as "bench transport"."""
    root: Any = get_command(app)
    return {"": root} | root.commands | {f"bench {name}": one for name, one in root.commands["bench"].commands.items()}


def options_of(command: str) -> set[str]:
    """The options of a command, in both forms where it is a switch."""
    named = {name for one in commands()[command].params for name in (*one.opts, *one.secondary_opts)}
    return {*named, "-h", "--help"}


def command_of(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """The command that some words begin with, and the rest of them."""
    length = 2 if " ".join(words[:2]) in commands() else int(bool(words) and words[0] in commands())
    return " ".join(words[:length]), list(words[length:])


NAMES = {page: page.relative_to(ROOT).as_posix() for page in PAGES}
SHOWN = list(dict.fromkeys(one for page, name in NAMES.items() for one in shown_in(page.read_text(), name)))


def test_the_pages_show_commands() -> None:
    assert {"README.md", "docs/quick-start.md", "docs/operating.md", "bench/README.md"} <= {one.page for one in SHOWN}
    assert sum(one.whole for one in SHOWN) > 15


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_a_shown_command_parses(shown: Shown) -> None:
    command, arguments = command_of(shown.words)
    assert command or arguments == ["--version"] or arguments[0].startswith("-"), f"there is no lamina {arguments}"
    try:
        commands()[command].make_context(command, arguments)
    except Exception as error:  # click's, which typer may bring along under another name
        names = [kind.__name__ for kind in type(error).__mro__]
        missing = not shown.whole and ("MissingParameter" in names or "requires an argument" in str(error))
        asked = "Exit" in names  # --help and --version
        assert missing or asked, str(error)


def runs_in_seconds(shown: Shown) -> bool:
    if not shown.whole or any(word in shown.words for word in ("--url", "--dry-run")):
        return False
    return shown.words[0] in ("generate", "chat", "split", "simulate") or "--context" in shown.words


@pytest.mark.parametrize("shown", [one for one in SHOWN if runs_in_seconds(one)], ids=str)
def test_a_shown_command_runs(shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "azure_conv_2023.csv").write_text(TRACE)
    prices = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/cost-model.md").read_text(), re.DOTALL)
    (tmp_path / "mine.toml").write_text(prices[0])
    words = [SAMPLE.get(word, word) for word in shown.words]
    monkeypatch.chdir(tmp_path)
    starts_nothing = words[0] in ("plan", "simulate")
    done = run_here(*words) if starts_nothing else run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout or shown.words[0] == "chat"


NAMED = re.compile(r"\blamina ((?:bench )?[a-z]+)((?: --[a-z-]+(?: [^\s`;,]+)?)+)")
"""A command with options in a text."""


def texts_of(file: Path) -> Iterator[str]:
    """The texts in a source file; {} in place of what a formatted text inserts."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]


def test_every_command_that_the_program_names_has_the_options_given() -> None:
    named = 0
    for file in SOURCES:
        for text in texts_of(file):
            for match in NAMED.finditer(" ".join(text.split())):
                command, _ = command_of(tuple(match[1].split()))
                options = re.findall(r"--[a-z-]+", match[2])
                assert command and not set(options) - options_of(command), f"{file.name}: {match[0]}"
                named += 1
    assert named > 10


def test_every_option_that_help_and_errors_name_exists() -> None:
    known = set().union(*map(options_of, commands())) | OTHERS
    for file in SOURCES:
        for text in texts_of(file):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
                assert option in known, f"{file.relative_to(ROOT)} names {option}: {text[:80]}"


def test_every_option_of_a_page_s_prose_exists() -> None:
    known = set().union(*map(options_of, commands()))
    for page in PAGES:
        if page.parent.name in ("bench", "cost") or page.name in ("lab-notebook.md", "http-api.md"):
            continue  # options of benchmarks, and of vLLM
        for option in re.findall(r"`(--[a-z][a-z-]+)", page.read_text()):
            assert option in known | OTHERS, f"{page.name} names {option}"


def test_every_module_and_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for module, rest in re.findall(r"python\s+-m\s+([\w.]+)([^`\n]*)", text):
            if module.split(".")[0] not in ("bench", "lamina", "tests") or module == "bench.PART.NAME":
                continue
            place = ROOT / module.replace(".", "/")
            file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            assert file.is_file(), f"{page.name} names {module}"
            source = file.read_text()
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest):
                assert option in source, f"{page.name}: {module} has no {option}"
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert target in targets, f"{page.name} names make {target}"
