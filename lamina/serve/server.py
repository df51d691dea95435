"""Runs the HTTP server: binds a socket before the model is loaded, and serves on it with uvicorn afterwards."""

import asyncio
import errno
import functools
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from lamina.config.server_config import DEFAULTS, ServerConfig
from lamina.core.errors import ConfigError, EngineDeadError
from lamina.engine.streams import Runtime
from lamina.serve.app import create_app
from lamina.serve.connections import Connection, Connections, accept, connection_limit, raise_file_limit
from lamina.serve.connections import logger as connections_logger
from lamina.serve.gate import tls_context
from lamina.serve.http_errors import first_line
from lamina.serve.request_log import OncePer
from lamina.serve.tracing import close, provider_from_environment
from lamina.worker.process import no_old_garbage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than clients keep idle connections (OpenAI's: 5 s): no request meets a closing server
WRITE_TIMEOUT_S = 60  # a client that has not read its answer for so long is disconnected, its requests cancelled
TELL_S = 3  # time to send clients the error when the engine stops; connections of those that do not read are cut
POLL_S = 0.1


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket on ``host``; port 0 lets the system choose.

    Raises:
        ConfigError: the port is in use or may not be opened, or the host is not an address of this machine.
    """
    raise_file_limit()  # before the workers start, which inherit the limit
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); use --host 127.0.0.1") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections: the kernel closes one whose client has acknowledged nothing for so long.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, WRITE_TIMEOUT_S * 1000)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not(error, host, port)) from error
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        return f"port {port} on {host} is in use. Use --port {other}, or --port 0 for any free port"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges that this process lacks. Use a port from 1024 up, such as --port 8000"
    return f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Use --host 127.0.0.1, or 0.0.0.0 for all"


def url(listener: socket.socket, config: ServerConfig = DEFAULTS) -> str:
    """Return the URL of ``listener`` for clients."""
    scheme = "http" if config.ssl_certfile is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, which also ends when the engine stops; ``died`` then holds the engine's error."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Runtime,
        on_ready: Callable[[], None],
        settings: ServerConfig,
        traces: "TracerProvider | None",
        closing: asyncio.Event,
    ) -> None:
        super().__init__(config)
        self._traces, self._closing = traces, closing
        self._grace_s, self._tls = settings.shutdown_timeout, tls_context(settings)
        self._engine = engine
        self._on_ready = on_ready
        self._hurry = False
        self.died: str | None = None
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # no sockets: uvicorn accepts connections without a limit
        connections, most = Connections(), connection_limit()
        make = functools.partial(Connection, connections, self.config, self.server_state, self.lifespan.state)
        for listener in sockets or []:
            task = asyncio.create_task(accept(listener, make, connections, most, self._tls))
            task.add_done_callback(self._accepting_ended)
            self._accepting.append(task)
        self._on_ready()

    def _accepting_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            connections_logger.error("accepting connections failed; the server stops", exc_info=error)
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and (dead := self._engine.dead) is not None:
            self.died = dead
            self.should_exit = self._hurry = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let open answers finish at the first signal, and end them with an error at the second."""
        if self.should_exit:
            self._hurry = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        for task in self._accepting:
            task.cancel()
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            if self._traces is not None:
                await asyncio.to_thread(close, self._traces)

    async def _end_answers(self) -> None:
        """After the shutdown timeout or a second signal, close the engine, which ends open answers with an error."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        await asyncio.sleep(POLL_S)  # the streams of dashboards end first
        if self._answers and not self._hurry:
            log.warning(
                "%d open answers have %d s to finish; press Ctrl-C again to end them now", self._answers, self._grace_s
            )
        while loop.time() < deadline and not self._hurry:
            await asyncio.sleep(POLL_S)
        if self._answers and self.died is None:
            log.warning("ending %d open answers with an error", self._answers)
        loop.run_in_executor(None, self._engine.close)
        await asyncio.sleep(TELL_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    @property
    def _answers(self) -> int:
        return len(self.server_state.tasks)


def serve(
    engine: Runtime, listener: socket.socket, on_ready: Callable[[], None], config: ServerConfig = DEFAULTS
) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again once open answers have ended.

    After the shutdown timeout or at a second signal the engine is closed, and answers still open end with an error.

    Raises:
        EngineDeadError: the engine has stopped by itself; clients have received the error.
    """
    asyncio.run(serve_in_loop(engine, listener, on_ready, None, config))


async def serve_in_loop(
    engine: Runtime,
    listener: socket.socket,
    on_ready: Callable[[], None],
    owner: int | None,
    config: ServerConfig,
) -> None:
    """Serve in the running event loop. ``owner``: the process to stop the server in; None: this one."""
    server = make_server(engine, on_ready, owner, config)
    with no_old_garbage():
        await server.serve(sockets=[listener])
    if server.died is not None:
        raise EngineDeadError(f"the engine has stopped: {first_line(server.died)}. Start the server again")


def make_server(
    engine: Runtime, on_ready: Callable[[], None], owner: int | None = None, config: ServerConfig = DEFAULTS
) -> _Server:
    """Build the server that ``serve`` runs. ``owner``: see ``serve_in_loop``."""
    traces, closing = provider_from_environment(), asyncio.Event()
    uvicorns = uvicorn.Config(
        create_app(engine, owner or os.getpid(), config, traces, closing),
        log_config=None,
        access_log=False,
        http="h11",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.shutdown_timeout + 2 * TELL_S,
        lifespan="off",
    )
    for name in ("uvicorn.error", connections_logger.name):  # clients can trigger any number of their lines
        target = logging.getLogger(name)
        if not any(isinstance(each, OncePer) for each in target.filters):
            target.addFilter(OncePer())
    return _Server(uvicorns, engine, on_ready, config, traces, closing)
