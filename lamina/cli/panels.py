"""Help of commands with many options: panels of options, the common ones first."""

from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from lamina.config.settings import Group

COMMON = "Common options"
PANELS = ("Arguments", "Options", COMMON, *get_args(Group))
"""The panels in the order of the help. Options without a panel are in "Options"."""

WIDEST_NAME = 28
"""Columns for the names of options. The help of an option with a longer name begins on the next line."""


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
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is None:
            continue
        name, text = record
        if getattr(option, "secondary_opts", None):
            name = f"--[no-]{option.opts[0].removeprefix('--')}"
        kind = "Arguments" if option.param_type_name == "argument" else "Options"
        panel = getattr(option, "rich_help_panel", None) or kind
        if panel in get_args(Group):
            name, text = (
                name.split(" <")[0],
                getattr(option, "help", None) or "",
            )  # the documentation has types and defaults
        panels.setdefault(panel, []).append((name, text))
    for panel in sorted(panels, key=PANELS.index):
        with formatter.section(panel):
            formatter.write_dl(panels[panel], col_max=WIDEST_NAME)
