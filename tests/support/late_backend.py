"""Emulated GPUs whose work runs as late as a GPU's may: not before the host waits for it, or touches its results.

The ordinary emulation runs everything at once, which hides what a real GPU does not forgive: memory that the host uses
again, gives back or reads while copies and kernels that use it are still to run.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.compute.device.emulated import Emulated
from lamina.compute.device.kit import Replay
from lamina.kernels.gpu.backend import ALIGNMENT, Program
from lamina.kernels.gpu.interpreter import Interpreter, is_recording, reject_recording
from lamina.transport.arena import HostMemory


class Queue:
    """What has been given to a device and has not run yet, in order. Other threads are streams of their own."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._work: list[Callable[[], object]] = []
        self._runs = False

    def put(self, work: Callable[[], object]) -> None:
        """Run it later; at once in another thread, or if it is part of what runs."""
        if self._runs or threading.get_ident() != self._thread:
            work()
        else:
            self._work.append(work)

    @property
    def end(self) -> Callable[[], object] | None:
        """What was given last."""
        return self._work[-1] if self._work else None

    def flush(self, last: Callable[[], object] | None = None) -> None:
        """Run everything, or what was given up to ``last``."""
        if self._runs or threading.get_ident() != self._thread or (last is not None and last not in self._work):
            return
        self._runs = True
        try:
            while self._work:
                work = self._work.pop(0)
                work()
                if work is last:
                    break
        finally:
            self._runs = False


class There(np.ndarray):
    """Memory of the device. What CuPy would do in stream order sees all that was given to the device before."""

    queue: Queue | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.queue = getattr(other, "queue", None)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            self._flush()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._flush()
        super().__setitem__(index, value)

    def copy(self, order: Any = "C") -> Any:
        self._flush()
        return super().copy(order)

    def _flush(self) -> None:
        if self.queue is not None:
            self.queue.flush()


class LateBackend(Interpreter):
    """A ``Backend``."""

    def __init__(self) -> None:
        self.queue = Queue()
        self._host = HostMemory(lambda at, nbytes: None, lambda at: None)
        self._read: Callable[[], object] | None = None  # the last upload of what was adopted

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """See ``Backend``."""
        made = super().empty(shape, dtype).view(There)
        made.queue = self.queue
        return made

    def register_upload(self, memory: memoryview) -> None:
        """See ``Backend``."""
        self._host.register_own(memory)

    def upload(self, source: Any, target: Any) -> None:
        """See ``Backend``: memory that was adopted is read late."""
        reject_recording("this copies from the host")
        adopted = self._host.own.covers(source.ctypes.data, source.nbytes)
        kept = source if adopted else source.copy()
        self.queue.put(lambda: np.copyto(_plain(target)[: len(kept)], _plain(kept)))
        self._read = self.queue.end if adopted else self._read

    def download(self, *copies: tuple[Any, Any]) -> None:
        """See ``Backend``."""
        self.queue.flush()
        super().download(*((_plain(source), target) for source, target in copies))

    def wait_for_uploads(self) -> None:
        """See ``Backend``: up to the last upload of what was adopted, and no further."""
        if self._read is not None:
            self.queue.flush(self._read)
            self._read = None

    def aligned(self, array: Any) -> Any:
        """See ``Backend``."""
        if array.ctypes.data % ALIGNMENT == 0:
            return array
        copy = self.empty(array.shape, array.dtype)
        self.queue.put(lambda: np.copyto(_plain(copy), _plain(array)))
        return copy

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """See ``Backend``."""
        plain = [_plain(each) if isinstance(each, np.ndarray) else each for each in arguments]
        if is_recording():
            self.queue.flush()
            super().launch(program, grid, plain)
            return
        self.queue.put(lambda: super(LateBackend, self).launch(program, grid, plain))


def _plain(array: Any) -> Any:
    return array.view(np.ndarray)


class LateKit(Emulated):
    """A ``Kit``. torch's own operators see what was given to the device before, in ``mode``."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.mode = _Flushing(self.queue)

    def capture(self, work: Callable[[], object]) -> Replay:
        """See ``Kit``."""
        self.queue.flush()
        replay = super().capture(work)
        return lambda: self.queue.put(replay)

    def write_rows(self, source: torch.Tensor, table: torch.Tensor, bodies: torch.Tensor, lead: int) -> None:
        """See ``Kit``."""
        if self._recorder is not None:
            super().write_rows(source, table, bodies, lead)
        else:
            self.queue.put(lambda: super(LateKit, self).write_rows(source, table, bodies, lead))

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Kit``."""
        self.queue.put(lambda: super(LateKit, self).upload(target, source))

    def lent(self, tensor: torch.Tensor) -> Any:
        """See ``Kit``."""
        self.queue.flush()
        return super().lent(tensor)

    def synchronize(self) -> None:
        """See ``Kit``."""
        self.queue.flush()


class _Flushing(TorchDispatchMode):
    """Runs what is late before any operator of torch: they are in order."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._queue.flush()
        return func(*args, **(kwargs or {}))
