"""Compiles programs ahead of time to machine code of one kind of GPU; needs Triton, but no GPU."""

import importlib
from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamina.kernels.gpu.backend import ALIGNMENT, Program

LANGUAGE_TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


@dataclass(frozen=True)
class Binary:
    """Machine code of one program. Its last ``hidden`` parameters are Triton's own pointers; pass null."""

    name: str
    cubin: bytes
    ptx: str
    warps: int
    shared_bytes: int
    hidden: int


@cache
def compile_program(program: Program, capability: int) -> Binary:
    """Return a program's machine code for GPUs of one compute capability, such as 90.

    Raises:
        RuntimeError: the program needs Triton's scratch memory, which is not provided, or Triton interprets kernels.
    """
    made, passed = source(program)
    options = {"num_warps": program.warps, "num_stages": program.stages, "enable_fp_fusion": True}
    options |= {"maxnreg": program.registers} if program.registers else {}
    compiled = triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise RuntimeError(f"{program} needs scratch memory in Triton {triton.__version__}, which is not supported")
    ptx = compiled.asm["ptx"]
    entry = ptx[ptx.index(".entry") :]
    parameters = entry[: entry.index(")")].count(".param")
    return Binary(
        compiled.metadata.name,
        compiled.asm["cubin"],
        ptx,
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        parameters - passed,
    )


def source(program: Program) -> tuple[ASTSource, int]:
    """Return a program's source for Triton's compiler, and how many arguments it takes."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process; unset it to compile")
    kernel = getattr(importlib.import_module(f"lamina.kernels.gpu.{program.module}"), program.kernel)
    constants = dict(program.constants)
    passed = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(passed, program.types, strict=True))
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {name: LANGUAGE_TYPES[value] if isinstance(value, str) else value for name, value in constants.items()},
        {
            (index,): [["tt.divisibility", ALIGNMENT]]
            for index, name in enumerate(kernel.arg_names)
            if types.get(name, "").startswith("*")
        },
    )
    return source, len(passed)
