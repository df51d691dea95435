"""Engines that are killed while their workers go on, against Hugging Face: the next engine keeps the KV."""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.commands import RUN_S, Server, start
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.waiting import END_S

TOKENS = 250
PROMPTS = (200, 150, 90)  # tokens
RANKS = ("--compute", "cpu:2", "--tensor-parallel", "2")
STAGES = ("--compute", "cpu:2", "--pipeline-parallel", "2")


def engine_of(server: Server) -> psutil.Process:
    (engine,) = [one for one in server.workers() if "lamina.serve.engine_process" in one.cmdline()]
    return engine


def workers_of(server: Server) -> set[int]:
    modules = {"lamina.compute", "lamina.memory.worker"}
    return {one.pid for one in server.workers() if modules.intersection(one.cmdline())}


def batches(lines: Iterator[str]) -> Iterator[list[int]]:
    """Yield the token ids of each event of a stream."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event["choices"][0]["token_ids"]


def looked_up(server: Server) -> tuple[int, int]:
    """Tokens of requests that the engine has looked up in its prefix cache, and has not found there."""
    lines = httpx.get(f"{server.url}/metrics", timeout=RUN_S).text.splitlines()
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
    asked, hits = (found[f"lamina_prefix_cache_{name}_total"] for name in ("queries", "hits"))
    return round(asked), round(asked - hits)


@pytest.mark.parametrize(
    ("family", "pools"),
    [
        # test_frontends.py ends an engine of such workers too
        pytest.param("llama", ("--compute", "cpu:1", "--memory", "cpu:2"), id="workers", marks=pytest.mark.slow),
        pytest.param("llama", (*RANKS, "--memory", "cpu:2"), id="ranks"),
        pytest.param("llama", (*RANKS, "--memory", "local"), id="ranks with local memory", marks=pytest.mark.slow),
        pytest.param("llama", (*STAGES, "--memory", "cpu:1"), id="stages", marks=pytest.mark.slow),
        pytest.param("llama", (*STAGES, "--memory", "local"), id="stages with local memory", marks=pytest.mark.slow),
        pytest.param("gemma2", ("--compute", "cpu:1", "--memory", "cpu:1"), id="windows", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_takes_over_computes_no_token_again(family: str, pools: tuple[str, ...], tmp_path: Path) -> None:
    """But the last of each request, which no step had run. The workers go on, and tokens are Hugging Face's."""
    sizes = {} if family == "gemma2" else {"max_position_embeddings": 512}
    ranks = 2 if "--tensor-parallel" in pools else 1
    reference = write_prepared(served(family, **sizes), tmp_path, ranks=ranks)
    lengths, tokens = (PROMPTS, TOKENS) if sizes else ((60, 40, 20), 60)
    draw = random.Random(family)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in lengths]
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    server = start("--model", str(tmp_path), "--frontends", "1", "--dtype", "float32", *pools)
    children, workers = server.workers(), workers_of(server)
    got: list[list[int]] = [[] for _ in prompts]
    try:
        with httpx.Client(timeout=RUN_S) as client, contextlib.ExitStack() as streams:
            found = [streams.enter_context(_stream(client, server, prompt, body)) for prompt in prompts]
            for tokens_of, each in zip(got, found, strict=True):
                while len(tokens_of) < 20:
                    tokens_of.extend(next(each))
            engine_of(server).kill()
            for tokens_of, each in zip(got, found, strict=True):
                for batch in each:
                    tokens_of.extend(batch)
        assert workers_of(server) == workers
        asked, missing = looked_up(server)
        assert got == [greedy(reference, prompt, tokens) for prompt in prompts]
        assert asked > sum(lengths), "no request was in flight when the engine was killed"
        assert family == "gemma2" or missing == len(prompts)
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
    assert psutil.wait_procs(children, END_S)[1] == []


@contextlib.contextmanager
def _stream(
    client: httpx.Client, server: Server, prompt: list[int], body: dict[str, Any]
) -> Iterator[Iterator[list[int]]]:
    with client.stream("POST", f"{server.url}/v1/completions", json=body | {"prompt": prompt}) as response:
        yield batches(response.iter_lines())
