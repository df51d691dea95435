"""Description of a Triton kernel to compile (``Program``), and interface of the device that runs it (``Backend``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lamina.core.types import KvElement
from lamina.transport.device.inboxes import Maker

ALIGNMENT = 16
"""Alignment in bytes of every array passed to a program."""

Constant = int | bool | str
"""A kernel's compile-time parameter; a string names a type of triton.language."""


TRITON_NAMES = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16", np.dtype(np.uint16): "bf16"}
"""Triton's names of the element types that q, k and v of a message may have."""

SLAB_NAMES: Mapping[KvElement, str] = {
    KvElement.FLOAT32: "fp32",
    KvElement.FLOAT16: "fp16",
    KvElement.BFLOAT16: "bf16",
    KvElement.INT8: "i8",
    KvElement.FP8: "u8",
}
"""Triton's names of the element types of slabs."""


@dataclass(frozen=True)
class Program:
    """One Triton kernel of this package with its types, its constants and its launch options.

    ``types`` are those of the parameters passed at a launch, in order: ``*`` and an element for an array.
    """

    module: str
    kernel: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int = 4
    stages: int = 1
    registers: int = 0
    """Most registers that a thread may use; 0 if the compiler decides."""

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.constants)})"


class Backend(Protocol):
    """Runs programs: on a GPU, or in Triton's interpreter in tests. Arrays are C-contiguous, of the backend's type."""

    capability: int
    """Compute capability, major and minor digit: 90 for an H200."""
    multiprocessors: int
    name: str
    """The device's name, under which measured tilings are stored."""
    timed: bool
    """Whether measured times are meaningful: False for the interpreter."""
    ends_long_kernels: bool
    """Whether the driver ends kernels that run for seconds, as it does where the device has a display."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return uninitialised device memory."""

    def memory(self) -> tuple[int, int]:
        """Return the free bytes and the total bytes of the device."""

    def on_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return uninitialised host memory that programs access directly."""

    def constant(self, numbers: tuple[float, ...]) -> Any:
        """Return ``numbers`` as float32 on the device; the first call may wait for what runs there."""

    def trim(self) -> None:
        """Free unused memory to the device; memory from ``empty`` is otherwise kept for reuse."""

    def register_upload(self, memory: memoryview) -> None:
        """Register host memory, so that ``upload`` copies from it without a staging buffer, if possible."""

    def register_download(self, name: str, memory: memoryview) -> bool:
        """Let ``download`` copy to host memory directly, until ``unregister_download``. False if it cannot."""

    def unregister_download(self, name: str) -> None:
        """Undo ``register_download`` of ``name``. Does nothing if it was not registered."""

    def inbox_maker(self) -> Maker:
        """Return the maker of inboxes, through which devices of other processes write into this device's memory."""

    def is_on_device(self, array: Any) -> bool:
        """Return whether an array is in device memory."""

    def wait_for_uploads(self) -> None:
        """Wait until all uploads from registered memory have completed."""

    def upload(self, source: npt.NDArray[Any], target: Any) -> None:
        """Copy to the beginning of ``target`` in stream order; reads registered memory until ``wait_for_uploads``."""

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return uninitialised page-locked host memory, to which ``download`` copies without a staging buffer."""

    def download(self, *copies: tuple[Any, Any]) -> None:
        """Copy each source to its target, C-contiguous with equal shapes, and wait. Targets may be in an inbox."""

    def aligned(self, array: Any) -> Any:
        """Return the array, or a copy if it does not begin at a multiple of ``ALIGNMENT`` bytes."""

    def fits(self, program: Program) -> bool:
        """Compile a program, and return whether the device has enough shared memory to run it."""

    def time_on_device(self, call: Callable[[], object]) -> float:
        """Return the seconds that programs launched by ``call`` run on the device. Only if ``timed``."""

    def prepare(self, program: Program) -> None:
        """Compile and load a program, so that no later ``launch`` has to."""

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch a program in stream order, without waiting. ``arguments``: Array or number for each of ``types``."""
