"""Commands `lamina launch`, a server with its pools of workers, and `lamina worker`, one worker of a remote engine."""

import functools
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from lamina.cli import options
from lamina.config.engine_config import EngineConfig
from lamina.config.environment import LOG_FORMAT, environment
from lamina.config.server_config import ServerConfig
from lamina.core.errors import ConfigError
from lamina.output import configure_logging, unblock


@options.options_of(EngineConfig, ServerConfig)
def launch(
    config: EngineConfig,
    server: ServerConfig,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="With --ray: only print where workers would run.",
            rich_help_panel="Pools",
        ),
    ] = False,
) -> None:
    """Start an OpenAI-compatible server. Ctrl-C or SIGTERM stops it.

    Every setting is described in docs/settings.md.
    """
    if dry_run:
        _print_placement(config)
        return
    if server.log_format != "text":
        os.environ[LOG_FORMAT] = server.log_format  # inherited by child processes
        configure_logging()
    unblock("stdout")
    unblock("stderr")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # SIGTERM is a regular way to stop a server
    from lamina.serve.gate import api_keys, tls_context
    from lamina.serve.server import bind, serve, url

    ready = functools.partial(_print_ready, keyed=bool(api_keys(server)))
    tls_context(server)  # report errors before the model is loaded
    if config.listen is not None and (config.secret_file or environment().secret):  # else the start is refused
        _print_join_command(config)
    with bind(server.host, server.port) as listener:
        if server.frontends == 0:
            from lamina.sdk import Lamina
            from lamina.serve.engine_process import describe

            with Lamina.from_config(config) as lamina:
                on_ready = functools.partial(ready, describe(lamina.engine), url(listener, server))
                serve(lamina.engine, listener, on_ready, server)
            return
        from lamina.models.directory import find
        from lamina.serve.frontend_processes import FrontendProcesses
        from lamina.serve.supervisor import Supervisor

        model = find(config.model, weights=False)
        with (
            FrontendProcesses(server, model.path, listener) as processes,
            Supervisor(config, processes.folder, processes.names) as supervisor,
        ):
            processes.serve(supervisor, on_ready=lambda: ready(supervisor.summary, url(listener, server)))


def _print_placement(config: EngineConfig) -> None:
    """Print the node of each worker. Raises ConfigError if the Ray cluster has too few resources."""
    from rich.table import Table

    from lamina.cli.console import print_table
    from lamina.launch import join_ray, ray_bundles

    if config.ray is None:
        raise ConfigError("dry-run prints a placement on a Ray cluster: give --ray auto, or the address of its head")
    table = Table("worker", "takes", "node")
    bundles = ray_bundles(config)
    for worker, node in join_ray(config)[1].items():
        takes = ", ".join(f"{name} {amount:g}" for name, amount in bundles[worker].items())
        table.add_row(worker, takes, node)
    print_table(table)


def _print_join_command(config: EngineConfig) -> None:
    """Print the command with which other machines' workers join: the start may wait for them."""
    from lamina.cli.console import notes, print_text

    name, _, port = (config.listen or "").rpartition(":")
    command = f"lamina worker --engine {config.advertise or name}:{port} --role memory --kind cpu"
    if config.secret_file is not None:
        where = f"with a copy of {config.secret_file}"
        command += f" --secret-file {shlex.quote(str(config.secret_file))}"
    else:
        where = "with the same LAMINA_SECRET"
    print_text(f"Workers of other machines join {where}:\n  {command}\n", console=notes())


def _print_ready(summary: str, url: str, keyed: bool) -> None:
    """Print the server's URL and examples of its use. ``keyed``: whether clients must send a key."""
    from lamina.cli.console import output, print_text

    header, key = (" -H 'Authorization: Bearer KEY'", "KEY") if keyed else ("", "-")
    output().print(f"[bold green]Lamina is ready[/] on [bold]{url}[/]", soft_wrap=True)
    print_text(
        f"{summary}\n"
        f"Chat in a browser: {url}/  Live view of both pools: {url}/dashboard\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{header} \\\n"
        f"""    -d '{{"prompt": "def fibonacci(n):", "max_tokens": 48}}'\n"""
        f"""  python -c "from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='{key}'); print(\n"""
        """    c.completions.create(model=c.models.list().data[0].id, prompt='def f(n):').choices[0].text)"\n\n""",
    )
    output().print("[dim]Ctrl-C stops it.[/]")


def worker(
    engine: Annotated[str, typer.Option(help="HOST:PORT of the engine, which was started with --listen.")],
    role: Annotated[
        Literal["compute", "memory", "prefill"],
        typer.Option(help="Holds weights (compute; prefill: to run only prompts), or the KV cache (memory)."),
    ],
    kind: Annotated[str, typer.Option(help="Device of the worker: cpu, cuda, or a kind of GPU such as a100.")] = "cpu",
    secret_file: Annotated[
        Path | None, typer.Option(help="File of the cluster's secret. Default: the variable LAMINA_SECRET.")
    ] = None,
    cores: Annotated[str | None, typer.Option(help="CPU list, such as 0-3,8. Default: all cores.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address at which other workers reach this machine. Default: that of its route to the engine."
        ),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on for other workers. Default: that of --address.")
    ] = None,
) -> None:
    """Run one worker on this machine for an engine on another one.

    The worker joins when the engine starts with a pool such as --memory remote:2, or later while it serves. It ends
    with the engine. SIGTERM or Ctrl-C lets it leave: a memory worker's KV moves to others first. A second one ends it
    at once. A compute worker reads the model's files under the engine's path, or else fetches them from the engine.
    """
    from lamina.cli.console import print_text
    from lamina.cluster.agent import Agent, WorkerPlace, application, keys_of
    from lamina.cluster.pool import RUNNABLE, PoolEntry, assign, find_devices, require_kind
    from lamina.cluster.sizing import worker_cores
    from lamina.control.secret import configured
    from lamina.core.topology import role_of

    name, _, port = engine.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"engine is {engine!r}; give its HOST:PORT, as after its --listen")
    secret = configured(secret_file, create=False)
    if secret is None:
        raise ConfigError(
            "the cluster's secret is missing: copy the engine's --secret-file here and give it, or set LAMINA_SECRET"
        )
    require_kind(kind, RUNNABLE)
    (assigned,) = assign(role_of(role), (PoolEntry(kind, 1),), find_devices(), remedy="Use --kind cpu")
    if cores is not None:
        available = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, worker_cores(cores, 1, available)[0])
    place = WorkerPlace(assigned.device, address or "", bind or "", own_cores=cores is not None)
    unblock("stdout")
    unblock("stderr")
    agent = Agent((name, int(port)), keys_of(secret), application(role, kind), place)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: agent.request_leave())
    worker_name = agent.host_worker()
    print_text(f"{worker_name} has ended\n" if worker_name else "left before the engine needed a worker\n")
    sys.exit(0)
