"""`lamina worker`: runs one worker for an engine on another machine."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from lamina.core.errors import ConfigError
from lamina.output import unblock


def worker(
    engine: Annotated[str, typer.Option(help="HOST:PORT of the engine, which was started with --listen.")],
    role: Annotated[
        Literal["compute", "memory"], typer.Option(help="Holds weights (compute), or the KV cache (memory).")
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
    at once. A compute worker needs the model's files under the path that the engine has.
    """
    from lamina.cli.console import print_text
    from lamina.cluster.agent import Agent, WorkerPlace, application, keys_of
    from lamina.cluster.pool import assign, find_devices, parse
    from lamina.cluster.sizing import worker_cores
    from lamina.control.secret import configured

    name, _, port = engine.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"engine is {engine!r}; give its HOST:PORT, as after its --listen")
    secret = configured(secret_file, create=False)
    if secret is None:
        raise ConfigError(
            "the cluster's secret is missing: copy the engine's --secret-file here and give it, or set LAMINA_SECRET"
        )
    (assigned,) = assign(role, parse(f"{kind}:1"), find_devices())
    if cores is not None:
        available = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, worker_cores(cores, 1, available)[0])
    place = WorkerPlace(assigned.device, address or "", bind or "", own_cores=cores is not None)
    unblock("stdout")
    unblock("stderr")
    agent = Agent((name, int(port)), keys_of(secret), application(role, kind), place)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: agent.request_leave())
    worker_name = agent.run()
    print_text(f"{worker_name} has ended\n" if worker_name else "left before the engine needed a worker\n")
    sys.exit(0)
