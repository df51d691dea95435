"""Help of commands with many options: panels of options, the common ones first."""

import re
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from lamina.config.settings import Group

COMMON = "Common options"
PANELS = ("Arguments", "Options", COMMON, *get_args(Group))
"""The panels in the order of the help. Options without a panel are in "Options"."""

_OF_SETTINGS = (COMMON, *get_args(Group))
"""The panels of settings, whose whole help is in docs/settings.md."""

WIDEST_NAME = 28
"""Columns for the names of options. The help of an option with a longer name begins on the next line."""

_MARGINS = 4  # click's: two columns before the name, two before the help


class PanelledCommand(TyperCommand):
    """A command whose help shows its options by panel, as plain text.

    Typer's own panels are tables, which cut long names off at 80 columns and need a line for every three words.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)


class PanelledGroup(TyperGroup):
    """A command with subcommands whose help shows its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_panels(command: TyperCommand | TyperGroup, context: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str, str]]] = {}  # name, help, and what click adds to the help: the default
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is None:
            continue
        name, text = record
        if getattr(option, "secondary_opts", None):
            name = f"--[no-]{option.opts[0].removeprefix('--')}"
        kind = "Arguments" if option.param_type_name == "argument" else "Options"
        panel = getattr(option, "rich_help_panel", None) or kind
        help = getattr(option, "help", None) or ""
        added = text.removeprefix(help)
        if panel in get_args(Group):  # the documentation has types and defaults
            name, added = name.split(" <")[0], ""
        panels.setdefault(panel, []).append((name, help, added))
    for panel in sorted(panels, key=PANELS.index):
        rows = panels[panel]
        columns = formatter.width - min(max(len(name) for name, *_ in rows), WIDEST_NAME) - _MARGINS
        with formatter.section(panel):
            formatter.write_dl(
                [
                    (name, (_sentences(help, columns - len(added)) if panel in _OF_SETTINGS else help) + added)
                    for name, help, added in rows
                ],
                col_max=WIDEST_NAME,
            )


def _sentences(help: str, columns: int) -> str:
    """Return the first sentence of a help text, and as many more as one line of ``columns`` has room for."""
    text, *others = re.split(r"(?<=\.) ", help)
    for sentence in others:
        if len(text) + 1 + len(sentence) > columns:
            break
        text += f" {sentence}"
    return text
