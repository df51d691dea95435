"""GPU kernels become machine code without a GPU: Triton's ahead of time, CUDA's by nvcc where there is one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.kernels.gpu.tilings import SHARED_KIB

ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 86, 89, 90, 100)
CORE = r"bfloat16, GQA 4, 128|256 pairs|^GQA|8 partials|bfloat16, 8 heads|^$|64 rows, (dense|int4 in 32s)|K, V|tokens"
"""Variants that between them are of every kernel; compiling all takes 50 s of one core."""
DEADLINE_S = 900  # many times as long as compiling takes: others use the cores too
POLLING = ROOT / "native" / "polling.cu"
pytestmark = pytest.mark.timeout(DEADLINE_S)
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc on this machine: install the CUDA toolkit"
)


def run(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("capability", "variants"),
    [
        pytest.param(90, CORE, id="core"),
        *(pytest.param(each, "", id=str(each), marks=pytest.mark.slow) for each in CAPABILITIES),
    ],
)
def test_every_program_compiles_for_its_registers_and_memory(capability, variants, tmp_path):
    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    results = tmp_path / "compiled.json"
    which = ("--capability", str(capability), "--variants", variants)
    run(sys.executable, "bench/gpu.py", "compile", *which, "--json", str(results))
    rows = json.loads(results.read_text())["programs"]
    assert {row["capability"] for row in rows} == {capability}
    assert {"attend", "plan", "combine", "merge", "append", "write_words", "write_rows", "multiply", "draw"} <= {
        row["kernel"] for row in rows
    }
    # A few registers of some variants: on that one by Triton 3.7, on all by Triton 3.6.
    if capability != 100 and not triton.__version__.startswith("3.6."):
        assert not [row for row in rows if row["spill_stores"] or row["spill_loads"]]
    assert all(row["shared_bytes"] <= SHARED_KIB[capability] * 1024 for row in rows)
    decode = [row["resident"] for row in rows if row["variant"].startswith("decode, bfloat16, GQA 4, 128")]
    assert decode == [4], "fewer programs at once than the default tiling counts on"


COMPILE_FOR_AMD = """
import sys
from bench.gpu.__main__ import programs
import triton
from triton.backends.compiler import GPUTarget
from lamina.kernels.gpu.triton_compile import source
threads = 64 if sys.argv[1].startswith("gfx9") else 32  # of a wavefront: CDNA, and RDNA
for variant, program in programs(0):
    if sys.argv[2] == "all" or variant == "decode, bfloat16, GQA 4, 128":
        options = {"num_warps": program.warps, "num_stages": min(program.stages, 2)}
        target = GPUTarget("hip", sys.argv[1], threads)
        code = triton.compile(source(program)[0], target=target, options=options).asm["hsaco"]
        assert code.startswith(b"\\x7fELF"), (program, variant)
        print(program.kernel, variant)
"""


@pytest.mark.parametrize("architecture", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["decode", pytest.param("all", marks=pytest.mark.slow)])
def test_programs_compile_for_amd(architecture, which):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    assert "attend" in run(sys.executable, "-c", COMPILE_FOR_AMD, architecture, which)


PRINT_PTX = """
import numpy as np
from lamina.kernels.gpu.tilings import Context, Shape, default
from lamina.core.types import KvElement
from lamina.kernels.gpu.specialize import attend_program
from lamina.kernels.gpu.triton_compile import compile_program
from lamina.core.types import AttentionSpec
spec = AttentionSpec(0, 32, 8, 128, 128, 128**-0.5)
tiling = default(Shape(Context.NORMAL, False, False, KvElement.BFLOAT16, 4, 128), 16, 90)
print(compile_program(attend_program(spec, KvElement.BFLOAT16, tiling, 16, np.uint16, 90), 90).ptx)
"""


def test_decode_copies_16_bytes_at_once_and_multiplies_on_tensor_cores():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    ptx = run(sys.executable, "-c", PRINT_PTX)
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 0x10", ptx)
    assert len(copies) == 2 * 2 * 64 * 128 * 2 // (16 * 128)  # K and V, before the loop and in it, by 128 threads
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx and "ex2.approx" in ptx
    assert "ld.local" not in ptx and "st.local" not in ptx


@needs_nvcc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_polling_compiles(capability, tmp_path):
    cubin = str(tmp_path / "polling.cubin")
    run("nvcc", f"-arch=sm_{capability}", "-cubin", "-Werror", "all-warnings", "-o", cubin, str(POLLING))


@needs_nvcc
def test_polling_acquires_and_releases_at_system_scope():
    """In the PTX that nvcc makes, the loop's look and the ring are the ordered ones, and every look asks the clock."""
    ptx = run("nvcc", "-arch=sm_90", "-ptx", "-o", "-", str(POLLING))
    wait, ring = (ptx[ptx.index(f".entry {name}") :].partition("\n}")[0] for name in ("lamina_wait", "lamina_ring"))
    assert "ld.acquire.sys.global.u64" in wait and "clock64" in wait and "ld.acquire.sys.global.u32" in wait
    assert ring.index("membar.sys") < ring.index("st.release.sys.global.u64")


def test_polling_source_travels_with_the_package():
    from lamina.transport.device.polling import SOURCE

    assert SOURCE.read_text() == POLLING.read_text()


def test_interpreted_kernels_are_not_compiled_by_accident():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from lamina.kernels.gpu.specialize import plan_program
    from lamina.kernels.gpu.triton_compile import compile_program

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_program(plan_program(1), 90)
