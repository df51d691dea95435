"""`lamina bench serve` against our server, against one of few features, and its figures against sums by hand."""

import http.server
import itertools
import json
import math
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.load import Answer, arrivals, figures
from tests.support.http_server import serve
from tests.support.scripted_engine import Running


def text_of(prompt: Iterable[Any]) -> str:
    return "".join(map(chr, prompt))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with serve(max_model_len=100_000) as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Running:
    shared_server.engine.forget()
    return shared_server


class Plain(http.server.BaseHTTPRequestHandler):
    """A server with the least that OpenAI's API has: it counts no tokens, and refuses every second request."""

    protocol_version = "HTTP/1.0"
    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        if len(self.bodies) % 2 == 0:
            self.send_error(429)
            return
        self.send_response(200)
        self.end_headers()
        for text in ("", "a", "b", "c"):
            chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def plain() -> Iterator[str]:
    Plain.bodies.clear()
    Plain.keys.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Plain) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}/v1"
        made.shutdown()
        thread.join(60)


def run(*options: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def test_every_request_is_measured(server: Running, tmp_path: Path) -> None:
    written, page = tmp_path / "figures.json", tmp_path / "page.html"
    shape = ["--requests", "12", "--rate", "200", "--burst", "3", "--prompt", "7", "--output", "5"]
    shown = run("--url", server.url, *shape, "--json", str(written), "--html", str(page))
    assert max(map(len, shown.splitlines())) <= 80, shown
    found = json.loads(written.read_text())
    assert (found["completed"], found["failed"], found["model"]) == (12, 0, "fake")
    assert found["output_tokens"] == 12 * 3 and found["tokens_counted_by_server"]
    assert len(server.engine.submitted) == 12 and len(found["requests"]) == 12
    assert all(params.max_tokens == 5 for _, params in server.engine.submitted)
    lengths = [len(prompt) for prompt, _ in server.engine.submitted]
    assert found["prompt_tokens"] == sum(lengths)
    for one in found["requests"]:
        assert one["sent_s"] <= one["arrivals_s"][0] <= one["arrivals_s"][-1] <= one["end_s"]
        assert len(one["arrivals_s"]) <= 3 and one["output_tokens"] == 3
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<svg" in text and "http://www.w3.org" in text
    assert "src=" not in text and "fake at" in text  # the page loads nothing


def test_turns_follow_the_answers_before_them(server: Running) -> None:
    run("--url", server.url, "--requests", "3", "--rate", "inf", "--turns", "3", "--think-time", "0", "--prompt", "4")
    prompts = sorted((text_of(prompt) for prompt, _ in server.engine.submitted), key=len)
    assert len(prompts) == 9
    for number, prompt in enumerate(prompts):
        assert prompt.count("<assistant> one two three") == number // 3
        assert prompt.count("<user>") == 1 + number // 3
    for later in prompts[3:]:
        assert any(later.startswith(earlier) for earlier in prompts[:6])


def test_a_trace_gives_lengths_and_what_prompts_have_in_common(server: Running, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 30, "output_length": 9, "content": [[1, 20], [2, 10]], "answer": 3},
        {"timestamp": 4000, "input_length": 32, "output_length": 8, "content": [[1, 20], [2, 10], [3, 2]]},
        {"timestamp": 4010, "input_length": 5, "output_length": 7},
        {"timestamp": 4020, "input_length": 5, "output_length": 6},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("--url", server.url, "--trace", str(trace), "--speed", "2", "--requests", "3")
    limits = {params.max_tokens or 0: text_of(prompt) for prompt, params in server.engine.submitted}
    assert sorted(limits) == [7, 8, 9]  # the fourth is not sent
    assert limits[8] == limits[9] + "  one two three"  # the answer that there was
    assert [len(limits[place].removeprefix("<user>").split()) for place in (9, 7)] == [30, 5]
    azure = tmp_path / "trace.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    run("--url", server.url, "--trace", str(azure))
    prompt, params = server.engine.submitted[-1]
    assert params.max_tokens == 44 and len(text_of(prompt).removeprefix("<user>").split()) == 374


def test_a_server_that_counts_nothing_and_refuses_half(plain: str) -> None:
    options = ["--url", plain, "--model", "m", "--api-key", "k", "--requests", "6", "--rate", "inf", "--prompt", "2"]
    shown = run(*options, "--ignore-eos", "--ttft", "1000", "--tbt", "1000")
    assert "3 requests in" in shown and "3 failed" in shown and "3 x status 429" in shown
    assert "50% have their first token" in shown and "parts of streams count as tokens" in shown
    assert {body["model"] for body in Plain.bodies} == {"m"} and all(body["ignore_eos"] for body in Plain.bodies)
    assert set(Plain.keys) == {"Bearer k"}


def test_faults_are_errors_with_a_remedy(server: Running, plain: str, tmp_path: Path) -> None:
    for options, status, said in (
        (["--url", server.url, "--rate", "0"], 1, "--rate is 0; give conversations per second above 0"),
        (["--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9"),
        (["--url", plain], 1, "wants a key; give it as --api-key"),
        (["--url", server.url, "--trace", str(tmp_path / "none.csv")], 1, "cannot be read"),
        (["--url", server.url, "--model", "gpt", "--requests", "1"], 1, "none of 1 requests was answered: status 404"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", *options])
        assert result.exit_code == status and said in str(result.exception), result.output


def test_guidellm_gets_the_load_as_its_scenario(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that stands for GuideLLM copies what it is given; its status is that of the command."""
    program = tmp_path / "guidellm"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "run --config" ] && cp "$3" {tmp_path}/got.json\nexit ${{STATUS:-0}}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    options = ("--client", "guidellm", "--url", server.url, "--requests", "7", "--rate", "2", "--prompt", "30")
    run(*options, "--output", "5", "--api-key", "k", "--tokenizer", "/tok", "--html", str(tmp_path / "page.html"))
    spec = json.loads((tmp_path / "got.json").read_text())["spec"]
    assert spec["backend"] == {
        "kind": "openai_http",
        "target": server.url,
        "model": "fake",
        "timeout": 600.0,
        "api_key": "k",
    }
    assert spec["profile"] == {"kind": "poisson", "rate": [2.0]}
    assert spec["constraints"] == [{"kind": "max_requests", "count": 7}]
    assert spec["data"] == [{"kind": "synthetic_text", "prompt_tokens": 30, "output_tokens": 5, "turns": 1}]
    assert spec["tokenizer"] == {"kind": "huggingface_auto", "model": "/tok"}
    assert spec["outputs"] == [{"kind": "console"}, {"kind": "html", "path": str(tmp_path / "page.html")}]
    run(*options, "--rate", "inf", "--ignore-eos")
    spec = json.loads((tmp_path / "got.json").read_text())["spec"]
    assert spec["profile"] == {"kind": "throughput"} and spec["backend"]["extras"] == {"body": {"ignore_eos": True}}

    def fault(*more: str) -> str:
        return str(CliRunner().invoke(app, ["bench", "serve", *options, *more]).exception)

    assert "no --trace and no --burst" in fault("--burst", "2")
    monkeypatch.setenv("STATUS", "3")
    assert "GuideLLM ended with status 3" in fault()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "pip install guidellm" in fault()


@pytest.mark.parametrize("burst", [1, 4])
def test_arrivals_are_bursts_at_the_rate(burst: int) -> None:
    times = arrivals(4000, 20.0, burst, seed=1)
    assert len(times) == 4000 and times[0] == 0.0 and times == sorted(times)
    starts = times[::burst]
    assert all(times[place] == starts[place // burst] for place in range(len(times)))
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    mean = burst / 20.0
    assert statistics.mean(gaps) == pytest.approx(mean, rel=5 / math.sqrt(len(gaps)))
    assert statistics.stdev(gaps) == pytest.approx(mean, rel=8 / math.sqrt(len(gaps)))  # as exponential times have
    assert set(arrivals(5, math.inf, burst, 0)) == {0.0}


def test_figures_are_those_of_sums_by_hand() -> None:
    answers = [
        Answer(1.0, 0.0, [1.5, 1.7, 2.1], 2.2, 10, 5, True),  # 0.5 s, then 0.6 s for 4 tokens
        Answer(2.0, 0.3, [4.0, 4.1], 4.2, 10, 2, True),  # too late for the SLO
        Answer(2.0, 0.0, [2.1, 3.1], 6.0, 10, 2, True),  # too slow for it
        Answer(2.0, 0.0, [2.5], 3.0, error="x"),
        Answer(3.0, 0.0, [], 3.5, 10, 1, True),  # a token without text
    ]
    found = figures(answers, ttft_s=1.0, tbt_s=0.2)
    assert (found["completed"], found["failed"], found["errors"], found["most_late_s"]) == (4, 1, {"x": 1}, 0.3)
    assert found["seconds"] == 5.0 and found["output_tokens_per_s"] == 2.0 and found["prompt_tokens_per_s"] == 8.0
    assert found["goodput"]["share"] == pytest.approx(2 / 5)
    assert found["goodput"]["requests_per_s"] == pytest.approx(2 / 5)
    assert found["ttft_s"]["p50"] == pytest.approx(0.5) and found["ttft_s"]["mean"] == pytest.approx(3.1 / 4)
    assert found["tbt_s"]["mean"] == pytest.approx((0.2 + 0.4 + 0.1 + 1.0) / 4)
    assert found["tpot_s"]["mean"] == pytest.approx((0.15 + 0.1 + 1.0) / 3)
    assert found["latency_s"]["p99"] == pytest.approx(4.0 - 0.03 * (4.0 - 2.2))
    assert figures([], 1, 1)["ttft_s"] is None


def served(events: Sequence[str]) -> type[Plain]:
    """A server that answers with ``events``."""

    class Server(Plain):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())

    return Server


TEXT = json.dumps({"choices": [{"delta": {"content": "a\u2028b\x85c"}, "finish_reason": None}]}, ensure_ascii=False)
LAST = json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([TEXT, LAST], ""),
        ([TEXT, "[DONE]"], ""),
        ([TEXT], "the stream ended before the answer"),
        ([TEXT, '{"choices": null}', "[DONE]"], "TypeError"),
        ([TEXT, '{"choices": [{"delta": null}]}', "[DONE]"], "AttributeError"),
        ([TEXT, "[]", "[DONE]"], "AttributeError"),
        ([TEXT, '{"usage": {"prompt_tokens": null, "completion_tokens": 1}}', "[DONE]"], "TypeError"),
        ([TEXT, '{"error": "no room"}', "[DONE]"], "no room"),
    ],
)
def test_answers_of_any_form_are_whole_or_errors(events: list[str], error: str, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    with http.server.HTTPServer(("127.0.0.1", 0), served(events)) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        shape = ["--model", "m", "--requests", "2", "--rate", "inf", "--json", str(written)]
        run("--url", f"http://127.0.0.1:{made.server_port}", *shape, status=1 if error else 0)
        made.shutdown()
    found = json.loads(written.read_text())
    assert (found["completed"], found["failed"]) == ((0, 2) if error else (2, 0))
    assert all(error in one for one in found["errors"])
