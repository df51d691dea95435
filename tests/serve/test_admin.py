"""`POST /admin/scale` and `/admin/stop`, `lamina scale` and `lamina down`, with a scripted engine behind the server."""

import concurrent.futures
import signal
import threading

import pytest

from lamina.cli.client import down, scale
from lamina.cluster.local_workers import LocalWorkers
from lamina.cluster.pool import PoolChange, parse_change
from lamina.core.errors import ConfigError, EngineDeadError, LaminaError, TransportError, WorkerError
from tests.support.scripted_engine import Running

KEY = "a-key"


@pytest.fixture
def asked(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The changes that the engine received; it fails if more than 2 workers are to leave."""
    seen: list[dict[str, str]] = []
    errors: dict[str, LaminaError] = {
        "-3": ConfigError("3 memory workers cannot leave: the pool has 2"),
        "-4": EngineDeadError("the engine has stopped"),
        "+9": WorkerError("memory2", "its process exited with status 1\nTraceback"),
    }

    def resize(**changes: str) -> "concurrent.futures.Future[list[str]]":
        seen.append(changes)
        done: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        if (error := errors.get(changes.get("memory", ""))) is not None:
            done.set_exception(error)
        else:
            done.set_result([f"{pool}{change}" for pool, change in changes.items()])
        return done

    monkeypatch.setattr(server.engine, "scale", resize, raising=False)
    monkeypatch.setenv("LAMINA_ADMIN_KEY", KEY)
    return seen


def test_scale_asks_the_engine_and_names_the_workers(
    server: Running, asked: list[dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    scale(memory="rtx3090:+2", compute="-1", url=server.url)
    assert asked == [{"memory": "rtx3090:+2", "compute": "-1"}]
    assert capsys.readouterr().out == "done: memoryrtx3090:+2, compute-1\n"
    scale(prefill="+1", compute="-1", url=server.url)
    assert asked[1:] == [{"prefill": "+1", "compute": "-1"}]


@pytest.mark.parametrize(
    ("memory", "kind", "said"),
    [
        ("-3", ConfigError, "3 memory workers cannot leave: the pool has 2"),
        ("-4", TransportError, "the engine has stopped"),
        ("+9", TransportError, "worker memory2 failed: its process exited with status 1"),
        ("2000", ConfigError, "memory is '2000'; give the workers to add or remove"),
        ("a100+1", ConfigError, "memory is 'a100\\+1'; give the workers to add or remove"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_is_refused_says_why(server: Running, memory: str, kind: type[LaminaError], said: str) -> None:
    with pytest.raises(kind, match=said):
        scale(memory=memory, url=server.url)


def test_a_wrong_key_or_none_changes_nothing(
    server: Running, asked: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        for path in ("/admin/scale", "/admin/stop"):
            answer = server.http.post(path, json={"memory": "+1"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_admin_key"
    monkeypatch.delenv("LAMINA_ADMIN_KEY")
    answer = server.http.post("/admin/scale", json={"memory": "+1"}, headers={"Authorization": "Bearer x"})
    assert answer.status_code == 403 and "LAMINA_ADMIN_KEY" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="LAMINA_ADMIN_KEY is not set"):
        scale(memory="+1", url=server.url)
    with pytest.raises(ConfigError, match="LAMINA_ADMIN_KEY is not set"):
        down(url=server.url)
    assert not asked


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"memory": 2}', b'{"disk": "+1"}', b'{"memory": "+1e3"}'])
def test_a_malformed_body_is_refused(server: Running, asked: list[dict[str, str]], body: bytes) -> None:
    answer = server.http.post("/admin/scale", content=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and not asked


def test_a_change_of_a_pool_is_a_signed_number_of_workers_or_a_size() -> None:
    changes = [parse_change("memory", text) for text in ("+2", "-1", "cpu:+3", " RTX3090:-4 ")]
    assert changes == [PoolChange(2), PoolChange(-1), PoolChange(3, "cpu"), PoolChange(-4, "rtx3090")]
    assert [parse_change("prefill", text) for text in ("0", " 3")] == [
        PoolChange(0, is_size=True),
        PoolChange(3, is_size=True),
    ]
    for text in ("", "1025", "+0", "+1025", "cpu:", "cpu:2", "+2,-1"):
        with pytest.raises(ConfigError):
            parse_change("memory", text)


def test_a_kind_that_this_machine_does_not_have_is_refused() -> None:
    workers = LocalWorkers()
    workers.validate_pool("memory", "cpu", 2)
    for kind, said in (("cup", "unknown kind 'cup'; did you mean cpu?"), ("gh200", "gh200:1 asks for 1 GPU; this")):
        with pytest.raises(ConfigError, match=said):
            workers.validate_pool("memory", kind, 1)
    workers.close()


@pytest.mark.usefixtures("asked")
def test_down_stops_the_server_s_process_and_waits_for_its_end(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server in a thread goes on, so that the end is that of the wait."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    monkeypatch.setattr("lamina.cli.client.END_S", 1.0)
    try:
        with pytest.raises(TransportError, match="told to stop, but still listens after 1 s"):
            down(url=server.url)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.is_set()
    with pytest.raises(TransportError, match="no server answers"):
        down(url="http://127.0.0.1:9")
