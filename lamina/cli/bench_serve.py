"""`lamina bench serve`: loads a server, and reports latencies, throughput and goodput as a table, JSON or a page."""

import asyncio
import html
import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lamina.cli.client import LOCAL_URL
from lamina.core.errors import ConfigError, LaminaError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lamina.cli.load import Answer, Conversation

ROWS = {
    "ttft_s": "time to first token",
    "tbt_s": "time between parts of text",
    "tpot_s": "time per token of a request",
    "latency_s": "whole answer",
}
Figures = Mapping[str, Any]


def serve(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = LOCAL_URL,
    model: Annotated[str | None, typer.Option(help="Model to ask for; by default the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key that the server asks for.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Conversations to begin, or requests of a trace to send.")] = 100,
    rate: Annotated[float, typer.Option(help="Conversations per second, at random; inf: all at once.")] = 4.0,
    burst: Annotated[int, typer.Option(min=1, help="Conversations that begin together.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Words of each prompt, about a token each.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a conversation, each with the earlier ones.")] = 1,
    think_time: Annotated[float, typer.Option(min=0.0, help="Seconds from an answer to the next turn.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Take times and lengths from an Azure CSV or Mooncake .jsonl trace.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="Replay a trace this many times as fast.")] = 1.0,
    ttft: Annotated[float, typer.Option(min=0.0, help="SLO of goodput: seconds to the first token.")] = 1.0,
    tbt: Annotated[float, typer.Option(min=0.0, help="SLO of goodput: mean seconds per token.")] = 0.1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length, as Lamina and vLLM allow.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest seconds of one request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of arrival times.")] = 0,
    client: Annotated[
        Literal["lamina", "guidellm"], typer.Option(help="What sends the requests and reports: GuideLLM, if installed.")
    ] = "lamina",
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that GuideLLM makes prompts with: a directory or a name.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write figures and each request to this file.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots; needs matplotlib.")
    ] = None,
) -> None:
    """Load a server with chats and measure its answers.

    The server may be any that has OpenAI's API. Requests are sent at their times whatever has been answered. Exit
    status 1 if no request is answered.
    """
    from lamina.cli.load import Load, figures, first_model
    from lamina.config.engine_config import check_writable
    from lamina.observe.progress import counting_progress

    for option, file in (("--json", json_file), ("--html", html_file)):
        if file is not None:
            check_writable(option, file)
    if client == "lamina" and html_file is not None and find_spec("matplotlib") is None:
        raise ConfigError("--html needs matplotlib, which is not installed: pip install matplotlib, or give --json")
    if client == "guidellm" and (trace is not None or burst != 1):
        raise ConfigError("--client guidellm has no --trace and no --burst; leave these out, or --client")
    planned = _plan(trace, speed, requests, rate, burst, seed, (turns, prompt, output, think_time))
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    fields = {"model": model or first_model(base, headers)} | ({"ignore_eos": True} if ignore_eos else {})
    if client == "guidellm":
        load, files = (requests, rate, timeout), {"json": json_file, "html": html_file}
        _run_guidellm(_guidellm_scenario(base, fields, api_key, tokenizer, load, (turns, prompt, output), files))
        return
    with counting_progress("Requests", sum(len(one.turns) for one in planned)) as on_progress:
        count = 0

        def on_answer() -> None:
            nonlocal count
            count += 1
            on_progress(count)

        answers = asyncio.run(Load(base, headers, fields, timeout, on_answer).send_all(planned))
    found = {"url": base, "model": fields["model"], **figures(answers, ttft, tbt)}
    show(found)
    if json_file is not None:
        each = [{key: value for key, value in asdict(one).items() if key != "text"} for one in answers]
        json_file.write_text(json.dumps({**found, "requests": each}) + "\n")
    if html_file is not None:
        html_file.write_text(page(found, answers))
    if not found["completed"]:
        raise LaminaError(f"none of {len(answers)} requests was answered: {next(iter(found['errors']))}")


def _plan(
    trace: Path | None,
    speed: float,
    requests: int,
    rate: float,
    burst: int,
    seed: int,
    shape: tuple[int, int, int, float],
) -> "list[Conversation]":
    """Return the conversations to send. ``shape``: turns, prompt, output and think time without a trace."""
    from lamina.cli.load import arrivals, conversations, of_trace
    from lamina.planning.plan.workload import read_trace

    if trace is not None:
        return of_trace(read_trace(trace)[:requests], speed)
    if not rate > 0:
        raise ConfigError(f"--rate is {rate:g}; give conversations per second above 0, or inf for all at once")
    return conversations(arrivals(requests, rate, burst, seed), *shape)


def _guidellm_scenario(
    base: str,
    fields: Mapping[str, Any],
    api_key: str | None,
    tokenizer: str | None,
    load: tuple[int, float, float],
    shape: tuple[int, int, int],
    files: Mapping[str, Path | None],
) -> dict[str, Any]:
    """Return the scenario for GuideLLM's ``--config``, as of GuideLLM 0.8.

    Args:
        fields: The model, and fields of each request's body besides GuideLLM's own.
        tokenizer: Directory or name of the tokenizer that makes prompts; None: GuideLLM looks for that of the model.
        load: Requests, requests per second (inf: all at once), and the longest seconds of a request.
        shape: Turns, tokens of each prompt, tokens of each answer.
        files: Files to write, by GuideLLM's name of their form; None: not this one.
    """
    (requests, rate, timeout), (turns, prompt, output) = load, shape
    extra = {name: value for name, value in fields.items() if name != "model"}
    backend = {"kind": "openai_http", "target": base, "model": fields["model"], "timeout": timeout}
    backend |= ({"api_key": api_key} if api_key else {}) | ({"extras": {"body": extra}} if extra else {})
    at_once = math.isinf(rate)
    spec: dict[str, Any] = {
        "backend": backend,
        "profile": {"kind": "throughput"} if at_once else {"kind": "poisson", "rate": [rate]},
        "constraints": [{"kind": "max_requests", "count": requests * turns}],
        "data": [{"kind": "synthetic_text", "prompt_tokens": prompt, "output_tokens": output, "turns": turns}],
        "outputs": [{"kind": "console"}, *({"kind": kind, "path": str(to)} for kind, to in files.items() if to)],
    }
    if tokenizer is not None:
        spec["tokenizer"] = {"kind": "huggingface_auto", "model": tokenizer}
    return {"spec": spec}


def _run_guidellm(wanted: Mapping[str, Any]) -> None:
    """Run GuideLLM with a scenario; its output goes where this program's goes.

    Raises ConfigError if it is not installed, LaminaError if it fails.
    """
    program = shutil.which("guidellm")
    if program is None:
        raise ConfigError("--client guidellm: it is not installed: pip install guidellm, or leave --client out")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # only this user may read the key in it
        json.dump(wanted, file)
        file.flush()
        done = subprocess.run([program, "run", "--config", file.name], check=False)
    if done.returncode:
        raise LaminaError(f"GuideLLM ended with status {done.returncode}; its output says why")


def show(found: Figures) -> None:
    """Print the figures, in at most 80 columns."""
    from rich.table import Column, Table

    from lamina.cli.console import output, print_table

    names = ("mean", "p50", "p90", "p99")
    table = Table("milliseconds", *(Column(name, justify="right") for name in names))
    for key, name in ROWS.items():
        if found[key] is not None:
            table.add_row(name, *(f"{1000 * found[key][one]:.1f}" for one in names))
    print_table(table)
    for line in summary(found):
        output().print(line, soft_wrap=True, markup=False)


def summary(found: Figures) -> list[str]:
    """Return what the table does not have, in lines."""
    slo = found["goodput"]
    lines = [
        f"{found['completed']} requests in {found['seconds']:.1f} s, {found['failed']} failed",
        f"{found['requests_per_s']:.2f} requests/s, {found['prompt_tokens_per_s']:.0f} prompt tokens/s, "
        f"{found['output_tokens_per_s']:.0f} output tokens/s",
        f"goodput {slo['requests_per_s']:.2f} requests/s: {slo['share']:.0%} have their first token in "
        f"{slo['ttft_s']:g} s",
        f"  and the others every {slo['tbt_s']:g} s on average",
    ]
    if found["most_late_s"] > 0.1:
        lines.append(f"This client was late by up to {found['most_late_s']:.2f} s: it limits the load.")
    if not found["tokens_counted_by_server"]:
        lines.append("The server counts no tokens: parts of streams count as tokens.")
    return lines + [f"{count} x {error}" for error, count in found["errors"].items()]


def page(found: Figures, answers: "Sequence[Answer]") -> str:
    """Return the figures as an HTML page with plots, which needs no other file."""
    names = ("mean", "p50", "p90", "p99")
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{1000 * found[key][one]:.1f}</td>' for one in names)}</tr>"
        for key, name in ROWS.items()
        if found[key] is not None
    )
    head = "".join(f"<th>{name}</th>" for name in ("milliseconds", *names))
    title = html.escape(f"{found['model']} at {found['url']}")
    lines = "<br>".join(map(html.escape, summary(found)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:15px sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:right;padding:.2rem .8rem}td:first-child,th:first-child{text-align:left}"
        "svg{max-width:100%;height:auto}</style>"
        f"<h1>{title}</h1><table><tr>{head}</tr>{rows}</table><p>{lines}</p>{_svg(_plots(found, answers))}</html>\n"
    )


def _plots(found: Figures, answers: "Sequence[Answer]") -> "Figure":
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (first, between), (open_, tokens) = figure.subplots(2, 2)
    whole = [one for one in answers if not one.error]
    gaps = [gap for one in whole for gap in one.gaps_s]
    for axes, values, name, slo in (
        (first, [one.ttft_s for one in whole], "time to first token", found["goodput"]["ttft_s"]),
        (between, gaps, "time between parts of text", found["goodput"]["tbt_s"]),
    ):
        axes.ecdf(values or [0.0])
        axes.axvline(slo, linestyle=":", color="gray", label="SLO")
        axes.set(title=name, xlabel="seconds", ylabel="share")
        axes.legend()
    times = sorted([(one.sent_s, 1) for one in answers] + [(one.end_s, -1) for one in answers])
    open_.step([at for at, _ in times], np.cumsum([change for _, change in times]), where="post")
    open_.set(title="open requests", xlabel="seconds", ylim=(0, None))
    tokens.hist([at for one in whole for at in one.arrivals_s], bins=60)
    tokens.set(title="parts of text that arrived", xlabel="seconds")
    return figure


def _svg(figure: "Figure") -> str:
    import io

    written = io.StringIO()
    figure.savefig(written, format="svg")
    return written.getvalue()[written.getvalue().index("<svg") :]
