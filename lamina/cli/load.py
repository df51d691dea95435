"""Sends a load to an OpenAI-compatible server, and measures its answers as clients see them."""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.core.errors import ConfigError, TransportError
from lamina.planning.plan.workload import Content, TracedRequest

if TYPE_CHECKING:
    import httpx

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its"
)
WORDS = _COMMON.split()
"""Words of which prompts are made: nearly every tokenizer has a token for each."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        content: The turn's prompt as runs of tokens, as in ``TracedRequest``.
        output: Most tokens of the answer.
        answer: Id of the answer in later prompts; None if no prompt repeats it.
    """

    content: Content
    output: int
    answer: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Consecutive requests, each with all earlier turns in its prompt. Times are in seconds."""

    at_s: float
    turns: Sequence[Turn]
    think_s: float = 0.0


@dataclass
class Answer:
    """One request as its client saw it. Times are in seconds since the load began.

    Attributes:
        sent_s: When the request was sent.
        late_s: How much later than planned it was sent.
        arrivals_s: When parts of the text arrived; a part has one token or more.
        end_s: When the answer ended.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens of the answer; number of parts unless ``counted``.
        counted: Whether the server has reported token counts.
        error: Why the answer is incomplete; empty if it is complete.
        text: Text of the answer.
    """

    sent_s: float
    late_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    error: str = ""
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first part of the text, or to the end if there was no text."""
        return (self.arrivals_s[0] if self.arrivals_s else self.end_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for an answer of one token or part."""
        if self.output_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between parts of the text."""
        return np.diff(self.arrivals_s).tolist()


def arrivals(count: int, rate: float, burst: int, seed: int) -> list[float]:
    """Return ``count`` times at ``rate`` a second: bursts of ``burst`` at once, with exponential times between them."""
    draw = random.Random(seed)
    times, at = list[float](), 0.0
    while len(times) < count:
        times += [at] * min(burst, count - len(times))
        at += 0.0 if math.isinf(rate) else draw.expovariate(rate / burst)
    return times


def conversations(times: Sequence[float], turns: int, prompt: int, output: int, think_s: float) -> list[Conversation]:
    """Return conversations that begin at ``times``, with ``turns`` requests of ``prompt`` new tokens each."""
    return [
        Conversation(at, [Turn(((index * turns + turn, prompt),), output) for turn in range(turns)], think_s)
        for index, at in enumerate(times)
    ]


def of_trace(requests: Sequence[TracedRequest], speed: float) -> list[Conversation]:
    """Return the requests of a trace, ``speed`` times as fast, with the trace's shared prefixes."""
    ids = 1 + max((number for one in requests for number, _ in one.content), default=0)
    return [
        Conversation(one.arrival_s / speed, [Turn(one.content or ((ids + index, one.prompt),), one.output, one.answer)])
        for index, one in enumerate(requests)
    ]


class Load:
    """Sends conversations to one server.

    Args:
        url: Address of the server, without /v1.
        fields: Fields of each request's body besides the messages, the limit and the stream.
        timeout_s: Longest time of one request.
        on_answer: Called after each request.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        fields: Mapping[str, Any],
        timeout_s: float,
        on_answer: Callable[[], None],
    ) -> None:
        self._url = url
        self._headers = dict(headers)
        self._fields = fields
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._answers: list[Answer] = []
        self._texts: dict[int, str] = {}  # answers that later prompts of a trace repeat
        self._start = 0.0

    async def send_all(self, planned: Sequence[Conversation]) -> list[Answer]:
        """Send all conversations at their times, whatever has been answered, and return the answers."""
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, limits=limits) as client:
            self._start = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for one in planned:
                    tasks.create_task(self._converse(client, one))
        return sorted(self._answers, key=lambda answer: answer.sent_s)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _converse(self, client: "httpx.AsyncClient", conversation: Conversation) -> None:
        due, messages = conversation.at_s, list[dict[str, str]]()
        for turn in conversation.turns:
            await asyncio.sleep(max(0.0, due - self._now()))
            prompt = " ".join(self._texts.get(number) or words(number, tokens) for number, tokens in turn.content)
            messages.append({"role": "user", "content": prompt})
            answer = Answer(self._now())
            answer.late_s = answer.sent_s - due
            await self._ask(client, messages, turn.output, answer)
            self._answers.append(answer)
            self._on_answer()
            if answer.error:
                return  # the next turn would have no answer to follow
            if turn.answer is not None:
                self._texts[turn.answer] = answer.text
            messages.append({"role": "assistant", "content": answer.text})
            due = self._now() + conversation.think_s

    async def _ask(
        self, client: "httpx.AsyncClient", messages: list[dict[str, str]], output: int, answer: Answer
    ) -> None:
        import httpx

        body = {"messages": messages, "max_tokens": output, "stream": True, **self._fields}
        body["stream_options"] = {"include_usage": True}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {text[:200]}"
                    return
                ended = False
                async for line in _lines(response.aiter_bytes()):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    ended = data == b"[DONE]" or self._read(json.loads(data), answer) or ended
                if not ended and not answer.error:
                    answer.error = "the stream ended before the answer"
        except TimeoutError:
            answer.error = f"no whole answer in {self._timeout_s:g} s"
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            answer.end_s = self._now()

    def _read(self, chunk: Mapping[str, Any], answer: Answer) -> bool:
        """Add an event to an answer; return whether it ends the answer."""
        ended = False
        if "error" in chunk:
            answer.error = str(chunk["error"])[:200]
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            ended = ended or choice.get("finish_reason") is not None
            text = delta.get("content") or ""
            answer.text += text
            if text or delta.get("reasoning_content") or delta.get("reasoning"):
                answer.arrivals_s.append(self._now())
        if usage := chunk.get("usage"):
            answer.prompt_tokens, answer.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            answer.counted = True
        elif not answer.counted:
            answer.output_tokens = len(answer.arrivals_s)
        return ended


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a body. Other separators than line feeds, such as U+2028, are part of them."""
    line = b""
    async for part in parts:
        *lines, line = (line + part).split(b"\n")
        for whole in lines:
            yield whole
    yield line


def words(number: int, count: int) -> str:
    """Return ``count`` words, always the same for one ``number``."""
    return " ".join(random.Random(number).choices(WORDS, k=count))


def first_model(url: str, headers: Mapping[str, str]) -> str:
    """Return the name of the first model that a server has. Raises TransportError, ConfigError."""
    import httpx

    try:
        answer = httpx.get(f"{url}/v1/models", headers=dict(headers), timeout=30)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{url} wants a key; give it as --api-key, or set OPENAI_API_KEY")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise TransportError(f"no server answers at {url}: {error}; start one, or give --url its address") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models does not name a model ({error}); give --model") from error


def figures(answers: Sequence[Answer], ttft_s: float, tbt_s: float) -> dict[str, Any]:
    """Return the measured figures, in seconds and per second.

    A request counts for the goodput if its TTFT is at most ``ttft_s`` and its mean time per token at most ``tbt_s``.
    """
    whole = [one for one in answers if not one.error]
    seconds = max((one.end_s for one in answers), default=0.0) - min((one.sent_s for one in answers), default=0.0)
    good = sum(one.ttft_s <= ttft_s and (one.tpot_s or 0.0) <= tbt_s for one in whole)

    def rate(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "seconds": seconds,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "errors": dict(Counter(one.error for one in answers if one.error).most_common(5)),
        "most_late_s": max((one.late_s for one in answers), default=0.0),
        "tokens_counted_by_server": all(one.counted for one in whole),
        "prompt_tokens": sum(one.prompt_tokens for one in whole),
        "output_tokens": sum(one.output_tokens for one in whole),
        "requests_per_s": rate(len(whole)),
        "prompt_tokens_per_s": rate(sum(one.prompt_tokens for one in whole)),
        "output_tokens_per_s": rate(sum(one.output_tokens for one in whole)),
        "goodput": {
            "ttft_s": ttft_s,
            "tbt_s": tbt_s,
            "requests_per_s": rate(good),
            "share": good / len(answers) if answers else 0.0,
        },
        "ttft_s": spread([one.ttft_s for one in whole]),
        "tbt_s": spread([gap for one in whole for gap in one.gaps_s]),
        "tpot_s": spread([one.tpot_s for one in whole if one.tpot_s is not None]),
        "latency_s": spread([one.end_s - one.sent_s for one in whole]),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles; None without values."""
    if not values:
        return None
    found = {"mean": float(np.mean(values))}
    return found | {f"p{one}": float(np.percentile(values, one)) for one in PERCENTILES}
