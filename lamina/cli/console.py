"""Where commands print: results on standard output, errors on standard error."""

from functools import cache

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text


@cache
def output() -> Console:
    """Standard output; plain text without colours when it is not a terminal."""
    return Console(highlight=False)


def print_error(error: BaseException | str) -> None:
    """One line (or the lines of a worker's last words) that begins with a red "error:"."""
    Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def print_text(text: str, style: str = "", end: str = "") -> None:
    """Model text as it is: never wrapped, never read as markup, its tabs not turned into spaces."""
    output().print(Segments([Segment(text + end, Style.parse(style))]), soft_wrap=True, end="")
