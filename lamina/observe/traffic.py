"""Counts the server's requests and tokens, and measures how long their clients wait."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from lamina.engine.updates import RequestUpdate

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Traffic:
    """Metrics of the requests that reached the engine over HTTP, kept in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter("lamina_prompt_tokens", "Tokens of prompts answered.", registry=registry)
        self.generated_tokens = Counter("lamina_generated_tokens", "Tokens generated.", registry=registry)
        self.completions = Counter(
            "lamina_completions", "Completions ended, by finish reason.", ["finish_reason"], registry=registry
        )
        self.first_token = Histogram(
            "lamina_time_to_first_token_seconds",
            "From the decoded request to its first token.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "lamina_time_between_tokens_seconds",
            "Between updates of a request, per token of one completion.",
            buckets=BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "lamina_request_duration_seconds",
            "From the decoded request to its last token.",
            buckets=REQUEST_S,
            registry=registry,
        )


class Timing:
    """Observes the updates of one HTTP request as they are read: a client that reads slowly delays its own."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._begun = time.monotonic()
        self._last: dict[int, float] = {}  # by prompt: when its latest update with tokens was read
        self._ended = set[tuple[int, int]]()

    def observe(self, prompt: int, update: RequestUpdate) -> None:
        """Count what is new in prompt number ``prompt``'s next update."""
        traffic, now = self._traffic, time.monotonic()
        most = max(len(completion.token_ids) for completion in update.completions)
        if most > 0:
            if (last := self._last.get(prompt)) is None:
                traffic.prompt_tokens.inc(len(update.request.prompt_token_ids))
                traffic.first_token.observe(now - self._begun)
            else:
                traffic.between_tokens.observe((now - last) / most)
            self._last[prompt] = now
            traffic.generated_tokens.inc(update.tokens)
        for completion in update.completions:
            key = prompt, completion.index
            if completion.finish_reason is not None and key not in self._ended:
                self._ended.add(key)
                traffic.completions.labels(completion.finish_reason.value).inc()
        if update.finished:
            traffic.duration.observe(now - self._begun)
