"""Clients that do not read their answers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from lamina.control.packed_logprobs import pack
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate
from lamina.serve import generation
from lamina.serve import server as serving
from lamina.serve.answers import MOST_POSITIONS, Sent
from lamina.serve.app import create_app
from lamina.serve.requests import GenerationRequest
from lamina.text.detokenizer import Position
from tests.support.scripted_engine import COMPLETION, TIMEOUT_S, FakeEngine, FakeTokenizer

POSITION = Position(pack([Logprob(0, -0.5, 1), *(Logprob(0, -0.5, rank) for rank in range(1, 21))]), " one")


class TalkativeEngine(FakeEngine):
    """Answers "talk" without end, ``size`` characters a token, until it is cancelled."""

    size = 4096
    drawn = 0

    def _answer(self, request_id: str, prompt: Any, text: str, params: SamplingParams, on_update: OnUpdate) -> None:
        if "talk" not in text:
            return super()._answer(request_id, prompt, text, params, on_update)
        while request_id not in self.aborted:
            on_update(self.update(request_id, params))
            self.drawn += params.n
        on_update(self.update(request_id, params, FinishReason.ABORT))

    def update(self, request_id: str, params: SamplingParams, reason: FinishReason | None = None) -> RequestUpdate:
        logprobs = None if params.logprobs is None else [POSITION]
        news = [
            CompletionUpdate(index, [1], ["x" * self.size], None if logprobs is None else list(logprobs), "", reason)
            for index in range(params.n)
        ]
        return RequestUpdate(Request(request_id, "talk", [1], params), news, reason is not None)


@contextmanager
def running(engine: FakeEngine) -> Iterator[str]:
    listener = serving.bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(engine), log_config=None, lifespan="off")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield serving.url(listener)
    server.should_exit = server.force_exit = True
    thread.join(TIMEOUT_S)
    listener.close()
    assert not thread.is_alive()


def ask(url: str, **body: Any) -> socket.socket:
    """A connection whose request is sent and whose answer nobody reads."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({"prompt": "talk", "stream": True, **body}).encode()
    client = socket.create_connection((host, int(port)), TIMEOUT_S)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    client.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    return client


def everything(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


def test_what_a_client_leaves_unread_is_bounded_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_UNREAD", 500)
    engine = TalkativeEngine()
    with running(engine) as url, ask(url, n=2) as client:
        assert engine.wait_until(lambda: bool(engine.running) and engine.running <= engine.aborted)
        kept = engine.drawn * engine.size
        answer = everything(client)
        assert httpx.get(f"{url}/health").status_code == 200
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    error = json.loads(events[-2])["error"]
    assert "read too slowly" in error["message"] and "at most 500 are kept" in error["message"]
    assert len(answer) < kept, "what was unread was kept after all"


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 1)
    monkeypatch.setattr(generation, "MOST_UNREAD", 10**9)
    engine = TalkativeEngine()
    engine.size = 1 << 16
    with running(engine) as url, ask(url):
        assert engine.wait_until(lambda: bool(engine.running) and engine.running <= engine.aborted)


@pytest.mark.parametrize("most", [1, 7, MOST_POSITIONS])
def test_a_long_update_goes_out_in_pieces_that_join_to_the_whole(most: int) -> None:
    texts = [f"{number} " for number in range(200)]
    request = Request("r", "p", [1], SamplingParams(logprobs=1, n=2))
    completions = [
        CompletionUpdate(index, list(range(200)), list(texts), [POSITION] * 200, "end", FinishReason.LENGTH)
        for index in range(2)
    ]
    update = RequestUpdate(request, completions, True)
    sent = Sent(FakeTokenizer(), GenerationRequest([], SamplingParams(n=2), echo=["prompt "]))  # type: ignore[arg-type]
    pieces = list(sent.advance(0, update, most))
    for choice in range(2):
        own = [piece for piece in pieces if piece.choice == choice]
        assert "".join(piece.text for piece in own) == "prompt " + "".join(texts) + "end"
        assert all(len(piece.logprobs or []) <= most for piece in own)
        assert sum(len(piece.logprobs or []) for piece in own) == 200
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
        assert [offset for piece in own for offset in piece.text_offsets] == [len(" one") * n for n in range(200)]
