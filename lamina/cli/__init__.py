"""The `lamina` command. Commands import what they need when they run, so that help and errors come at once."""

import logging
import signal
import sys
from typing import Annotated, NoReturn

import typer

from lamina import __version__
from lamina.cli import (
    bench,
    bench_transport,
    chat,
    cost_report,
    doctor,
    generate,
    launch,
    plan,
    simulate,
    split,
    status,
)
from lamina.cli.console import print_error
from lamina.env import LOG_FORMAT, environment
from lamina.errors import LaminaError, UserError

app = typer.Typer(
    name="lamina",
    help="LLM inference that cuts the model at its attention operators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off in a terminal of 80 columns
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(launch.launch)
app.command()(status.status)
app.command()(split.split)
app.command()(plan.plan)
app.command()(simulate.simulate)
benches = typer.Typer(invoke_without_command=True)
benches.callback()(bench.bench)
benches.command()(bench_transport.transport)
benches.command("cost", help="Write the papers' numbers beside ours to lamina-cost.html, here.")(cost_report.write)
app.add_typer(benches, name="bench")
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lamina {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    logging.basicConfig(level=environment().log_level, format=LOG_FORMAT)


def main() -> NoReturn:
    """Run the command line. Exit status: 0, 1 (it failed), 2 (the caller can mend it), 128 + signal (Ctrl-C: 130)."""
    # As an exception, so that workers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        app()
    except LaminaError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, UserError) else 1)
    sys.exit(0)
