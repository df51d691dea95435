"""`lamina bench`: how fast a batch decodes, where the time goes; `lamina bench cost`."""

import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, LaminaError

if TYPE_CHECKING:
    from lamina.cluster.bringup import Cluster
    from lamina.control.timeline import Span
    from lamina.observe.decoding import Window
    from lamina.observe.step_trace import Share

SUITE = Path(__file__).parents[2] / "bench" / "cost" / "report.py"
REPORT = Path("lamina-cost.html")
SUITE_TIMEOUT_S = 600.0


def write() -> None:
    """Write the report to ``REPORT`` in the current directory.

    Raises:
        ConfigError: this is not a source tree, matplotlib is missing, or the directory is not writable.
        LaminaError: the suite failed or took longer than ``SUITE_TIMEOUT_S``.
    """
    from lamina.config.engine_config import check_writable
    from lamina.observe.progress import waiting

    if not SUITE.is_file():
        raise ConfigError(
            f"the cost suite is not part of the installed package: {SUITE} does not exist. Run it from a checkout"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError("the cost suite needs matplotlib, which is not installed: pip install matplotlib")
    check_writable("the report", REPORT)
    try:
        with waiting("Comparing with the papers"):
            done = subprocess.run([sys.executable, SUITE, "--out", REPORT], timeout=SUITE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaminaError(
            f"{SUITE} did not finish within {SUITE_TIMEOUT_S:g} s; is the machine busy? Run it without a time limit: "
            f"python {SUITE} --out {REPORT}"
        ) from error
    if done.returncode:
        raise LaminaError(f"{SUITE} failed with status {done.returncode}; its message is above")


TIMEOUT_S = 900.0


@options.engine_options
def bench(
    config: EngineConfig,
    invocation: typer.Context,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")] = 512,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request draws.")] = 64,
) -> None:
    """Measure how fast a batch decodes and where the time goes.

    The commands below measure something else.
    """
    if invocation.invoked_subcommand is not None:
        return
    options.check_model(config)
    from lamina.launch import launch
    from lamina.observe.decoding import decode_batch, decode_window
    from lamina.observe.progress import loading_progress, waiting

    config = replace(config, max_num_seqs=max(batch, config.max_num_seqs))
    spans: dict[str, list[Span]] = {}
    with loading_progress() as on_progress:
        engine = launch(config, on_progress, spans.update)
    try:
        draw = random.Random(0)
        prompts = [[draw.randrange(engine.vocab_size) for _ in range(context)] for _ in range(batch)]
        with waiting(f"Running {batch} prompts of {context} tokens and drawing {tokens} more for each"):
            window = decode_window(decode_batch(engine, prompts, tokens, TIMEOUT_S))
    finally:
        engine.close()
    _show(spans, window)
    _show_network(engine.cluster)


def _show(spans: "Mapping[str, list[Span]]", window: "Window") -> None:
    from rich.table import Table

    from lamina.cli.console import output, print_table
    from lamina.observe.step_trace import shares, turnarounds

    parts = shares(spans, window.begin_ns, window.end_ns)
    table = Table(title=f"Where {window.seconds:.2f} s of decoding went", title_justify="left", title_style="bold")
    for name in ("worker", "stage"):
        table.add_column(name)
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(part.worker, part.stage, f"{part.seconds:.3f}", f"{part.share:.0%}")
    print_table(table)
    output().print(f"[bold]{window.tokens_per_s:.1f} tokens/s[/]. {verdict(parts)}", soft_wrap=True)
    between = turnarounds(spans, window.begin_ns, window.end_ns)
    if between:
        microseconds = statistics.median(between) / 1000
        output().print(
            f"From sampling a lane's tokens to its next slice: {microseconds:.0f} us (median).", soft_wrap=True
        )


def verdict(parts: "Sequence[Share]") -> str:
    """The bottleneck in words: the longest stage, or its worker's time outside all stages if that is longer."""
    from lamina.observe.step_trace import OTHER, bottleneck

    worst = bottleneck(parts)
    other = next((part for part in parts if (part.worker, part.stage) == (worst.worker, OTHER)), None)
    if other is None or other.share <= worst.share:
        return f"The bottleneck is {worst.stage} on {worst.worker}: {worst.share:.0%} of the time."
    return (
        f"No stage is the bottleneck: {worst.worker} spends {other.share:.0%} of the time outside all stages (plans, "
        f"replies, waiting for a core). Its longest stage is {worst.stage}: {worst.share:.0%}."
    )


def _show_network(cluster: "Cluster") -> None:
    from lamina.cli.console import output
    from lamina.dataplane.transport_choice import summary
    from lamina.dataplane.wire import nbytes_per_token, paper_nbytes_per_token

    if not cluster.links:
        output().print("One worker does everything: nothing travels between workers.")
        return
    attentions, dtype = cluster.loaded.attentions, cluster.loaded.dtype
    ours, paper = (count(attentions, dtype) for count in (nbytes_per_token, paper_nbytes_per_token))
    output().print(
        f"Bytes between workers per token: {ours}, {ours / paper:.2f} x the paper's (2 + 2/G) e d L = {paper:.0f}; "
        f"{', '.join(summary(cluster.links))}.",
        soft_wrap=True,
    )
