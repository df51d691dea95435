"""Measures the longest pause of a stream while a megabyte of prompt arrives, against the same stream alone.

    python -m bench.runtime.intake [--megabytes 1]   # as text, chat and token ids; gaps in milliseconds

The engine is scripted (a word every 5 ms); HTTP, decoding, the chat template and the tokenizer are the server's own.
"""

import argparse
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx

from lamina.core.outputs import FinishReason
from lamina.core.types import Client, Request
from lamina.engine.stats import EngineStats
from lamina.engine.streams import Submission
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate
from lamina.models.directory import find
from lamina.serve.server import make_server, url
from lamina.text.prompts import encode_prompt
from lamina.text.tokenizer import Tokenizer

WORD_S = 0.005
STREAM_S = 12.0


class Scripted:
    """An engine that answers "stream" with a word every 5 ms for ``STREAM_S``, and anything else at once."""

    model_name = "scripted"
    model_aliases = ()
    vocab_size = 2048
    max_model_len = 1_000_000
    sampling_defaults: ClassVar[dict[str, int | float]] = {}
    dead = None

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(find(None))

    def submit_all(self, submissions: Sequence[Submission], client: Client) -> None:
        for one in submissions:
            prompt = one.prompt
            text = prompt if isinstance(prompt, str) else None
            tokens = encode_prompt(self.tokenizer, prompt, self.max_model_len) if isinstance(prompt, str) else prompt
            words = round(STREAM_S / WORD_S) if len(tokens) < 8 else 1
            request = Request(one.request_id, text, tokens, one.params, client=client)
            threading.Thread(target=self._answer, args=(request, words, one.on_update), daemon=True).start()

    def _answer(self, request: Request, words: int, on_update: OnUpdate) -> None:
        for count in range(1, words + 1):
            time.sleep(WORD_S)
            reason = FinishReason.LENGTH if count == words else None
            word = CompletionUpdate(0, [0], [" w"], finish_reason=reason)
            on_update(RequestUpdate(request, [word], reason is not None))

    def abort(self, request_id: str) -> None:
        """Do nothing: a scripted request ends by itself."""

    def stats(self) -> EngineStats:
        return EngineStats(
            running=0,
            waiting=0,
            steps=0,
            preempted=0,
            recoveries=0,
            recomputed=0,
            memory={},
            dead=None,
            silent={},
        )


def gaps(base: str, begin: Any, results: Any) -> None:
    """Times between the events of a stream, in a process of its own."""
    with httpx.stream(
        "POST", f"{base}/v1/completions", json={"prompt": "stream", "stream": True}, timeout=60
    ) as response:
        last: float | None = None
        found: list[tuple[float, float]] = []
        for line in response.iter_lines():
            if line.startswith("data:"):
                now = time.monotonic()
                found += [] if last is None else [(last, now - last)]
                last = now
                begin.set()
    results.put(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1.0)
    size = int(parser.parse_args().megabytes * 1e6)
    source = (find(None).path / "tokenizer.json").read_text()
    text = (source * (size // len(source) + 1))[:size]
    bodies = {
        "text": ("/v1/completions", {"prompt": text}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "ids": ("/v1/completions", {"prompt": [1234] * (size // 6)}),
    }
    listener = socket.create_server(("127.0.0.1", 0))
    base = url(listener)
    server = make_server(Scripted(), lambda: None)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    reader = context.Process(target=gaps, args=(base, begin, results))
    reader.start()
    begin.wait()
    spans = {"alone": (time.monotonic(), time.monotonic() + 2)}
    time.sleep(2)
    for name, (path, body) in bodies.items():
        content = json.dumps(body).encode()
        begun = time.monotonic()
        answer = httpx.post(base + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
        spans[name] = begun, time.monotonic()
        print(f"{name}: {len(content)} bytes, status {answer.status_code}, {spans[name][1] - begun:.2f} s")
    found = results.get()
    reader.join()
    for name, (begun, ended) in spans.items():
        inside = sorted(gap for at, gap in found if begun <= at + gap and at <= ended) or [float("nan")]
        print(f"beside {name}: worst gap {inside[-1] * 1e3:.0f} ms, median {inside[len(inside) // 2] * 1e3:.1f} ms")
    server.should_exit = server.force_exit = True
    thread.join()


if __name__ == "__main__":
    main()
