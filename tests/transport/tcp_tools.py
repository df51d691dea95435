"""Shared by the TCP tests: frames as bytes, types of the fixtures, raw connections, and a proxy that cuts them."""

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from lamina.transport import listener
from lamina.transport.listener import SocketDescriptor
from lamina.transport.tcp import TcpEndpoint
from tests.transport.far import SECRET

NBYTES = 1 << 16
DOORBELLS = 4
TIMEOUT_S = 30.0
FRAME = struct.Struct("<QQQII")
MAGIC = 0x314D414C
NO_DOORBELL = 0xFFFFFFFF

MakeTcp = Callable[..., TcpEndpoint]


def frame(offset: int, nbytes: int, doorbell: int = NO_DOORBELL, sequence: int = 0, magic: int = MAGIC) -> bytes:
    return FRAME.pack(offset, nbytes, sequence, doorbell, magic)


def described(endpoint: TcpEndpoint, **changes: Any) -> bytes:
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=SocketDescriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))


def port_of(endpoint: TcpEndpoint) -> int:
    return msgspec.msgpack.decode(endpoint.descriptor(), type=SocketDescriptor).port


def raw_stream(endpoint: TcpEndpoint, stream: int = 1, *, is_new: bool = True) -> tuple[socket.socket, int]:
    """An authenticated raw connection, and the position of the next byte that the receiver needs."""
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=SocketDescriptor)
    request = struct.pack("<QQ??", stream, 77, is_new, False)
    connection, answer = listener.attempt(where, SECRET, request, TIMEOUT_S, TIMEOUT_S)
    return connection, struct.unpack("<Q", answer)[0]


def reset(connection: socket.socket) -> None:
    """Reset the connection, as the kernel of a killed process may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Proxy:
    """Forwards connections to a port, and cuts each after the next of ``budgets`` bytes (None: never).

    ``seen`` is what has passed, both ways.
    """

    def __init__(self, port: int, budgets: Iterator[int | None]) -> None:
        self.cuts = 0
        self.seen = bytearray()
        self._target = port
        self._budgets = budgets
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._pool = ThreadPoolExecutor(16)
        self._ended = threading.Event()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._pool.shutdown()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self._pool.submit(self._pass_on, near, next(self._budgets))

    def _pass_on(self, near: socket.socket, budget: int | None) -> None:
        far = socket.create_connection(("127.0.0.1", self._target))
        left = float("inf") if budget is None else budget
        while not self._ended.is_set() and left > 0:
            for source in select.select([near, far], [], [], 0.05)[0]:
                try:
                    data = source.recv(min(65536, int(min(left, 65536))))
                    self.seen += data  # before it is forwarded, so that the receiver's test can check it
                    (far if source is near else near).sendall(data)
                except OSError:
                    data = b""
                left = left - len(data) if data else 0
        self.cuts += 1
        reset(near)
        reset(far)


MakeProxy = Callable[[int, Iterator[int | None]], Proxy]
