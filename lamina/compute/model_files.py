"""Finds the model's files on a compute worker's machine, or fetches them from the engine's machine.

Tried in this order: the engine's path; the same revision in this machine's Hugging Face cache, if the engine's path is
a snapshot in its cache; a copy fetched earlier; a copy fetched now. A copy must be complete and have the digest of the
engine's files.
"""

import contextlib
import fcntl
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lamina.config.environment import environment
from lamina.control.file_transfer import FileSource, OnFetched
from lamina.core.errors import ConfigError, DeadlineError, ModelError
from lamina.models import directory
from lamina.models.directory import CONFIG, checkpoint_digest

log = logging.getLogger(__name__)

SNAPSHOT = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")
LOCK_S = 1800.0  # longest wait while another worker of this machine fetches the same files
LOG_S = 10.0
POLL_S = 0.2
SPARE_NBYTES = 1 << 28  # bytes that stay free on the disk

Fetch = Callable[[FileSource, Path, OnFetched], None]
Tell = Callable[[str, int, int], None]
"""Called with a stage, and how much of it is done, of how much in all."""


def locate(path: str, source: FileSource | None, weights: bool, fetch: Fetch, tell: Tell) -> Path:
    """Return the directory to read the model from. ``weights``: whether weights are needed besides the configuration.

    Raises:
        ModelError: The fetched files are not the engine's.
        ConfigError: The disk has too little space.
        TransportError: The engine does not send the files.
    """
    if source is None or (Path(path) / CONFIG).is_file():
        return Path(path)
    if (known := in_hub_cache(path)) is not None and _has(known, weights, source.digest):
        return known
    folder = environment().cache_dir
    if folder is None:
        raise ConfigError(
            f"{path} does not exist on this machine, and its files cannot be kept here: set LAMINA_CACHE_DIR to a "
            "directory with room for them, or copy the model to the same path"
        )
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy = checkpoints / source.digest
    with _locked(checkpoints / f"{source.digest}.lock", tell):
        if not copy.is_dir():
            _fetch(source, copy, weights, fetch, tell)
    return copy


def in_hub_cache(path: str) -> Path | None:
    """Return the same snapshot of a model in this machine's Hugging Face cache (`hf download`); nothing is
    downloaded."""
    match = SNAPSHOT.search(path)
    if match is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            f"{match['owner']}/{match['name']}", revision=match["revision"], local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _fetch(source: FileSource, copy: Path, weights: bool, fetch: Fetch, tell: Tell) -> None:
    partial = copy.with_name(f"{copy.name}.partial")
    partial.mkdir(mode=0o700, exist_ok=True)  # complete files of an attempt that was interrupted are kept
    needed = source.nbytes - sum(file.stat().st_size for file in partial.iterdir())
    free = shutil.disk_usage(partial).free
    if needed + SPARE_NBYTES > free:
        raise ConfigError(
            f"the model's files need {needed} more bytes in {partial}, where {free} are free; set LAMINA_CACHE_DIR to "
            "a directory with more room, or copy the model to the path that the engine has"
        )
    log.warning("fetching the model's files from the engine, %d MiB, to %s", source.nbytes >> 20, copy)
    told = logged = time.monotonic()

    def on_fetched(done: int, total: int) -> None:
        nonlocal told, logged
        now = time.monotonic()
        if now - told >= POLL_S or done == total:
            told = now
            tell("MiB of files", done >> 20, total >> 20)
        if now - logged >= LOG_S:
            logged = now
            log.warning("%d of %d MiB of the model's files are here", done >> 20, total >> 20)

    fetch(source, partial, on_fetched)
    found = _digest(partial, weights)
    if found != source.digest:
        shutil.rmtree(partial)
        raise ModelError(
            f"the files fetched from the engine have the digest {found}, and those there had {source.digest} when it "
            "started: they have changed meanwhile. Start the engine again"
        )
    partial.rename(copy)


def _has(place: Path, weights: bool, digest: str) -> bool:
    try:
        return _digest(place, weights) == digest
    except ModelError as error:
        log.warning("not used: %s", error)
        return False


def _digest(place: Path, weights: bool) -> str:
    return checkpoint_digest(directory.find(place, weights=weights))


@contextlib.contextmanager
def _locked(file: Path, tell: Tell) -> Iterator[None]:
    """Hold a model's lock, so that one worker of a machine fetches it. Raises DeadlineError."""
    deadline = time.monotonic() + LOCK_S
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell("waiting for files", 0, 1)
            if time.monotonic() > deadline:
                raise DeadlineError(f"another worker has fetched the files of {file.stem} for {LOCK_S:.0f} s")
            time.sleep(POLL_S)
        yield
