"""What is served: lengths of requests, from one context length or from a trace, and the means the planner needs."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lamina.errors import ConfigError

MOST_TOKENS = 10**9
"""Of one prompt or answer: above it, a trace is broken rather than long."""


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace: seconds since the first one, prompt tokens, tokens drawn."""

    arrival_s: float
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Means over requests, in tokens.

    Attributes:
        name: the trace's or the context's.
        prompt, output: of a request.
        live: cached tokens of a sequence at a decode step; a long answer counts for every one of its steps.
        reserved: tokens a decoding sequence holds slots for: its whole length, as the scheduler admits.
        longest: of any request, prompt and answer.
    """

    name: str
    prompt: float
    output: float
    live: float
    reserved: float
    longest: int


def of_context(tokens: int) -> Workload:
    """Sequences that all have ``tokens`` cached, as in the papers' figures: nothing is said of prompts."""
    if tokens < 1:
        raise ConfigError(f"the context is {tokens} tokens; give at least 1")
    return Workload(name=f"context {tokens}", prompt=tokens, output=1, live=tokens, reserved=tokens, longest=tokens)


def of_trace(file: Path) -> Workload:
    """The means of a trace. Raises ConfigError as ``read_trace``."""
    requests = list(read_trace(file))
    prompts = np.array([request.prompt for request in requests], dtype=np.float64)
    outputs = np.array([request.output for request in requests], dtype=np.float64)
    steps = outputs.sum()
    return Workload(
        name=file.name,
        prompt=float(prompts.mean()),
        output=float(outputs.mean()),
        live=float((outputs * (prompts + outputs / 2)).sum() / steps),
        reserved=float((outputs * (prompts + outputs)).sum() / steps),
        longest=int((prompts + outputs).max()),
    )


def paged(served: Workload) -> Workload:
    """The same requests where KV is allocated as it grows: a sequence holds what is cached, not its whole length."""
    return replace(served, reserved=served.live)


def read_trace(file: Path) -> list[TracedRequest]:
    """Requests in the order of the file: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON
    lines (timestamp in ms, input_length, output_length). Requests without prompt or answer are left out; time begins
    with the earliest of the others.

    Raises:
        ConfigError: the file cannot be read, has another form, a value that cannot be or no request.
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
            f"{file} is no trace ({type(error).__name__}: {error}); give Azure's CSV with TIMESTAMP, ContextTokens and "
            "GeneratedTokens, or Mooncake's .jsonl with timestamp, input_length and output_length"
        ) from error
    kept = [request for request in found if request.prompt > 0 and request.output > 0]
    if not kept:
        raise ConfigError(f"{file} has no request with a prompt and an answer")
    first_s = min(request.arrival_s for request in kept)
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in kept]


def _mooncake(row: Mapping[str, Any]) -> TracedRequest:
    seconds = row["timestamp"] / 1000
    if not math.isfinite(seconds):
        raise ValueError(f"a timestamp is {row['timestamp']}")
    return TracedRequest(seconds, _tokens(row["input_length"]), _tokens(row["output_length"]))


def _azure(rows: Sequence[Mapping[str, str]]) -> list[TracedRequest]:
    # Azure gives seven digits of a second; datetime takes six. The zone that may follow is the same for all.
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
