"""deploy/ray/lamina_serve.py: two engines behind one address by Ray Serve, on a Ray cluster of this machine."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support import ray_cluster
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "deploy" / "ray"
PATIENCE_S = 180.0
ENGINE = "x-lamina-engine"
SYSTEM = "You complete functions of a library that sorts, searches and parses. "


@pytest.fixture(scope="module")
def served() -> Iterator[httpx.Client]:
    """A client of two engines, whose workers Ray places."""
    serve = pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install "ray[serve]"')
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(APP), str(APP.parents[1])]))
        patch.syspath_prepend(str(APP))
        cluster = ray_cluster.started(num_cpus=8)
        ray.init(cluster.address, log_to_driver=False)
        try:
            import lamina_serve  # type: ignore[import-not-found]

            serve.start(http_options={"host": "127.0.0.1", "port": port})
            settings = {"ray": "auto", "compute": "cpu:1", "memory": "cpu:1", "max_model_len": "1024"}
            serve.run(lamina_serve.app({"engines": "2", "cpus": "0.5", **settings}))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                yield client
            workers = worker_processes()
            serve.shutdown()
            assert workers and not psutil.wait_procs(workers, PATIENCE_S)[1], "a worker is left behind"
        finally:
            ray.shutdown()
            cluster.shutdown()


def worker_processes(module: str = "lamina.") -> list[psutil.Process]:
    """Worker processes of this cluster: descendants of this process, through raylets and actors."""
    return [one for one in psutil.Process().children(recursive=True) if module in command(one).partition(" -m ")[2]]


def command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


def ask(client: httpx.Client, prompt: str, **more: Any) -> httpx.Response:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer


def test_answers_are_those_of_a_server(served: httpx.Client) -> None:
    whole = ask(served, "def f(").json()
    assert whole["usage"]["completion_tokens"] == 8
    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, "stream": True}
    with served.stream("POST", "/v1/completions", json=body) as parts:
        events = [line.removeprefix("data: ") for line in parts.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    (model,) = served.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 1024
    for wrong, status, said in (
        ({"prompt": "x " * 2000}, 400, "1024"),
        ({"prompt": "x", "model": "another"}, 404, "does not exist"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ):
        refused = served.post("/v1/completions", json=wrong)
        assert refused.status_code == status and said in refused.json()["error"]["message"]
    assert served.get("/nothing").status_code == 404


def test_conversations_stay_with_their_engine_and_are_spread_over_both(served: httpx.Client) -> None:
    """Each conversation has four turns, all on one engine, whose prefix cache has the earlier turns."""

    def converse(number: int) -> tuple[set[str], int]:
        said, engines, cached = f"{number}: {SYSTEM * 8}", set(), 0
        for turn in range(4):
            answer = ask(served, said)
            engines.add(answer.headers[ENGINE])
            cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            said += answer.json()["choices"][0]["text"] + f" and {turn}"
        return engines, cached

    with ThreadPoolExecutor(3) as pool:  # with more at once, some would move to an idle engine
        each = list(pool.map(converse, range(8)))
    assert all(len(engines) == 1 for engines, _ in each), "a conversation has moved"
    assert len(set.union(*(engines for engines, _ in each))) == 2, "one engine has all conversations"
    assert all(cached > 0 for _, cached in each)


def test_an_engine_ends_the_request_of_a_client_that_leaves(served: httpx.Client) -> None:
    long = {"prompt": "def", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
    with served.stream("POST", "/v1/completions", json=long) as parts:
        engine = parts.headers[ENGINE]
        next(parts.iter_lines())

    def is_idle() -> bool:
        health = served.get("/health")
        return health.headers[ENGINE] == engine and health.json()["running"] == 0

    wait_until(is_idle, "the request goes on")
