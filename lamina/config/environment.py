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
    """Values of the ``LAMINA_*`` variables.

    Attributes:
        log_level: ``LAMINA_LOG_LEVEL``, the log level of all processes.
        rdma_device: ``LAMINA_RDMA_DEVICE``, the RDMA device and port to use, as ``mlx5_0`` or ``mlx5_0:1`` (default:
            ``transport.rdma.ports`` chooses one).
        admin_key: ``LAMINA_ADMIN_KEY``, the key that allows to scale a running server (default: nobody may).
        api_key: ``LAMINA_API_KEY``, keys that clients of a server must send, joined by commas (default: none).
        metrics_key: ``LAMINA_METRICS_KEY``, the key for a server's metrics (default: anybody may read them).
        log_format: ``LAMINA_LOG_FORMAT``, text or json, the format of log lines of all processes (default text).
        emulated_gpus: ``LAMINA_EMULATED_GPUS``, the GPUs that this machine pretends to have instead of its own, as a
            pool, ``a100:2,rtx3090:6``; workers on them run the code for GPUs on the CPU (for tests).
        secret: ``LAMINA_SECRET``, the cluster's secret, 64 hex digits, where no file of it is given (default: none).
        cache_dir: ``LAMINA_CACHE_DIR``, the directory of files kept between starts (default: ``lamina`` in
            ``XDG_CACHE_HOME`` or in ``~/.cache``; None: the user has no home directory, nothing is kept).
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
