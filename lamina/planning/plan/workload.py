"""Describes the requests to serve: lengths, given or from a trace, and the prefixes that their prompts share.

A prompt is a sequence of runs of tokens: (id, tokens). Two prompts share a prefix if their first runs are equal. From
a trace's ids follows the hit rate of an LRU prefix cache by its size, which does not depend on the request rate
(Mattson et al., 1970). Without a trace, ``Sessions`` models conversations that are idle between turns.
"""

import csv
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lamina.core.errors import ConfigError
from lamina.planning.plan.kernel_times import Floats

Content = tuple[tuple[int, int], ...]
"""A prompt as runs of (id, tokens)."""


class Reuse(Protocol):
    """Hit rate of a prefix cache in the KV that running requests leave free."""

    def found_tokens(self, room: Floats, active: Floats) -> Floats:
        """Return the mean tokens of a prompt found in a cache of ``room`` tokens while ``active`` sequences decode."""

    def each(self, found: float, prompts: Floats) -> Floats:
        """Return the tokens found of each prompt of the workload's sample, if ``found`` are found on average."""

    @property
    def most(self) -> float:
        """Mean tokens of a prompt found in an unbounded cache."""

    @property
    def shared(self) -> float:
        """Length of the prefix that all running sequences share, whose KV is stored once."""


@dataclass(frozen=True)
class Sessions:
    """Prompts of one length, with a prefix that all share, followed by earlier turns of a session.

    Attributes:
        shared: Tokens of the shared prefix.
        resumed: Tokens of earlier turns.
        idle: Share of sessions that wait for their user. The KV of idle sessions that fits the free memory is found at
            the next turn; the rest is computed again.
    """

    shared: int = 0
    resumed: int = 0
    idle: float = 0.0

    @property
    def most(self) -> float:
        return float(self.shared + self.resumed)

    def found_tokens(self, room: Floats, active: Floats) -> Floats:
        waiting = active * self.idle / (1 - self.idle) * self.resumed
        kept = np.clip((room - self.shared) / np.maximum(waiting, 1e-9), 0.0, 1.0)
        return np.asarray(np.where(room >= 0, self.shared, 0.0) + self.resumed * kept)

    def each(self, found: float, prompts: Floats) -> Floats:
        return np.full_like(prompts, math.floor(found))

    def describe(self) -> str:
        """Return a description of the prompts."""
        parts = [f"{self.shared} shared"] if self.shared else []
        parts += [f"{self.resumed} of earlier turns, {self.idle:.0%} of sessions idle"] if self.resumed else []
        return ", ".join(parts) or "nothing in common"


NOTHING = Sessions()


@dataclass(frozen=True)
class FromTrace:
    """Hit rate of a trace by the size of the cache.

    Attributes:
        sizes: Sizes of caches in tokens; other sizes are interpolated.
        tokens: Mean tokens of a prompt found, by size.
        sampled: float64 [sizes, requests of the sample], tokens found of each prompt.
        shared: Tokens of a prefix that all prompts share.
    """

    sizes: tuple[float, ...] = field(repr=False)
    tokens: tuple[float, ...] = field(repr=False)
    sampled: Floats = field(repr=False, compare=False)
    shared: float = 0.0

    @classmethod
    def from_requests(cls, requests: Sequence[tuple[Content, int | None, int]], every: int = 1) -> "FromTrace | None":
        """Compute hit rates from requests (content of the prompt, id of the answer, its tokens).

        Returns None if no prompt has ids. The sample has one in ``every`` requests, beginning with the first.
        """
        if not any(content for content, _, _ in requests):
            return None
        whole = [_keys(content, answer, output) for content, answer, output in requests]
        largest = sum({key: tokens for keys, _ in whole for key, tokens in keys}.values())
        sizes = [0.0, *np.geomspace(largest / 2**10, largest, 11).tolist()]
        found = np.array([list(_lru(whole, size)) for size in sizes], np.float64)
        return cls(tuple(sizes), tuple(found.mean(axis=1).tolist()), found[:, ::every])

    @property
    def most(self) -> float:
        return self.tokens[-1]

    def found_tokens(self, room: Floats, active: Floats) -> Floats:
        return np.asarray(np.interp(room, self.sizes, self.tokens))

    def each(self, found: float, prompts: Floats) -> Floats:
        below = min(int(np.searchsorted(self.tokens, found, side="right")), len(self.tokens) - 1) - 1
        low, high = self.tokens[below], self.tokens[below + 1]
        part = (found - low) / max(high - low, 1e-9)
        between = np.floor(self.sampled[below] * (1 - part) + self.sampled[below + 1] * part)
        return np.asarray(np.minimum(between, prompts - 1))


_Keys = tuple[list[tuple[int, int]], int]


def _keys(content: Content, answer: int | None, output: int) -> _Keys:
    """Return (key, tokens) of every run of a request, with its answer last, and the number of the prompt's runs.

    A key identifies a run and all runs before it.
    """
    behind = () if answer is None else ((answer, output),)
    keys, key = [], 0
    for run in (*content, *behind):
        key = hash((key, run))
        keys.append((key, run[1]))
    return keys, len(content)


def _lru(requests: Sequence[_Keys], size: float) -> Iterator[int]:
    """Yield the tokens of each prompt found in an LRU cache of ``size`` tokens."""
    kept: OrderedDict[int, int] = OrderedDict()
    total = 0
    for keys, prompt in requests:
        yield sum(tokens for _, tokens in itertools.takewhile(lambda one: one[0] in kept, keys[:prompt]))
        for key, tokens in reversed(keys):  # the end of a prefix is evicted before its beginning
            if key in kept:
                kept.move_to_end(key)
            else:
                kept[key] = tokens
                total += tokens
        while total > size:
            total -= kept.popitem(last=False)[1]


SAMPLE = 500
"""About how many requests of a trace stand for it where every request would take too long."""

MOST_TOKENS = 10**9
"""Most tokens of one prompt or output: a trace with more is considered corrupt."""


MOST_IDS = 2**30
"""Ids of runs of tokens are below this."""

MOONCAKE_BLOCK = 512
"""Tokens of the prompt that one of Mooncake's ``hash_ids`` stands for."""


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the first request.
        prompt: Prompt tokens.
        output: Output tokens.
        content: The prompt as runs of tokens (see the module's docstring); empty if it shares no prefix.
        answer: Id of the output in later prompts; None if no prompt repeats it.
    """

    arrival_s: float
    prompt: int
    output: int
    content: Content = ()
    answer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean lengths of requests in tokens, with a sample.

    Attributes:
        name: Name for display.
        prompt: Mean prompt tokens.
        output: Mean output tokens.
        live: Cached tokens of a decoding sequence, averaged over decode steps.
        longest: Prompt plus output tokens of the longest request.
        sample: Requests to draw from, in order of arrival; empty if only means are known.
        reuse: Hit rate of a prefix cache.
    """

    name: str
    prompt: float
    output: float
    live: float
    longest: int
    sample: tuple[TracedRequest, ...] = field(default=(), repr=False)
    reuse: Reuse = NOTHING

    @property
    def replayed(self) -> bool:
        """Whether requests are simulated in the trace's order, since prompts share prefixes. ``sample`` has all of
        them."""
        return any(request.content for request in self.sample)

    def summary(self) -> dict[str, Any]:
        """Return all figures but the sample, for JSON; ``reuse`` as the most tokens found of a prompt."""
        values = {name: value for name, value in vars(self).items() if name not in ("sample", "reuse")}
        return values | {"found_at_most": self.reuse.most}


def of_context(tokens: int) -> Workload:
    """Return a workload of sequences that all have ``tokens`` cached tokens, without prompts, as in papers' figures."""
    if tokens < 1:
        raise ConfigError(f"the context is {tokens} tokens; give at least 1")
    return Workload(name=f"context {tokens}", prompt=tokens, output=1, live=tokens, longest=tokens)


def of_requests(name: str, requests: Sequence[TracedRequest]) -> Workload:
    """Return the workload of ``requests``, of which there must be at least one."""
    prompts = np.array([request.prompt for request in requests], dtype=np.float64)
    outputs = np.array([request.output for request in requests], dtype=np.float64)
    steps = outputs.sum()
    replayed = any(request.content for request in requests)
    every = 1 if replayed else max(1, len(requests) // SAMPLE)
    return Workload(
        name=name,
        prompt=float(prompts.mean()),
        output=float(outputs.mean()),
        live=float((outputs * (prompts + outputs / 2)).sum() / steps),
        longest=int((prompts + outputs).max()),
        sample=tuple(requests[::every]),
        reuse=FromTrace.from_requests([(one.content, one.answer, one.output) for one in requests], every) or NOTHING,
    )


def of_lengths(prompt: int, output: int, reuse: Sessions | None = None) -> Workload:
    """Return a workload of requests of one length. Raises ConfigError for a length below 1, or prompts all reused."""
    if min(prompt, output) < 1:
        raise ConfigError(f"prompts of {prompt} tokens and outputs of {output}; give at least 1 of each")
    if reuse and reuse.shared + reuse.resumed >= prompt:
        raise ConfigError(
            f"{reuse.shared} shared tokens and {reuse.resumed} of earlier turns leave nothing new in a prompt of "
            f"{prompt}; give a longer prompt"
        )
    return Workload(
        name=f"prompts of {prompt} tokens, outputs of {output}" + (f", {reuse.describe()}" if reuse else ""),
        reuse=reuse or NOTHING,
        prompt=prompt,
        output=output,
        live=prompt + output / 2,
        longest=prompt + output,
    )


def one_a_second(prompt: int, output: int) -> list[TracedRequest]:
    """Return a trace of requests of one length, one a second, whose arrivals ``draw`` makes random."""
    return [TracedRequest(second, prompt, output) for second in (0.0, 1.0)]


def read_trace(file: Path) -> list[TracedRequest]:
    """Read the requests of a trace, in the order of the file, without those that lack a prompt or an output.

    The file is Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines (timestamp in ms,
    input_length, output_length). Shared prefixes are given by Mooncake's ``hash_ids``, one for every 512 tokens of the
    prompt, or by ``content``, a list of [id, tokens], with ``answer``, the id of the output in later prompts.

    Raises ConfigError if the file cannot be read, has another format, an invalid value or no request.
    """
    try:
        with file.open(newline="") as opened:
            if file.suffix == ".jsonl":
                found = [_mooncake(json.loads(line)) for line in opened if line.strip()]
            else:
                found = _azure(csv.DictReader(opened))
    except OSError as error:
        raise ConfigError(f"the trace {file} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, OverflowError, csv.Error) as error:
        raise ConfigError(
            f"{file} is not a trace ({type(error).__name__}: {error}); give Azure's CSV with TIMESTAMP, ContextTokens "
            "and GeneratedTokens, or Mooncake's .jsonl with timestamp, input_length and output_length"
        ) from error
    kept = [request for request in found if request.prompt > 0 and request.output > 0]
    if not kept:
        raise ConfigError(f"{file} has no request with both a prompt and an output")
    first_s = min(request.arrival_s for request in kept)
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in kept]


def _mooncake(row: Mapping[str, Any]) -> TracedRequest:
    seconds = row["timestamp"] / 1000
    if not math.isfinite(seconds):
        raise ValueError(f"a timestamp is {row['timestamp']}")
    prompt, output = _tokens(row["input_length"]), _tokens(row["output_length"])
    content: Content = tuple((_id(one), _tokens(tokens)) for one, tokens in row.get("content", ()))
    if not content and row.get("hash_ids"):
        starts = range(0, prompt, MOONCAKE_BLOCK)
        content = tuple(
            (_id(one), min(MOONCAKE_BLOCK, prompt - start)) for one, start in zip(row["hash_ids"], starts, strict=True)
        )
    if content and sum(tokens for _, tokens in content) != prompt:
        raise ValueError(f"the content of a prompt of {prompt} tokens has {sum(tokens for _, tokens in content)}")
    return TracedRequest(seconds, prompt, output, content, _id(row["answer"]) if "answer" in row else None)


def _azure(opened: "csv.DictReader[str]") -> list[TracedRequest]:
    if missing := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - {*(opened.fieldnames or ())}:
        raise ValueError(f"it has no column {', '.join(sorted(missing))}")
    rows = list(opened)
    # Azure gives seven digits of a second; datetime takes six. A time zone that follows is the same for all rows.
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=None) for row in rows]
    return [
        TracedRequest(
            (moment - moments[0]).total_seconds(), _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])
        )
        for moment, row in zip(moments, rows, strict=True)
    ]


def _id(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_IDS:
        raise ValueError(f"an id is {value!r}; give a whole number from 0 to below {MOST_IDS}")
    return value


def _tokens(value: str | int) -> int:
    tokens = int(value)
    if (isinstance(value, float) and tokens != value) or tokens > MOST_TOKENS:
        raise ValueError(f"a length is {value!r}; give a whole number of tokens, at most {MOST_TOKENS}")
    return tokens
