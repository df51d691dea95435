"""Streams of a server against the same requests in the SDK, and CPU time per token of each process of the server.

    python -m bench.runtime.http [--model 60m] [--streams 64] [--tokens 400] [--threads N] [--rounds 3]

``lamina launch`` and the SDK serve the same random Llama with local memory, in turn. All requests begin at once, with
prompts of a few tokens; rates are all tokens over the time until the last one has arrived. The clients of the server
are one process that parses nothing. The same streams run a second time with a JSON schema, which no text of so many
tokens ends. CPU time is that of whole processes, prompts included.
"""

import argparse
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.models import MODELS, model_directory
from lamina import Lamina
from lamina.models.directory import find
from lamina.observe.timing import decode_batch
from lamina.text.tokenizer import Tokenizer

PROMPT = "def f"
WARM_UP = 16  # tokens
TIMEOUT_S = 600.0
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
WAYS: dict[str, dict[str, object]] = {"HTTP": {}, "HTTP, schema": {"structured_outputs": {"json": SCHEMA}}}
"""What requests to the server have besides."""
PROCESSES = {
    "engine": "lamina.serve.engine_process",
    "frontend": "lamina.serve",
    "compute worker": "lamina.compute",
}
"""Modules of the processes whose CPU time is printed."""


@dataclass(frozen=True)
class Served:
    """Tokens per second of a server, and CPU microseconds per token by kind of process."""

    tokens_per_s: float
    cpu_us: dict[str, float]


def read_streams(port: int, streams: int, tokens: int, besides: dict[str, object]) -> float:
    """Return the seconds until all streams of ``tokens`` tokens have ended. Runs in a process of its own."""
    same = {"prompt": PROMPT, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(same | besides)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode()
    ready = selectors.DefaultSelector()
    begun = time.monotonic()
    for _ in range(streams):
        client = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        client.sendall(request)
        ready.register(client, selectors.EVENT_READ)
    while ready.get_map():
        events = ready.select(TIMEOUT_S)
        if not events:
            raise TimeoutError(f"{len(ready.get_map())} streams have sent nothing for {TIMEOUT_S:.0f} s")
        for key, _ in events:
            if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                ready.unregister(key.fileobj)
    return time.monotonic() - begun


@contextmanager
def launched(model: Path, threads: int | None) -> Iterator[tuple[int, psutil.Process]]:
    """A server: its port and its process."""
    command = [sys.executable, "-m", "lamina", "launch", "--port", "0", "--model", str(model), "--load-format", "dummy"]
    command += [] if threads is None else ["--threads", str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = re.search(r"http://[0-9.]+:([0-9]+)", server.stdout.readline() if server.stdout is not None else "")
            if found is None:
                raise SystemExit("error: the server has not started")
            yield int(found[1]), psutil.Process(server.pid)
        finally:
            server.terminate()


def serve(model: Path, streams: int, tokens: int, threads: int | None) -> dict[str, Served]:
    """Return what the server does, by way."""
    with (
        launched(model, threads) as (port, server),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients,
    ):

        def measured(besides: dict[str, object]) -> Served:
            clients.submit(read_streams, port, streams, WARM_UP, besides).result()
            children = server.children(recursive=True)
            kinds = {name: [one for one in children if module in one.cmdline()] for name, module in PROCESSES.items()}
            before = {name: _spent_s(processes) for name, processes in kinds.items()}
            seconds = clients.submit(read_streams, port, streams, tokens, besides).result()
            spent = {name: _spent_s(processes) - before[name] for name, processes in kinds.items()}
            count = streams * tokens
            return Served(count / seconds, {name: 1e6 * each / count for name, each in spent.items()})

        return {way: measured(besides) for way, besides in WAYS.items()}


def _spent_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def generate(model: Path, streams: int, tokens: int, threads: int | None) -> float:
    """Return tokens per second of the SDK."""
    prompts = [Tokenizer(find(str(model), weights=False)).encode(PROMPT)] * streams
    with Lamina(str(model), load_format="dummy", threads=threads) as lamina:
        decode_batch(lamina.engine, prompts, WARM_UP, TIMEOUT_S)
        begun = time.monotonic_ns()
        arrivals = decode_batch(lamina.engine, prompts, tokens, TIMEOUT_S)
    return streams * tokens / ((max(each[-1] for each in arrivals) - begun) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--threads", type=int, help="of the compute worker")
    parser.add_argument("--rounds", type=int, default=3, help="in turn; medians are printed")
    given = parser.parse_args()
    served, offline = list[dict[str, Served]](), list[float]()
    with model_directory(given.model) as model:
        arguments = model, given.streams, given.tokens, given.threads
        for _ in range(given.rounds):
            served.append(serve(*arguments))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                offline.append(fresh.submit(generate, *arguments).result())
    table = Table(title=f"{given.streams} streams of {given.model}; CPU time in microseconds per token")
    for column in ("", "tokens/s", "over SDK", *PROCESSES):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("SDK", f"{statistics.median(offline):.0f}", "1.00")
    for way in WAYS:
        runs = [each[way] for each in served]
        ratio = statistics.median(one.tokens_per_s / other for one, other in zip(runs, offline, strict=True))
        spent = (f"{statistics.median(one.cpu_us[name] for one in runs):.1f}" for name in PROCESSES)
        table.add_row(way, f"{statistics.median(one.tokens_per_s for one in runs):.0f}", f"{ratio:.2f}", *spent)
    Console().print(table)


if __name__ == "__main__":
    main()
