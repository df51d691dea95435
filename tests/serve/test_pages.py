"""The chat page and the dashboard: what they load, what they are told, and that a browser shows it."""

import html.parser
import shutil
import subprocess
import urllib.parse
from pathlib import Path

import httpx
import pytest

from lamina.control.timeline import Span
from lamina.engine.stats import EngineStats, MemoryStats
from lamina.serve.monitoring import FILES, LANES_PATH, MOST_SHOWN, STATE_PATH, WEB, lanes_of, limit_of
from tests.support.scripted_engine import FakeEngine, Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; Debian: apt-get install chromium")
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/dashboard", [">memory0<", ">Live<", "requests running", "compute0: slices 60 %, attention 0 %"]),
        ("/", [">fake<"]),
    ],
)
def test_a_browser_shows_the_server_s_state(server: Running, path: str, shown: list[str], tmp_path: Path) -> None:
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=5000",
    ]
    command = [CHROMIUM, *options, "--dump-dom", server.url + path]
    page = subprocess.run(command, capture_output=True, text=True, timeout=SHOWN_S, check=True).stdout
    for text in shown:
        assert text in page
