"""GPU kernels: the resources they use, compiled without a GPU, and their speed on one.

    python bench/gpu.py compile [--capability 80 86 89 90] [--variants REGEX] [--json FILE]
    python bench/gpu.py [tests tune attention cascade merge polling loop worker torch_sdpa flash_attention flashinfer]
                        [--device 0] [--json FILE]

``compile`` needs Triton alone and prints registers, shared memory and spills of every kernel. The others need a GPU,
measure everything they compare with in the same run and write ``results/gpu-<gpu>.json``; without a GPU they say what
is missing. Each is a process of its own with a deadline of its own, and the file is written after each: one that fails
takes no other with it. All together take less than eight minutes. ``tests`` runs the kernels' tests first; ``tune``
measures tilings of attention on this GPU and keeps them for the others and for later processes; ``worker`` is the
memory worker itself, with messages that the GPU or the host waits for.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import RESULTS, ROOT
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.backend import Program
from lamina.kernels.gpu.device import find, require
from lamina.kernels.gpu.specialize import (
    GroupedWeights,
    append_program,
    attend_program,
    combine_program,
    decode_tile,
    draw_program,
    grouped_program,
    grouped_tile,
    merge_program,
    plan_program,
    prompt_tile,
    write_rows_program,
    write_words_program,
)
from lamina.kernels.gpu.tilings import REGISTERS, SHARED_KIB, Context, Shape, default
from lamina.models.quantisation.codes import GROUPS

if TYPE_CHECKING:
    from lamina.kernels.gpu.triton_compile import Binary

CAPABILITIES = (80, 86, 89, 90)
PEERS = {"torch_sdpa": 60, "flash_attention": 40, "flashinfer": 200}  # the last one compiles its kernels when used
TOTAL_S = 470  # all parts together: a GPU may be lent for ten minutes
OWN = {
    "tests": 90, "tune": 90, "attention": 90, "cascade": 40, "merge": 30, "polling": 30, "loop": 45, "experts": 40,
    "worker": 90,
}  # fmt: skip
DEADLINES_S = {**OWN, **PEERS}
KERNEL_TESTS = tuple(f"tests/kernels/test_triton_{name}.py" for name in ("attention", "plan", "grouped"))
TESTED = "decode_batch or appends or long_segment or one_wave or merge_equals or rows_are_written or multiplied"
Rows = list[dict[str, Any]]
QUERY = {KvElement.FLOAT32: np.float32, KvElement.FLOAT16: np.float16}  # bfloat16 for the others


def make_spec(kv_heads: int, group: int, qk_dim: int, v_dim: int | None = None, **options: Any) -> AttentionSpec:
    """An attention with the usual scale; V is as wide as K unless said."""
    return AttentionSpec(0, kv_heads * group, kv_heads, qk_dim, v_dim or qk_dim, qk_dim**-0.5, **options)


PLAIN = make_spec(8, 4, 128)
SPECS = {
    "GQA 1, 64": make_spec(16, 1, 64),
    "GQA 1, 128": make_spec(8, 1, 128),
    "GQA 8, 128": make_spec(8, 8, 128),
    "GQA 2, 256": make_spec(8, 2, 256),
    "MLA 192/128": make_spec(16, 1, 192, 128),
    "window, softcap": make_spec(8, 4, 128, window=4096, softcap=50.0),
    "chunk, alibi": make_spec(8, 4, 128, chunk=8192, alibi_slopes=tuple(0.5**i for i in range(1, 33))),
}


of_experts = partial(GroupedWeights, 64, 2048, 1536, True)
GROUPED = {
    "dense": of_experts(),
    "int8": of_experts("int8", 2048),
    "fp8": of_experts("fp8", 2048),
    **{f"fp8 in {group}s": of_experts("fp8", group) for group in GROUPS},
    **{f"int8 in {group}s": of_experts("int8", group) for group in GROUPS},
    **{f"int8 in {group}s with zeros": of_experts("int8", group, True) for group in GROUPS},
    **{f"int4 in {group}s": of_experts("int4", group, True) for group in GROUPS},
}


def attend_programs(
    title: str, spec: AttentionSpec, element: KvElement, capability: int
) -> Iterator[tuple[str, Program]]:
    """Yield the kernels of decode steps and prompt chunks, with the tilings of a device without measurements."""
    query, group = QUERY.get(element, np.uint16), spec.query_heads // spec.kv_heads
    for prompt in (False, True):
        block_m = prompt_tile(element) if prompt else decode_tile(spec)[0]
        shape = Shape(Context.NORMAL, False, prompt, element, group, spec.qk_dim)
        tiling = default(shape, block_m, capability)
        given = spec, element, tiling, block_m, query, capability
        name = f"{'prompt' if prompt else 'decode'}, {element.name.lower()}, {title}"
        yield name, attend_program(*given, None if prompt else query)
        if spec is PLAIN:
            yield f"shared {name}", attend_program(*given, joins=True)


def programs(capability: int) -> Iterator[tuple[str, Program]]:
    """Every kernel, in the variants that matter most, with a description."""
    for element in KvElement:
        yield from attend_programs("GQA 4, 128", PLAIN, element, capability)
    for title, spec in SPECS.items():
        yield from attend_programs(title, spec, KvElement.BFLOAT16, capability)
    yield "256 pairs", plan_program(256)
    yield "GQA 4, 128", combine_program(PLAIN, 16)
    yield "shared, GQA 4, 128", combine_program(PLAIN, 16, joins=True)
    yield "8 partials, 32 heads of 128", merge_program(8, 32, 128, True)
    for element in (KvElement.BFLOAT16, KvElement.INT8, KvElement.FP8):
        yield f"{element.name.lower()}, 8 heads of 128", append_program(element, np.uint16, 8, 128, 128)
    yield "", write_words_program()
    for form, weights in GROUPED.items():
        for rows in (64, 4096):
            yield (
                f"{rows} rows, {form}",
                grouped_program(np.uint16, weights, grouped_tile(rows, 2, weights), capability),
            )
    yield "K, V and Q of 8 and 32 heads of 128", write_rows_program(np.uint16, 4096, 2048)
    yield "tokens from logits in bfloat16", draw_program(np.uint16)


@dataclass(frozen=True)
class Resources:
    """The multiprocessor resources of one program, as ptxas reports them; spills in bytes per thread."""

    registers: int
    shared_bytes: int
    spill_stores: int
    spill_loads: int


def resources(binary: "Binary") -> Resources:
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


def compile_all(capabilities: list[int], variants: str = "") -> list[dict[str, Any]]:
    """Compile every program whose variant matches ``variants`` for every capability; one row each."""
    from lamina.kernels.gpu.triton_compile import compile_program

    found = ((capability, *described) for capability in capabilities for described in programs(capability))
    every = [one for one in found if re.search(variants, one[1])]
    rows = []
    for capability, title, program in track(every, "compiling", transient=True):
        figures = asdict(resources(compile_program(program, capability)))
        options = {"warps": program.warps, "stages": program.stages}
        figures["resident"] = resident(program.warps, figures["registers"], figures["shared_bytes"], capability)
        rows.append({"capability": capability, "kernel": program.kernel, "variant": title, **options, **figures})
    return rows


def resident(warps: int, registers: int, shared_bytes: int, capability: int) -> int:
    """Programs that a multiprocessor runs at once. Registers come in eights; shared memory takes 1 KiB more of each."""
    threads = 2048 if capability in (80, 90, 100) else 1536
    by_shared = (SHARED_KIB[capability] + 1) * 1024 // (shared_bytes + 1024)
    return min(threads // (32 * warps), REGISTERS // (32 * warps * -(-registers // 8) * 8), by_shared)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)


def by_capability(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant, a column per capability: registers, KiB of shared memory, programs resident, any spills."""
    variants: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["kernel"], row["variant"]
        spills = f" +{row['spill_stores']} B spilled" if row["spill_stores"] + row["spill_loads"] else ""
        cell = f"{row['registers']} regs {row['shared_bytes'] / 1024:.0f} KiB x{row['resident']}{spills}"
        variants.setdefault(key, dict(zip(("kernel", "variant"), key, strict=True)))[f"sm_{row['capability']}"] = cell
    return list(variants.values())


def compiled(args: argparse.Namespace) -> None:
    rows = compile_all(args.capability, args.variants)
    title = "Registers per thread, shared memory, programs resident and spills, compiled without a GPU"
    show(title, by_capability(rows))
    path = args.json or RESULTS / "gpu-compile.json"
    path.write_text(json.dumps({"triton": metadata.version("triton"), "programs": rows}, indent=1) + "\n")


def require_card(index: int) -> str:
    """Return the GPU's name. Exits with a message if there is no such GPU."""
    try:
        return require(index, find()).name
    except ConfigError as error:
        raise SystemExit(f"skipped: {error}") from None


def part(what: str, index: int) -> dict[str, Any]:
    """Run one part in this process: the GPU, the versions and its rows."""
    from bench.gpu import attention, doorbells, experts, peers, worker  # these import CuPy
    from bench.gpu.step import Gpu

    parts: dict[str, Callable[[Gpu], Rows]] = {
        "tune": attention.tune,
        "attention": attention.attention,
        "cascade": attention.cascade,
        "merge": attention.merge,
        "polling": doorbells.polling,
        "loop": doorbells.loop,
        "experts": lambda gpu: experts.experts(index),
        "worker": lambda gpu: worker.worker(f"cuda:{index}", 16, [1, 16, 64], 1024, 20),
        **{name: partial(attention.peer, name=name) for name in PEERS},
    }
    gpu = Gpu(index)
    with gpu.stream:
        if what in PEERS and not peers.installed(what):
            print(f"skipped: {what} is not installed")
            return gpu.describe() | {"skipped": "not installed"}
        rows = parts[what](gpu)
    show(what, rows)
    return gpu.describe() | {"rows": rows}


def run(command: list[str], deadline_s: float, **options: Any) -> None:
    """Run a command to its end, and end it with all its children if it takes too long or this process is interrupted.

    Raises:
        subprocess.SubprocessError: it failed or took too long.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            status = process.wait(deadline_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def tests(deadline_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "--dist", "worksteal", "-k", TESTED, *KERNEL_TESTS]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run(command, deadline_s, cwd=ROOT, env=environment)
    return {"passed": TESTED}


def attempt(what: str, device: int, deadline_s: float) -> dict[str, Any]:
    started, today = time.monotonic(), datetime.date.today().isoformat()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "part.json")
        command = [sys.executable, "-m", "bench.gpu", what, "--here", "--device", str(device), "--json", str(path)]
        try:
            if what == "tests":
                found = tests(deadline_s)
            else:
                run(command, deadline_s, cwd=ROOT)
                found = json.loads(path.read_text())
        except subprocess.TimeoutExpired:
            found = {"failed": f"no end within {deadline_s:.0f} s"}
        except subprocess.CalledProcessError as error:
            found = {"failed": f"exit status {error.returncode}; what it printed says why"}
    seconds = round(time.monotonic() - started)
    print(f"{what}: {'FAILED, ' + found['failed'] if 'failed' in found else 'done'} ({seconds} s)", flush=True)
    return {"date": today, "seconds": seconds} | found


def measured(args: argparse.Namespace) -> None:
    """Run the requested parts one after another. Ends with status 1 if one failed."""
    name = require_card(args.device)
    path = args.json or RESULTS / f"gpu-{name.lower().replace(' ', '-')}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    parts, until = args.what or list(DEADLINES_S), time.monotonic() + TOTAL_S
    for what in parts:
        record[what] = attempt(what, args.device, min(DEADLINES_S[what], max(0.0, until - time.monotonic())))
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
    if failed := [what for what in parts if "failed" in record[what]]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser("gpu.py", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"compile, or of {', '.join(DEADLINES_S)} (all)")
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--variants", default="", metavar="REGEX", help="compile only the variants that match")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there instead of results/")
    parser.add_argument("--here", action="store_true", help="one part in this process, for profilers; writes if --json")
    args = parser.parse_args()
    if args.what == ["compile"]:
        compiled(args)
    elif not set(args.what) <= set(DEADLINES_S):
        parser.error(f"unknown part in {args.what}; give compile, {', '.join(DEADLINES_S)}")
    elif args.here:
        if len(args.what) != 1 or args.what == ["tests"]:
            parser.error("--here takes one of " + ", ".join(list(DEADLINES_S)[1:]))
        require_card(args.device)
        found = part(args.what[0], args.device)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        measured(args)


if __name__ == "__main__":
    main()
