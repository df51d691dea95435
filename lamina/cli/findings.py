"""The result of one check of `lamina doctor`."""

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """How a finding is shown; only PROBLEM makes the command fail."""

    OK = "[green]ok[/]"
    NOTE = "[yellow]note[/]"
    PROBLEM = "[bold red]problem[/]"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` says what to do, empty if all is well."""

    subject: str
    found: str
    status: Status = Status.OK
    remedy: str = ""
