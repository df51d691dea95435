"""`lamina launch --frontends 2`: what crosses from the engine's process to the frontends', and what happens when one of
them, or the engine, is killed."""

import contextlib
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from lamina.core import __version__
from tests.support.commands import RUN_S, Server, start
from tests.support.waiting import END_S, wait_until

PROMPT = "def fibonacci(n):"
GREEDY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 40}
LONG = GREEDY | {"max_tokens": 150, "stream": True}
ENDLESS = LONG | {"max_tokens": 800, "n": 4}
UPGRADE = """
import os
if os.path.exists({!r}):
    import lamina.core
    lamina.core.__version__ = "9.9.9"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(
        *("--frontends", "2", "--memory", "cpu:2", "--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20))
    )
    children = running.workers()
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(children, END_S)[1] == []


def frontends(server: Server) -> list[psutil.Process]:
    return [one for one in server.workers() if "lamina.serve" in one.cmdline()]


def ask(server: Server, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=RUN_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def stream(client: httpx.Client, server: Server, **body: Any) -> Iterator[tuple[Iterator[dict[str, Any]], int]]:
    """The events of an open stream, at least one of which has come, and the client's port."""
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        found = events(response.iter_lines())
        next(found)
        yield found, port


def owner(server: Server, port: int) -> psutil.Process:
    """The frontend that has the connection from this port."""
    (found,) = [
        one for one in frontends(server) if any(c.raddr and c.raddr.port == port for c in one.net_connections("tcp"))
    ]
    return found


def values(metrics: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def idle(server: Server) -> bool:
    held = values(httpx.get(f"{server.url}/metrics", timeout=RUN_S).text)
    used = [value for name, value in held.items() if name.startswith("lamina_kv_slots_used{")]
    return held["lamina_requests_running"] == sum(used) == 0 and len(used) == 2


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_joins_to_the_whole_answer(server: Server, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"temperature": 0, "seed": 1, "n": 2, "max_tokens": 30, "logprobs": True if chat else 1}
    body |= {"messages": [{"role": "user", "content": PROMPT}], "top_logprobs": 1} if chat else {"prompt": PROMPT}
    whole = httpx.post(server.url + path, json=body, timeout=RUN_S).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    texts, reasons = ["", ""], [None, None]
    with httpx.stream("POST", server.url + path, json=body, timeout=RUN_S) as response:
        *chunks, last = events(response.iter_lines())
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["message"]["content"] if chat else choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert last["usage"] == whole["usage"] and last["usage"]["completion_tokens"] == 60
    for choice, text in zip(whole["choices"], texts, strict=True):
        found = choice["logprobs"]
        assert "".join(entry["token"] for entry in found["content"]) == text if chat else "".join(found["tokens"])


def test_frontends_select_the_best_completions_and_score_prompts(server: Server) -> None:
    asked = {"prompt": PROMPT, "seed": 3, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    every = ask(server, **asked, n=6, logprobs=0)["choices"]
    every.sort(key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True)  # all of 6 tokens
    best = ask(server, **asked, n=2, best_of=6)
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in every[:2]]
    (scored,) = ask(server, **asked, prompt_logprobs=0)["choices"]
    (plain,) = ask(server, **asked)["choices"]
    assert scored["token_ids"] == plain["token_ids"]
    first, *others = scored["prompt_logprobs"]
    assert first is None and [*map(int, (token for one in others for token in one))] == plain["prompt_token_ids"][1:]
    (free,) = ask(server, **asked, temperature=0)["choices"]
    (word,) = (
        httpx.post(f"{server.url}/detokenize", json={"tokens": free["token_ids"][:1]}, timeout=RUN_S).json().values()
    )
    (other,) = ask(server, **asked, temperature=0, bad_words=[word])["choices"]
    assert free["token_ids"][0] not in other["token_ids"]


def test_a_stop_string_cuts_what_the_engine_had_drawn_already(server: Server) -> None:
    text = ask(server, **GREEDY)["choices"][0]["text"]
    stop = text[20:27]  # over the bounds of tokens, most likely
    expected = text[: text.index(stop)]
    assert expected
    (stopped,) = ask(server, **GREEDY | {"max_tokens": 100, "stop": [stop]})["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (expected, "stop")
    answer = ask(server, **GREEDY | {"max_tokens": 100, "stop": [stop], "n": 3, "temperature": 1.0, "seed": 5})
    assert all(stop not in choice["text"] for choice in answer["choices"])
    with httpx.Client(timeout=RUN_S) as client, stream(client, server, **LONG | {"stop": [stop]}) as (found, _):
        *_, last = found
        assert last["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: idle(server))


def test_refusals_of_the_engine_reach_clients(server: Server) -> None:
    def refused(**body: Any) -> str:
        response = httpx.post(f"{server.url}/v1/completions", json=GREEDY | body, timeout=RUN_S)
        assert response.status_code == 400
        return str(response.json()["error"]["message"])

    assert "outside the vocabulary of 2048 tokens" in refused(prompt=[2**70])
    assert "at most 1023" in refused(prompt=[[5], [5] * 1024])
    assert "the prompt has 900 tokens, which leave room for 124" in refused(prompt=[[5] * 900], max_tokens=125)
    wait_until(lambda: idle(server))


def test_a_client_that_leaves_frees_its_kv(server: Server) -> None:
    with httpx.Client(timeout=RUN_S) as client, stream(client, server, **ENDLESS):
        assert not idle(server)
    wait_until(lambda: idle(server))


def test_a_killed_frontend_takes_its_own_requests_with_it_and_no_others(server: Server) -> None:
    """Its connections break, the KV of its requests is freed; others go on, and another frontend takes its place."""
    expected = ask(server, **LONG | {"stream": False})["choices"][0]["text"]
    counted = values(httpx.get(f"{server.url}/metrics").text)["lamina_generated_tokens_total"]
    before = {one.pid for one in frontends(server)}
    assert len(before) == 2
    with httpx.Client(timeout=RUN_S) as first, stream(first, server, **ENDLESS) as (broken, port):
        victim = owner(server, port)
        for _ in range(200):  # until a connection goes to the other frontend
            other = httpx.Client(timeout=RUN_S)
            with other, stream(other, server, **LONG) as (events_, other_port):
                if owner(server, other_port) != victim:
                    victim.kill()
                    chunks = list(events_)
                    break
        else:
            pytest.fail("one frontend takes all connections")
        with pytest.raises(httpx.RemoteProtocolError):
            list(broken)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert expected.endswith(text) and chunks[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: idle(server))
    wait_until(lambda: len({one.pid for one in frontends(server)} - before) == 1)
    for _ in range(4):  # whichever answers: what the killed one had counted is still counted
        with httpx.Client() as client:
            assert values(client.get(f"{server.url}/metrics").text)["lamina_generated_tokens_total"] > counted
    assert server.process.stderr is not None
    said = next(line for line in server.process.stderr if "still starting" not in line)
    assert "its process was ended by signal 9 (process " in said and "; its requests are cancelled" in said


def engine_of(server: Server) -> psutil.Process:
    (engine,) = [one for one in server.workers() if "lamina.serve.engine_process" in one.cmdline()]
    return engine


def workers_of(server: Server) -> dict[int, str]:
    modules = {"lamina.compute", "lamina.memory.worker"}
    return {one.pid: one.cmdline()[-1] for one in server.workers() if modules.intersection(one.cmdline())}


@pytest.mark.parametrize(
    "also", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in ("lamina.memory.worker", "lamina.compute"))]
)
def test_clients_notice_an_engine_that_is_killed_as_a_pause(server: Server, also: str) -> None:
    """Also if a worker dies with it. The others keep what they have loaded, unless it was the last compute worker."""
    one_long = LONG | {"max_tokens": 100}
    many = one_long | {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 0, "frequency_penalty": 0.3}
    expected = [ask(server, **body | {"stream": False})["choices"] for body in (one_long, many)]
    before, old = workers_of(server), engine_of(server)
    with httpx.Client(timeout=RUN_S) as one, httpx.Client(timeout=RUN_S) as other, contextlib.ExitStack() as streams:
        firsts = [
            streams.enter_context(_texts(client, server, body)) for client, body in ((one, one_long), (other, many))
        ]
        for texts, found in firsts:
            while len(texts[0]) < 40:
                _add(texts, next(found))
        old.kill()
        victims = [pid for pid, module in before.items() if module == also][:1]
        for pid in victims:
            psutil.Process(pid).kill()
        waiting = httpx.post(f"{server.url}/v1/completions", json=GREEDY, timeout=RUN_S)  # while there is no engine
        for texts, found in firsts:
            for event in found:
                _add(texts, event)
    assert waiting.status_code == 200
    for (texts, _), choices in zip(firsts, expected, strict=True):
        assert texts == [choice["text"] for choice in choices]
    assert engine_of(server).pid != old.pid
    kept = set() if also == "lamina.compute" else before.keys() - victims
    wait_until(lambda: sorted(workers_of(server).values()) == sorted(before.values()))
    assert kept <= workers_of(server).keys()
    wait_until(lambda: idle(server))


@pytest.mark.slow
def test_local_memory_outlives_an_engine_and_then_its_compute_worker() -> None:
    """What starts the next compute worker is an engine that has taken over: it must know that the worker holds KV."""
    running = start("--frontends", "1", "--memory", "local", "--dtype", "float32")
    children = running.workers()
    try:
        expected = ask(running, **GREEDY)["choices"]
        old = engine_of(running)
        old.kill()
        assert ask(running, **GREEDY)["choices"] == expected
        (worker,) = workers_of(running)
        psutil.Process(worker).kill()
        assert ask(running, **GREEDY)["choices"] == expected
        assert engine_of(running).pid != old.pid and workers_of(running).keys() != {worker}
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(children, END_S)[1] == []


@pytest.mark.slow
def test_an_engine_of_another_release_starts_its_own_workers_and_requests_go_on(tmp_path: Path) -> None:
    """As if Lamina were upgraded while it serves. What engine and workers say to each other may have changed."""
    upgraded = tmp_path / "upgraded"
    (tmp_path / "sitecustomize.py").write_text(UPGRADE.format(str(upgraded)))
    running = start("--frontends", "1", "--dtype", "float32", PYTHONPATH=str(tmp_path))
    children = running.workers()
    try:
        body = LONG | {"max_tokens": 100}
        expected = ask(running, **body | {"stream": False})["choices"][0]["text"]
        before = workers_of(running).keys()
        with httpx.Client(timeout=RUN_S) as client, _texts(client, running, body) as (texts, found):
            _add(texts, next(found))
            upgraded.touch()
            engine_of(running).kill()
            for event in found:
                _add(texts, event)
        assert texts == [expected]
        assert workers_of(running).keys().isdisjoint(before)
        assert running.process.stderr is not None
        said = next(line for line in running.process.stderr if "could not take over" in line)
        assert f"runs lamina {__version__}, the engine 9.9.9; install the same release" in said
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(children, END_S)[1] == []


@contextmanager
def _texts(
    client: httpx.Client, server: Server, body: dict[str, Any]
) -> Iterator[tuple[list[str], Iterator[dict[str, Any]]]]:
    """The texts so far of an open stream, and its other events."""
    texts = [""] * body.get("n", 1)
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        yield texts, events(response.iter_lines())


def _add(texts: list[str], event: dict[str, Any]) -> None:
    assert "error" not in event, event
    for choice in event["choices"]:
        texts[choice["index"]] += choice["text"]


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_replaced(server: Server) -> None:
    old = engine_of(server)
    old.suspend()
    assert ask(server, **GREEDY)["choices"][0]["finish_reason"] == "length"
    assert not old.is_running() and engine_of(server).pid != old.pid


@pytest.mark.slow
def test_a_frontend_that_is_stopped_is_replaced(server: Server) -> None:
    victim, *_ = frontends(server)
    victim.suspend()
    assert psutil.wait_procs([victim], END_S + 15)[1] == []
    wait_until(lambda: len(frontends(server)) == 2)


@pytest.mark.slow  # test_launch_ends.py kills a worker
def test_clients_of_an_engine_that_is_killed_are_told() -> None:
    running = start("--frontends", "1")
    children = running.workers()
    (frontend,) = frontends(running)
    folder = Path(frontend.environ()["PROMETHEUS_MULTIPROC_DIR"]).parent
    with httpx.Client(timeout=RUN_S) as client, stream(client, running, **LONG) as (found, _):
        running.process.kill()
        *_, last = found
    assert "the engine has stopped: its process has ended" in last["error"]["message"]
    assert psutil.wait_procs(children, END_S)[1] == []
    assert not folder.exists()
