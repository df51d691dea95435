"""Describes the requests to serve: their lengths, from a trace or one context length, and the planner's means."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lamina.errors import ConfigError

SAMPLE = 500
"""About how many requests of a trace stand for it where every request would take too long."""

MOST_TOKENS = 10**9
"""Most tokens of one prompt or output: a trace with more is considered corrupt."""


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace: seconds since the first one, prompt tokens, output tokens."""

    arrival_s: float
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Means over requests, in tokens.

    Attributes:
        name: for display.
        prompt, output: per request.
        live: cached tokens of a sequence, averaged over decode steps, so that a long output counts for every step; KV
            is allocated as it grows, so this is also what a sequence occupies.
        longest: the longest request, prompt and output together.
        sample: requests to draw from, in the order of their arrival; empty where only means are known.
    """

    name: str
    prompt: float
    output: float
    live: float
    longest: int
    sample: tuple[TracedRequest, ...] = field(default=(), repr=False)


def of_context(tokens: int) -> Workload:
    """Sequences that all have ``tokens`` cached, as in the papers' figures, which do not specify prompts."""
    if tokens < 1:
        raise ConfigError(f"the context is {tokens} tokens; give at least 1")
    return Workload(name=f"context {tokens}", prompt=tokens, output=1, live=tokens, longest=tokens)


def of_trace(file: Path) -> Workload:
    """The means of a trace. Raises ConfigError like ``read_trace``."""
    return of_requests(file.name, read_trace(file))


def of_requests(name: str, requests: Sequence[TracedRequest]) -> Workload:
    """The means of requests, of which there is at least one."""
    prompts = np.array([request.prompt for request in requests], dtype=np.float64)
    outputs = np.array([request.output for request in requests], dtype=np.float64)
    steps = outputs.sum()
    return Workload(
        name=name,
        prompt=float(prompts.mean()),
        output=float(outputs.mean()),
        live=float((outputs * (prompts + outputs / 2)).sum() / steps),
        longest=int((prompts + outputs).max()),
        sample=tuple(requests[:: max(1, len(requests) // SAMPLE)]),
    )


def of_lengths(prompt: int, output: int) -> Workload:
    """Requests that all have one length. Raises ConfigError for a length below 1."""
    if min(prompt, output) < 1:
        raise ConfigError(f"prompts of {prompt} tokens and outputs of {output}; give at least 1 of each")
    return Workload(
        name=f"prompts of {prompt} tokens, outputs of {output}",
        prompt=prompt,
        output=output,
        live=prompt + output / 2,
        longest=prompt + output,
    )


def read_trace(file: Path) -> list[TracedRequest]:
    """Requests in the order of the file: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON
    lines (timestamp in ms, input_length, output_length). Requests without prompt or output are left out; time starts
    with the earliest of the others.

    Raises:
        ConfigError: the file cannot be read, has another format, an invalid value or no request.
    """
    try:
        with file.open(newline="") as opened:
            if file.suffix == ".jsonl":
                found = [_mooncake(json.loads(line)) for line in opened if line.strip()]
            else:
                found = _azure(list(csv.DictReader(opened)))
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
    return TracedRequest(seconds, _tokens(row["input_length"]), _tokens(row["output_length"]))


def _azure(rows: Sequence[Mapping[str, str]]) -> list[TracedRequest]:
    # Azure gives seven digits of a second; datetime takes six. A time zone that follows is the same for all rows.
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=None) for row in rows]
    return [
        TracedRequest(
            (moment - moments[0]).total_seconds(), _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])
        )
        for moment, row in zip(moments, rows, strict=True)
    ]


def _tokens(value: str | int) -> int:
    tokens = int(value)
    if (isinstance(value, float) and tokens != value) or tokens > MOST_TOKENS:
        raise ValueError(f"a length is {value!r}; give a whole number of tokens, at most {MOST_TOKENS}")
    return tokens
