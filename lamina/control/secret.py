"""A cluster's secret: 32 random bytes from which all its keys are derived.

Whoever has it can join the cluster. It is kept in memory, or in a file that only its owner can read, to start parts of
a cluster on several machines. Workers get their own keys, never the secret itself.
"""

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from lamina.config.environment import environment
from lamina.core.errors import ConfigError

NBYTES = 32


@dataclass(frozen=True, repr=False)
class Secret:
    """The secret of one cluster. Its ``repr`` does not show it."""

    data: bytes

    def curve_keys(self, name: str) -> tuple[bytes, bytes]:
        """Return the public and the secret CURVE key of the engine or of a worker, in Z85."""
        key = z85.encode(self._derived(f"curve {name}"))
        return zmq.curve_public(key), key

    @property
    def data_plane(self) -> bytes:
        """The key by which workers of this cluster know each other on the data plane."""
        return self._derived("data plane")

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.data, b"lamina " + purpose.encode(), hashlib.sha256)


def new() -> Secret:
    """Return a new random secret."""
    return Secret(secrets.token_bytes(NBYTES))


def configured(file: str | os.PathLike[str] | None, *, create: bool = True) -> Secret | None:
    """Return the secret in ``file``, else that of the variable LAMINA_SECRET; None if neither is given. Raises
    ConfigError."""
    if file is not None:
        return from_file(file, create=create)
    text = environment().secret
    return _parse(text, "LAMINA_SECRET") if text else None


def from_file(file: str | os.PathLike[str], *, create: bool = True) -> Secret:
    """Return the secret in ``file``; with ``create``, the file is made, readable by its owner alone, if it does not
    exist.

    Raises ConfigError if others can read it or its content is invalid.
    """
    path = Path(file)
    if os.path.exists(path) or not create:
        return _read(path)
    made = new()
    try:
        # Linked once complete: a start at the same time, or after a full disk, must not find a part of the file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as written:  # mode 0600
            written.write(made.data.hex() + "\n")
            written.flush()
            os.link(written.name, path)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"the cluster secret cannot be written to {path}: {error}") from error
    return made


def _read(path: Path) -> Secret:
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * NBYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the cluster secret in {path}: {why}") from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path} has mode {mode:03o}, so others may know the cluster secret; run chmod 600 on it or create another"
        )
    return _parse(text, str(path))


def _parse(text: str, where: str) -> Secret:
    try:
        data = bytes.fromhex(text.strip())
    except ValueError:
        data = b""
    if len(data) != NBYTES:
        raise ConfigError(
            f"{where} is not a cluster secret: it holds {len(text)} characters, not {2 * NBYTES} hex digits"
        )
    return Secret(data)
