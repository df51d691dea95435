"""`lamina launch`: starts an OpenAI-compatible server with its pools of workers on this machine."""

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.config import EngineConfig

if TYPE_CHECKING:
    from lamina.engine.engine import Engine


@options.engine_options
def launch(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000,
    frontends: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Processes that speak HTTP, tokenise and detokenise; 0: the engine's own process does it.",
        ),
    ] = 1,
) -> None:
    """Start an OpenAI-compatible server. Ctrl-C or SIGTERM stops it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # SIGTERM is a regular way to stop a server
    from lamina.sdk import Lamina
    from lamina.serve.server import bind, serve, url

    if config.listen is not None:
        _invite(config)
    with bind(host, port) as listener:
        if frontends == 0:
            with Lamina.from_config(config) as lamina:
                serve(lamina.engine, listener, on_ready=lambda: _ready(lamina.engine, url(listener)))
            return
        from lamina.models.directory import find
        from lamina.serve.processes import FrontendProcesses

        model = find(config.model, weights=False)
        with FrontendProcesses(frontends, model.path, listener) as processes, Lamina.from_config(config) as lamina:
            processes.serve(lamina.engine, on_ready=lambda: _ready(lamina.engine, url(listener)))


def _invite(config: EngineConfig) -> None:
    """Say how workers of other machines join: the start may wait for them."""
    from lamina.cli.console import notes, print_text

    name, _, port = (config.listen or "").rpartition(":")
    secret = f"--secret-file {config.secret_file}" if config.secret_file is not None else "(with LAMINA_SECRET set)"
    command = f"lamina worker --engine {config.advertise or name}:{port} --role memory --kind cpu {secret}"
    print_text(f"Workers of other machines join with\n  {command}\n", console=notes())


def _ready(engine: "Engine", url: str) -> None:
    from lamina.cli.console import output, print_text
    from lamina.protocol.choice import summary

    slots = sum(worker.capacity for worker in engine.stats().memory.values())
    output().print(f"[bold green]Lamina is ready[/] on [bold]{url}[/]", soft_wrap=True)
    print_text(
        f"  model    {engine.model_name}, {engine.cluster.parameters / 1e6:.1f}M parameters, "
        f"{engine.cluster.dtype.value}, up to {engine.max_model_len} tokens per request\n"
        f"  compute  {engine.config.compute}\n"
        f"  memory   {engine.config.memory}, room for {slots} tokens of KV\n"
        f"  network  {', '.join(summary(engine.cluster.links))}\n\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"prompt": "def fibonacci(n):", "max_tokens": 48}}'\n\n""",
    )
    output().print("[dim]Ctrl-C stops it.[/]")
