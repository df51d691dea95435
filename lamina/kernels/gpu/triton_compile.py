"""Compiles programs ahead of time to machine code of one kind of GPU; needs Triton, but no GPU."""

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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


@dataclass(frozen=True)
class Resources:
    """The multiprocessor resources of one program, as ptxas reports them; spills in bytes per thread."""

    registers: int
    shared_bytes: int
    spill_stores: int
    spill_loads: int


@cache
def compile_program(program: Program, capability: int) -> Binary:
    """Machine code for GPUs of one compute capability, such as 90.

    Raises:
        RuntimeError: the program needs Triton's scratch memory, which is not provided, or Triton interprets kernels.
    """
    source, passed = _source(program)
    options = {"num_warps": program.warps, "num_stages": program.stages, "enable_fp_fusion": True}
    options |= {"maxnreg": program.registers} if program.registers else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
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


def compile_for_amd(program: Program, architecture: str) -> bytes:
    """Machine code (an ELF file) for AMD GPUs of an architecture such as gfx942. It has never run on one.

    Raises RuntimeError if Triton interprets kernels.
    """
    threads = 64 if architecture.startswith("gfx9") else 32  # of a wavefront: CDNA, and RDNA
    options = {"num_warps": program.warps, "num_stages": min(program.stages, 2)}
    code: bytes = triton.compile(
        _source(program)[0], target=GPUTarget("hip", architecture, threads), options=options
    ).asm["hsaco"]
    return code


def _source(program: Program) -> tuple[ASTSource, int]:
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


def resources(binary: Binary) -> Resources:
    """Registers and spills of a binary, by assembling its PTX once more with a report.

    Raises:
        RuntimeError: ptxas fails; the message is its own.
    """
    from triton.backends.nvidia.compiler import get_ptxas  # an internal of Triton; not needed to run programs

    target = re.search(r"^\.target (\w+)", binary.ptx, re.MULTILINE)
    assert target
    architecture = int(re.sub(r"\D", "", target[1]))
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory, "program.ptx")
        ptx.write_text(binary.ptx)
        command = [
            get_ptxas(architecture).path,
            "-v",
            f"-arch={target[1]}",
            str(ptx),
            "-o",
            f"{directory}/program.cubin",
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas failed on {binary.name}: {run.stderr}")

    def figure(pattern: str) -> int:
        return int(match[1]) if (match := re.search(pattern, run.stderr)) else 0

    stores, loads = figure(r"(\d+) bytes spill stores"), figure(r"(\d+) bytes spill loads")
    return Resources(figure(r"Used (\d+) registers"), binary.shared_bytes, stores, loads)
