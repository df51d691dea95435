"""The settings of a server, besides those of its engine. Nothing mutates a config."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from lamina.config.settings import Meaning, settings
from lamina.core.errors import ConfigError

_network = partial(Meaning, group="Network")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How `lamina launch` serves HTTP. Raises ConfigError for a value of the wrong type or outside its range."""

    host: Annotated[str, _network("Address to listen on; 0.0.0.0 is all of them.", common=True)] = "127.0.0.1"
    port: Annotated[
        int, _network("Port to listen on; 0 is any free one.", unit="port", ge=0, le=65535, common=True)
    ] = 8000
    frontends: Annotated[
        int,
        _network(
            "Processes for HTTP and tokenizing. They detokenize too. With 0, the engine's process does it all.",
            unit="processes",
            ge=0,
            le=64,
        ),
    ] = 1

    api_key: Annotated[
        str | None,
        _network(
            "Keys that clients must send, joined by commas. Other users of this machine see command lines: prefer the "
            "variable LAMINA_API_KEY or api_key_file. Default: anybody may send requests.",
            common=True,
        ),
    ] = None
    api_key_file: Annotated[
        str | os.PathLike[str] | None,
        _network("File of keys that clients must send, one a line. Lines that begin with # are comments."),
    ] = None
    ssl_certfile: Annotated[
        str | os.PathLike[str] | None, _network("File of the TLS certificate, for HTTPS. It has the chain.")
    ] = None
    ssl_keyfile: Annotated[
        str | os.PathLike[str] | None,
        _network("File of the certificate's private key. Default: the certificate's file."),
    ] = None
    allowed_origins: Annotated[
        str | None,
        _network(
            "Origins whose web pages may call the server. Several are joined by commas; * is all. Default: none (no "
            "CORS)."
        ),
    ] = None
    root_path: Annotated[
        str, _network("Path of the server behind a proxy, such as /llm. The proxy may strip the path.")
    ] = ""
    requests_per_minute: Annotated[
        int | None,
        _network(
            "Most requests of a client in a minute. Others get status 429 with Retry-After. A client is an API key, or "
            "an address without keys. Each frontend counts for itself. Default: no limit.",
            unit="requests",
            ge=1,
        ),
    ] = None
    concurrent_requests: Annotated[
        int | None,
        _network(
            "Most requests of a client at once. Others get status 429 with Retry-After. Each frontend counts for "
            "itself. Default: no limit.",
            unit="requests",
            ge=1,
        ),
    ] = None
    request_timeout: Annotated[
        int | None,
        _network(
            "Most time for a request. Then it is cancelled: status 504, or an error event if its answer has begun. "
            "Default: no limit.",
            unit="seconds",
            ge=1,
        ),
    ] = None
    shutdown_timeout: Annotated[
        int, _network("Time for open answers to end after SIGTERM. Then they end with an error.", unit="seconds", ge=0)
    ] = 5
    access_log: Annotated[bool, _network("Log a line for each request. LAMINA_LOG_LEVEL=INFO does so too.")] = False
    log_format: Annotated[
        Literal["text", "json"], _network("Format of log lines of all processes. json: an object on each.")
    ] = "text"

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            setting.validate(getattr(self, setting.name))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile belongs to a certificate: give ssl_certfile too")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}; give a path that begins with / and ends without one")


DEFAULTS = ServerConfig()
