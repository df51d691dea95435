"""`lamina launch` serves: OpenAI's client, hostile requests, connections that idle, clients that come and go."""

import asyncio
import contextlib
import http.client
import random
import shlex
import time
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from lamina.cli.console import notes, output
from lamina.cli.launch import _print_join_command, _print_ready
from lamina.config.engine_config import EngineConfig
from tests.support.commands import RUN_S, Server, assert_refused, run, run_here, start
from tests.support.waiting import END_S


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Ended by `lamina down`, which leaves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_ADMIN_KEY", "a-key")
        running = start("--compute", "cpu:1", "--memory", "cpu:2")
        workers = running.workers()
        yield running
        done = run_here("down", "--url", running.url)
    assert (done.returncode, done.stdout) == (0, "stopped: compute0, memory0, memory1\n"), done.stderr
    assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(workers, END_S)[1] == []
    assert running.process.stderr is not None
    said = [line for line in running.process.stderr if "still starting" not in line]
    assert len(said) == 1 and "/admin/stop was called: the server stops" in said[0]


def test_launch_serves_openai_s_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=RUN_S) as client:
        (model,) = client.models.list()
        whole = client.completions.create(
            model=model.id, prompt=["def f(", "import "], max_tokens=8, temperature=0, logprobs=2
        )
        assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
        pieces = client.completions.create(model=model.id, prompt="def f(", max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "sort a list"}], max_tokens=8, n=2, seed=1
        )
        assert len(answer.choices) == 2 and answer.usage is not None
        with pytest.raises(openai.BadRequestError, match="1024"):
            client.completions.create(model=model.id, prompt="a b c " * 600)
        with pytest.raises(openai.BadRequestError, match="outside the vocabulary of 2048 tokens"):
            client.completions.create(model=model.id, prompt=[10**6])
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.slow
def test_a_connection_may_be_idle_for_longer_than_clients_leave_one(server: Server) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=RUN_S)
    with contextlib.closing(connection):
        for _ in range(2):
            connection.request("GET", "/health")
            response = connection.getresponse()
            assert response.status == 200 and response.read()
            connection.auto_open = 0  # a connection that the server has closed is an error from here on
            time.sleep(6)  # httpx, and with it OpenAI's client, closes what it has not used for 5 s


HUGE, TINY = 2**70, 1e-300
LONE = "\\ud800"  # half of a surrogate pair: JSON may carry it, UTF-8 cannot


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (f'"prompt": "{LONE}"', 400),
        (f'"prompt": "a", "stop": "{LONE}"', 400),
        (f'"prompt": "a", "stop_token_ids": [{HUGE}]', 400),
        (f'"prompt": [{HUGE}]', 400),
        ('"prompt": "a", "stop_token_ids": [2147483647]', 200),
        (f'"prompt": "a", "seed": {-(2**63)}', 200),
        (f'"prompt": "a", "seed": {2**63 - 1}', 200),
        (f'"prompt": "a", "temperature": {TINY}', 200),
        ('"prompt": "a", "temperature": 1e400', 400),
        (f'"prompt": "a", "top_p": {TINY}, "top_k": 2147483647', 200),
        ('"prompt": "a", "min_p": 1', 200),
        (f'"prompt": "a", "repetition_penalty": {TINY}', 400),
        ('"prompt": "a", "repetition_penalty": 0.01', 200),
        ('"prompt": "a", "repetition_penalty": 100, "temperature": 100', 200),
        ('"prompt": "a", "max_tokens": 2147483647, "min_tokens": 2147483647', 400),
        ('"prompt": "a<|endoftext|>\\u0000b", "echo": true', 200),
        ('"prompt": ["a", "b"], "n": 128', 200),
        (f'"prompt": {"[" * 3000}{"]" * 3000}', 400),
    ],
)
def test_no_single_request_ends_the_engine(server: Server, fields: str, status: int) -> None:
    tail = "" if "max_tokens" in fields else ', "max_tokens": 3'
    headers = {"Content-Type": "application/json"}
    body = f"{{{fields}{tail}}}"
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=RUN_S)
    assert response.status_code == status, response.text
    assert ("error" in response.json()) == (status != 200)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_port_in_use_is_refused_before_the_model_is_loaded(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    done = run("launch", "--port", port, "--model", "/nowhere/model")
    assert_refused(done, f"port {port} on 127.0.0.1 is in use. Use --port {int(port) + 1}")


@pytest.mark.slow
def test_clients_that_come_and_go_leave_nothing_behind(server: Server) -> None:
    """300 requests of all kinds, a third of them abandoned; afterwards the server is idle and answers as before."""
    rng = random.Random(0)
    probe = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}

    async def visit(client: httpx.AsyncClient, gate: asyncio.Semaphore) -> None:
        body = {"prompt": "x = " * rng.randint(1, 200), "n": rng.randint(1, 4), "max_tokens": rng.randint(1, 60)}
        patience_s = rng.choice([None, None, rng.random()])
        async with gate:
            try:
                async with (
                    asyncio.timeout(patience_s),
                    client.stream("POST", "/v1/completions", json={**body, "stream": rng.random() < 0.5}) as response,
                ):
                    await response.aread()
                    assert response.status_code == 200, response.text
            except TimeoutError:
                assert patience_s is not None

    async def storm() -> None:
        gate = asyncio.Semaphore(40)
        async with httpx.AsyncClient(base_url=server.url, timeout=RUN_S) as client:
            await asyncio.gather(*(visit(client, gate) for _ in range(300)))

    with httpx.Client(base_url=server.url, timeout=RUN_S) as http:
        before = http.post("/v1/completions", json=probe).json()["choices"]
        asyncio.run(storm())
        assert http.post("/v1/completions", json=probe).json()["choices"] == before
        assert http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("secret_file", ["my secret", None])
def test_the_printed_command_of_a_worker_can_be_pasted(
    secret_file: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    notes.cache_clear()  # so that the next use writes to what pytest captures
    _print_join_command(EngineConfig(listen="10.0.0.1:7070", secret_file=secret_file))
    how, command, _ = capsys.readouterr().err.split("\n")
    words = shlex.split(command)
    expected = ["lamina", "worker", "--engine", "10.0.0.1:7070", "--role", "memory", "--kind", "cpu"]
    assert words == expected + (["--secret-file", secret_file] if secret_file else [])
    assert (secret_file or "LAMINA_SECRET") in how


@pytest.mark.parametrize("keyed", [False, True])
def test_the_examples_of_a_server_with_keys_send_one(keyed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    output.cache_clear()  # so that the next use writes to what pytest captures
    _print_ready("summary", "http://127.0.0.1:8000", keyed)
    said = capsys.readouterr().out
    assert ("-H 'Authorization: Bearer KEY'" in said, "api_key='KEY'" in said) == (keyed, keyed)
