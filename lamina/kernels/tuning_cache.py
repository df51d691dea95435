"""Stores measurements of a device in the user's cache, so that later starts on the same kind of device read them."""

import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lamina.config.environment import environment

logger = logging.getLogger(__name__)

T = TypeVar("T")


def file_for(what: str, *names: str) -> Path | None:
    """Return the file for measurements of the kind ``what``, of devices and versions ``names``; None without a cache
    directory."""
    cache = environment().cache_dir
    name = "-".join(names).replace(" ", "-").replace("/", "-").lower()
    return cache and cache / what / f"{name}.json"


def load(path: Path | None, kind: type[T]) -> T | None:
    """Return what ``save`` wrote; None if the file does not exist or is invalid."""
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def save(path: Path | None, found: Any) -> None:
    """Write ``found`` atomically. Logs a warning if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        unfinished.replace(path)
    except OSError as error:
        logger.warning("measurements cannot be stored, so the next start measures again: %s", error)
