"""Standard output and standard error of processes that serve: writing to them never waits.

A reader that stalls (Docker's blocking log driver, ``| less``, Ctrl-S in a terminal) would otherwise stop every process
that logs, in the middle of a request.
"""

import atexit
import io
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal

from lamina.config.environment import environment

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MOST_WAITING_BYTES = 1 << 20
DRAIN_S = 1.0


class Unblocked(io.RawIOBase):
    """Hands what is written to a thread, which writes it to a descriptor.

    At most ``MOST_WAITING_BYTES`` wait for the thread. What exceeds them is dropped and counted; a line says so once
    the reader reads again. There are no locks: a thread that ends with the interpreter would keep them.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: pieces were dropped here
        self._accepted_bytes = self._done_bytes = 0  # the thread alone changes ``_done_bytes``
        self._dropped_lines = self._reported_lines = 0  # the thread alone changes ``_reported_lines``
        self._marked = False
        threading.Thread(target=self._run, name=f"output-{descriptor}", daemon=True).start()

    def write(self, data: "ReadableBuffer", /) -> int:
        """Queue ``data``, or drop it. The caller, a ``BufferedWriter``, lets in one thread at a time."""
        piece = bytes(data)
        if self._accepted_bytes - self._done_bytes + len(piece) <= MOST_WAITING_BYTES:
            self._accepted_bytes += len(piece)
            self._pieces.put(piece)
        else:
            self._dropped_lines += piece.count(b"\n")
            if not self._marked:
                self._marked = True
                self._pieces.put(None)
        return len(piece)

    def drain(self, deadline: float) -> None:
        """Wait until everything is written, or until ``deadline`` (``time.monotonic``)."""
        while (self._done_bytes < self._accepted_bytes or self._marked) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            piece = self._pieces.get()
            if piece is None:
                self._marked = False
                dropped = self._dropped_lines
                if lines := dropped - self._reported_lines:
                    self._write(b"%d lines were dropped here, since nobody read this output\n" % lines)
                self._reported_lines = dropped
            else:
                self._write(piece)
                self._done_bytes += len(piece)

    def _write(self, piece: bytes) -> None:
        while piece:
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # the reader has gone, or the disk is full: the process serves on without a log
                return

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


_unblocked: list[Unblocked] = []


def unblock(name: Literal["stdout", "stderr"]) -> None:
    """Let writing to ``sys.stdout`` or ``sys.stderr`` never wait. A stream that the program has replaced is kept."""
    stream = getattr(sys, name)
    if stream is None or stream is not getattr(sys, f"__{name}__"):
        return
    stream.flush()
    raw = Unblocked(stream.fileno())
    _unblocked.append(raw)
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
    setattr(sys, name, text)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            handler.setStream(text)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line, with the record's ``fields`` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time (UTC), level, logger, message, fields, and a traceback as "exception"."""
        time_ms = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        line = {"time": time_ms, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging() -> None:
    """Log to standard error, at the level of ``LAMINA_LOG_LEVEL`` and in the format of ``LAMINA_LOG_FORMAT``."""
    now = environment()
    logging.basicConfig(level=now.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    if now.log_format == "json":
        for handler in logging.root.handlers:
            handler.setFormatter(JsonFormatter())


def start_logging() -> None:
    """Configure logging so that it never waits for the reader of standard error."""
    unblock("stderr")
    configure_logging()


_TALKATIVE = ("torch.utils.flop_counter", "torch.utils._pytree", "torchao")
"""Loggers that warn, while they are imported, of what nothing here uses: a missing triton, kernels of other GPUs, and
torch's own deprecations in torchao."""


def quiet_imports() -> None:
    """Keep warnings that torch and torchao log while they are imported off the user's screen; errors are shown.

    A logger whose level is set already keeps it.
    """
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


@atexit.register
def drain() -> None:
    """Wait ``DRAIN_S`` at most for output to be written. A process that ends without ``atexit`` calls this itself."""
    deadline = time.monotonic() + DRAIN_S
    for raw in _unblocked:
        raw.drain(deadline)
