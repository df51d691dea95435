"""The control plane lets in only the workers it issued keys to, under their own names."""

import os
import threading

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import DeadlineError, TransportError, WorkerError
from lamina.transport import secret
from lamina.transport.control import ControlClient, ControlServer, decode
from lamina.transport.messages import Hello, LoadProgress, Stop, ToEngine


@pytest.fixture
def server() -> ControlServer:
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
    assert [(worker, message.done) for worker, message in got] == [("compute0", done) for done in range(50)]
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
    with pytest.raises(TransportError, match="cannot reach worker compute0"):
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
    for stranger in strangers:
        stranger.send(Hello("here"))
    assert received(server) == []
    assert server.refused["KEY"] >= 3
    assert len([record for record in caplog.records if "not of this cluster" in record.message]) == 1
    for stranger in strangers:
        stranger.close()


def test_a_message_of_another_release_names_its_worker(server: ControlServer) -> None:
    client = ControlClient(server.bootstraps["memory0"])
    client._socket.send(msgspec.msgpack.encode({"type": "Hello", "host": 5}))
    with pytest.raises(WorkerError, match=r"worker memory0 failed: .*run the same release of lamina"):
        received(server)
    client.close()


@given(payload=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
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
