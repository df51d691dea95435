"""The `lamina` command line. Commands import heavy modules only when they run: help and errors appear at once."""

import errno
import logging
import signal
import sys
from typing import Annotated, NoReturn

import typer

from lamina import __version__
from lamina.cli import (
    batch,
    bench,
    bench_serve,
    client,
    doctor,
    generate,
    launch,
    models,
    plan,
    simulate,
    top,
)
from lamina.cli.console import discard_output, machine_trouble, print_error
from lamina.cli.options import PanelledCommand, PanelledGroup
from lamina.core.errors import LaminaError, UserError
from lamina.output import configure_logging

logger = logging.getLogger(__name__)

MOST_HELP_COLUMNS = 160
"""Help is as wide as the terminal, up to this."""

app = typer.Typer(
    name="lamina",
    help="LLM inference that cuts the model at its attention operators: compute workers run the dense layers, memory "
    "workers hold the KV cache and run attention.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MOST_HELP_COLUMNS},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # see lamina.cli.options
)
app.command(cls=PanelledCommand)(generate.generate)
app.command(cls=PanelledCommand)(generate.chat)
app.command(cls=PanelledCommand)(batch.batch)
app.command(cls=PanelledCommand)(launch.launch)
app.command(cls=PanelledCommand)(client.status)
app.command(cls=PanelledCommand)(top.top)
app.command(cls=PanelledCommand)(client.scale)
app.command(cls=PanelledCommand)(client.down)
app.command(cls=PanelledCommand)(launch.worker)
app.command(cls=PanelledCommand)(models.models)
app.command(cls=PanelledCommand)(models.split)
app.command(cls=PanelledCommand)(plan.plan)
app.command(cls=PanelledCommand)(simulate.simulate)
benches = typer.Typer(cls=PanelledGroup, invoke_without_command=True)
benches.callback()(bench.bench)
benches.command()(bench.transport)
benches.command()(bench_serve.serve)
benches.command("cost", help="Compare our numbers with the papers' in ./lamina-cost.html.")(bench.write_cost_report)
app.add_typer(benches, name="bench")
app.command(cls=PanelledCommand)(doctor.doctor)


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
    configure_logging()


def main() -> NoReturn:
    """Run the command line. Exit status: 0, 1 (failure), 2 (invalid input), 128 + signal (Ctrl-C: 130)."""
    # Signals become exceptions, so that workers are stopped on the way out.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    status = _run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to stop
    sys.exit(status)


def _run() -> int | str | None:
    try:
        app()
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
    except SystemExit as ended:
        return ended.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except LaminaError as error:
        print_error(error)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:  # a full disk, no permission, too many open files
        discard_output()
        if error.errno != errno.EPIPE:  # the reader of the pipe has seen enough
            logger.debug("raised here:", exc_info=error)
            print_error(machine_trouble(error))
        return 1
    return 0
