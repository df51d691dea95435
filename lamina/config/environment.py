"""Reads the ``LAMINA_*`` environment variables; nothing else in Lamina does."""

import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lamina.core.errors import ConfigError

LOG_FORMAT = "LAMINA_LOG_FORMAT"


@dataclass(frozen=True)
class Environment:
    """Values of the ``LAMINA_*`` variables: the variable of ``log_level`` is ``LAMINA_LOG_LEVEL``.

    Attributes:
        log_level: The log level of all processes.
        rdma_device: The RDMA device and port to use, as ``mlx5_0`` or ``mlx5_0:1``; empty: ``transport.rdma.ports``
            chooses one.
        admin_key: The key that allows to scale a running server; empty: nobody may.
        api_key: Keys that clients of a server must send, joined by commas; empty: none.
        metrics_key: The key for a server's metrics; empty: anybody may read them.
        log_format: text or json, the format of log lines of all processes.
        emulated_gpus: The GPUs that this machine pretends to have instead of its own, as a pool,
            ``a100:2,rtx3090:6``; workers on them run the code for GPUs on the CPU (for tests).
        secret: The cluster's secret, 64 hex digits, where no file of it is given; empty: none.
        cache_dir: The directory of files kept between starts (default: ``lamina`` in ``XDG_CACHE_HOME`` or in
            ``~/.cache``; None: the user has no home directory, nothing is kept).
    """

    log_level: str = "WARNING"
    rdma_device: str = ""
    admin_key: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    metrics_key: str = field(default="", repr=False)
    log_format: str = "text"
    emulated_gpus: str = ""
    secret: str = field(default="", repr=False)
    cache_dir: Path | None = None


def environment() -> Environment:
    """Read the variables now. Raises ConfigError for a log level that does not exist."""
    names = [each.name for each in fields(Environment)]
    values: dict[str, Any] = {name: given for name in names if (given := os.environ.get(f"LAMINA_{name.upper()}"))}
    values["log_level"] = level = values.get("log_level", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"LAMINA_LOG_LEVEL is {level!r}; give DEBUG, INFO, WARNING or ERROR")
    return Environment(**values | {"cache_dir": _cache_dir()})


def _cache_dir() -> Path | None:
    own, home = os.environ.get("LAMINA_CACHE_DIR"), os.path.expanduser("~")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else "")
    return Path(users, "lamina") if users else None
