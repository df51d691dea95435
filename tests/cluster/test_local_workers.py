"""Worker processes that exit before they have started, or are ended."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamina.cluster import local_workers
from lamina.cluster.local_workers import LocalWorkers, SupervisedWorkers, describe_exit, start_process
from lamina.control.agent_messages import Done, Start, receive_from_engine
from lamina.control.sockets import Bootstrap
from lamina.core.errors import ConfigError, TransportError
from lamina.core.topology import Role

MORE_THAN_A_PIPE_HOLDS = bytes(1 << 20)
CORES = frozenset(os.sched_getaffinity(0))


class Failing(LocalWorkers):
    def command(self, name: str, module: str) -> list[str]:
        return ["sh", "-c", "exit 7"]


def test_a_worker_that_ends_before_it_has_read_its_keys_is_reported_as_ended() -> None:
    workers = Failing()
    bootstrap = Bootstrap("memory0", "", b"", b"", b"", MORE_THAN_A_PIPE_HOLDS, os.getpid())
    workers.start(Start("memory", "cpu", bootstrap, CORES))
    deadline = time.monotonic() + 30
    while not workers.ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers.ended() == {
        "memory0": f"its process exited with status 7 (process {workers.processes['memory0'].pid})"
    }
    workers.close()


class Sleeping(LocalWorkers):
    def command(self, name: str, module: str) -> list[str]:
        return ["sleep", "600"]


def test_a_stopped_worker_can_be_ended_and_is_not_reported() -> None:
    workers = Sleeping()
    for name in ("memory0", "memory1"):
        bootstrap = Bootstrap(name, "", b"", b"", b"", b"", os.getpid())
        workers.start(Start("memory", "cpu", bootstrap, CORES))
    pids = {name: process.pid for name, process in workers.processes.items()}
    os.kill(pids["memory0"], signal.SIGSTOP)
    workers.kill_worker("memory0")
    assert not psutil.pid_exists(pids["memory0"]), "killed, and reaped"
    assert workers.ended() == {} and psutil.pid_exists(pids["memory1"])
    workers.kill()
    assert not psutil.pid_exists(pids["memory1"])


class Waiting(LocalWorkers):
    def command(self, name: str, module: str) -> list[str]:
        return ["sleep", "60"]


def test_a_worker_is_replaced_on_the_gpu_of_the_one_that_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:2,a100:1")
    workers = Waiting()
    try:
        for index, device in enumerate(("emulated:0", "emulated:1", "emulated:2")):
            bootstrap = Bootstrap(f"memory{index}", "", b"", b"", b"", b"", os.getpid(), device)
            workers.start(Start("memory", "cuda", bootstrap, CORES))
        workers.kill_worker("memory1")
        workers.start(Start("memory", "rtx3090", Bootstrap("memory3", "", b"", b"", b"", b"", os.getpid())))
        assert workers.devices["memory3"] == "emulated:1"
        with pytest.raises(ConfigError, match="h20:1 asks for 1 GPU"):
            workers.start(Start("memory", "h20", Bootstrap("memory4", "", b"", b"", b"", b"", os.getpid())))
    finally:
        workers.kill()


@pytest.mark.parametrize("mps", [False, True])
def test_a_memory_worker_on_a_gpu_that_computes_knows_it(
    mps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And who started it, whether they take turns; if not, it gets a part of the GPU."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    if mps:
        (tmp_path / "control").touch()
    started: list[Bootstrap] = []

    class Printing(LocalWorkers):
        def command(self, name: str, module: str) -> list[str]:
            return ["sh", "-c", f'echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" > {tmp_path}/{name}']

    def start(command: list[str], bootstrap: Bootstrap, *others: Any) -> subprocess.Popen[bytes]:
        started.append(bootstrap)
        return start_process(command, bootstrap, *others)

    monkeypatch.setattr(local_workers, "start_process", start)
    workers = Printing()
    placed: list[tuple[str, Role, str]] = [
        ("compute0", "compute", "cuda:0"),
        ("compute1", "compute", "cpu"),
        ("memory0", "memory", "cuda:0"),
        ("memory1", "memory", "cuda:1"),
        ("memory2", "memory", "cpu"),
        ("memory3", "memory", "cuda:0"),
    ]
    try:
        for name, role, device in placed:
            workers.start(Start(role, device, Bootstrap(name, "", b"", b"", b"", b"", 0, device), CORES))
    finally:
        workers.close()
    assert [one.name for one in started if one.shares_gpu] == ["memory0", "memory3"]
    limited = [one.name for one in started if (tmp_path / one.name).read_text() == "60\n"]
    assert limited == (["memory0", "memory3"] if mps else [])
    assert all((tmp_path / one.name).read_text() == "\n" for one in started if one.name not in limited)
    assert caplog.text.count("nvidia-cuda-mps-control") == (0 if mps else 1)


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("exit 7", "its process exited with status 7 (process {})"),
        ("kill -TERM $$", "its process was ended by signal 15 (process {})"),
        (
            "kill -KILL $$",
            "its process was ended by signal 9 (process {}; the kernel does so when memory runs out: see dmesg)",
        ),
    ],
)
def test_the_end_of_a_process_names_it_and_the_usual_cause(command: str, how: str) -> None:
    process = subprocess.Popen(["sh", "-c", command])
    process.wait(30)
    assert describe_exit(process) == how.format(process.pid)


def test_a_late_answer_of_the_supervisor_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts as ended only once the supervisor has ended it: until then, it may write to its peers."""
    line, supervisor = multiprocessing.Pipe()
    workers = SupervisedWorkers(line, ["memory0", "memory1"], {})
    monkeypatch.setattr(local_workers, "ANSWER_S", 0.0)
    with pytest.raises(TransportError, match="has not answered"):
        workers.kill_worker("memory0")
    workers.on_supervisor_message(Done())  # to the first message
    with pytest.raises(TransportError, match="has not answered"):
        workers.kill_worker("memory1")
    assert workers.processes == {"memory0", "memory1"}
    workers.on_supervisor_message(Done("memory1 does not end"))
    workers.on_supervisor_message(Done())
    workers.kill_worker("memory0")
    assert workers.processes == {"memory1"}
    assert [receive_from_engine(supervisor) for _ in range(3)]
    line.close()
    supervisor.close()
