"""Requests written byte by byte."""

import json
import socket
from typing import Any

import httpx

from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, Running


def raw(server: Running, data: bytes) -> socket.socket:
    """A connection on which ``data`` has been sent."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), TIMEOUT_S)
    connection.sendall(data)
    return connection


def head(length: int | None, path: str = COMPLETION, extra: str = "") -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{framing}\r\n{extra}\r\n".encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The next answer's status and JSON."""
    with connection.makefile("rb") as lines:
        status = int(lines.readline().split()[1])
        length = 0
        while (line := lines.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(lines.read(length))
