"""What commands print fits a terminal of 80 columns, and no figure is cut off."""

import io
import os
import pty
import re
import subprocess
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from lamina.cli import client, console, plan_ways
from lamina.cli.console import print_table
from tests.support.commands import LAMINA, RUN_S, run_here

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MEASUREMENTS = Path(__file__).parents[2] / "bench" / "cost" / "measurements"
PLAN = ("plan", "--model", "Llama-3-70B", "--compute", "a100-80g:2", "--memory", "rtx3090:4")
PLAN_REQUESTS = (*PLAN, "--prompt", "512", "--output", "16")  # few tokens, which are soon simulated


def in_terminal(columns: int, *arguments: str) -> str:
    """The output of a command in a terminal with so many columns."""
    near, far = pty.openpty()
    termios.tcsetwinsize(far, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*LAMINA, *arguments],
        stdin=far,
        stdout=far,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(far)
    printed = b""
    try:
        while piece := os.read(near, 65536):
            printed += piece
    except OSError:  # Linux's way to say that nobody has the other end
        pass
    os.close(near)
    assert process.wait(RUN_S) == 0
    return ESCAPES.sub("", printed.decode())


def shown(table: Table, columns: int, terminal: bool = True) -> str:
    """What a console of so many columns shows of a table."""
    printed = io.StringIO()
    print_table(table, Console(file=printed, width=columns, force_terminal=terminal, color_system=None))
    return printed.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_no_figure_of_a_table_is_cut(terminal: bool) -> None:
    table = Table("kind", "figure")
    table.add_row("k" * 60, "123456.789")
    printed = shown(table, 40, terminal)
    assert "k" * 60 in printed and "123456.789" in printed and "…" not in printed


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_plan_fits_a_terminal_and_shows_every_figure(columns: int) -> None:
    bounds = ("--prices", "own", "--slo-tbt", "200ms", "--slo-ttft", "10s")  # two kinds keep these
    printed = in_terminal(columns, *PLAN_REQUESTS, *bounds)
    table = printed.partition("Simulated at")[0]
    table = table[table.index("way to serve") :]  # the answer comes before it
    assert "…" not in table and max(map(len, table.splitlines())) <= columns
    rows = table.count(" ms")  # TBT
    assert rows > 0 and len(re.findall(r"\d+\.\d\d s\b", table)) == 2 * rows  # TTFT, stall
    assert len(re.findall(r"\d+\.\d\d", table)) == 7 * rows  # these, requests/s, $/h, $/M in, $/M out, model
    assert re.search(r"a100-80g:\d \+ rtx3090:\d", table)  # a way's pools in one line


def test_errors_wrap_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/tmp/" + "folder/" * 12
    arguments = ("plan", "--model", "Llama-3-8B", "--compute", "h10", "--hardware")
    whole = run_here(*arguments[:-1]).stderr
    assert whole.count("\n") == 1 and len(whole) > 160
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    printed = ESCAPES.sub("", run_here(*arguments[:-1]).stderr)
    assert max(map(len, printed.splitlines())) < 80 and printed.split() == whole.split()
    assert folder.rstrip("/") in ESCAPES.sub("", run_here(*arguments, folder).stderr)  # a path stays whole


WORDS = st.lists(st.text("abc019.%", min_size=1, max_size=24), min_size=1, max_size=4).map(" ".join)


@given(st.integers(1, 12).flatmap(lambda columns: st.lists(st.tuples(*[WORDS] * columns), min_size=2, max_size=4)))
def test_every_word_of_any_table_is_shown_within_the_terminal(rows: list[tuple[str, ...]]) -> None:
    headings, *cells = rows
    table = Table(*headings)
    for row in cells:
        table.add_row(*row)
    printed = shown(table, 80)
    longest_cell = max(len(heading) for heading in headings) + max(len(cell) for row in cells for cell in row) + 2
    assert max(map(len, printed.splitlines())) <= max(80, longest_cell)
    words = printed.split()
    for row in cells:
        for cell in row:
            for word in cell.split():
                words.remove(word)


def test_a_plan_with_the_longest_figures_is_a_table_of_80_columns() -> None:
    way = "a100-80g:8 + rx7900xtx:12 memory, 2 x TP4, 4 rotating lanes, KV in parts of 16384"
    rates = ("1234.56", "100.32 s", "100.02 s", "1580 ms", "141720")
    figures = (*rates, "1103.40", "1110.81", "1102.47", "100% 100%", "1119.80 (+120%)")
    printed = shown(plan_ways.table_of([(way, *figures)] * 2, "title", "caption", narrow=True), 80)
    lines = [line for line in printed.splitlines() if "1234.56" in line]
    assert len(lines) == 2 and all("1580 ms" in line and "1119.80" in line for line in lines)
    assert max(map(len, printed.splitlines())) <= 80


def test_the_slots_of_a_memory_worker_are_a_line_of_80_columns() -> None:
    worker = {"capacity": 12345678, "used": 1234567, "cached": 1234567, "largest_requests": {}}
    assert all(len(line) <= 80 for line in client._worker_lines("memory12", worker))


def test_a_line_of_status_wraps_beside_the_name_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "compute10 serving, stage 1, rank 1 of replica 12, runs prompts, 1234567 of 12345678 token slots in use"
    printed = io.StringIO()
    for terminal in (True, False):
        monkeypatch.setattr(console, "output", lambda: Console(file=printed, width=80, force_terminal=terminal))  # noqa: B023
        console.print_lines([line, "requests  1 running"])
    first, second, *others = printed.getvalue().splitlines()
    assert len(first) < 80 and second.startswith(" " * 10 + "1") and f"{first} {second.strip()}" == line
    assert others == ["requests  1 running", line, "requests  1 running"]


@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "--context", "1024"),
        ("split",),
        ("doctor", "--topology"),
    ],
)
def test_tables_of_commands_fit_a_terminal(arguments: tuple[str, ...]) -> None:
    printed = in_terminal(80, *arguments)
    table = printed.partition("Recommended")[0]  # sentences are wrapped by the terminal
    assert "…" not in table and max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("command", [[], ["launch"], ["plan"], ["bench", "transport"]])
def test_help_is_as_wide_as_the_terminal(command: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = max(map(len, run_here(*command, "-h").stdout.splitlines()))
    assert widest <= columns
    assert command == [] or widest > columns - 16
