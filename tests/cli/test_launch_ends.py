"""`lamina launch` ends: by signals, by workers that die or are stopped, and nothing is left."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time

import httpx
import psutil
import pytest

from lamina.control.liveness import LOST_S
from tests.support.commands import LAMINA, RUN_S, Server, assert_refused, run, start
from tests.support.waiting import END_S


def ask_for_long_answers(running: Server, completions: int = 8) -> tuple[list[threading.Thread], list[httpx.Response]]:
    """Four clients with open answers, two of them streams; and their answers once those have ended."""
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        body = {"prompt": "def", "max_tokens": 1000, "n": completions, "stream": stream, "ignore_eos": True}
        answers.append(httpx.post(f"{running.url}/v1/completions", json=body, timeout=2 * RUN_S))

    clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, False, True, True)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + RUN_S
    while httpx.get(f"{running.url}/health", timeout=RUN_S).json()["running"] < len(clients):
        assert time.monotonic() < deadline
    return clients, answers


def assert_told(clients: list[threading.Thread], answers: list[httpx.Response], why: str) -> None:
    for client in clients:
        client.join(END_S)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
    for answer in answers:
        events = answer.text.strip().split("\n\n")
        if answer.status_code == 200:
            assert events.pop() == "data: [DONE]"
        assert why in json.loads(events[-1].removeprefix("data: "))["error"]["message"]


def test_a_second_ctrl_c_ends_everything_at_once_and_clients_are_told() -> None:
    running = start()
    workers = running.workers()
    assert len(workers) == 3, "engine, compute worker and frontend"
    clients, answers = ask_for_long_answers(running)
    assert running.process.stderr is not None
    running.process.send_signal(signal.SIGINT)
    said = next(line for line in running.process.stderr if "still starting" not in line)  # on a busy machine
    assert "press Ctrl-C again to end them now" in said
    running.process.send_signal(signal.SIGINT)
    assert_told(clients, answers, "the engine was closed")
    assert running.process.wait(END_S) == 130
    (said,) = running.process.stderr.read().splitlines()
    assert said.endswith("ending 4 open answers with an error")
    assert psutil.wait_procs(workers, END_S)[1] == []


@pytest.mark.parametrize("frontends", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_server_whose_log_nobody_reads_serves_and_stops(frontends: str) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"f" * 4096)
    running = start("--frontends", frontends, stderr=writing, LAMINA_LOG_LEVEL="DEBUG")
    workers = running.workers()
    with httpx.Client(base_url=running.url, timeout=END_S) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "def", "max_tokens": 2}).status_code == 200
            assert client.get("/health").json()["status"] == "ok"
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(workers, END_S)[1] == []
    for descriptor in (reading, writing):
        os.close(descriptor)


@pytest.mark.parametrize("frontends", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_server_whose_worker_died_tells_its_clients_and_ends(frontends: str) -> None:
    running = start("--max-restarts", "0", "--frontends", frontends)
    workers = running.workers()
    clients, answers = ask_for_long_answers(running)
    assert run("status", "--url", running.url).returncode == 0
    next(worker for worker in workers if "lamina.compute" in " ".join(worker.cmdline())).kill()
    assert_told(clients, answers, "worker compute0 is gone: its process was ended by signal 9")
    assert running.process.wait(END_S) == 1
    assert running.process.stderr is not None
    said = running.process.stderr.read()
    *progress, error = said.splitlines()  # a busy machine says that workers are still starting
    assert error.startswith("error: the engine has stopped: worker compute0 is gone"), said
    assert all(line.startswith("after ") for line in progress), said
    assert psutil.wait_procs(workers, END_S)[1] == []
    assert_refused(run("status", "--url", running.url), f"no server answers at {running.url}/metrics", status=1)


@pytest.mark.slow
def test_a_server_whose_worker_is_stopped_names_it_and_then_ends() -> None:
    running = start("--max-restarts", "0")
    workers = running.workers()
    clients, answers = ask_for_long_answers(running)
    next(worker for worker in workers if "lamina.compute" in " ".join(worker.cmdline())).suspend()
    stopped = time.monotonic()
    while (health := httpx.get(f"{running.url}/health", timeout=RUN_S)).status_code == 200:
        assert time.monotonic() < stopped + 5.0
    assert health.status_code == 503 and health.json()["status"] == "degraded"
    assert set(health.json()["silent_s"]) == {"compute0"}
    done = run("status", "--url", running.url)
    assert done.returncode == 1 and "worker compute0 has not answered" in done.stderr
    assert_told(clients, answers, "worker compute0 has not answered for 13 s")
    assert time.monotonic() < stopped + 15.0
    assert running.process.wait(END_S) == 1
    assert psutil.wait_procs(workers, END_S)[1] == []


@pytest.mark.slow
def test_an_engine_that_was_stopped_itself_goes_on() -> None:
    running = start()
    server = psutil.Process(running.process.pid)
    clients, answers = ask_for_long_answers(running, completions=1)
    server.suspend()
    time.sleep(LOST_S + 5.0)
    server.resume()
    for client in clients:
        client.join(2 * RUN_S)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert not any('"error":' in answer.text for answer in answers)  # the model may write "error" itself
    assert httpx.get(f"{running.url}/health").status_code == 200
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_S) == 0


@pytest.mark.parametrize(
    ("command", "sent", "status"),
    [
        (("launch", "--port", "0"), signal.SIGINT, 130),
        pytest.param(("launch", "--port", "0"), signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(("generate", "x"), signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_loading_leaves_nothing(command: tuple[str, ...], sent: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [*LAMINA, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + RUN_S
    children = 3 if command[0] == "launch" else 1
    while len(workers := parent.children()) != children or any(worker.cpu_times().user < 0.05 for worker in workers):
        assert time.monotonic() < deadline and process.poll() is None, f"{len(workers)} workers, {process.poll()}"
        time.sleep(0.001)
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # as Ctrl-C does: to every process of the terminal's foreground
    else:
        process.send_signal(sent)
    _, said = process.communicate(timeout=END_S)
    assert (process.returncode, said) == (status, b"")
    assert psutil.wait_procs(workers, END_S)[1] == []


def test_a_signal_while_it_waits_for_another_machine_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    command = [*LAMINA, "launch", "--port", "0", "--listen", where, "--memory", "remote:1"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"LAMINA_SECRET": "5a" * 32}
    )
    deadline = time.monotonic() + RUN_S
    while len(workers := psutil.Process(process.pid).children()) != 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 130 and b"Traceback" not in said, said
    assert psutil.wait_procs(workers, END_S)[1] == []


def test_the_port_is_free_again_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert_refused(run("launch", "--port", str(port), "--memory", "a100"), "a100:1 asks for 1 GPU")
    socket.create_server(("127.0.0.1", port)).close()


def test_an_engine_that_is_killed_while_it_loads_is_named() -> None:
    command = [*LAMINA, "launch", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, engines = time.monotonic() + RUN_S, list[psutil.Process]()
    while not engines:
        assert time.monotonic() < deadline
        engines = [
            one for one in psutil.Process(process.pid).children() if "lamina.serve.engine_process" in one.cmdline()
        ]
    engines[0].kill()
    said = process.communicate(timeout=END_S)[1]
    assert process.returncode == 1
    assert f"error: the engine could not start: its process was ended by signal 9 (process {engines[0].pid};" in said
