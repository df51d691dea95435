"""Where commands print: results on standard output, errors and what else there is to say on standard error."""

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
    """Standard output; plain text without colours when it is not a terminal."""
    return Console(highlight=False)


@cache
def notes() -> Console:
    """Standard error, for what is said beside a command's result."""
    return Console(stderr=True, highlight=False)


def print_table(table: "Table", console: Console | None = None) -> None:
    """A table of figures, with all of them: in a terminal too narrow for it the terminal wraps its lines.

    A pipe has no width of its own: a table gets what it needs there.
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
    """Let nothing more be written to standard output, which cannot take it; Python would try again as it ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    output.cache_clear()


def machine_trouble(error: OSError) -> str:
    """What the system refused, and on which file if it says so."""
    what = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{what}: this process may open {limit}. Raise the limit and run it again: ulimit -n 1024"
    where = error.filename or ("standard output" if error.errno == errno.ENOSPC else "")
    return f"{what}: {where}" if where else what


def print_error(error: BaseException | str) -> None:
    """One line (or the lines of a worker's last words) that begins with a red "error:"."""
    Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def print_text(text: str, style: str = "", end: str = "", console: Console | None = None) -> None:
    """Model text as it is: never wrapped, never read as markup, its tabs not turned into spaces."""
    console = console or output()
    console.print(Segments([Segment(text + end, Style.parse(style))]), soft_wrap=True, end="")
