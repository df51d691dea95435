"""Implements ``Kit`` on the CPU, for tests: runs the GPU code, and replays recorded operators instead of graphs."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamina.compute.device.kit import Replay
from lamina.kernels.gpu.interpreter import recorded
from lamina.lowering.gpu_slices import Main
from lamina.splitter import as_numpy
from lamina.transport.device.inboxes import SharedMaker


class Emulated:
    """A ``Kit`` on the CPU."""

    place = torch.device("cpu")
    backend = "gloo"
    grouped = True
    name = "emulated"

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None

    def capture(self, work: Callable[[], object]) -> Replay:
        """Record the work. As with a CUDA graph, replay runs only torch's operators, on the recorded memory, and
        kernels in Triton's interpreter."""
        recorder = _Recorder()
        work()
        self._recorder = recorder
        try:
            with recorder, recorded(recorder.record_launch):
                work()
        finally:
            self._recorder = None
        return recorder.replay

    def compiled(self, graph: Main) -> Main | None:
        """Return None: a compiled graph cannot be recorded operator by operator."""
        return None

    def time_replay(self, replay: Replay) -> float:
        start = time.perf_counter()
        replay()
        return time.perf_counter() - start

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True, scale=scale)
        return out, lse

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def limit(self, share: float) -> None:
        """Do nothing: an emulated card has no memory of its own."""

    def register_own(self, memory: memoryview) -> None:
        """Do nothing: an emulated card gains nothing by registered memory."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        return True

    def unmap_peer(self, peer: str) -> None:
        """Do nothing: nothing was mapped."""

    def inbox_maker(self) -> SharedMaker:
        return SharedMaker()

    def write_rows(self, source: Tensor, table: Tensor, bodies: Tensor, lead: int) -> None:
        nbytes, columns, addresses = source.nbytes // len(source), table.numpy().T, bodies.numpy()

        def replay() -> None:
            for row, message, place, before in columns.tolist():
                if message >= 0:
                    at = int(addresses[message]) + before * lead + place * nbytes
                    ctypes.memmove(at, source.data_ptr() + row * nbytes, nbytes)

        replay()
        if self._recorder is not None:
            self._recorder.record_call(replay)

    def lent(self, tensor: Tensor) -> Any:
        return as_numpy(tensor)

    def borrowed(self, array: Any) -> Tensor:
        return torch.from_numpy(array)

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def has_ended(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: nothing runs in the background."""


@dataclass(frozen=True)
class _Call:
    """One operator with its arguments, and the memory of its results."""

    operator: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Tensor, ...]

    def replay(self) -> None:
        again = self.operator(*self.arguments, **self.named)
        for old, new in zip(self.results, _tensors(again), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Replay] = []

    def replay(self) -> None:
        """Run everything recorded again."""
        for call in self._calls:
            call()

    def record_call(self, call: Replay) -> None:
        """Record a call that is not a torch operator."""
        self._calls.append(call)

    def record_launch(self, launch: Replay) -> None:
        """Run a kernel in Triton's interpreter, whose own use of torch is no part of the recording, and record it."""
        with _disable_current_modes():
            launch()
        self._calls.append(launch)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it. Rejects operators that synchronise with the host, as CUDA graphs do."""
        by_number = func is torch.ops.aten.index.Tensor and not any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        depends = torch.Tag.dynamic_output_shape in func.tags and not by_number
        if torch.Tag.data_dependent_output in func.tags or depends:
            raise RuntimeError(f"{func} waits for the device, which a recording must not do")
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._calls.append(_Call(func, args, kwargs or {}, _tensors(results)).replay)
        return results


def _tensors(results: Any) -> tuple[Tensor, ...]:
    every = results if isinstance(results, list | tuple) else (results,)
    return tuple(each for each in every if isinstance(each, Tensor))
