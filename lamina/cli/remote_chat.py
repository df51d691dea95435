"""`lamina chat --url`: answers of a running server, over its OpenAI-compatible API."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from lamina.core.errors import ConfigError, LaminaError, RequestError, TransportError

TIMEOUT_S = 600.0
"""Longest wait for the next token, and so for a place in the queue and the prompt."""


class Server:
    """The model that a server at ``url`` has.

    Raises:
        ConfigError: ``url`` is not that of a server with an OpenAI-compatible API. TransportError: nobody answers.
    """

    def __init__(self, url: str, sampling: Mapping[str, float]) -> None:
        """``sampling``: fields of each request; the server has defaults for all others."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the URL of a server; give --url http://HOST:PORT")
        self._url, self._sampling = url.rstrip("/").removesuffix("/v1") + "/v1", sampling
        try:
            with self._open("/models") as response:
                self.name = str(json.load(response)["data"][0]["id"])
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:  # RequestError too
            raise self._no_server(error) from error

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """Yield the answer in pieces; closing the iterator cancels it.

        Raises:
            RequestError: the server refuses the conversation or fails to answer it. TransportError: it is gone.
        """
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._sampling}
        try:
            with self._open("/chat/completions", body) as response:
                for line in response:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield self._text(data)
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"the server at {self._url} ended in mid-answer: {error}") from error

    def _text(self, data: bytes) -> str:
        """The piece of the answer in an event of the stream. Raises RequestError for an error."""
        try:
            event = json.loads(data)
            failed = str(event["error"]["message"]) if "error" in event else ""
            text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._no_server(error) from error
        if failed:
            raise RequestError(failed)
        return text

    def _open(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The server's answer of status 200. Raises RequestError for another, TransportError if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT_S))
        except urllib.error.HTTPError as error:
            raise _refused(error) from error
        except OSError as error:  # URLError and TimeoutError too
            reason = getattr(error, "reason", error)
            raise TransportError(
                f"no server answers at {self._url}: {reason}; start one with `lamina launch`, or give --url its address"
            ) from error

    def _no_server(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._url} has no OpenAI-compatible API: {error}; give --url a server's address")


def _refused(error: urllib.error.HTTPError) -> LaminaError:
    try:
        return RequestError(str(json.load(error)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return RequestError(str(error))
