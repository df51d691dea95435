"""Requests to the administration of a running server."""

import http
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from lamina.env import environment
from lamina.errors import ConfigError, LaminaError, TransportError

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
