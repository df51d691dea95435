"""What has been measured of a device, kept in the user's cache: later starts on such a device find it again."""

import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lamina.config.environment import environment

logger = logging.getLogger(__name__)

T = TypeVar("T")


def place(what: str, *names: str) -> Path | None:
    """Return the file of measurements of the devices and versions ``names``; None without a cache directory."""
    cache = environment().cache_dir
    name = "-".join(names).replace(" ", "-").replace("/", "-").lower()
    return cache and cache / what / f"{name}.json"


def load(path: Path | None, kind: type[T]) -> T | None:
    """Return what ``save`` wrote; None if it is not there, or unreadable: it is a cache."""
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def save(path: Path | None, found: Any) -> None:
    """Keep it, whole, for later processes, if there is a place for it that can be written to."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        unfinished.replace(path)
    except OSError as error:
        logger.warning("what was measured is not kept, and measured again by the next start: %s", error)
