"""Fixtures: a running server with a scripted engine, and a client of it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    place = tmp_path_factory.mktemp("tls")
    files = place / "cert.pem", place / "key.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run([*made, *subject, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files
