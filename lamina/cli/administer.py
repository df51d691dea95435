"""`lamina scale` and `lamina down`: requests to the administration of a running server."""

import http
import http.client
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from lamina.cluster.pool import parse_change
from lamina.config.environment import environment
from lamina.core.errors import ConfigError, LaminaError, TransportError

TIMEOUT_S = 1800.0  # compute workers load weights first


def administer(server: str, path: str, body: Any) -> list[str]:
    """POST ``body`` as JSON, with the key in LAMINA_ADMIN_KEY. Returns the names of the workers concerned.

    Raises ConfigError, TransportError, LaminaError.
    """
    key = environment().admin_key
    if not key:
        raise ConfigError("LAMINA_ADMIN_KEY is not set; set it to the key that the server was started with")
    if not server.startswith(("http://", "https://")):
        raise ConfigError(f"{server!r} is not the URL of a server; give --url http://HOST:PORT")
    url = server.rstrip("/") + path
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            workers: list[str] = json.load(response)["workers"]
    except urllib.error.HTTPError as error:
        raise _refused(error) from error
    except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} is not a Lamina server: {error}; give --url its address") from error
    except OSError as error:  # URLError and TimeoutError too
        reason = getattr(error, "reason", error)
        raise TransportError(
            f"no server answers at {url}: {reason}; give --url the address of a running one"
        ) from error
    return workers


def _refused(error: urllib.error.HTTPError) -> LaminaError:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ConfigError(f"{error.url} is not a Lamina server: {error}; give --url its address")
    return TransportError(message) if error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR else ConfigError(message)


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


END_S = 180.0  # open answers may finish, workers exit by themselves
POLL_S = 0.2


def down(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
) -> None:
    """Stop a running server: its engine, its frontends and all its workers.

    Open answers have a few seconds to finish. Workers on other machines end too: each `lamina worker` exits, and on a
    Ray cluster the workers' actors end and their places are freed; the Ray cluster itself goes on. Returns once
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
