"""Console output of the commands: results go to standard output, errors and notes to standard error."""

import errno
import math
import os
from collections.abc import Iterable, Iterator
from functools import cache
from textwrap import fill
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


MOST_COLUMNS = 1000
LABEL = " " * 10  # width of a label of ``print_lines``


@cache
def output() -> Console:
    """Standard output; without colours unless it is a terminal."""
    return Console(highlight=False)


@cache
def notes() -> Console:
    """Standard error, for notes that are not part of a command's result."""
    return Console(stderr=True, highlight=False)


def print_table(table: "Table", console: Console | None = None) -> None:
    """Print a table without cutting off a figure.

    A pipe has no width, so the table takes what it needs. On a terminal, texts wrap between words; if some column is
    too narrow for its words even then, the table becomes a list with a line for each cell.
    """
    console = console or output()
    if console.is_terminal:
        if _fits(table, console):
            console.print(table)
        else:
            console.print(table.title or "")
            console.print("\n".join(_listed(table)), soft_wrap=True, markup=False)
            console.print(table.caption or "")
        return
    width = console.width
    console.width = MOST_COLUMNS
    console.width = console.measure(table).maximum
    try:
        console.print(table)
    finally:
        console.width = width


def _fits(table: "Table", console: Console) -> bool:
    """Return whether the console shows the table without cutting off a word, which rich marks with "…"."""
    lines = console.render_lines(table, pad=False)
    texts = ["".join(segment.text for segment in line) for line in lines]
    return not any("…" in text or cell_len(text) > console.width for text in texts)


def _listed(table: "Table") -> Iterator[str]:
    """Yield a line "heading  cell" for each cell, and a blank line after each row."""
    headings = [_plain(column.header) for column in table.columns]
    width = max(map(cell_len, headings), default=0)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for heading, cell in zip(headings, row, strict=True):
            yield f"{heading:<{width}}  {_plain(cell)}".strip()
        yield ""


def _plain(cell: object) -> str:
    text = Text.from_markup(cell).plain if isinstance(cell, str) else str(cell or "")
    return " ".join(text.split())


def discard_output() -> None:
    """Redirect standard output to /dev/null after a failed write, which Python would otherwise retry as it exits."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    output.cache_clear()


def machine_trouble(error: OSError) -> str:
    """Return the message of a system error, with the file it concerns if known."""
    what = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{what}: the limit is {limit} open files. Raise it and run the command again: ulimit -n 1024"
    where = error.filename or ("standard output" if error.errno == errno.ENOSPC else "")
    return f"{what}: {where}" if where else what


def print_error(error: BaseException | str) -> None:
    """Print an error after a red "error:", on one line unless it holds a worker's traceback.

    On a terminal, it wraps between words.
    """
    console, text = Console(stderr=True, highlight=False), f"error: {error}"
    if console.is_terminal:
        text = "\n".join(_wrapped(line, console, "", "  ") for line in text.splitlines())
    shown = Text(text)
    shown.stylize("bold red", 0, len("error:"))
    console.print(shown, soft_wrap=True)


def print_text(text: str, style: str = "", end: str = "", console: Console | None = None) -> None:
    """Print text verbatim: not wrapped, not parsed as markup, tabs kept."""
    console = console or output()
    console.print(Segments([Segment(text + end, Style.parse(style))]), soft_wrap=True, end="")


def print_sentence(text: str, style: str = "") -> None:
    """Print an indented sentence, which wraps between words on a terminal. Commands are to be pasted and never wrap."""
    console = output()
    if console.is_terminal and not text.startswith("lamina "):
        print_text(f"{_wrapped(text, console, '  ', '    ')}\n", style)
    else:
        print_text(f"  {text}\n", style)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of a label and what is said of it, which wraps between words, beside the label, on a terminal."""
    console = output()
    shown = (_wrapped(line, console, "", LABEL) for line in lines) if console.is_terminal else lines
    print_text("".join(f"{line}\n" for line in shown))


def _wrapped(text: str, console: Console, first: str, others: str) -> str:
    """Break a line between words at the width of a terminal; paths stay whole."""
    return fill(
        text,
        console.width - 1,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def show_size(nbytes: float) -> str:
    """Return a number of bytes for people: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def show_usd(usd: float) -> str:
    """Return an amount of dollars in cents or, below ten cents, with two significant digits."""
    decimals = 2 if not 0 < usd < 0.1 else 1 - math.floor(math.log10(usd))
    return f"${usd:.{decimals}f}"


def show_rate(per_second: float) -> str:
    """Return a rate with two decimals or, below 1, three significant digits."""
    decimals = 2 if not 0 < per_second < 1 else 2 - math.floor(math.log10(per_second))
    return f"{per_second:.{decimals}f}"
