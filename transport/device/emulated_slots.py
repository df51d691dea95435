"""``PolledSlots`` for tests, with threads of the host in place of a device's streams."""

import collections
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lamina._native import Arena as NativeArena
from lamina.core.errors import DeadlineError, TransportError
from lamina.transport.device.slots import (
    CREDIT_WORD,
    DRAIN_S,
    HEADER_WORDS,
    IN_INBOX,
    PLACE_SHIFT,
    RECORD,
    SILENCE_S,
    SLOTS,
    Incoming,
    Outcome,
    Outgoing,
    Records,
)

LOOK_S = 50e-6  # time between two reads of doorbells
_PLACE = 0xFF << PLACE_SHIFT


class _NotReceivedError(Exception):
    """A wait has ended without a message."""


class ThreadSlots:
    """``PolledSlots`` in host memory."""

    def __init__(self) -> None:
        self._arenas: dict[int, NativeArena] = {}

    def map_ranges(self, arena: NativeArena, ranges: Sequence[tuple[int, int]]) -> None:
        self._arenas[id(arena)] = arena

    def unmap(self, arena: NativeArena) -> None:
        self._arenas.pop(id(arena), None)

    def stream(self, records: int) -> "ThreadStream":
        return ThreadStream(records)


class ThreadStream:
    """A ``SlotStream``: a thread that runs launched work in order."""

    def __init__(self, records: int, silence_s: float = SILENCE_S) -> None:
        self.records: Records = np.zeros(records, RECORD)
        self._silence_s = silence_s
        self._outcome = Outcome.READY
        self._aborted = False
        self._beats = 0
        self._error: BaseException | None = None
        self._received: tuple[int, int, int, bytes] = 0, 0, 0, b""
        self._done: collections.deque[Callable[[], None]] = collections.deque()  # freed by the host's thread
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="emulated stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except _NotReceivedError:
                pass
            except BaseException as error:  # raised by ``raise_failure``
                self._error, self._outcome = error, Outcome.ABORTED
            self._done.append(work)
            del work

    def order_after_host(self) -> None:
        """Do nothing: work in host memory is complete when a call returns."""

    def launch(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def receive(self, incoming: Incoming, into: Any, nbytes: int) -> None:
        slot, number = self._find(incoming)
        found = time.monotonic_ns()
        start = incoming.slots[slot]
        in_inbox = _word(start) >> PLACE_SHIFT & 0xFF == IN_INBOX
        body = incoming.inbox[slot] if in_inbox else start + 8 * HEADER_WORDS
        into[:nbytes] = np.frombuffer(_memory(body, nbytes), np.uint8)
        self._received = slot, number, found, bytes(_memory(start, 8 * HEADER_WORDS))

    def _find(self, incoming: Incoming) -> tuple[int, int]:
        since, beats = time.monotonic(), self._beats
        while self._outcome is Outcome.READY:
            for slot in range(SLOTS):
                number = _word(incoming.doorbells[slot])
                wanted = incoming.stamp | (number & 0xFFFF) << 48
                if number >= incoming.floors[slot] and _word(incoming.slots[slot]) & ~_PLACE == wanted:
                    return slot, number
            if self._aborted:
                self._outcome = Outcome.ABORTED
            elif self._beats != beats:
                since, beats = time.monotonic(), self._beats
            elif time.monotonic() - since > self._silence_s:
                self._outcome = Outcome.EXPIRED
            time.sleep(LOOK_S)
        raise _NotReceivedError

    def answer(self, outgoing: Outgoing, parts: Sequence[Any], record: int, pieces: int) -> None:
        slot, number, found, header = self._received
        at = outgoing.body
        for part in parts:
            _memory(at, part.nbytes)[:] = part.tobytes()
            at += part.nbytes
        words = np.zeros(HEADER_WORDS, np.uint64)
        words[: len(outgoing.header)] = outgoing.header
        words[CREDIT_WORD + slot] = (number - 1) // pieces + 1
        _memory(outgoing.slot, words.nbytes)[:] = words.tobytes()
        row = self.records[record : record + 1]
        row["header"] = np.frombuffer(header, np.uint64)
        row["number"], row["slot"], row["found_ns"] = number, slot, found
        row["done_ns"] = time.monotonic_ns()
        ctypes.c_uint64.from_address(outgoing.doorbell).value = outgoing.number  # wakes nobody, as a device

    def beat(self) -> None:
        self._beats += 1

    def abort(self) -> None:
        self._aborted = True

    def raise_failure(self) -> None:
        self._done.clear()
        if self._error is not None:
            raise self._error
        if self._outcome is Outcome.EXPIRED:
            raise expired(self._silence_s)

    def drain(self) -> None:
        ended = threading.Event()
        self._work.put(ended.set)
        if not ended.wait(DRAIN_S):
            raise TransportError(f"work of an emulated device still runs {DRAIN_S:g} s after its waits were aborted")

    def reset(self) -> None:
        self._done.clear()
        self._aborted, self._outcome = False, Outcome.READY

    def close(self) -> None:
        self.abort()
        self._work.put(None)
        self._thread.join(DRAIN_S)


def expired(silence_s: float) -> DeadlineError:
    """Return the error after a wait that has expired."""
    return DeadlineError(
        f"the device stopped waiting for a message: this process had done nothing for {silence_s:g} s; it hung, or "
        "was stopped"
    )


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
