"""Fixtures: a running server with a scripted engine, and a client of it."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.http_server import serve
from tests.support.scripted_engine import TIMEOUT_S, Running


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with serve() as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Running:
    shared_server.engine.forget()
    return shared_server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made
