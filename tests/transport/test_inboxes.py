"""Inboxes of devices: what another process writes into one is read here; whatever fails, messages go another way."""

import os
import subprocess
import sys

import numpy as np
import pytest

from lamina.core.errors import TransportError
from lamina.transport.device.inboxes import Inboxes, OwnInbox, PeerInbox, SharedMaker

NBYTES, TIMEOUT_S = 10_000, 60.0

WRITER = """
import sys
from lamina.transport.device.inboxes import Inboxes, SharedMaker
inboxes = Inboxes(SharedMaker())
inboxes.open("reader", bytes.fromhex(sys.argv[1]), int(sys.argv[2]), b"proof")
inboxes.theirs("reader").array[100:104] = list(b"body")
inboxes.close_outgoing("reader")
assert inboxes.theirs("reader") is None
"""


def test_another_process_writes_into_an_inbox() -> None:
    inboxes = Inboxes(SharedMaker())
    held = inboxes.make("writer", NBYTES)
    assert held is not None
    handle, inbox = held.handle, inboxes.own("writer")
    assert inbox is held.inbox and not inbox.array.any()
    subprocess.run([sys.executable, "-c", WRITER, handle.hex(), str(NBYTES)], check=True, timeout=TIMEOUT_S)
    assert inbox.address == inbox.array.ctypes.data and inbox.array.shape == (NBYTES,)
    assert bytes(inbox.array[100:104]) == b"body" and np.count_nonzero(inbox.array) == 4 + len(b"proof")
    assert (
        inboxes.proof_arrived("writer", b"proof")
        and not inboxes.proof_arrived("writer", b"other")
        and not inboxes.proof_arrived("x", b"proof")
    )
    inboxes.close("writer")
    assert inboxes.own("writer") is None
    with pytest.raises(TransportError, match="cannot open the inbox"):
        SharedMaker().open(handle, NBYTES)


def test_no_other_file_is_opened(tmp_path: os.PathLike[str]) -> None:
    with open(os.path.join(tmp_path, "other"), "w+b") as file, pytest.raises(TransportError, match="is no inbox"):
        SharedMaker().open(f"{os.getpid()} {file.fileno()}".encode(), NBYTES)


class Lacking:
    """A maker whose device has no memory left, and reaches that of no other."""

    kind = "emulated"

    def make(self, nbytes: int) -> OwnInbox:
        raise TransportError("no memory")

    def open(self, handle: bytes, nbytes: int) -> PeerInbox:
        raise TransportError("no way")


def test_without_an_inbox_there_is_no_handle_and_nothing_to_write_into(caplog: pytest.LogCaptureFixture) -> None:
    inboxes = Inboxes(Lacking())
    assert inboxes.make("peer", NBYTES) is None and inboxes.own("peer") is None
    inboxes.open("peer", b"1 2", NBYTES, b"proof")
    assert inboxes.theirs("peer") is None
    assert "messages of peer go through the host's memory: no memory" in caplog.text
    inboxes.close_outgoing("peer")
    inboxes.close("peer")


def test_none_is_made_or_opened_once_they_are_fixed() -> None:
    inboxes = Inboxes(SharedMaker())
    held = inboxes.make("before", NBYTES)
    assert held is not None
    inboxes.fixed = True
    assert inboxes.make("after", NBYTES) is None and inboxes.own("after") is None
    inboxes.open("after", held.handle, NBYTES, b"proof")
    assert inboxes.theirs("after") is None and inboxes.own("before") is not None
    inboxes.close_all()
    assert inboxes.own("before") is None
