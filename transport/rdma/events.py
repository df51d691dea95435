"""Completion events that wake a sleeping wait of the RDMA transport. ``verbs`` are the modules of pyverbs.

A doorbell is written with immediate data, so that it also raises a completion at the receiver. A wait polls doorbells
in memory. If none is ready, it arms an event, polls once more, and sleeps until the event.
"""

import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lamina.core.errors import TransportError

MESSAGES = 1024  # most messages that may arrive between waits; the device delays senders of more
REFILL = 64  # receive requests returned to the device at once
OPEN_FILES = Path("/proc/self/fd")
EVENT_FILE = "anon_inode:[infinibandevent]"

_opening = threading.Lock()


class Events:
    """A completion queue of ``depth`` entries, and a file that becomes readable at the first completion after ``arm``.

    Attributes:
        fd: descriptor of the file.
    """

    def __init__(self, verbs: Any, context: Any, depth: int) -> None:
        """Raises TransportError if the file cannot be identified, and pyverbs' errors."""
        with _opening:
            before = _event_files()
            self._channel = verbs.cq.CompChannel(context)
            opened = _event_files() - before  # pyverbs does not expose it
        try:
            if len(opened) != 1:
                raise TransportError(f"a completion channel opened {len(opened)} files {EVENT_FILE}; expected one")
            self.fd = opened.pop()
            self.completions = verbs.cq.CQ(context, depth, channel=self._channel)
        except BaseException:
            self._channel.close()
            raise
        self._armed = False

    def arm(self) -> None:
        """Request an event at the next completion; earlier completions raise none."""
        if not self._armed:
            self.completions.req_notify()
            self._armed = True

    def acknowledge(self) -> None:
        """Consume the event that made the file readable."""
        self._channel.get_cq_event(self.completions)
        self.completions.ack_events(1)
        self._armed = False

    def close(self) -> None:
        """Release the queue, which no queue pair may use any more."""
        self.completions.close()
        self._channel.close()


class Receiver:
    """Receives the notifications of all peers' messages. They carry no data; the message is in the arena.

    Attributes:
        events: event source of notifications.
        queue: receive queue that the queue pairs of all peers share.
    """

    def __init__(self, verbs: Any, context: Any, domain: Any, address: int, local_key: int) -> None:
        """Nothing is written to ``address``, which is registered under ``local_key``. Raises pyverbs' errors."""
        self.events = Events(verbs, context, MESSAGES)
        try:
            wanted = verbs.srq.SrqInitAttr(verbs.srq.SrqAttr(max_wr=MESSAGES, max_sge=1))
            self.queue = verbs.srq.SRQ(domain, wanted)
        except BaseException:
            self.events.close()
            raise
        nothing = [verbs.wr.SGE(address, 0, local_key)]  # pyverbs needs at least one element
        self._requests: list[Any] = []  # a chain: each names the one before as its next
        for _ in range(REFILL):
            before = self._requests[-1] if self._requests else None
            self._requests.append(verbs.wr.RecvWR(num_sge=1, sg=nothing, next_wr=before))
        self._taken = MESSAGES  # none has been handed to the device yet
        try:
            self.refill()
        except BaseException:
            self.close()
            raise

    def refill(self) -> None:
        """Return the receive requests that arrived messages have used to the device."""
        self._taken += self.events.completions.poll(MESSAGES)[0]
        while self._taken >= REFILL:
            self.queue.post_recv(self._requests[-1])
            self._taken -= REFILL

    def close(self) -> None:
        self.queue.close()
        self.events.close()


def sleep(sources: Iterable[Events], seconds: float) -> None:
    """Sleep until one of the armed sources has an event, at most ``seconds``. Releases the GIL."""
    by_fd = {source.fd: source for source in sources}
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    for fd, _ in poller.poll(seconds * 1000):
        by_fd[fd].acknowledge()


def _event_files() -> set[int]:
    found = set()
    for entry in os.listdir(OPEN_FILES):
        try:
            if os.readlink(OPEN_FILES / entry) == EVENT_FILE:
                found.add(int(entry))
        except FileNotFoundError:  # closed since, as listdir's own is
            continue
    return found
