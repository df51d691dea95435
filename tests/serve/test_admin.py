"""`POST /admin/scale` and `lamina scale`, with a scripted engine behind the server."""

import concurrent.futures

import pytest

from lamina.cli.scale import scale
from lamina.cluster.pool import parse_change
from lamina.errors import ConfigError, EngineDeadError, LaminaError, TransportError, WorkerError
from tests.serve.scripted import Running

KEY = "a-key"


@pytest.fixture
def asked(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The changes that the engine received; it fails if more than 2 workers are to leave."""
    seen: list[dict[str, int]] = []
    errors: dict[int, LaminaError] = {
        -3: ConfigError("3 memory workers cannot leave: the pool has 2"),
        -4: EngineDeadError("the engine has stopped"),
        9: WorkerError("memory2", "its process exited with status 1\nTraceback"),
    }

    def resize(**changes: int) -> "concurrent.futures.Future[list[str]]":
        seen.append(changes)
        done: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        if (error := errors.get(changes.get("memory", 0))) is not None:
            done.set_exception(error)
        else:
            done.set_result([f"{pool}{change}" for pool, change in changes.items()])
        return done

    monkeypatch.setattr(server.engine, "scale", resize, raising=False)
    monkeypatch.setenv("LAMINA_ADMIN_KEY", KEY)
    return seen


def test_scale_asks_the_engine_and_names_the_workers(
    server: Running, asked: list[dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    scale(memory="+2", compute="cpu:-1", url=server.url)
    assert asked == [{"memory": 2, "compute": -1}]
    assert capsys.readouterr().out == "done: memory2, compute-1\n"


@pytest.mark.parametrize(
    ("memory", "kind", "said"),
    [
        ("-3", ConfigError, "3 memory workers cannot leave: the pool has 2"),
        ("-4", TransportError, "the engine has stopped"),
        ("+9", TransportError, "worker memory2 failed: its process exited with status 1"),
        ("2", ConfigError, "memory is '2'; give the workers to add or remove"),
        ("a100:+1", ConfigError, "only workers on CPUs join and leave so far. Use cpu:"),
        ("cup:+1", ConfigError, "unknown kind; did you mean cpu?"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_is_refused_says_why(server: Running, memory: str, kind: type[LaminaError], said: str) -> None:
    with pytest.raises(kind, match=said):
        scale(memory=memory, url=server.url)


def test_a_wrong_key_or_none_changes_nothing(
    server: Running, asked: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        answer = server.http.post("/admin/scale", json={"memory": "+1"}, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_admin_key"
    monkeypatch.delenv("LAMINA_ADMIN_KEY")
    answer = server.http.post("/admin/scale", json={"memory": "+1"}, headers={"Authorization": "Bearer x"})
    assert answer.status_code == 403 and "LAMINA_ADMIN_KEY" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="LAMINA_ADMIN_KEY is not set"):
        scale(memory="+1", url=server.url)
    assert not asked


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"memory": 2}', b'{"disk": "+1"}', b'{"memory": "+1e3"}'])
def test_a_malformed_body_is_refused(server: Running, asked: list[dict[str, int]], body: bytes) -> None:
    answer = server.http.post("/admin/scale", content=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400 and not asked


def test_a_change_of_a_pool_is_a_signed_number_of_workers() -> None:
    assert [parse_change("memory", text) for text in ("+2", "-1", "cpu:+3", " CPU:-4 ")] == [2, -1, 3, -4]
    for text in ("", "0", "+0", "+1025", "cpu:", "cpu:2", "+2,-1"):
        with pytest.raises(ConfigError):
            parse_change("memory", text)
