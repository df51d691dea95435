"""Console output of the commands: results go to standard output, errors and notes to standard error."""

import errno
import os
from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


MOST_COLUMNS = 1000


@cache
def output() -> Console:
    """Standard output; without colours unless it is a terminal."""
    return Console(highlight=False)


@cache
def notes() -> Console:
    """Standard error, for notes that are not part of a command's result."""
    return Console(stderr=True, highlight=False)


def print_table(table: "Table", console: Console | None = None) -> None:
    """Print a table at its full width: no figure is cut off, and a narrower terminal wraps its lines.

    A pipe has no width, so the table takes what it needs.
    """
    console = console or output()
    width = console.width
    console.width = MOST_COLUMNS
    needed = console.measure(table).maximum
    console.width = max(needed, width) if console.is_terminal else needed
    try:
        console.print(table)
    finally:
        console.width = width


def discard_output() -> None:
    """Redirect standard output to /dev/null after a failed write, which Python would otherwise retry as it exits."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    output.cache_clear()


def machine_trouble(error: OSError) -> str:
    """The message of a system error, with the file it concerns if known."""
    what = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{what}: the limit is {limit} open files. Raise it and run the command again: ulimit -n 1024"
    where = error.filename or ("standard output" if error.errno == errno.ENOSPC else "")
    return f"{what}: {where}" if where else what


def print_error(error: BaseException | str) -> None:
    """Print an error after a red "error:", on one line unless it holds a worker's traceback."""
    Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def print_text(text: str, style: str = "", end: str = "", console: Console | None = None) -> None:
    """Print text verbatim: not wrapped, not parsed as markup, tabs kept."""
    console = console or output()
    console.print(Segments([Segment(text + end, Style.parse(style))]), soft_wrap=True, end="")
