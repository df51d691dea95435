"""Selects the launch options of attention: measured ones stored per device, or defaults that work on every GPU."""

import enum
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lamina.core.types import KvElement
from lamina.kernels import tuning_cache
from lamina.kernels.segments import STORAGE


class Context(enum.Enum):
    """Classes of the longest segment of a step, in tokens (DistKV-LLM, section 5)."""

    NORMAL = 8 * 1024
    LONG = 32 * 1024
    ULTRA = 2**31


@dataclass(frozen=True)
class Shape:
    """What selects the tiling of an attention. ``ragged``: the longest segment is over 4 times the mean."""

    context: Context
    ragged: bool
    prompt: bool
    element: KvElement
    group: int
    head_dim: int

    def __str__(self) -> str:
        lengths = f"{self.context.name.lower()}-{'ragged' if self.ragged else 'even'}"
        kind = "prompt" if self.prompt else "decode"
        return f"{kind}/{lengths}/{self.element.name.lower()}/group{self.group}/dim{self.head_dim}"


@dataclass(frozen=True)
class Tiling:
    """Launch options of ``attend``.

    Args:
        block_n: tokens of one loop iteration.
        warps: warps of a program.
        stages: Triton's pipeline depth. Slots are loaded one iteration before their K and V. With 3, a program loads an
            iteration's K and V after the previous iteration, and other programs' loads overlap. With 5, its own next
            loads overlap too, for twice the shared memory.
        resident: programs that a multiprocessor runs at once; limits the registers that the compiler may use.
        waves: a step's tokens are cut into this many times the programs that the GPU runs at once.
        least_tokens: minimum length of a part of a segment.
    """

    block_n: int
    warps: int
    stages: int
    resident: int
    waves: int = 1
    least_tokens: int = 256

    @property
    def registers(self) -> int:
        """Registers that a thread may use: of 65536 per multiprocessor, allocated in units of 8, at most 255."""
        return min(255, REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


RAGGED = 4
REGISTERS = 65536  # registers of a multiprocessor, on every GPU that can run attention
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program may use, by compute capability (CUDA C++ Programming Guide, table of
technical specifications); 64 for GPUs not listed."""


TALL_WARPS = 8
"""Warps of programs with tall tiles over 8-bit KV: with 4, Triton 3.6 computed wrong results on an H200."""


def is_tall(element: KvElement, block_m: int) -> bool:
    """Return whether a tile of ``block_m`` rows over such KV needs ``TALL_WARPS``."""
    return element.scaled and block_m >= 64


def classify(tokens: npt.NDArray[np.int32]) -> tuple[Context, bool]:
    """Return the context class and raggedness of the segments' lengths; without segments, normal and even."""
    longest = int(tokens.max(initial=0))
    context = next(context for context in Context if longest <= context.value)
    return context, longest * len(tokens) > RAGGED * int(tokens.sum(dtype=np.int64))


def default(shape: Shape, block_m: int, capability: int) -> Tiling:
    """Return a tiling for a device without measurements: no spills, and enough loads in flight while some programs
    compute.

    On an H200, a multiprocessor needs about 36 KB in flight (4.8 TB/s, 132 multiprocessors, a latency of 1 us). Four
    programs with 64 tokens of 128 x 2 bytes for K and V load 128 KiB, of which half is in flight if they wait about
    as long as they compute.
    """
    width = 1 << (shape.head_dim - 1).bit_length()
    waves = 2 if shape.ragged or shape.context is Context.ULTRA else 1
    if shape.element is KvElement.FLOAT32:
        return Tiling(16, 8, 3, 2, waves)  # products without tensor cores keep their operands in registers
    block_n = max(16, min(64, 8 * 1024 // width))
    warps = TALL_WARPS if block_m * width > 8 * 1024 or is_tall(shape.element, block_m) else 4
    resident = (16 if block_m * width <= 2 * 1024 else 8) // warps
    free_bytes = SHARED_KIB.get(capability, 64) * 1024 // resident - (block_m + 16) * width * 2
    while block_n > 16 and 2 * block_n * width * STORAGE[shape.element].itemsize > free_bytes:
        block_n //= 2
    return Tiling(block_n, warps, 3, resident, waves)


class Choices:
    """Tilings measured on one device, with one version of the compiler; other shapes get the default."""

    def __init__(self, device: str, measured: dict[str, Tiling] | None = None) -> None:
        self.device = device
        self.measured = measured or {}

    def tiling(self, shape: Shape, block_m: int, capability: int) -> Tiling:
        """Return the measured tiling of ``shape``, or the default."""
        found = self.measured.get(str(shape))
        if found is None or (is_tall(shape.element, block_m) and found.warps != TALL_WARPS):
            return default(shape, block_m, capability)
        return found

    @property
    def kept(self) -> bool:
        """True if there is a place for what is measured."""
        return _file(self.device) is not None

    def merge_measured(self, measured: dict[str, Tiling]) -> None:
        """Take over what was measured here, and store it with what others have stored meanwhile."""
        self.measured |= measured
        tuning_cache.save(_file(self.device), Choices.load(self.device).measured | measured)

    @classmethod
    def load(cls, device: str) -> "Choices":
        """Return the tilings measured on this device before."""
        return cls(device, tuning_cache.load(_file(device), dict[str, Tiling]))


def _file(device: str) -> Path | None:
    """Return the file of the tilings measured on ``device``: one for each version of the compiler."""
    try:
        compiler = f"triton-{metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        compiler = "no-triton"
    return tuning_cache.file_for("attention", device, compiler)
