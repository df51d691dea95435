"""The `lamina` command as people run it: processes, pipes, signals and exit statuses."""

import asyncio
import dataclasses
import errno
import io
import ipaddress
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from lamina.cli import doctor_network
from lamina.cli.console import output, print_text
from lamina.cli.doctor import _cpu, examine
from lamina.cli.findings import Status
from lamina.cli.generate import _standard_input
from lamina.errors import RequestError
from lamina.protocol.liveness import LOST_S
from lamina.transport.rdma.devices import Gid, Port

LAMINA = [sys.executable, "-m", "lamina"]
RUN_S = 120.0
END_S = 20.0


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAMINA, *arguments], input=stdin, capture_output=True, text=True, timeout=RUN_S, check=False
    )


def assert_refused(done: subprocess.CompletedProcess[str], said: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert done.stdout == ""


# -- generate, chat ------------------------------------------------------------------------------------------------


def test_generate_prints_texts_speed_and_where_the_kv_lived() -> None:
    prompts = ["def fibonacci(n):", "import os", "class [bold]Stack:"]
    done = run("generate", "--compute", "cpu:1", "--memory", "cpu:2", "--max-tokens", "8", *prompts)
    assert done.returncode == 0, done.stderr
    assert all(prompt in done.stderr for prompt in prompts)
    assert re.search(r"\d+\.\d tokens/s: \d+ tokens drawn after \d+ prompt tokens in \d+\.\d\d s", done.stderr)
    assert re.search(r"seed (\d+); --seed \1 draws the same", done.stderr)
    rows = re.findall(r"(\d) +│ (memory\d) +│ 0 to 1 +│ 0 to \d+ +│ +[\d.]+ KiB", done.stderr)
    assert [request for request, _ in rows] == ["0", "1", "2"]
    assert {worker for _, worker in rows} == {"memory0", "memory1"}
    assert done.stdout.count("\n") >= 3 and not re.search("prompt|tokens/s|request|memory0|─", done.stdout)
    assert "warn" not in done.stderr.lower() and "torch" not in done.stderr


def test_bench_says_where_the_time_went_and_writes_a_timeline(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    done = run("bench", "--batch", "3", "--context", "9", "--tokens", "24", "--lanes", "2", "--trace", str(place))
    assert done.returncode == 0, done.stderr
    for stage in (r"compute0 +│ slice", r"compute0 +│ send", r"compute0 +│ receive", r"memory0 +│ attention"):
        assert re.search(stage + r" +│ +\d+\.\d{3} │ +\d+%", done.stdout)
    assert re.search(r"\d+\.\d tokens/s\. (The bottleneck is|No stage is the bottleneck: \w+ spends) ", done.stdout)
    assert re.search(r"From a lane's draw to its next slice: \d+ us", done.stdout)
    events = json.loads(place.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event.get("name") == "slice"} == {1, 2}  # both lanes


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--lanes", "many"), "give auto or a number"),
        (("--compute", "cpu:2", "--lanes", "1"), "1 lanes cannot keep 2 replicas busy"),
        (("--lanes", "3", "--pipelining", "rotational"), "runs 2 lanes on 1 replicas, not 3"),
        (("--compute-cores", "0-x"), "give numbers and ranges"),
        (("--memory-cores", "999"), "names [999]"),
        (("--mini-batches", "16"), "give 1 to 15"),
        (("--trace", "/nowhere/t.json"), "folder that does not exist"),
        (("--trace", "/"), "cannot be written"),
    ],
)
def test_impossible_pipelines_are_refused_before_anything_starts(option: tuple[str, ...], said: str) -> None:
    assert_refused(run("bench", *option), said)


def test_a_prompt_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\nimport sys\n"))
    assert _standard_input() == "import os\nimport sys"
    monkeypatch.setattr("sys.stdin", None)  # closed, as by a service manager
    with pytest.raises(RequestError, match="no prompt"):
        _standard_input()


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output.cache_clear()  # made anew, for what pytest captures
    text = "if x:\n\treturn [bold]y[/] :smile: " + "z " * 80 + "\r\n"
    print_text(text, "bold")
    assert capsys.readouterr().out == text


def test_chat_answers_each_line_of_a_pipe() -> None:
    done = run(
        "chat", "--max-tokens", "4", "--temperature", "0", stdin="sort a list\n\nreverse it\n/clear\n/exit\nno\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) >= 4 and "error" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "no prompt. Give one"),
        (("generate", ""), "empty"),
        (("generate", "x", "--memory", "rtx3090:6"), "rtx3090:6 asks for 6 GPUs; this machine has"),
        (("generate", "x", "--compute", "toaster"), "no known kind"),
        (("generate", "x", "--memory", "cpu:0"), "give a whole number from 1"),
        (("generate", "x", "--temperature", "nan"), "temperature is nan; give a number from 0.0"),
        (("generate", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "x", "--model", "/nowhere/model"), "/nowhere/model"),
        (("chat", "--model", "/nowhere/model"), "/nowhere/model"),
        (("launch", "--host", "not an address"), "no address to listen on"),
        (("launch", "--port", "0", "--compute", "a100:2"), "a100:2 asks for 2 GPUs"),
        (("split", "--output", "/nowhere/cut.svg"), "folder that does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(arguments: tuple[str, ...], said: str) -> None:
    assert_refused(run(*arguments), said)


def test_a_log_level_that_does_not_exist_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_LOG_LEVEL", "verbose")
    assert_refused(run("split"), "LAMINA_LOG_LEVEL is 'VERBOSE'; give DEBUG")


def test_a_text_file_is_no_model(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("hello")
    assert_refused(run("generate", "x", "--model", str(text)), str(text))


def test_version_and_help_do_not_wait_for_torch() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, "lamina 0.1.0\n")
    code = "import sys, lamina.cli; sys.exit('torch' in sys.modules or 'lamina.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    shown = run("--help").stdout
    for command in ("generate", "chat", "launch", "split", "plan", "bench", "doctor"):
        assert f" {command} " in shown


# -- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_reports_and_exits_by_what_it_found() -> None:
    done = run("doctor")
    problems = [finding for finding in examine() if finding.status is Status.PROBLEM]
    assert done.returncode == (1 if problems else 0)
    for subject in ("Python", "native module", "CPU", "RAM", "kernel", "GPUs", "RDMA", "transport", "bundled model"):
        assert subject in done.stdout


def test_every_finding_that_is_not_well_has_a_remedy() -> None:
    findings = [*examine(), *(_cpu(frozenset(flags)) for flags in ((), ("avx2",), ("avx2", "avx512_bf16")))]
    assert all(bool(finding.remedy) == (finding.status is not Status.OK) for finding in findings)


def test_doctor_tries_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    shm, tcp, chosen = doctor_network.transports(has_rdma=False)
    assert (shm.status, tcp.status) == (Status.OK, Status.OK)
    assert chosen.found == "shm on this host; tcp to other hosts, if both sides prove it"

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.pidfd_open", refuse)
    findings = list(doctor_network.transports(has_rdma=True))
    assert findings[0].status is Status.PROBLEM and "not permitted" in findings[0].found and findings[0].remedy
    assert "no usable RDMA port" in findings[1].found and findings[1].status is Status.NOTE
    assert "tcp to other hosts" in findings[-1].found

    def unreachable(*_: object, **__: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr(doctor_network, "TRY_S", 0.1)
    _, tcp, _ = doctor_network.transports(has_rdma=False)
    assert tcp.status is Status.PROBLEM and "unreachable" in tcp.found and "ip link set lo up" in tcp.remedy


def test_doctor_says_what_rdma_lacks() -> None:
    address = Gid(1, "RoCE v2", ipaddress.IPv6Address("::ffff:192.0.2.1"))
    port = Port("mlx5_0", 1, True, "Ethernet", 100.0, -1, 0, (address,))
    good = doctor_network.rdma([port], frozenset({"ib_uverbs"}))
    assert good.status is Status.OK and "would use mlx5_0:1 with RoCE v2 address 192.0.2.1 (GID 1)" in good.found
    assert "modprobe ib_uverbs" in doctor_network.rdma([port], frozenset({"mlx5_ib"})).remedy
    down = doctor_network.rdma([dataclasses.replace(port, active=False)], frozenset({"ib_uverbs"}))
    assert down.status is Status.NOTE and "bring a port up" in down.remedy
    modules = doctor_network.rdma_modules(frozenset({"mlx5_ib", "ib_uverbs", "rdma_rxe", "ext4", "bnxt_re"}))
    assert modules.found == "bnxt_re, ib_uverbs, mlx5_ib, rdma_rxe"
    assert doctor_network.locked_memory(-1).status is Status.OK
    little = doctor_network.locked_memory(8 << 20)
    assert little.found == "at most 8 MiB" and "ulimit -l unlimited" in little.remedy


def test_doctor_says_whether_rdma_reaches_gpus_and_why_not() -> None:
    both = doctor_network.peer_memory({"cuda:0": ""}, "mlx5_0", "", frozenset({"nvidia_peermem"}))
    assert both.status is Status.OK
    assert both.found == (
        "mlx5_0 registers dma-bufs; cuda:0 exports them; module nvidia_peermem is loaded, and not needed"
    )
    for exports, refusal in (
        ({"cuda:0": "too old"}, ""),
        ({"cuda:0": ""}, "too old"),
        ({"cuda:0": "", "cuda:1": "too old"}, ""),
    ):
        one = doctor_network.peer_memory(exports, "mlx5_0", refusal, frozenset())
        assert one.status is Status.NOTE and "too old" in one.found and "by way of the host" in one.remedy
    assert doctor_network.peer_memory({}, "rxe0", "it cannot", frozenset()).found == (
        "rxe0 registers no dma-buf: it cannot; no GPU here"
    )


# -- launch --------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def start(*arguments: str) -> Server:
    command = [*LAMINA, "launch", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://127\.0\.0\.1:\d+", line)
    if match is None:
        pytest.fail(f"{line!r}, then {process.communicate(timeout=RUN_S)}")
    return Server(process, match[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start("--compute", "cpu:1", "--memory", "cpu:2")
    workers = running.workers()
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_S) == 0
    assert psutil.wait_procs(workers, END_S)[1] == []
    assert running.process.stderr is not None
    assert [line for line in running.process.stderr if "still starting" not in line] == []


def test_doctor_says_what_encryption_lacks() -> None:
    assert doctor_network.encryption("").remedy == ""
    lacking = doctor_network.encryption("OpenSSL 3 cannot be opened (no such file): install it (Debian: ...)")
    assert (lacking.found, lacking.remedy) == (
        "tcp cannot be encrypted: OpenSSL 3 cannot be opened (no such file)",
        "install it (Debian: ...)",
    )


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
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=RUN_S) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: lamina\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
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


def ask_for_long_answers(running: Server, completions: int = 8) -> tuple[list[threading.Thread], list[httpx.Response]]:
    """Four clients, two of them of streams, that are being answered; and their answers, once those have ended."""
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
    assert len(workers) == 2
    clients, answers = ask_for_long_answers(running)
    assert running.process.stderr is not None
    running.process.send_signal(signal.SIGINT)
    assert "another Ctrl-C ends them now" in running.process.stderr.readline()
    running.process.send_signal(signal.SIGINT)
    assert_told(clients, answers, "the engine was closed")
    assert running.process.wait(END_S) == 130
    (said,) = running.process.stderr.read().splitlines()
    assert said.endswith("4 answers are ended with an error")
    assert psutil.wait_procs(workers, END_S)[1] == []


def test_a_server_whose_worker_died_tells_its_clients_and_ends() -> None:
    running = start()
    workers = running.workers()
    clients, answers = ask_for_long_answers(running)
    assert run("status", "--url", running.url).returncode == 0
    next(worker for worker in workers if "lamina.memory" in " ".join(worker.cmdline())).kill()
    assert_told(clients, answers, "worker memory0 is gone: its process was ended by signal 9")
    assert running.process.wait(END_S) == 1
    assert running.process.stderr is not None
    (said,) = running.process.stderr.read().splitlines()
    assert said.startswith("error: the engine has stopped: worker memory0 is gone")
    assert psutil.wait_procs(workers, END_S)[1] == []
    assert_refused(run("status", "--url", running.url), f"no server answers at {running.url}/metrics", status=1)


@pytest.mark.slow
def test_a_server_whose_worker_is_stopped_names_it_and_then_ends() -> None:
    running = start()
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
    assert not any('"error"' in answer.text for answer in answers)
    assert httpx.get(f"{running.url}/health").status_code == 200
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(END_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [("generate", *["def"] * 100), ("chat",)], ids=["generate", "chat"])
def test_commands_whose_engine_dies_fail(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_LOG_LEVEL", "INFO")
    process = subprocess.Popen(
        [*LAMINA, *command, "--max-tokens", "900", "--max-num-seqs", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write("def\n" * 100)  # to chat: each line is asked
    process.stdin.flush()
    while "compute0 and memory0 are linked" not in (line := process.stderr.readline()):
        assert line, process.wait(END_S)
    time.sleep(2.0)  # requests run
    children = psutil.Process(process.pid).children()
    next(child for child in children if "lamina.memory.worker" in child.cmdline()).kill()
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert "error: the engine has stopped: worker memory0 is gone" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "sent", "status"),
    [
        (("launch", "--port", "0"), signal.SIGINT, 130),
        (("launch", "--port", "0"), signal.SIGTERM, 0),
        (("generate", "x"), signal.SIGTERM, 143),
    ],
)
def test_a_signal_while_loading_leaves_nothing(command: tuple[str, ...], sent: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [*LAMINA, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + RUN_S
    while len(workers := parent.children()) != 2 or any(worker.cpu_times().user < 0.05 for worker in workers):
        assert time.monotonic() < deadline and process.poll() is None, f"{len(workers)} workers, {process.poll()}"
        time.sleep(0.001)
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # as Ctrl-C does: to every process of the terminal's foreground
    else:
        process.send_signal(sent)
    _, said = process.communicate(timeout=END_S)
    assert (process.returncode, said) == (status, b"")
    assert psutil.wait_procs(workers, END_S)[1] == []


def test_the_port_is_free_again_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert_refused(run("launch", "--port", str(port), "--memory", "a100"), "a100:1 asks for 1 GPU")
    socket.create_server(("127.0.0.1", port)).close()


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
