"""Servers that run in a thread of the tests' process."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import openai

from lamina.config.server_config import DEFAULTS, ServerConfig
from lamina.engine.engine import Engine
from lamina.serve.server import make_server, url
from tests.support.scripted_engine import TIMEOUT_S, FakeEngine, Running


@contextlib.contextmanager
def serve(
    backlog: int | None = None, config: ServerConfig = DEFAULTS, max_model_len: int = FakeEngine.max_model_len
) -> Iterator[Running]:
    """A server with an engine of its own, in a thread of this process."""
    engine, listener = FakeEngine(), socket.create_server(("127.0.0.1", 0), backlog=backlog)
    engine.max_model_len = max_model_len
    uvicorn_server = make_server(engine, lambda: None, config=config)  # type: ignore[arg-type]
    uvicorn_server._engine = FakeEngine()  # type: ignore[assignment]  # it would end with the tests' dead engine
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = url(listener, config)
    with httpx.Client(base_url=address, timeout=TIMEOUT_S) as http:
        yield Running(engine, address, http)
    uvicorn_server.should_exit = uvicorn_server.force_exit = True
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def openai_client(engine: Engine) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server of ``engine``, which goes on afterwards."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(engine, lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with openai.OpenAI(base_url=f"{url(listener, DEFAULTS)}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.should_exit = server.force_exit = True
    thread.join(60)
    assert not thread.is_alive()
