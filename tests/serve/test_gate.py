"""Which requests reach the application: keys, limits of clients, timeouts, origins, TLS."""

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.server_config import ServerConfig
from lamina.core.errors import ConfigError
from lamina.observe.metrics import VLLM_NAMES
from lamina.serve.gate import Keys, RateLimit, api_keys, tls_context
from tests.support.http_server import serve
from tests.support.scripted_engine import CHAT, COMPLETION, TIMEOUT_S, Running, refusal

BODY = {"prompt": "a"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server with keys from all three sources, and one for its metrics."""
    (tmp_path / "keys").write_text("# of the team\nfrom-file\n\n")
    monkeypatch.setenv("LAMINA_API_KEY", "from-variable")
    monkeypatch.setenv("LAMINA_METRICS_KEY", "monitoring")
    with serve(config=ServerConfig(api_key="one, two", api_key_file=tmp_path / "keys")) as running:
        yield running


def test_requests_need_one_of_the_keys(keyed: Running) -> None:
    for key in ("one", "two", "from-file", "from-variable"):
        assert keyed.http.post(COMPLETION, json=BODY, headers=bearer(key)).status_code == 200
    for headers in ({}, bearer("three"), bearer("on"), bearer("monitoring"), {"Authorization": "one"}):
        answer = keyed.http.post(COMPLETION, json=BODY, headers=headers)
        assert refusal(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer" and answer.headers["X-Request-Id"]
    assert keyed.http.get("/v1/models").status_code == 401
    assert keyed.http.get("/health").status_code == keyed.http.get("/dashboard").status_code == 200
    assert keyed.http.post(COMPLETION, json=BODY, headers={"x-api-key": "two"}).status_code == 200


def test_refusals_of_messages_have_anthropic_s_form(keyed: Running) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = keyed.http.post(path, json=BODY)
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_metrics_have_a_key_of_their_own(keyed: Running) -> None:
    assert keyed.http.get("/metrics").status_code == keyed.http.get("/dashboard/state").status_code == 401
    assert keyed.http.get("/metrics", headers=bearer("one")).status_code == 401
    assert keyed.http.get("/metrics", headers=bearer("monitoring")).status_code == 200


def test_keys_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read api_key_file '.*none': No such file"):
        api_keys(ServerConfig(api_key_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="hold no key"):
        api_keys(ServerConfig(api_key=" , "))
    assert api_keys(ServerConfig()) == []


@given(st.lists(st.text(min_size=1), max_size=4), st.text())
def test_a_key_is_accepted_if_it_is_one_of_the_keys(keys: list[str], given: str) -> None:
    assert Keys(keys).accepts(given.encode()) == (given in keys)


@given(st.integers(1, 6), st.lists(st.floats(0.0, 40.0), max_size=30))
def test_no_client_passes_more_than_its_rate(most: int, pauses: list[float]) -> None:
    """Compared with the times that have passed: never more than twice the rate in a minute (a burst and its refill),
    and a request that waits as long as it is told passes."""
    limit, now, passed = RateLimit(most), 0.0, list[float]()
    for pause in pauses:
        now += pause
        wait_s = limit.wait_s("a", now)
        if wait_s == 0:
            passed.append(now)
        else:
            now += wait_s
            assert limit.wait_s("a", now) == 0
            passed.append(now)
    for begin in passed:
        within = sum(begin <= at <= begin + 60 for at in passed)
        assert within <= 2 * most + 1
    assert limit.wait_s("b", now) == 0


def test_a_client_beyond_its_rate_gets_429_and_when_to_come_back() -> None:
    with serve(config=ServerConfig(requests_per_minute=2, api_key="a,b")) as running:
        answers = [running.http.post(COMPLETION, json=BODY, headers=bearer("a")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert 25 <= int(answers[2].headers["Retry-After"]) <= 30
        assert refusal(answers[2], 429)["code"] == "rate_limit_exceeded"
        assert running.http.post(COMPLETION, json=BODY, headers=bearer("b")).status_code == 200
        assert running.http.get("/v1/models", headers=bearer("a")).status_code == 200


def test_a_client_may_have_so_many_requests_at_once() -> None:
    with serve(config=ServerConfig(concurrent_requests=1)) as running:
        first = threading.Thread(target=lambda: running.http.post(COMPLETION, json={"prompt": "hang"}))
        first.start()
        assert running.engine.wait_until(lambda: len(running.engine.hanging) == 1)
        answer = running.http.post(COMPLETION, json=BODY)
        assert refusal(answer, 429)["code"] == "rate_limit_exceeded" and answer.headers["Retry-After"]
        running.engine.close()
        first.join(TIMEOUT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_cancelled(stream: bool) -> None:
    with serve(config=ServerConfig(request_timeout=1)) as running:
        answer = running.http.post(COMPLETION, json={"prompt": "hang", "stream": stream})
        assert running.engine.wait_until(lambda: len(running.engine.aborted) == 1)
        if answer.status_code == 200:  # it had begun
            *_, event, last = [part for part in answer.text.split("\n\n") if part]
            assert last == "data: [DONE]"
            error = json.loads(event.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert error["code"] == "request_timeout"
        assert running.http.post(COMPLETION, json=BODY).status_code == 200


def test_a_response_that_takes_too_long_has_failed() -> None:
    with serve(config=ServerConfig(request_timeout=1)) as running:
        answer = running.http.post("/v1/responses", json={"input": "hang", "stream": True})
    *_, name, data = answer.text.strip().splitlines()
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "request_timeout" and event["sequence_number"] > 0


def test_pages_of_allowed_origins_may_call_the_server() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serve(config=ServerConfig(allowed_origins="https://a.example, https://b.example", api_key="one")) as running:
        preflight = running.http.options(CHAT, headers=asked | {"Access-Control-Request-Headers": "authorization"})
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == "https://a.example"
        refused = running.http.post(COMPLETION, json=BODY, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["Access-Control-Allow-Origin"] == "https://a.example"
        shown = refused.headers["Access-Control-Expose-Headers"].split(", ")
        assert {*shown} == {"X-Request-Id", "X-Lamina-Ignored-Fields", "Retry-After"}
        assert running.http.options(CHAT, headers=asked | {"Origin": "https://c.example"}).status_code == 400


def test_pages_may_not_call_a_server_without_allowed_origins(server: Running) -> None:
    answer = server.http.post(COMPLETION, json=BODY, headers={"Origin": "https://a.example"})
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert server.http.options(CHAT, headers={"Origin": "https://a.example"}).status_code == 405


def test_a_proxy_may_show_the_server_under_a_path() -> None:
    with serve(config=ServerConfig(root_path="/llm", api_key="one")) as running:
        for path in (COMPLETION, f"/llm{COMPLETION}"):
            assert running.http.post(path, json=BODY, headers=bearer("one")).status_code == 200
            assert running.http.post(path, json=BODY).status_code == 401
        assert running.http.get("/llm/health").status_code == 200
    with pytest.raises(ConfigError, match="root_path is 'llm/'"):
        ServerConfig(root_path="llm/")


@contextmanager
def serve_tls(certificate: tuple[Path, Path]) -> Iterator[tuple[Running, ssl.SSLContext]]:
    config = ServerConfig(ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    with serve(config=config) as running:
        yield running, ssl.create_default_context(cafile=str(certificate[0]))


def test_https_clients_trust_the_certificate(certificate: tuple[Path, Path]) -> None:
    with serve_tls(certificate) as (running, trust), httpx.Client(verify=trust, timeout=TIMEOUT_S) as https:
        assert running.url.startswith("https://")
        assert https.post(running.url + COMPLETION, json=BODY).status_code == 200
        with https.stream("POST", running.url + COMPLETION, json=BODY | {"stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        refused = https.post(running.url + COMPLETION, content=b"x", headers={"Content-Type": "application/json"})
        assert refused.status_code == 400


def test_a_client_without_a_handshake_keeps_nobody_waiting(certificate: tuple[Path, Path]) -> None:
    with serve_tls(certificate) as (running, trust), httpx.Client(verify=trust, timeout=TIMEOUT_S) as https:
        port = int(running.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert https.get(running.url + "/health").status_code == 200
            assert b"HTTP" not in plain.recv(1000)


def test_a_certificate_that_cannot_be_used_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give a certificate"):
        tls_context(ServerConfig(ssl_certfile=tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(ServerConfig(ssl_certfile=certificate[1], ssl_keyfile=certificate[0]))
    with pytest.raises(ConfigError, match="give ssl_certfile too"):
        ServerConfig(ssl_keyfile=certificate[1])


VLLM_DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
}
"""Names in vLLM's examples/observability/prometheus_grafana/grafana.json (4b5c627c) for what Lamina measures too. Not
here: request_prompt_tokens, request_generation_tokens, and times in queue, prefill and decode."""


def test_dashboards_of_vllm_find_their_metrics(server: Running) -> None:
    server.post(COMPLETION, prompt="a")
    text = server.http.get("/metrics").text
    found = set(re.findall(r'^(vllm:\w+)\{[^}]*model_name="fake"[^}]*\} \S+$', text, re.MULTILINE))
    assert found >= VLLM_DASHBOARD
    assert re.search(r'^vllm:request_success_total\{finished_reason="\w+",model_name="fake"\} \d', text, re.MULTILINE)
    shares = [float(value) for value in re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text, re.MULTILINE)]
    assert len(shares) == 1 and 0.0 <= shares[0] <= 1.0
    for ours, theirs in VLLM_NAMES.items():
        same = {re.sub(r"\{.*\}", "", line) for line in text.splitlines() if line.startswith(ours)}
        assert same, f"{ours} is no metric, so {theirs} has no values"
