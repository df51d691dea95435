"""The control plane lets in only the workers it issued keys to, under their own names."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from lamina.control import liveness, secret, sockets
from lamina.control.messages import Hello, LoadProgress, Stop, ToEngine
from lamina.control.sockets import ControlClient, ControlServer, decode
from lamina.core.errors import DeadlineError, TransportError, WorkerError


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer(["compute0", "memory0"])
    yield server
    server.close()


def received(server: ControlServer, turns: int = 10) -> list[tuple[str, ToEngine]]:
    return [item for _ in range(turns) for item in server.receive(0.1)]


def test_messages_travel_both_ways_in_order(server: ControlServer) -> None:
    client = ControlClient(server.bootstraps["compute0"])
    for done in range(50):
        client.send(LoadProgress("weights", done, 50))
    got = received(server)
    assert got == [("compute0", LoadProgress("weights", done, 50)) for done in range(50)]
    server.send(["compute0"], Stop())
    assert isinstance(client.receive(5.0), Stop)
    client.close()


def test_a_key_that_was_not_issued_is_refused(server: ControlServer) -> None:
    public, secret = zmq.curve_keypair()
    stranger = ControlClient(
        msgspec.structs.replace(server.bootstraps["compute0"], public_key=public, secret_key=secret)
    )
    stranger.send(Hello("here"))
    assert received(server) == []
    assert server.refused["KEY"] >= 1
    with pytest.raises(TransportError, match="worker compute0: Host unreachable"):
        server.send(["compute0"], Stop())
    stranger.close()


def test_a_worker_cannot_speak_under_another_workers_name(server: ControlServer) -> None:
    impostor = ControlClient(msgspec.structs.replace(server.bootstraps["memory0"], name="compute0"))
    impostor.send(Hello("here"))
    assert received(server) == []
    assert set(server.refused) == {"NAME"}
    impostor.close()


def test_a_key_of_another_cluster_is_refused_and_logged_once(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    public, private = secret.new().curve_keys("compute0")
    strangers = [
        ControlClient(msgspec.structs.replace(server.bootstraps["compute0"], public_key=public, secret_key=private))
        for _ in range(3)
    ]
    while server.refused["KEY"] < 2 * len(strangers):  # one connection for messages, one for heartbeats
        assert received(server, 1) == []
    assert len([record for record in caplog.records if "not belong to this cluster" in record.message]) == 1
    for stranger in strangers:
        with pytest.raises(TransportError, match=r"refused compute0's connection; start this worker with a key"):
            while True:  # until it has heard of the refusal
                stranger.send(Hello("here"))
                time.sleep(0.01)
    for stranger in strangers:
        stranger.close()


WORKER = """
import ctypes, sys
import msgspec
from lamina.control.sockets import Bootstrap, ControlClient
from lamina.control.messages import Hello
client = ControlClient(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Bootstrap))
client.send(Hello("here"))
holding = ctypes.PyDLL(None)  # its calls keep Python's lock
holding.sleep(3)
client.send(Hello("again"))
client.receive(60.0)
client.close()
"""


def test_a_worker_that_holds_pythons_lock_is_alive_and_a_stopped_one_is_not(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "PING_S", 0.1)
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.5)
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE)
    assert worker.stdin is not None
    with worker.stdin as stdin:
        stdin.write(msgspec.msgpack.encode(server.bootstraps["memory0"]))
    got: list[ToEngine] = []
    suspected: set[str] = set()

    def listen_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline and worker.poll() is None
            got.extend(message for _, message in server.receive(0.1))
            suspected.update(server.liveness.suspects())

    listen_until(lambda: bool(got))
    listen_until(lambda: len(got) == 2)
    assert not suspected, "it was busy in native code, holding the lock, for twice as long as a suspect is silent"
    time.sleep(2.0)  # the engine's own pause
    listen_until(lambda: True)
    got.extend(message for _, message in server.receive(0.1))
    assert not server.liveness.suspects()
    worker.send_signal(signal.SIGSTOP)
    listen_until(lambda: set(server.liveness.suspects()) == {"memory0"})
    worker.send_signal(signal.SIGCONT)
    listen_until(lambda: not server.liveness.suspects())
    server.send(["memory0"], Stop())
    assert worker.wait(30.0) == 0


def test_a_flood_leaves_the_engine_its_turns(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGES", 100)
    flooding, other = (ControlClient(server.bootstraps[name]) for name in ("compute0", "memory0"))
    for done in range(1000):
        flooding.send(LoadProgress("weights", done, 1000))
    time.sleep(0.5)
    other.send(Hello("here"))
    time.sleep(0.5)
    rounds = [list(server.receive(0.1)) for _ in range(20)]
    assert max(map(len, rounds)) <= 100
    assert "memory0" in {worker for worker, _ in rounds[0] + rounds[1]}, "others are heard between"
    numbers = [message.done for messages in rounds for _, message in messages if isinstance(message, LoadProgress)]
    assert numbers == list(range(1000))
    flooding.close()
    other.close()


def test_a_message_of_another_release_names_its_worker(server: ControlServer) -> None:
    client = ControlClient(server.bootstraps["memory0"])
    client._socket.send(msgspec.msgpack.encode({"type": "Hello", "host": 5}))
    with pytest.raises(WorkerError, match=r"worker memory0 failed: .*run the same release of lamina"):
        received(server)
    client.close()


@given(payload=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_name_their_worker(payload: bytes) -> None:
    try:
        assert isinstance(decode("memory0", payload), msgspec.Struct)
    except WorkerError as error:
        assert error.worker == "memory0"


def test_keys_never_show_in_the_repr(server: ControlServer) -> None:
    bootstrap = server.bootstraps["compute0"]
    assert bootstrap.secret_key.decode() not in repr(bootstrap)


@pytest.mark.timeout(60)
def test_one_that_cannot_listen_leaves_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        ControlServer(["compute0"], host="192.0.2.1")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_waits_end_at_their_deadline_or_when_woken(server: ControlServer) -> None:
    client = ControlClient(server.bootstraps["compute0"])
    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        client.receive(0.05)
    with pytest.raises(DeadlineError):
        client.receive(-1.0)  # a deadline that has passed, not a wait for ever
    assert client.poll() is None
    server.wake()
    assert list(server.receive(30.0)) == []  # returns at once, or the test's own deadline ends it
    client.close()
    server.close()
    server.wake()  # harmless after close


@pytest.mark.timeout(60)
def test_short_waits_do_not_last_for_whole_milliseconds(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ZeroMQ's own waits last for ten minutes, so that only the timer ends them before this test's deadline."""
    monkeypatch.setattr(sockets, "_milliseconds", lambda seconds: 600_000 if seconds > 0 else 0)
    for wait_s in (0.0001, 0.02):
        assert list(server.receive(wait_s)) == []
    server.wake()
    assert list(server.receive(0.05)) == []  # leaves the timer set
    client = ControlClient(server.bootstraps["compute0"])
    client.send(Hello("host"))
    assert list(server.receive(30.0)) == [("compute0", Hello("host"))], "the timer has not ended this wait"
    client.close()


def test_a_message_of_several_parts_is_refused_and_others_are_received(server: ControlServer) -> None:
    client = ControlClient(server.bootstraps["compute0"])
    client._socket.send_multipart([b"two", b"parts"])
    client.send(Hello("host"))
    assert received(server) == [("compute0", Hello("host"))]
    assert server.refused == {"FRAME": 1}
    client.close()
