"""A ``Backend`` without a GPU: Triton's interpreter runs programs one after another on numpy arrays."""

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamina.kernels.gpu.backend import ALIGNMENT, Program
from lamina.transport.device.inboxes import SharedMaker

RUNNING = threading.Lock()  # the interpreter's state is the process's, and programs may come from several threads
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8, "u8": torch.uint8}


_recorders: list[Callable[[Callable[[], None]], None]] = []


@contextmanager
def recorded(recorder: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Pass launches to ``recorder``, which runs them, like a stream that is being captured.

    Meanwhile, a backend may do nothing else, not even allocate memory.
    """
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


def is_recording() -> bool:
    """Return whether launches are recorded."""
    return bool(_recorders)


def reject_recording(what: str) -> None:
    """Raises RuntimeError while launches are recorded, as CUDA would."""
    if _recorders:
        raise RuntimeError(f"{what}, which a recording must not do")


class Interpreter:
    """A backend without a GPU. Two multiprocessors: short segments are cut too."""

    capability = 90
    multiprocessors = 2
    name = "interpreter"
    timed = False
    ends_long_kernels = False

    def constant(self, numbers: tuple[float, ...]) -> Any:
        return np.array(numbers, np.float32)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return memory whose bits are all 1: NaN in every floating-point type, -1 in every signed one."""
        reject_recording("this allocates memory")
        return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 255, np.uint8).view(dtype).reshape(shape)

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of memory: more than any test needs."""
        return 1 << 40, 1 << 40

    def on_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return self.empty(shape, dtype)

    def trim(self) -> None:
        """Do nothing: no memory is kept for later."""

    def upload(self, source: npt.NDArray[Any], target: Any) -> None:
        reject_recording("this copies from the host")
        target[: len(source)] = source

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def inbox_maker(self) -> SharedMaker:
        return SharedMaker()

    def is_on_device(self, array: Any) -> bool:
        """True if the array was made by this backend; other arrays may be the host's."""
        return isinstance(array, np.memmap)

    def download(self, *copies: tuple[Any, Any]) -> None:
        reject_recording("this waits for the device")
        for source, target in copies:
            target[...] = source

    def register_upload(self, memory: memoryview) -> None:
        """Do nothing: the interpreter gains nothing by registered memory."""

    def register_download(self, name: str, memory: memoryview) -> bool:
        return True

    def unregister_download(self, name: str) -> None:
        """Do nothing: nothing was mapped."""

    def wait_for_uploads(self) -> None:
        """Do nothing: nothing runs in the background."""

    def aligned(self, array: Any) -> Any:
        return array.copy() if array.ctypes.data % ALIGNMENT else array

    def fits(self, program: Program) -> bool:
        return True

    def time_on_device(self, call: Callable[[], object]) -> float:
        """Raise NotImplementedError: an interpreter's times say nothing about a GPU."""
        raise NotImplementedError

    def prepare(self, program: Program) -> None:
        """Do nothing: the interpreter compiles nothing."""

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Run the programs of ``grid`` one after another.

        Raises ValueError for an array that is not C-contiguous or not aligned: on a GPU, programs rely on both.
        """
        if _recorders:
            _recorders[-1](lambda: self._run(program, grid, arguments))
        else:
            self._run(program, grid, arguments)

    def _run(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        import triton.language as tl

        _match_gpus()
        _replace_language()
        for argument in arguments:
            if isinstance(argument, np.ndarray) and not (
                argument.flags.c_contiguous and argument.ctypes.data % ALIGNMENT == 0
            ):
                raise ValueError(
                    f"{program.kernel} got an array {argument.shape} at {argument.ctypes.data} with strides "
                    f"{argument.strides}; give C-contiguous ones at multiples of {ALIGNMENT} bytes"
                )
        kernel = getattr(importlib.import_module(f"lamina.kernels.gpu.{program.module}"), program.kernel)
        with RUNNING:
            kernel[grid](*map(_as_tensor, arguments, program.types), **constants(program, tl))


@functools.cache
def _match_gpus() -> None:
    """Make the interpreter compute what GPUs do.

    It keeps bfloat16 as uint16, takes those bits for numbers in products and casts from integers, and truncates to
    bfloat16; it spreads booleans as integers, and takes no such mask.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, side, tl.float32) if side.dtype.scalar == tl.bfloat16 else side for side in (a, b))
        return dot(self, a, b, *rest)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
            return cast(self, source, to)
        wide = source.data.astype(np.float32)
        bits = torch.from_numpy(wide).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, to.scalar)

    def masked(access: Callable[..., Any], place: int) -> Callable[..., Any]:
        def with_boolean_mask(*arguments: Any) -> Any:
            mask = TensorHandle(arguments[place].data.astype(np.bool_), tl.int1)
            return access(*arguments[:place], mask, *arguments[place + 1 :])

        return with_boolean_mask

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.create_masked_load = masked(InterpreterBuilder.create_masked_load, 2)
    InterpreterBuilder.create_masked_store = masked(InterpreterBuilder.create_masked_store, 3)


@functools.cache
def _replace_language() -> None:
    """Replace the functions of Triton's language by the interpreter's, once for all.

    Triton does it for each launch, and for each call of a helper in a kernel: a third of the time of small programs.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: type(scope)()  # with nothing to restore


def constants(program: Program, language: Any) -> dict[str, Any]:
    """Return the kernel's compile-time parameters, by name."""
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    return {
        name: getattr(language, names[value]) if isinstance(value, str) else value for name, value in program.constants
    }


def _as_tensor(argument: Any, name: str) -> Any:
    """Return an argument of a kernel as the interpreter reads it: an array as a tensor, since numpy has no bfloat16.

    ``name``: Triton's name of the argument's type; "*" marks an array.
    """
    if not name.startswith("*"):
        return argument
    tensor = torch.from_numpy(argument.view(np.int16) if argument.dtype == np.uint16 else argument)
    wanted = TYPES.get(name[1:], tensor.dtype)
    assert tensor.element_size() == wanted.itemsize, f"{argument.dtype} given for {name}"
    return tensor.view(wanted)
