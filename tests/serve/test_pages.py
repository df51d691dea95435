"""The chat page and the dashboard: what they load, what they are told, and that a browser shows it."""

import asyncio
import html.parser
import itertools
import json
import signal
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from lamina.config.server_config import ServerConfig
from lamina.control.timeline import Span
from lamina.core.errors import DeadlineError
from lamina.engine.stats import EngineStats, MemoryStats
from lamina.launch import launch
from lamina.observe.metrics import Metrics
from lamina.serve import monitoring
from lamina.serve.monitoring import (
    EVENTS_PATH,
    FILES,
    LANES_PATH,
    MOST_SHOWN,
    STATE_PATH,
    WEB,
    Feed,
    lanes_of,
    limit_of,
)
from lamina.serve.server import make_server
from tests.support.browser import CHROMIUM, browser
from tests.support.http_server import openai_client
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import served
from tests.support.running import LONG, Killable, Streams, config
from tests.support.scripted_engine import FakeEngine, Running

SHOWN_S = 60.0


class References(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in {"src", "href"} and value is not None]


@pytest.mark.parametrize("path", FILES)
def test_every_reference_of_a_page_is_answered_by_this_server(server: Running, path: str) -> None:
    response = httpx.get(server.url + path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(FILES[path][1])
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    references = References()
    references.feed(response.text if path in {"/", "/dashboard"} else "")
    for reference in references.found:
        assert not reference.startswith(("/", "http")), f"behind --root-path, {path} would not find {reference}"
        assert httpx.get(urllib.parse.urljoin(server.url + path, reference)).status_code == 200


def test_no_file_of_the_pages_is_left_out_of_the_routes() -> None:
    served = {name for name, _ in FILES.values()}
    assert {file.name for file in WEB.iterdir()} == served | {"uPlot.LICENSE"}


def test_the_state_counts_the_tokens_and_times_of_answers(server: Running) -> None:
    before = httpx.get(server.url + STATE_PATH).json()
    asked = httpx.post(server.url + "/v1/completions", json={"model": "fake", "prompt": "hello", "max_tokens": 3})
    usage = asked.json()["usage"]
    after = httpx.get(server.url + STATE_PATH).json()
    assert after["tokens"]["generated"] - before["tokens"]["generated"] == usage["completion_tokens"]
    assert after["tokens"]["prompt"] - before["tokens"]["prompt"] == usage["prompt_tokens"]
    then, now = (state["latency"]["time_to_first_token"] for state in (before, after))
    grown = [later[1] - earlier[1] for earlier, later in zip(then, now, strict=True)]
    assert grown[-1] == 1 and grown == sorted(grown)
    assert now[-1][0] is None


def test_lanes_are_told_by_worker_in_microseconds(server: Running) -> None:
    told = httpx.get(server.url + LANES_PATH).json()
    assert told["workers"]["compute0"][:2] == [["slice", 0, 0, 600], ["slice", 0, 1000, 600]]
    assert told["workers"]["memory0"][0] == ["attention", 0, 600, 300] and told["length_us"] == 98_900
    many = [Span("slice", 0, 1_000 * start, 1_000 * start + 900) for start in range(2 * MOST_SHOWN)]
    few = [Span("attention", 0, 5, 10), Span("attention", 0, 1_000 * MOST_SHOWN + 900, 1_000 * MOST_SHOWN + 1_000)]
    window = lanes_of({"compute0": many, "memory0": few})["workers"]
    assert len(window["compute0"]) == MOST_SHOWN and len(window["memory0"]) == 1 and window["compute0"][0][2] == 0
    assert lanes_of({}) == {"length_us": 0, "workers": {}}


def view(lines: Iterator[str]) -> tuple[str, dict[str, Any]]:
    """Return the next server-sent event: its name and its data."""
    found = dict(line.split(": ", 1) for line in itertools.takewhile(bool, lines))
    return found["event"], json.loads(found["data"])


def test_the_dashboard_gets_its_data_as_events(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "EVERY_S", 0.05)
    with server.http.stream("GET", EVENTS_PATH) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        for _ in range(2):
            kind, told = view(lines)
            assert kind == "view" and told["state"]["model"] == "fake" and "compute0" in told["lanes"]["workers"]
            assert [life["request"] for life in told["lives"]] == ["chat-2", "chat-1"]

        def wait() -> None:
            raise DeadlineError("the engine has not answered within 5 s")

        with monkeypatch.context() as silent:
            silent.setattr(server.engine, "stats", wait)
            failed = next(told for kind, told in iter(partial(view, lines), None) if kind == "failed")
            assert failed == {"message": "the engine has not answered within 5 s"}
        assert next(kind for kind, _ in iter(partial(view, lines), None) if kind == "view")


def test_any_number_of_dashboards_asks_the_engine_once_a_second(server: Running) -> None:
    asked = 0
    stats = server.engine.stats

    def counted() -> EngineStats:
        nonlocal asked
        asked += 1
        return stats()

    async def look() -> list[bytes]:
        feed = Feed(server.engine, Metrics(server.engine))  # type: ignore[arg-type]
        return await asyncio.gather(*(feed.latest() for _ in range(20)))

    server.engine.stats = counted  # type: ignore[method-assign]
    try:
        views = asyncio.run(look())
    finally:
        del server.engine.stats
    assert asked == 1 and len(set(views)) == 1


def test_an_open_dashboard_does_not_delay_the_end_of_the_server() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(FakeEngine(), lambda: None, config=ServerConfig(shutdown_timeout=600))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with httpx.stream("GET", f"http://127.0.0.1:{listener.getsockname()[1]}{EVENTS_PATH}", timeout=SHOWN_S) as response:
        lines = response.iter_lines()
        assert view(lines)[0] == "view"
        server.should_exit = True
        assert all(not line or line.startswith(("event:", "data:")) for line in lines)  # it ends in order
    thread.join(SHOWN_S)
    assert not thread.is_alive()


def stats(used: int, waiting: int, **changes: object) -> EngineStats:
    base = FakeEngine().stats()
    memory = {"memory0": MemoryStats(used, 1000, 3)}
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return EngineStats(**{**fields, "dead": None, "silent": {}, "memory": memory, "waiting": waiting, **changes})


@pytest.mark.parametrize(
    ("given", "what", "remedy"),
    [
        (stats(990, 0), "Nothing waits", ""),
        (stats(990, 4), "KV: requests use 990 of 1,000 token slots, and 4 more", "lamina scale --memory +1"),
        (stats(100, 4), "Compute: 4 requests wait while 900 of 1,000", "lamina scale --compute +1"),
        (stats(100, 4, silent={"memory0": 7.0}), "memory0, which does not answer", ""),
        (stats(0, 0, dead="memory0 was lost\ntrace"), "The engine has stopped: memory0 was lost", "lamina launch"),
    ],
    ids=["idle", "slots", "compute", "silent", "dead"],
)
def test_the_limit_named_is_what_requests_wait_for(given: EngineStats, what: str, remedy: str) -> None:
    found, advised = limit_of(given)
    assert what in found and "trace" not in found
    assert advised == remedy


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; Debian: apt-get install chromium")


@needs_chromium
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/dashboard", ["memory0", "Live", "requests running", "chat-1"]),
        ("/", ["fake"]),
    ],
)
def test_a_browser_shows_the_server_s_state(server: Running, path: str, shown: list[str]) -> None:
    with browser() as page:
        page.open(server.url + path)
        for text in shown:
            page.wait(f"document.body?.innerText.includes({json.dumps(text)})")
        lanes = "[...document.querySelectorAll('canvas.spans')].map((each) => each.getAttribute('aria-label'))"
        if path == "/dashboard":
            assert "compute0: slices 60 %, attention 0 % of the time" in page.value(lanes)


@needs_chromium
def test_a_request_s_life_opens_by_a_key_and_stays_open(server: Running) -> None:
    with browser() as page:
        page.open(server.url + "/dashboard")
        page.wait("document.querySelector('[data-request=chat-1]') !== null")
        assert page.value("document.getElementById('life').hidden")
        page.value("document.querySelector('[data-request=chat-1]').focus()")
        page.key("Enter")
        told = page.wait("document.getElementById('life').innerText")
        for text in ("Request chat-1", "lane 0, KV on memory0", "tokens 0 to 32, to memory1", "11 tokens, 50 ms each"):
            assert text in told
        bar = page.value("document.getElementById('life-bar').getAttribute('aria-label')")
        assert bar == "queued 500 ms, prompt 200 ms, decoding 500 ms"
        page.value("window.views = 0; draw = ((before) => () => { views++; before(); })(draw)")
        page.wait("views > 1")  # the server has sent more
        assert page.value("document.activeElement.dataset.request") == "chat-1"
        assert not page.value("document.getElementById('life').hidden")
        page.key("Enter")
        assert page.value("document.getElementById('life').hidden")


@needs_chromium
def test_the_dashboard_goes_on_through_a_worker_s_death(tmp_path: Path) -> None:
    write_prepared(served("llama"), tmp_path)
    workers = Killable()
    engine = launch(config(tmp_path, 1, 2), workers=workers)
    try:
        with openai_client(engine) as client, browser() as page:
            page.open(str(client.base_url).removesuffix("v1/") + "dashboard")
            streams = Streams(engine, [([5] * 20, LONG)] * 4)
            streams.wait_for_tokens(40)
            workers.signal("memory1", signal.SIGKILL)
            page.wait("[...document.querySelectorAll('.figure')].some((each) => /^1\\s*recover/.test(each.innerText))")
            assert all(output.error is None for output in streams.wait())
            page.value("document.querySelectorAll('#lives [data-request]').forEach((each) => each.click())")
            page.wait("document.getElementById('life').innerText.includes('length, 100 tokens')")
            assert page.value("document.getElementById('connection').innerText") == "Live"
    finally:
        engine.close()
