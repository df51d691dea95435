"""Sends a model's files from the engine's machine to workers on machines that do not have them.

The engine serves the files in a thread, on a separate port, with the CURVE keys of the control plane. A worker requests
pieces by file number and offset, several ahead, and gets them in the order of its requests.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lamina.core.errors import ModelError, TransportError
from lamina.core.threads import join_thread
from lamina.transport.listener import Refusals

log = logging.getLogger(__name__)

PIECE_NBYTES = 1 << 20
AHEAD = 16  # pieces that a worker requests before it has received the first of them
SILENCE_S = 30.0
TURN_S = 0.5

OnFetched = Callable[[int, int], None]
"""Called with the bytes fetched so far and the total."""


class ModelFile(msgspec.Struct, array_like=True, frozen=True):
    """A file of the model's directory, without folders in its name."""

    name: str
    nbytes: int


class FileSource(msgspec.Struct, frozen=True):
    """A model's files, which can be fetched from a port of the engine's machine.

    Attributes:
        digest: digest of the checkpoint, by ``models.directory``.
    """

    port: int
    digest: str
    files: list[ModelFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class Read(msgspec.Struct, array_like=True, frozen=True):
    """Worker to engine: send at most ``PIECE_NBYTES`` of a file from this offset. The answer is this message and the
    bytes."""

    file: int
    offset: int


class FileServer:
    """Serves ``paths`` in a thread until ``close``. Raises OSError, zmq.ZMQError.

    Args:
        context: the control plane's, whose authenticator decides who may connect.
        keys: CURVE keys, public and secret.

    Attributes:
        port: where the server listens.
    """

    def __init__(
        self, context: "zmq.Context[Any]", keys: tuple[bytes, bytes], host: str, paths: Sequence[Path]
    ) -> None:
        self._refusals = Refusals("the port for model files")
        self._over = threading.Event()
        with contextlib.ExitStack() as opened:
            self._files = [opened.enter_context(path.open("rb")) for path in paths]
            self._socket = opened.enter_context(context.socket(zmq.ROUTER))
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
            self._socket.linger = 0
            self._socket.maxmsgsize = 1 << 16
            self._socket.sndhwm = self._socket.rcvhwm = 0  # workers ask for a few pieces at a time
            self.port = self._socket.bind_to_random_port(f"tcp://{host}")
            self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="lamina-files", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(Read)
        with self._opened:
            while not self._over.is_set():
                if not self._socket.poll(int(TURN_S * 1000)):
                    continue
                identity, *rest = self._socket.recv_multipart()
                try:
                    (payload,) = rest
                    asked = decoder.decode(payload)
                    piece = os.pread(self._files[asked.file].fileno(), PIECE_NBYTES, asked.offset)
                except (ValueError, IndexError, OSError) as error:  # a malformed message is a ValueError too
                    self._refusals.record("MESSAGE", f"a request cannot be answered: {error}")
                    continue
                self._socket.send_multipart([identity, payload, piece])

    def close(self) -> None:
        """End the thread, and close files and socket. Idempotent."""
        self._over.set()
        join_thread(self._thread)


def fetch(socket: "zmq.Socket[bytes]", source: FileSource, folder: Path, on_fetched: OnFetched) -> None:
    """Fetch all files of ``source`` into ``folder``, over a socket that is connected to its server.

    A file gets its name once it is complete and on the disk. Files that exist already are not fetched.

    Raises TransportError if the server does not answer, ModelError if a file has changed, OSError.
    """
    encoder = msgspec.msgpack.Encoder()
    done = 0
    for number, file in enumerate(source.files):
        target = folder / Path(file.name).name
        if not target.is_file():
            part = target.with_name(f"{target.name}.part")
            with part.open("wb") as out:
                asked = got = 0
                while got < file.nbytes:
                    while asked < file.nbytes and asked - got < AHEAD * PIECE_NBYTES:
                        socket.send(encoder.encode(Read(number, asked)))
                        asked += PIECE_NBYTES
                    piece = _receive(socket, encoder.encode(Read(number, got)))
                    if len(piece) != min(PIECE_NBYTES, file.nbytes - got):
                        raise ModelError(f"{file.name} has changed on the engine's machine while it was fetched")
                    out.write(piece)
                    got += len(piece)
                    on_fetched(done + got, source.nbytes)
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
        done += file.nbytes
        on_fetched(done, source.nbytes)


def _receive(socket: "zmq.Socket[bytes]", request: bytes) -> bytes:
    if not socket.poll(int(SILENCE_S * 1000)):
        raise TransportError(f"the engine has sent nothing of the model's files for {SILENCE_S:.0f} s")
    answered, piece = socket.recv_multipart()
    if answered != request:
        raise TransportError("the engine has sent another piece of the model's files than was asked for")
    return bytes(piece)
