"""`lamina down`: stops a running server with all its workers, wherever they run."""

import socket
import time
import urllib.parse
from typing import Annotated

import typer

from lamina.cli.administer import administer
from lamina.errors import TransportError

END_S = 180.0  # open answers may finish, workers exit by themselves
POLL_S = 0.2


def down(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
) -> None:
    """Stop a running server: its engine, its frontends and all its workers.

    Open answers have a few seconds to finish. Workers on other machines end too: each `lamina worker` exits, and on a
    Ray cluster the workers' actors end and their places are given back; the Ray cluster itself goes on. Returns once
    the server does not listen any more. The server and this command need the same key in LAMINA_ADMIN_KEY.
    """
    from lamina.cli.console import print_text
    from lamina.observe.progress import waiting

    with waiting("Waiting for open answers and workers to end"):
        workers = administer(url, "/admin/stop", {})
        where = urllib.parse.urlsplit(url)
        address = where.hostname or "", where.port or (443 if where.scheme == "https" else 80)
        deadline = time.monotonic() + END_S
        while _listens(address):
            if time.monotonic() > deadline:
                raise TransportError(f"the server at {url} was told to stop, but still listens after {END_S:.0f} s")
            time.sleep(POLL_S)
    print_text(f"stopped: {', '.join(workers)}\n")


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 5.0).close()
    except OSError:
        return False
    return True
