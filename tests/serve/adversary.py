"""Runs hostile clients against a server, next to an ordinary client whose requests must not suffer.

    python -m tests.serve.adversary http://127.0.0.1:8000 --pid PID                 # one attack after another
    python -m tests.serve.adversary http://127.0.0.1:8000 --pid PID --seconds 600   # all of them together

Every attack is bounded in time and number. Printed for each: the longest that the bystander has waited, its errors, and
by how much the memory of the server's processes grew. Status 1 if the bystander saw an error or a bound is passed: of
its waits and of growth for a single attack, of growth once all attacks have been met for the mixed load. There it waits
for its turn among 100 clients that keep every place busy.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

BYSTANDER_S = 0.5
GROWTH_BYTES = 300e6
ATTACK_S = 40.0  # an attack's own time is shorter; it is ended then whatever it does
AFTER_S = 60.0  # until nothing of the attacks may be left in the server
FLAT_BYTES = 100e6  # from a quarter of a mixed load to its end

Says = Counter[str]


def main() -> int:
    """Run the attacks given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, help="of the server: watch its memory")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="some of them, separated by commas")
    parser.add_argument("--seconds", type=float, help="run all at once, again and again, for so long")
    given = parser.parse_args()
    names = given.attacks.split(",")
    if given.seconds is not None:
        found = [run(given.url, names, given.pid, given.seconds)]
        found[0].faults += [] if given.pid is None else left_behind(given.url)
    else:
        found = [run(given.url, [name], given.pid) for name in names]
    for each in found:
        print(each)
    return int(any(each.faults for each in found))


@dataclass
class Outcome:
    """The effect of one or several simultaneous attacks on other clients and on memory."""

    attacks: list[str]
    waits: list[float]  # of the bystander, seconds
    errors: Says  # of the bystander
    grown: float  # bytes, at most
    drift: float  # bytes, from a quarter of the time to the end
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = sorted(self.waits) or [float("nan")]
        verdict = "; ".join(self.faults) or "ok"
        return (
            f"{'+'.join(self.attacks)}: bystander {len(self.waits)} requests, median {waits[len(waits) // 2]:.3f} s, "
            f"worst {waits[-1]:.3f} s, errors {dict(self.errors)}; memory +{self.grown / 1e6:.0f} MB at most: {verdict}"
        )


def run(url: str, names: list[str], pid: int | None, seconds: float | None = None) -> Outcome:
    """Attack with a bystander and memory sampling running, until all have ended or ``seconds`` are over."""
    context = multiprocessing.get_context("spawn")  # attackers must not take the bystander's interpreter lock
    processes = [context.Process(target=attack, args=(name, url, seconds), daemon=True) for name in names]
    with watching(pid) as sizes, standing_by(url) as (waits, errors):
        for process in processes:
            process.start()
        deadline = time.monotonic() + (ATTACK_S if seconds is None else seconds + ATTACK_S)
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join(10)
        time.sleep(1.0)  # what follows from attackers' leaving counts too
    grown = max(sizes) - sizes[0] if sizes else 0.0
    drift = sizes[-1] - sizes[len(sizes) // 4] if sizes else 0.0
    outcome = Outcome(names, waits, errors, grown, drift)
    if errors or not waits:
        outcome.faults.append("the bystander saw errors")
    if seconds is None:
        if max(waits, default=0.0) > BYSTANDER_S:
            outcome.faults.append(f"the bystander waited more than {BYSTANDER_S} s")
        if grown > GROWTH_BYTES:
            outcome.faults.append(f"memory grew by more than {GROWTH_BYTES / 1e6:.0f} MB")
    elif drift > FLAT_BYTES:
        outcome.faults.append(f"memory still grew: +{drift / 1e6:.0f} MB in the last three quarters")
    return outcome


@contextlib.contextmanager
def standing_by(url: str) -> Iterator[tuple[list[float], Says]]:
    """An ordinary client in a thread: ten times a second a completion and, on a new connection, GET /health."""
    waits: list[float] = []
    errors: Says = Counter()
    end = threading.Event()

    def ask(client: httpx.Client) -> None:
        begun = time.monotonic()
        try:
            answer = client.post("/v1/completions", json={"prompt": "import", "max_tokens": 1})
            if answer.status_code != 200:
                errors[f"completion {answer.status_code}"] += 1
            waits.append(time.monotonic() - begun)
            begun = time.monotonic()
            health = httpx.get(f"{url}/health", timeout=30)
            if health.status_code != 200:
                errors[f"health {health.status_code}"] += 1
        except httpx.HTTPError as error:
            errors[type(error).__name__] += 1
        waits.append(time.monotonic() - begun)

    def stand_by() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            client.get("/health")
            while not end.wait(0.1):
                ask(client)

    thread = threading.Thread(target=stand_by)
    thread.start()
    try:
        time.sleep(0.5)
        yield waits, errors
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def watching(pid: int | None) -> Iterator[list[float]]:
    """Samples the resident bytes of a process and its descendants, five times a second."""
    sizes: list[float] = []
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.2):
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(resident(pid))

    thread = threading.Thread(target=watch) if pid is not None else None
    if thread is not None:
        sizes.append(resident(pid))
        thread.start()
    try:
        yield sizes
    finally:
        end.set()
        if thread is not None:
            thread.join()


def resident(pid: int | None) -> float:
    """Bytes of memory of a process and its descendants."""
    parent = psutil.Process(pid)
    return float(sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True))))


def left_behind(url: str) -> list[str]:
    """What the server still holds after all clients have left; it must drop to nothing."""
    deadline = time.monotonic() + AFTER_S
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        gauges = ("lamina_requests_running", "lamina_requests_waiting", "lamina_kv_slots_used")
        left = [f"{name} {value}" for name, value in values.items() if name.startswith(gauges) and float(value)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


# -- attackers, each in a process of its own -----------------------------------------------------------------------


def attack(name: str, url: str, seconds: float | None) -> None:
    """One attack, repeated for ``seconds`` if given."""
    os.nice(10)  # attackers are on other machines: they leave the server its processor
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - its sockets break off in every way there is
    ends = time.monotonic() + (seconds or 0)
    while True:
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(ATTACKS[name](url), ATTACK_S - 10))
        if time.monotonic() >= ends:
            return


async def large_prompts(url: str) -> None:
    """Bodies far beyond the limit, just below it, and ones that are cheap to send but expensive to decode."""
    await together(
        *[post(url, completion(prompt="a b " * 3_000_000)) for _ in range(6)],
        post(url, chat("word " * 4_200_000), CHAT),
        post(url, [b'{"prompt": "'] + [b"x" * 1_000_000] * 110 + [b'"}'], chunked=True),
        *[post(url, completion(prompt="a b " * 1_000_000)) for _ in range(6)],
        post(url, chat("word " * 800_000), CHAT),
        post(url, completion(prompt=[7] * 1_000_000)),
        post(url, completion(prompt=[[7]] * 500_000)),
        post(url, completion(prompt="a", metadata={str(i): "x" for i in range(200_000)})),
        post(url, [b'{"prompt":' + b"[" * 2_000_000]),
        post(url, [b'{"prompt":"a","tools":[' + b"[]," * 1_300_000 + b"[]]}"]),
        post(url, [b"{" + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}"]),
        post(url, [json.dumps({"messages": [{"role": "user", "content": ""}] * 90_000}).encode()], CHAT),
    )


async def many_prompts(url: str) -> None:
    """As many prompts in one body as the server accepts."""
    await post(url, completion(prompt=["import"] * 16_384, max_tokens=1))


async def stop_strings(url: str) -> None:
    """Too many stop strings, and a million entries that are not strings."""
    stops = [f"stop{i}" for i in range(100_000)]
    await together(
        *[post(url, completion(prompt="import", max_tokens=100, stop=stops)) for _ in range(4)],
        *[post(url, completion(prompt="import", max_tokens=100, stop=stops[:2_000])) for _ in range(4)],
        post(url, completion(prompt="import", stop=[1] * 1_000_000)),
    )


async def silent_connections(url: str) -> None:
    """Connections that send nothing, half a header, half a body, or requests without end."""
    host, port = address(url)
    header = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    first = [b""] * 1_020 + [b"GET /health HTTP/1.1\r\nHost:"] * 1_020 + [header + b"\r\n{"] * 100
    first += [
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
        b"\x00" * 1_000,
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 500,
    ]

    async def hold(start: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(start)
            while await asyncio.wait_for(reader.read(65536), 25):
                pass
        finally:
            writer.transport.abort()

    await together(*map(hold, first))


async def slow_readers(url: str) -> None:
    """Large answers, with many completions and log-probabilities, that the client does not read."""
    host, port = address(url)
    body = completion(prompt="import", n=8, logprobs=20, max_tokens=200, stream=True, ignore_eos=True)[0]

    async def ignore() -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        try:
            writer.write(head("/v1/completions", len(body)) + body)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(20)
        finally:
            writer.transport.abort()

    await together(*[ignore() for _ in range(100)])


async def nothing(url: str) -> None:
    """No attack: the bystander's latency without one."""
    await asyncio.sleep(5)


ATTACKS: dict[str, Callable[[str], Awaitable[None]]] = {
    "nothing": nothing,
    "large_prompts": large_prompts,
    "many_prompts": many_prompts,
    "stop_strings": stop_strings,
    "silent_connections": silent_connections,
    "slow_readers": slow_readers,
}

CHAT = "/v1/chat/completions"


def completion(**body: Any) -> list[bytes]:
    """A body in one piece."""
    return [json.dumps(body).encode()]


def chat(text: str) -> list[bytes]:
    """The body of a conversation of one message."""
    return [json.dumps({"messages": [{"role": "user", "content": text}]}).encode()]


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def head(path: str, length: int | None) -> bytes:
    """The header of a POST; chunked without a length."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()


async def post(url: str, pieces: list[bytes], path: str = "/v1/completions", chunked: bool = False) -> bytes:
    """Send a body and read the beginning of the answer, whatever it is."""
    host, port = address(url)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head(path, None if chunked else sum(map(len, pieces))))
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        return await reader.read(4096)
    finally:
        writer.transport.abort()


async def together(*attackers: Awaitable[object]) -> None:
    """Run all at once; broken connections are expected and ignored."""
    await asyncio.gather(*attackers, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
