"""An engine without workers that records what frontends ask of it, and says what a test lets it say."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar

from lamina.control.frontend_messages import CompletionTokens
from lamina.control.timeline import Span
from lamina.core.errors import OverloadedError, RequestError
from lamina.core.requests import Drawn
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client
from lamina.dataplane.transport_choice import Choice, Transport
from lamina.engine.lives import Event, Life
from lamina.engine.stats import EngineStats, MemoryStats
from lamina.engine.updates import OnTokens, PlainTokens, TokenUpdate
from lamina.models.directory import find
from lamina.text.tokenizer import Tokenizer
from tests.support.waiting import END_S

STATS = EngineStats(
    1, 2, 3, 4, 5, 6, {"memory0": MemoryStats(1, 2, 3)}, None, {}, {}, [(Choice(Transport.SHM, "a"), 1)]
)


class RecordingEngine:
    """Records what it is told; ``tell`` is a turn that brings tokens."""

    model_aliases = ("alias",)
    tokenizer = Tokenizer(find(None))
    model_name, max_model_len, vocab_size = "scripted", 100, 2048
    sampling_defaults: ClassVar[dict[str, int | float]] = {"temperature": 0.5, "top_k": 3}

    def __init__(self) -> None:
        self.longest = 98
        self.scaling = 0
        self.observers: list[Callable[[], None]] = []
        self.places = 3
        self.accepts = threading.Event()
        self.accepts.set()
        self.dead: str | None = None
        self.queued: dict[str, tuple[list[int], SamplingParams, OnTokens, Client]] = {}
        self.plain: dict[str, PlainTokens | None] = {}
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.begun: dict[str, tuple[int, Drawn | None]] = {}  # seeds, and what was drawn before

    def observe_turns(self, observe: Callable[[], None]) -> None:
        self.observers.append(observe)

    def end_turn(self) -> None:
        for observe in self.observers:
            observe()

    def new_seed(self) -> int:
        return 11

    def submit_tokens(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        on_tokens: OnTokens,
        client: Client,
        seed: int,
        drawn: Drawn | None = None,
        again: bool = False,
        plain: PlainTokens | None = None,
    ) -> None:
        assert self.accepts.wait(END_S)
        if len(self.queued) == self.places and not again:
            raise OverloadedError("three are enough")
        if len(tokens) > self.longest:
            raise RequestError(f"{len(tokens)} is too long")
        self.queued[request_id] = tokens, params, on_tokens, client
        self.begun[request_id] = seed, drawn
        self.plain[request_id] = plain

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def end_completion(self, request_id: str, index: int) -> None:
        self.finished.append((request_id, index))

    def timeline(self) -> dict[str, list[Span]]:
        return {"compute0": [Span("slice", 1, 2, 3)]}

    def lives(self) -> list[Life]:
        return [Life("chat-1", 1e9, 5, [Event(0.0, "queued")])]

    def stats(self) -> EngineStats:
        return STATS

    def scale(self, *, compute: int, memory: int, prefill: int) -> "Future[list[str]]":
        """Never done."""
        self.scaling += 1
        return Future()

    def tell_tokens(self, *drawn: tuple[str, int, int]) -> None:
        """A turn that brings tokens alone: of each the request, the index of the completion, and the token."""
        for request_id, index, token in drawn:
            self.put_token(request_id, index, token)
        self.end_turn()

    def put_token(self, request_id: str, index: int, token: int) -> None:
        """Let a token go with the next turn."""
        plain = self.plain[request_id]
        assert plain is not None
        plain.batch.extend((plain.number, index, token))

    def tell(
        self, request_id: str, *completions: CompletionTokens, finished: bool = False, cached_tokens: int = 0
    ) -> None:
        self.queued[request_id][2](TokenUpdate(list(completions), finished, None, cached_tokens))
        self.end_turn()
