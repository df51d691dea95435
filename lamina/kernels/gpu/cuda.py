"""The CUDA ``Backend``: Triton compiles programs, CuPy allocates memory and launches. Does not need torch."""

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from lamina.core.errors import TransportError
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.backend import ALIGNMENT, Program
from lamina.kernels.gpu.device import find, require, set_up_cuda
from lamina.kernels.gpu.triton_compile import Binary, compile_program
from lamina.kernels.segments import STORAGE, SegmentTable
from lamina.transport.arena import HostMemory
from lamina.transport.device.cuda import CudaMaker

NUMBERS = {"i32": np.int32, "fp32": np.float32}
SHARED_OPTIN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
KERNEL_TIMEOUT = 17  # cudaDevAttrKernelExecTimeout
TIMED_CALLS, TIMED_ROUNDS = 3, 5
STAGINGS = 4  # uploads in flight before the next one waits


class Cuda:
    """GPU ``index`` as a ``Backend``. Work goes to CuPy's current stream of the calling thread."""

    timed = True

    def __init__(self, index: int) -> None:
        """Raises ConfigError if the GPU does not exist or a package is missing."""
        require(index, find())
        set_up_cuda()
        self.device = cupy.cuda.Device(index)
        self.device.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.multiprocessors: int = properties["multiProcessorCount"]
        # What is the fastest depends on how many MPS lets this process use.
        self.name = f"{properties['name'].decode()} with {self.multiprocessors} multiprocessors"
        self.capability = int(self.device.compute_capability)
        self.ends_long_kernels = bool(cupy.cuda.runtime.deviceGetAttribute(KERNEL_TIMEOUT, index))
        self._shared_bytes = int(cupy.cuda.runtime.deviceGetAttribute(SHARED_OPTIN, index))
        self._kernels: dict[Program, tuple[Any, Binary]] = {}
        self._constants: dict[tuple[float, ...], Any] = {}
        self._stagings = [_Staging() for _ in range(STAGINGS)]
        self._host = HostMemory(_register, cupy.cuda.runtime.hostUnregister)
        self._read = cupy.cuda.Event(disable_timing=True)  # recorded after the last upload from adopted memory

    def constant(self, numbers: tuple[float, ...]) -> Any:
        if numbers not in self._constants:
            self._constants[numbers] = cupy.asarray(np.array(numbers, np.float32))
        return self._constants[numbers]

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return cupy.empty(shape, dtype)

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device. What the pool keeps for later allocations is not free."""
        free, total = self.device.mem_info
        return int(free), int(total)

    def on_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return an array in pinned memory, which has the same address on the device."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        # Not from CuPy's pool, which rounds up to powers of two.
        pinned = cupy.cuda.pinned_memory.PinnedMemory(nbytes, cupy.cuda.runtime.hostAllocPortable)
        memory = cupy.cuda.UnownedMemory(pinned.ptr, nbytes, pinned, self.device.id)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def trim(self) -> None:
        self.device.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def register_upload(self, memory: memoryview) -> None:
        self._host.register_own(memory)

    def register_download(self, name: str, memory: memoryview) -> bool:
        return self._host.register_peer(name, memory)

    def unregister_download(self, name: str) -> None:
        self._host.unregister_peer(name)

    def wait_for_uploads(self) -> None:
        self._read.synchronize()

    def upload(self, source: npt.NDArray[Any], target: Any) -> None:
        """Copy through pinned memory unless ``source`` is registered; waits while ``STAGINGS`` others are in flight."""
        if self._host.own.covers(source.ctypes.data, source.nbytes):
            stream = cupy.cuda.get_current_stream()
            target[: len(source)].set(source, stream=stream)
            self._read.record(stream)
        elif source.size:
            self._stagings.append(self._stagings.pop(0))
            self._stagings[-1].upload(source, target[: len(source)])

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return pinned memory from CuPy's pool, in few sizes: to grow, the pool may wait for kernels that run."""
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(1 << max(9, (count * np.dtype(dtype).itemsize - 1).bit_length()))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def inbox_maker(self) -> CudaMaker:
        return CudaMaker(self.device.id)

    def is_on_device(self, array: Any) -> bool:
        return isinstance(array, cupy.ndarray)

    def download(self, *copies: tuple[Any, Any]) -> None:
        stream = cupy.cuda.get_current_stream()
        for source, target in copies:
            if self.is_on_device(target):
                target[...] = source
            else:
                source.get(stream=stream, out=target, blocking=False)
        stream.synchronize()

    def aligned(self, array: Any) -> Any:
        return array.copy() if array.data.ptr % ALIGNMENT else array

    def fits(self, program: Program) -> bool:
        return compile_program(program, self.capability).shared_bytes <= self._shared_bytes

    def time_on_device(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, in seconds, over rounds of a CUDA graph of several calls."""
        self.device.synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            call()  # compiles and allocates, which cannot be captured
            stream.synchronize()
            stream.begin_capture()
            for _ in range(TIMED_CALLS):
                call()
            graph = stream.end_capture()
            times: list[float] = []
            for _ in range(TIMED_ROUNDS):
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(stream)
                graph.launch(stream)
                stop.record(stream)
                stop.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / TIMED_CALLS)
        return statistics.median(times)

    def prepare(self, program: Program) -> None:
        """Compile a program. Triton keeps compiled code on disk."""
        if program not in self._kernels:
            self._load(program)

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Run on the current stream; compiles on first use.

        Raises:
            ValueError: an array is not C-contiguous or not aligned to 16 bytes; programs rely on both.
        """
        if 0 in grid:
            return
        kernel, binary = self._kernels.get(program) or self._load(program)
        values = [
            argument if kind.startswith("*") else NUMBERS[kind](argument)
            for kind, argument in zip(program.types, arguments, strict=True)
        ]
        for value in values:
            if isinstance(value, cupy.ndarray) and (value.data.ptr % ALIGNMENT or not value.flags.c_contiguous):
                raise ValueError(
                    f"{program.kernel} got an array {value.shape} at {value.data.ptr} with strides {value.strides}; "
                    f"give C-contiguous ones at multiples of {ALIGNMENT} bytes, as cupy.ascontiguousarray makes"
                )
        hidden = [np.uint64(0)] * binary.hidden
        kernel(grid, (32 * binary.warps,), (*values, *hidden), shared_mem=binary.shared_bytes)

    def _load(self, program: Program) -> tuple[Any, Binary]:
        binary = compile_program(program, self.capability)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "program.cubin")
            path.write_bytes(binary.cubin)
            kernel = cupy.RawModule(path=str(path)).get_function(binary.name)  # loads it before the file is removed
        kernel.max_dynamic_shared_size_bytes = binary.shared_bytes
        # So that as many programs fit as it was compiled for; the same for all kernels, as switching it costs time.
        kernel.preferred_shared_memory_carveout = 100
        self._kernels[program] = kernel, binary
        return kernel, binary


def _register(at: int, nbytes: int) -> None:
    try:
        cupy.cuda.runtime.hostRegister(at, nbytes, 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TransportError(f"CUDA does not register {nbytes} bytes for messages: {error}") from error


class _Staging:
    def __init__(self) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(1)
        self._sent = cupy.cuda.Event(disable_timing=True)

    def upload(self, source: npt.NDArray[Any], target: Any) -> None:
        self._sent.synchronize()
        if self._memory.size() < source.nbytes:
            self._memory = cupy.cuda.alloc_pinned_memory(2 * source.nbytes)
        pinned = np.frombuffer(self._memory, source.dtype, source.size).reshape(source.shape)
        pinned[...] = source
        stream = cupy.cuda.get_current_stream()
        target.set(pinned, stream=stream)
        self._sent.record(stream)


def partial(
    q: Any,
    k: Any,
    v: Any,
    segments: SegmentTable,
    spec: AttentionSpec,
    out: Any | None,
    lse: Any | None,
    scales: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """``lamina.kernels.attention.partial`` for CuPy arrays on the current GPU; ``segments`` are numpy arrays.

    Raises ValueError for an invalid shape, element type, memory order or slot.

    Builds tables for this call only; a memory worker should keep an ``Attention`` and page tables on the GPU.
    """
    backend = _backend(q.device.id)
    element = next((each for each in KvElement if STORAGE[each] == k.dtype), None)
    if element is None or element.scaled != (scales is not None):
        raise ValueError(
            f"k is {k.dtype} {'without' if scales is None else 'with'} scales; it must be float32, float16 or uint16 "
            "(bfloat16 bits) without, or codes in int8 or uint8 (e4m3 bits) with scales"
        )
    out = backend.empty((*q.shape[:2], v.shape[2]), np.float32) if out is None else out
    lse = backend.empty(q.shape[:2], np.float32) if lse is None else lse
    if len(segments.slots) and not 0 <= int(segments.slots.min()) <= int(segments.slots.max()) < len(k):
        raise ValueError(f"slots holds {segments.slots.max()}; the slab has slots 0 to {len(k) - 1}")
    pairs, rows = len(segments.query_start), len(q)
    attention = Attention(backend, StepCapacity(max(1, pairs), max(1, rows)))
    attention.upload_pairs(pair_table(segments))
    slots = backend.empty((len(segments.slots) + 1,), np.int32)
    backend.upload(segments.slots, slots)
    attention.partial(q, KvSlab(element, k, v, *(scales or ())), slots, spec, out, lse)
    return out, lse


@cache
def _backend(index: int) -> Cuda:
    return Cuda(index)
