"""Runs the process of a frontend: ``python -m lamina.serve MODEL DESCRIPTOR``.

MODEL is the model's directory, DESCRIPTOR that of the inherited listening socket. The bootstrap comes through standard
input once the engine runs; until then, this process loads its tokenizer. It writes ``READY`` to standard output once it
accepts connections, and ``ALIVE`` periodically while its event loop runs.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import msgspec

from lamina.config.server_config import ServerConfig
from lamina.control.frontend_messages import ALIVE, ALIVE_S, ENGINE_STOPPED, READY, FrontendBootstrap
from lamina.core.errors import EngineDeadError, UserError
from lamina.engine.remote_engine import RemoteEngine
from lamina.models.directory import find
from lamina.output import start_logging
from lamina.serve.server import serve_in_loop
from lamina.text.tokenizer import Tokenizer


def main() -> None:
    """Serve until told to stop; exit with status ``ENGINE_STOPPED`` if the engine has stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    start_logging()
    try:
        tokenizer = Tokenizer(find(Path(sys.argv[1]), weights=False))
    except UserError:  # the parent process, which loads the tokenizer too, reports it
        sys.exit(1)
    listener = socket.socket(fileno=int(sys.argv[2]))
    received = sys.stdin.buffer.read()
    if not received:  # the engine did not start
        return
    bootstrap = msgspec.msgpack.decode(received, type=FrontendBootstrap)
    try:
        asyncio.run(_serve(bootstrap, tokenizer, listener))
    except EngineDeadError:  # the parent process reports it
        if os.getppid() != bootstrap.supervisor_pid:
            shutil.rmtree(Path(bootstrap.requests.removeprefix("ipc://")).parent, ignore_errors=True)
        sys.exit(ENGINE_STOPPED)


async def _serve(bootstrap: FrontendBootstrap, tokenizer: Tokenizer, listener: socket.socket) -> None:
    tokenizer.chat_settings = bootstrap.chat
    engine = await RemoteEngine.connect(bootstrap, tokenizer)
    config = ServerConfig(**bootstrap.server)  # type: ignore[arg-type]
    alive = asyncio.create_task(_say_alive())
    try:
        await serve_in_loop(engine, listener, lambda: _say(READY), bootstrap.supervisor_pid, config)
    finally:
        alive.cancel()
        engine.disconnect()


async def _say_alive() -> None:
    while True:
        _say(ALIVE)
        await asyncio.sleep(ALIVE_S)


def _say(what: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor has exited, which ends this process too
        os.write(sys.stdout.fileno(), what)


main()
