"""A server with a scripted engine in place of a model."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import msgspec
import pytest

from lamina.control.packed_logprobs import pack
from lamina.control.timeline import Span
from lamina.core.errors import EngineDeadError, LogitsError, OverloadedError, RequestError
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client, Request
from lamina.dataplane.transport_choice import Choice, Transport
from lamina.engine.lives import Event, Life
from lamina.engine.stats import EngineStats, MemoryStats, PlacementStats, ScalingStats
from lamina.engine.streams import Submission
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate
from lamina.text.chat_format import ChatFormat
from lamina.text.chat_template import ChatTemplate
from lamina.text.detokenizer import Position
from lamina.text.prompts import check_tokens
from lamina.text.tokenizer import complete_text

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TIMEOUT_S = 60.0
VOCABULARY = 0x110000
PIECE = 7  # characters of a scripted answer in one update
END = FinishReason.LENGTH
WORDS = [" one", " two", " three"]
TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})


class FakeTokenizer:
    """One token per character."""

    most_bytes_per_token = 4
    chat_format = ChatFormat("hermes", ("<think>", "</think>"))
    special_texts: ClassVar[dict[int, str]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        check_tokens(ids, VOCABULARY, self)  # type: ignore[arg-type]
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return [*(word.encode() for word in WORDS), b"\xe2\x82"][token_id]

    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        encoded = self.token_bytes(token_id)
        return complete_text(encoded)[0], tuple(encoded)

    def token(self, token_id: int) -> str | None:
        return None

    def apply_chat_template(self, *args: Any) -> str:
        return TEMPLATE.render(*args)


class FakeEngine:
    """Answers every prompt with WORDS, one word per update; keywords in a prompt make it behave differently."""

    model_name = "fake"
    model_aliases = ("alias",)
    vocab_size = VOCABULARY
    max_model_len = 100
    sampling_defaults: ClassVar[dict[str, int | float]] = {}
    tokenizer = FakeTokenizer()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.forget()

    def forget(self) -> None:
        """Reset for the next test."""
        self.dead: str | None = None
        self.silent: dict[str, float] = {}
        self.submitted: list[tuple[str | list[int], SamplingParams]] = []
        self.clients: list[Client] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.hanging: list[tuple[RequestUpdate, OnUpdate]] = []

    def submit_all(self, submissions: Sequence[Submission], client: Client) -> None:
        for count, one in enumerate(submissions):
            try:
                self.submit(one.request_id, one.prompt, one.params, one.on_update, client)
            except Exception:
                for queued in submissions[:count]:
                    self.abort(queued.request_id)
                raise

    def submit(self, request_id: str, prompt: Any, params: SamplingParams, on_update: OnUpdate, client: Client) -> None:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        if "crowd" in text:
            raise OverloadedError("16384 requests are in the engine")
        if not text or "too long" in text:
            raise RequestError(f"the prompt has {len(text)} tokens")
        self.submitted.append((prompt, params))
        self.clients.append(client)
        with self.changed:
            self.running.add(request_id)
            self.changed.notify_all()
        threading.Thread(target=self._answer, args=(request_id, prompt, text, params, on_update), daemon=True).start()

    def _answer(self, request_id: str, prompt: Any, text: str, params: SamplingParams, on_update: OnUpdate) -> None:
        for count in range(1, len(WORDS) + 1):
            last = count == len(WORDS)
            outputs = [
                CompletionUpdate(
                    index=i,
                    texts=[WORDS[count - 1]],
                    token_ids=[count - 1],
                    logprobs=None if params.logprobs is None else _positions(count - 1, params.logprobs),
                    prompt_logprobs=None
                    if params.prompt_logprobs is None
                    else _positions(0, params.prompt_logprobs) * (len(text) - 1 if count == 1 else 0),
                    finish_reason=END if last else None,
                )
                for i in range(params.n)
            ]
            request = Request(
                request_id, prompt if isinstance(prompt, str) else None, self.tokenizer.encode(text), params
            )
            out = RequestUpdate(request, outputs, last, cached_tokens=len(request.prompt_token_ids) - 1)
            if count == 2 and "hang" in text:
                with self.changed:
                    self.hanging.append((out, on_update))
                    self.changed.notify_all()
                return
            if count == 2 and ("break" in text or "no token" in text):
                for completion in outputs:
                    completion.finish_reason = FinishReason.ERROR
                error = "worker memory0 is gone" if "break" in text else str(LogitsError([0], ruled_out=True))
                on_update(msgspec.structs.replace(out, finished=True, error=error))
                return
            on_update(out)

    def close(self) -> None:
        """End hanging requests with an error."""
        for out, on_update in self.hanging:
            on_update(msgspec.structs.replace(out, finished=True, error="the engine was closed"))

    def abort(self, request_id: str) -> None:
        with self.changed:
            self.aborted.add(request_id)
            self.changed.notify_all()

    def timeline(self) -> dict[str, list[Span]]:
        slices = [Span("slice", 0, 1_000_000 * start, 1_000_000 * start + 600_000) for start in range(1, 100)]
        attentions = [Span("attention", 0, span.end_ns, span.end_ns + 300_000) for span in slices]
        return {"compute0": slices, "memory0": attentions}

    def lives(self) -> list[Life]:
        first = [Event(0.0, "queued"), Event(0.5, "admitted", "lane 0, KV on memory0")]
        chunk = [Event(0.7, "chunk", "tokens 0 to 64, 90.0 ms after it was planned"), Event(0.7, "first token")]
        moved = Event(0.9, "moved", "tokens 0 to 32, to memory1")
        whole = [*first, *chunk, moved, Event(1.2, "ended", "stop, 11 tokens")]
        now = time.time()
        return [Life("chat-2", now, 9, first[:1]), Life("chat-1", now - 2, 64, whole, 11, "stop")]

    def stats(self) -> EngineStats:
        near, far = Choice(Transport.SHM, "same host"), Choice(Transport.TCP, 'different hosts; no rdma: "none"')
        memory = {"memory0": MemoryStats(used=5, capacity=9, sequences=1, cached=3, parked=2, parked_nbytes=4096)}
        return EngineStats(
            running=1,
            waiting=2,
            steps=3,
            preempted=5,
            recoveries=6,
            recomputed=7,
            memory=memory,
            dead=self.dead,
            silent=self.silent,
            links=[(near, 1), (far, 2)],
            prefix_queries=8,
            prefix_hits=2,
            workers={"compute0": "serving", "compute1": "serving", "memory0": "serving"},
            places={
                "compute0": {"role": "prefill", "replica": "0", "stage": "", "rank": ""},
                "compute1": {"role": "decode", "replica": "1", "stage": "0", "rank": "1"},
            },
            handovers=4,
            scratch=96,
            placement=PlacementStats(
                {"memory0": {"chat-1": 5}}, [("memory0", "memory1", 64)], {"memory0": 4096}, 3, 2, 1
            ),
            scaling={"memory": ScalingStats(1, 4, 1.75, "7 of 8 slots", 2, 1, "+2, requests waited", 1e9)},
        )

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, TIMEOUT_S)


def _positions(place: int, count: int) -> list[Position]:
    likely = [Logprob(place, -0.5, 1), Logprob(len(WORDS), float("-inf"), 2)]
    return [Position(pack([likely[0], *likely[:count]]), WORDS[place])]


def script_template(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Let chats be rendered with a Jinja template."""
    monkeypatch.setattr(f"{__name__}.TEMPLATE", ChatTemplate(template, {}))


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the engine answer every prompt with ``text``, ``PIECE`` characters per update, and end by a stop token."""
    monkeypatch.setattr(f"{__name__}.WORDS", [text[at : at + PIECE] for at in range(0, len(text), PIECE)])
    monkeypatch.setattr(f"{__name__}.END", FinishReason.STOP)


@dataclass
class Running:
    engine: FakeEngine
    url: str
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def last_prompt(self) -> str:
        """Return the text of the prompt that the engine got last."""
        prompt, _ = self.engine.submitted[-1]
        return self.engine.tokenizer.decode(prompt) if isinstance(prompt, list) else prompt

    def completion(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response with this status, in OpenAI's form."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kinds = {429: "rate_limit_error", 501: "server_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    return error
