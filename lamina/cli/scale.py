"""`lamina scale`: adds workers to the pools of a running server, or lets some leave."""

import http
import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated

import typer

from lamina.cluster.pool import parse_change
from lamina.env import environment
from lamina.errors import ConfigError, LaminaError, TransportError

TIMEOUT_S = 1800.0  # compute workers load weights first


def scale(
    memory: Annotated[str | None, typer.Option(help="Memory workers to add or remove: +2, -1 or cpu:+2.")] = None,
    compute: Annotated[str | None, typer.Option(help="Compute workers to add or remove.")] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
) -> None:
    """Let workers join a running server, or leave it, while it answers requests.

    Returns once they have. A memory worker that leaves is emptied first: what it holds moves to others, or is computed
    again. The server and this command need the same key in LAMINA_ADMIN_KEY.
    """
    from lamina.cli.console import print_text

    wanted = {"memory": memory, "compute": compute}
    changes = {pool: change for pool, change in wanted.items() if change is not None}
    if not changes:
        raise ConfigError("nothing to change; give --memory or --compute, such as --memory +2")
    for pool, change in changes.items():
        parse_change(pool, change)
    key = environment().admin_key
    if not key:
        raise ConfigError("LAMINA_ADMIN_KEY is not set; set it to the key that the server was started with")
    workers = _post(url.rstrip("/") + "/admin/scale", json.dumps(changes).encode(), key)
    print_text(f"done: {', '.join(workers)}\n")


def _post(url: str, body: bytes, key: str) -> list[str]:
    """The names of the workers that joined or left. Raises ConfigError, TransportError, LaminaError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the URL of a server; give --url http://HOST:PORT")
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
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
