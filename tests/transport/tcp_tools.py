"""What tests of TCP share: frames as bytes, endpoints by the fixture ``make_tcp``, and raw connections to them."""

import socket
import struct
from collections.abc import Callable

import msgspec
from far import SECRET

from lamina.transport import listener
from lamina.transport.listener import Descriptor
from lamina.transport.tcp import TcpEndpoint

NBYTES = 1 << 16
DOORBELLS = 4
TIMEOUT_S = 30.0
FRAME = struct.Struct("<QQQII")
MAGIC = 0x314D414C
NO_DOORBELL = 0xFFFFFFFF

MakeTcp = Callable[..., TcpEndpoint]


def frame(offset: int, nbytes: int, doorbell: int = NO_DOORBELL, sequence: int = 0, magic: int = MAGIC) -> bytes:
    return FRAME.pack(offset, nbytes, sequence, doorbell, magic)


def described(endpoint: TcpEndpoint, **changes: object) -> bytes:
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor)
    return msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))


def port_of(endpoint: TcpEndpoint) -> int:
    return msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor).port


def raw_stream(endpoint: TcpEndpoint, stream: int = 1, *, is_new: bool = True) -> tuple[socket.socket, int]:
    """A connection that has proved itself, to send any bytes over, and the byte of its stream wanted next."""
    where = msgspec.msgpack.decode(endpoint.descriptor(), type=Descriptor)
    request = struct.pack("<QQ?", stream, 77, is_new)
    connection, answer = listener.attempt(where, SECRET, request, TIMEOUT_S, TIMEOUT_S)
    return connection, struct.unpack("<Q", answer)[0]


def reset(connection: socket.socket) -> None:
    """Close as a dead process's kernel may: without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
