"""Shared memory: identity of processes and arenas, wake-ups, signals, and nothing left behind."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from lamina.core.errors import PeerLostError, TransportError
from lamina.transport.shm import ShmDescriptor, ShmEndpoint
from tests.support.running import named_memory
from tests.transport.conftest import FarProcess, files_left

ROOT = Path(__file__).parents[2]


@pytest.fixture
def endpoint() -> Iterator[ShmEndpoint]:
    opened = ShmEndpoint("near")
    opened.register(4096, 2)
    yield opened
    opened.close()


def altered(endpoint: ShmEndpoint, **changes: int) -> bytes:
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=ShmDescriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_time": 1}, "now belongs to another process"),
        ({"pid": 2**22 + 1}, "not visible here"),  # above the largest possible id
        ({"fd": 100_000}, "exited or closed"),
        ({"fd": 0}, "exited or closed"),
        ({"identity": 1}, "exited or closed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_stale_descriptor_is_a_lost_peer(endpoint: ShmEndpoint, changes: dict[str, int], message: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerLostError, match=message):
        endpoint.connect(altered(endpoint, **changes), 1.0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("files", [0, 1])
def test_want_of_files_is_no_lost_peer(endpoint: ShmEndpoint, files: int) -> None:
    descriptor = endpoint.descriptor()
    with files_left(files), pytest.raises(TransportError, match="Too many open files") as failed:
        endpoint.connect(descriptor, 1.0)
    assert not isinstance(failed.value, PeerLostError)


def test_another_protocol_is_refused(endpoint: ShmEndpoint) -> None:
    with pytest.raises(TransportError, match=r"version 99 .* this process 1; run the same release"):
        endpoint.connect(altered(endpoint, protocol=99), 1.0)


def test_an_arena_cannot_be_shrunk(endpoint: ShmEndpoint) -> None:
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=ShmDescriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(where.fd, 0)


def test_more_memory_than_there_is_is_refused(endpoint: ShmEndpoint) -> None:
    fresh = ShmEndpoint("fresh")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=f"cannot map an arena of {2**60} bytes for fresh"):
        fresh.register(2**60, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_signal_handler_that_raises_ends_a_wait(endpoint: ShmEndpoint) -> None:
    """Like Ctrl-C."""

    class InterruptError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptError):
            endpoint.wait([(0, 1)], 60.0)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_killed_process_leaves_no_file() -> None:
    far = FarProcess.start()
    far.call("open", "shm", 1 << 20, 1)
    process = psutil.Process(far.process.pid)
    assert any("/memfd:" in one.path for one in process.memory_maps()), "it maps no arena"
    assert not named_memory(process)
    far.die()
    far.close()


def test_a_large_copy_arrives_whole(endpoint: ShmEndpoint) -> None:
    far = ShmEndpoint("far")
    arena = far.register(1 << 22, 1)
    data = os.urandom(1 << 22)
    endpoint.write(endpoint.connect(far.descriptor(), 1.0), 0, data)
    assert bytes(arena.view(0, 1 << 22)) == data
    far.close()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_no_wake_is_lost(tmp_path: Path) -> None:
    """Two processes. Each sleep may take ten seconds, so that a single lost wake-up is noticed."""
    program = tmp_path / "doorbell_stress"
    native = [ROOT / "native/transport" / name for name in ("arena.cpp", "doorbell.cpp", "shm.cpp")]
    sources = [ROOT / "tests/transport/doorbell_stress.cpp", *native]
    subprocess.run(["c++", "-std=c++20", "-O2", f"-I{ROOT}/native/include", *sources, "-o", program], check=True)
    finished = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout
