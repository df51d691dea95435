"""Implements ``Kit`` on an NVIDIA GPU with torch: CUDA graphs, FlashAttention, memory."""

import contextlib
import importlib.util
import logging
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.compute.device.kit import Replay
from lamina.core.errors import ConfigError, TransportError
from lamina.kernels.gpu.device import set_up_cuda
from lamina.kernels.gpu.specialize import WRITTEN_ELEMENTS, write_rows_program
from lamina.lowering.expert_operators import ELEMENTS
from lamina.lowering.gpu_slices import Main
from lamina.transport.arena import HostMemory
from lamina.transport.device.cuda import CudaMaker
from lamina.transport.device.peer_memory import uses_host_addresses

logger = logging.getLogger(__name__)

TIMED_ROUNDS, TIMED_CALLS = 5, 10
MOST_COMPILED = 64  # variants of one graph; one more than torch allows would be an error


class Cuda:
    """Implements ``Kit`` on GPU ``index`` of the GPUs visible to this process, in order of PCI bus address."""

    backend = "nccl"

    def __init__(self, index: int) -> None:
        """Raises ConfigError if torch cannot use the GPU."""
        set_up_cuda()
        _require_torch(index)
        self.place = torch.device("cuda", index)
        torch.cuda.set_device(self.place)
        self._stream = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the pool alive: torch frees a pool without graphs
        self._host = HostMemory(_register, torch.cuda.cudart().cudaHostUnregister)  # type: ignore[no-untyped-call]
        self.name = torch.cuda.get_device_name(self.place)
        # torch's kernels for other GPUs read on the host how many rows each expert has.
        self.grouped = torch.cuda.get_device_capability(self.place)[0] in (9, 10)

    def capture(self, work: Callable[[], object]) -> Replay:
        """Record a CUDA graph. Graphs share one pool of memory: they are replayed one after another."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), self._cupy_stream():
            work()  # libraries load and allocate at their first call, which cannot be recorded
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._drop(graph)
                raise
            graph.capture_end()
        self._first = self._first or graph
        current.wait_stream(self._stream)
        return graph.replay

    @contextlib.contextmanager
    def _cupy_stream(self) -> Iterator[None]:
        """Launch CuPy's kernels in the stream that is recorded. Without local memory, this process has none."""
        if "cupy" not in sys.modules:
            yield
            return
        import cupy

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # CuPy 13 knows no other way
            stream = cupy.cuda.ExternalStream(self._stream.cuda_stream, self.place.index)
        with stream:
            yield

    def _drop(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that has failed. Its memory pool may stay marked as being recorded to."""
        try:
            graph.capture_end()
        except RuntimeError:  # the recording is invalid; the first error says why
            torch._C._cuda_endAllocateToPool(self.place.index, self._pool)
        self._pool, self._first = torch.cuda.graph_pool_handle(), None

    def compiled(self, graph: Main) -> Main | None:
        torch._inductor.config.compile_threads = 1  # no processes besides, which might outlive this one
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        compiled: Main = torch.compile(graph, dynamic=True, fullgraph=True)
        return compiled

    def time_replay(self, replay: Replay) -> float:
        """Return the median time over rounds, in seconds."""
        times = list[float]()
        for _ in range(TIMED_ROUNDS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(TIMED_CALLS):
                replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / TIMED_CALLS)
        return statistics.median(times)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Return FlashAttention's result, for elements of 16 bits."""
        if q.dtype not in (torch.float16, torch.bfloat16):
            return None
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = flash(q, k, v, 0.0, True, False, scale=scale)
        return out, lse

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def limit(self, share: float) -> None:
        """Limit torch's memory in this process. Other libraries' allocations are not counted."""
        free, total = torch.cuda.mem_get_info(self.place)
        left = free - round((1 - share) * total)
        if left <= 0:
            raise ConfigError(
                f"{free} of the {total} bytes of {self.place} are free, and gpu_memory_utilization {share:g} leaves "
                f"{round((1 - share) * total)} of them unused. Raise it, or free memory there"
            )
        held = torch.cuda.memory_reserved(self.place)
        torch.cuda.set_per_process_memory_fraction((held + left) / total, self.place)

    def register_own(self, memory: memoryview) -> None:
        """Register memory with CUDA, so that copies from it need no staging buffer."""
        self._host.register_own(memory)

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        return uses_host_addresses(self.place.index) and self._host.register_peer(peer, memory)

    def unmap_peer(self, peer: str) -> None:
        self._host.unregister_peer(peer)

    def inbox_maker(self) -> CudaMaker | None:
        """Return the maker of inboxes, which uses CuPy; None without CuPy: messages then pass through host memory."""
        return CudaMaker(self.place.index) if importlib.util.find_spec("cupy") is not None else None

    def write_rows(self, source: Tensor, table: Tensor, bodies: Tensor, lead: int) -> None:
        from lamina.kernels.gpu.triton_rows import write_rows  # needs Triton

        unit, count = source[0].numel(), table.shape[1]
        program = write_rows_program(ELEMENTS[source.dtype], unit, lead // source.element_size())
        grid = count, -(-unit // WRITTEN_ELEMENTS)
        write_rows[grid](source, table, bodies, count, **dict(program.constants), num_warps=program.warps)

    def lent(self, tensor: Tensor) -> Any:
        """Return the tensor as a CuPy array. Both libraries use the legacy default stream, which orders their work."""
        import cupy  # only local memory needs it

        if tensor.dtype == torch.bfloat16:
            return cupy.from_dlpack(tensor.view(torch.int16)).view(np.uint16)
        return cupy.from_dlpack(tensor)

    def borrowed(self, array: Any) -> Tensor:
        tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
        return tensor

    def upload(self, target: Tensor, source: Tensor) -> None:
        if self._host.own.cuts(source.data_ptr(), source.nbytes):
            source = source.clone()
        target.copy_(source, non_blocking=True)

    def has_ended(self) -> bool:
        return bool(torch.cuda.current_stream().query())

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()


def _register(at: int, nbytes: int) -> None:
    if error := int(torch.cuda.cudart().cudaHostRegister(at, nbytes, 0)):  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # else the next operator would report it
            torch.zeros(1, device="cuda")
        raise TransportError(f"CUDA does not register {nbytes} bytes for messages (error {error})")


def _require_torch(index: int) -> None:
    """Raises ConfigError with what was found, unless torch can run slices on GPU ``index``."""
    found = f"PyTorch {torch.__version__}"
    remedy = "install a PyTorch with CUDA, or use --compute cpu:1"
    if torch.version.hip:
        raise ConfigError(
            f"cuda:{index} is an AMD GPU to this PyTorch, which was built for ROCm {torch.version.hip}; slices have "
            "never run on one. Use --compute cpu:1"
        )
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ConfigError(f"cuda:{index} cannot run slices: {found} was built without CUDA; {remedy}")
    if not torch.cuda.is_available():
        raise ConfigError(f"cuda:{index} cannot run slices: {found} finds no usable driver; {remedy}")
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        raise ConfigError(
            f"cuda:{index} cannot run slices: Triton finds no C compiler, by which it starts its kernels. Install gcc "
            "and Python's headers (Debian: apt-get install gcc python3-dev), or set CC"
        )
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"cuda:{index} does not exist: PyTorch sees {count} GPUs, from cuda:0 on")
