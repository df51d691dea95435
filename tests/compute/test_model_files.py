"""A model's files on a machine that lacks them: fetched whole or not at all, from the engine that has them."""

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from lamina.compute import model_files
from lamina.compute.model_files import locate
from lamina.control import file_transfer as protocol_files
from lamina.control.file_transfer import FileSource, ModelFile, OnFetched
from lamina.control.sockets import ControlClient, ControlServer
from lamina.core.errors import ConfigError, ModelError, TransportError
from lamina.models import directory
from lamina.models.directory import BUNDLED, checkpoint_digest

NOWHERE = "/nowhere/model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


class Engine:
    """Has a copy of the bundled model, and lets two workers fetch it."""

    def __init__(self, place: Path) -> None:
        self.place = Path(shutil.copytree(BUNDLED, place))
        model = directory.find(self.place)
        self.control = ControlServer(["compute0", "compute1"])
        self.source = self.control.offer_files(checkpoint_digest(model), model.files)
        self.clients = [ControlClient(bootstrap) for bootstrap in self.control.bootstraps.values()]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.control.close()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(protocol_files, "PIECE_NBYTES", 50_000)  # many pieces, the last of a file short
    made = Engine(tmp_path / "engine's")
    yield made
    made.close()


def silent(stage: str, done: int, total: int) -> None:
    pass


def forbidden(source: FileSource, folder: Path, on_fetched: OnFetched) -> None:
    raise AssertionError("nothing is to be fetched")


def test_files_come_whole_and_once_with_progress(engine: Engine, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(locate, NOWHERE, engine.source, True, client.fetch, lambda *told_: told.append(told_))
            for client in engine.clients
        ]
    (copy,) = {one.result() for one in both}
    assert copy == cache / engine.source.digest
    for file in engine.source.files:
        assert (copy / file.name).read_bytes() == (engine.place / file.name).read_bytes()
    total = sum(file.nbytes for file in engine.source.files) >> 20
    assert ("MiB of files", total, total) in told
    assert checkpoint_digest(directory.find(copy)) == engine.source.digest
    assert sorted(path.name for path in cache.iterdir()) == sorted([copy.name, f"{copy.name}.lock"])
    assert locate(NOWHERE, engine.source, True, forbidden, silent) == copy, "the next start fetches nothing"


def test_an_interrupted_fetch_leaves_nothing_that_is_used_and_is_continued(engine: Engine, cache: Path) -> None:
    client = engine.clients[0]
    seen: list[int] = []

    def interrupted(source: FileSource, folder: Path, on_fetched: OnFetched) -> None:
        def count(done: int, total: int) -> None:
            seen.append(done)
            if done > total - 60_000:  # inside of the last file
                raise KeyboardInterrupt

        client.fetch(source, folder, count)

    with pytest.raises(KeyboardInterrupt):
        locate(NOWHERE, engine.source, True, interrupted, silent)
    assert not (cache / engine.source.digest).exists()
    partial = cache / f"{engine.source.digest}.partial"
    complete = {path.name for path in partial.iterdir() if path.suffix != ".part"}
    assert 0 < len(complete) < len(engine.source.files)
    written = {name: os.stat(partial / name).st_mtime_ns for name in complete}
    copy = locate(NOWHERE, engine.source, True, engine.clients[1].fetch, silent)
    assert {name: os.stat(copy / name).st_mtime_ns for name in complete} == written, "not fetched again"
    assert checkpoint_digest(directory.find(copy)) == engine.source.digest


def test_files_that_have_changed_are_not_used(engine: Engine, cache: Path) -> None:
    weights = engine.place / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-64:] = bytes(64)
    weights.write_bytes(content)
    with pytest.raises(
        ModelError, match=rf"have the digest [0-9a-f]{{16}}, and those there had {engine.source.digest}"
    ):
        locate(NOWHERE, engine.source, True, engine.clients[0].fetch, silent)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    with weights.open("ab") as longer:
        longer.truncate(100)
    with pytest.raises(ModelError, match=r"model\.safetensors has changed on the engine's machine"):
        locate(NOWHERE, engine.source, True, engine.clients[1].fetch, silent)


def test_a_path_that_exists_and_a_revision_in_the_hub_s_cache_are_used_as_they_are(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    assert locate(str(engine.place), engine.source, True, forbidden, silent) == engine.place
    assert locate(NOWHERE, None, True, forbidden, silent) == Path(NOWHERE), "the error is that of a missing directory"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / revision
    shutil.copytree(engine.place, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    theirs = f"/home/other/.cache/huggingface/hub/models--some--model/snapshots/{revision}"
    assert locate(theirs, engine.source, True, forbidden, silent) == snapshot
    (snapshot / "model.safetensors").unlink()
    copy = locate(theirs, engine.source, True, engine.clients[0].fetch, silent)
    assert copy == cache / engine.source.digest, "one without weights is not used"
    assert model_files.in_hub_cache(theirs.replace("some", "any")) is None


@pytest.mark.usefixtures("cache")
def test_what_is_in_the_way_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    large = msgspec.structs.replace(engine.source, files=[ModelFile("model.safetensors", 1 << 60)])
    with pytest.raises(ConfigError, match=r"need \d+ more bytes in .* where \d+ are free; set LAMINA_CACHE_DIR"):
        locate(NOWHERE, large, True, forbidden, silent)
    monkeypatch.setattr(protocol_files, "SILENCE_S", 0.2)
    wrong = msgspec.structs.replace(engine.source, files=[*engine.source.files, ModelFile("another", 1)])
    with pytest.raises(TransportError, match="has sent nothing of the model's files for 0 s"):
        locate(NOWHERE, wrong, True, engine.clients[0].fetch, silent)


def test_strangers_get_nothing(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_files, "SILENCE_S", 0.3)
    other = ControlServer(["compute0"])
    keys = other.bootstraps["compute0"]
    ours = engine.control.bootstraps["compute0"]
    stranger = ControlClient(
        msgspec.structs.replace(ours, name="x", public_key=keys.public_key, secret_key=keys.secret_key)
    )
    with pytest.raises(TransportError, match="has sent nothing"):
        stranger.fetch(engine.source, tmp_path, lambda done, total: None)
    stranger.close()
    other.close()
    engine.control.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lamina-files"]
