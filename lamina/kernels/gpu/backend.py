"""Descriptions of compiled kernels (``Program``) and the interface of what runs them (``Backend``)."""

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
"""Triton's names of what slabs hold."""


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
    """The most that a thread may use; 0: the compiler decides."""

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
    """Whether times say anything: False where programs are interpreted."""
    ends_long_kernels: bool
    """Whether the driver ends kernels that run for seconds, as it does where the device has a display."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Uninitialised device memory."""

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that nobody has allocated, and all of its."""

    def on_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Uninitialised memory of the host that programs read and write where it is."""

    def constant(self, numbers: tuple[float, ...]) -> Any:
        """Return ``numbers`` as float32 on the device; the first call may wait for what runs there."""

    def trim(self) -> None:
        """Give memory back that ``empty`` has allocated and nobody uses any more: it is kept otherwise."""

    def register_upload(self, memory: memoryview) -> None:
        """This memory of the host is uploaded from without a stop in another, if possible."""

    def register_download(self, name: str, memory: memoryview) -> bool:
        """Let ``download`` copy to host memory directly, until ``unregister_download``. False if it cannot."""

    def unregister_download(self, name: str) -> None:
        """Stop using the memory that was mapped under this name, if any."""

    def inbox_maker(self) -> Maker:
        """How other processes' devices get to write into its memory."""

    def is_on_device(self, array: Any) -> bool:
        """True if an array is on the device, and not one of the host."""

    def wait_for_uploads(self) -> None:
        """Wait until all uploads from registered memory have completed."""

    def upload(self, source: npt.NDArray[Any], target: Any) -> None:
        """Copy to the beginning of ``target`` in stream order; reads registered memory until ``wait_for_uploads``."""

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised memory of the host that ``download`` copies to without a detour."""

    def download(self, *copies: tuple[Any, Any]) -> None:
        """Copy each (source, target), C-contiguous and alike, and wait once for all. Targets may be in an inbox."""

    def aligned(self, array: Any) -> Any:
        """Return the array, or a copy if it does not begin at a multiple of ``ALIGNMENT`` bytes."""

    def fits(self, program: Program) -> bool:
        """Compile; False if the device has too little shared memory to run it."""

    def time_on_device(self, call: Callable[[], object]) -> float:
        """Return how long the programs that ``call`` launches take, without the host. Only if ``timed``."""

    def prepare(self, program: Program) -> None:
        """Compile and load, so that no later ``launch`` has to."""

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Run in stream order without waiting. Arguments are arrays or numbers, one for each of ``program.types``."""
