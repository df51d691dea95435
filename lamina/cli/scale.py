"""`lamina scale`: adds workers to the pools of a running server, or lets some leave."""

from typing import Annotated

import typer

from lamina.cli.administer import administer
from lamina.cluster.pool import parse_change
from lamina.errors import ConfigError


def scale(
    memory: Annotated[
        str | None, typer.Option(help="Memory workers to add or remove: +2, -1, or with a kind rtx3090:+2.")
    ] = None,
    compute: Annotated[str | None, typer.Option(help="Compute workers to add or remove.")] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
) -> None:
    """Let workers join a running server, or leave it, while it answers requests.

    Returns once they have. A memory worker that leaves is emptied first: what it holds moves to others, or is computed
    again. On a Ray cluster, Ray finds a place for those that join, for which its autoscaler may start nodes. The server
    and this command need the same key in LAMINA_ADMIN_KEY.
    """
    from lamina.cli.console import print_text
    from lamina.observe.progress import waiting

    wanted = {"memory": memory, "compute": compute}
    changes = {pool: change for pool, change in wanted.items() if change is not None}
    if not changes:
        raise ConfigError("nothing to change; give --memory or --compute, such as --memory +2")
    for pool, change in changes.items():
        parse_change(pool, change)
    with waiting("Waiting for workers to join or leave"):
        workers = administer(url, "/admin/scale", changes)
    print_text(f"done: {', '.join(workers)}\n")
