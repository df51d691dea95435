"""GPU kernels: what they take of a card, compiled without one, and how fast they are on one.

    python bench/gpu.py compile [--capability 80 86 89 90] [--json FILE]
    python bench/gpu.py [attention merge polling loop] [--device cuda:0] [--json FILE]
    python bench/gpu.py tune [--device cuda:0]

``compile`` needs Triton alone and prints registers, shared memory and spills of every kernel. The others need a card,
measure everything they compare with in the same run and write ``results/gpu-<card>.json``; without a card they say what
is missing. ``tune`` measures the tilings of attention on this card and keeps them for later processes.
"""

import argparse
import datetime
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lamina.errors import ConfigError
from lamina.kernels.gpu.choice import Context, Shape, default
from lamina.kernels.gpu.device import find, select
from lamina.kernels.gpu.program import KvElement, Program
from lamina.kernels.gpu.specialize import (
    append_program,
    attend_program,
    combine_program,
    decode_tile,
    merge_program,
    plan_program,
    prompt_tile,
    write_words_program,
)
from lamina.types import AttentionSpec

RESULTS = Path(__file__).parent / "results"
CAPABILITIES = (80, 86, 89, 90)
MEASUREMENTS = ("attention", "merge", "polling", "loop")
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


def attend_programs(
    title: str, spec: AttentionSpec, element: KvElement, capability: int
) -> Iterator[tuple[str, Program]]:
    """Decode with appending, and prompt chunks, as a device that nobody measured runs them."""
    query, group = QUERY.get(element, np.uint16), spec.query_heads // spec.kv_heads
    for prompt in (False, True):
        block_m = prompt_tile(element) if prompt else decode_tile(spec)[0]
        shape = Shape(Context.NORMAL, False, prompt, element, group, spec.qk_dim)
        tiling = default(shape, block_m, capability)
        new = None if prompt else query
        name = f"{'prompt' if prompt else 'decode'}, {element.name.lower()}, {title}"
        yield name, attend_program(spec, element, tiling, block_m, query, capability, new)


def programs(capability: int) -> Iterator[tuple[str, Program]]:
    """Every kernel, in the variants that matter most, with a description."""
    for element in KvElement:
        yield from attend_programs("GQA 4, 128", PLAIN, element, capability)
    for title, spec in SPECS.items():
        yield from attend_programs(title, spec, KvElement.BFLOAT16, capability)
    tiling = default(Shape(Context.NORMAL, False, False, KvElement.BFLOAT16, 4, 128), 16, capability)
    yield "256 pairs", plan_program(PLAIN, tiling, 16, (1, 4), 66, 256)
    yield "GQA 4, 128", combine_program(PLAIN, 16)
    yield "8 partials, 32 heads of 128", merge_program(8, 32, 128, True)
    for element in (KvElement.BFLOAT16, KvElement.INT8, KvElement.FP8):
        yield f"{element.name.lower()}, 8 heads of 128", append_program(element, np.uint16, 8, 128, 128)
    yield "", write_words_program()


def compile_all(capabilities: list[int]) -> list[dict[str, Any]]:
    """Compile every program for every capability; one row each."""
    from lamina.kernels.gpu.triton_compile import compile_program, resources

    every = [(capability, *described) for capability in capabilities for described in programs(capability)]
    rows = []
    for capability, title, program in track(every, "compiling", transient=True):
        figures = asdict(resources(compile_program(program, capability)))
        options = {"warps": program.warps, "stages": program.stages}
        rows.append({"capability": capability, "kernel": program.kernel, "variant": title, **options, **figures})
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows that have the same keys."""
    table = Table(title=title)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)


def by_capability(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant, one column per capability: registers, KiB of shared memory, and spills if any."""
    variants: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["kernel"], row["variant"]
        spills = f" +{row['spill_stores']} B spilled" if row["spill_stores"] + row["spill_loads"] else ""
        cell = f"{row['registers']} regs {row['shared_bytes'] / 1024:.0f} KiB{spills}"
        variants.setdefault(key, dict(zip(("kernel", "variant"), key, strict=True)))[f"sm_{row['capability']}"] = cell
    return list(variants.values())


def compiled(args: argparse.Namespace) -> None:
    """``compile``: print the table and write it."""
    rows = compile_all(args.capability)
    show("Registers per thread, shared memory and spills, compiled without a card", by_capability(rows))
    path = args.json or RESULTS / "gpu-compile.json"
    path.write_text(json.dumps({"triton": metadata.version("triton"), "programs": rows}, indent=1) + "\n")


def measured(args: argparse.Namespace, what: list[str]) -> None:
    """Everything that needs a card."""
    found = find()
    try:
        index = select(args.device, found)
    except ConfigError as error:
        raise SystemExit(f"skipped: {error}") from None
    if index is None:
        raise SystemExit("skipped: these measurements need a card; ask for cuda:0")
    import gpu_card  # beside this file

    card = gpu_card.CardBench(index)
    if what == ["tune"]:
        print(f"wrote {card.tune()}")
        return
    record: dict[str, Any] = {"date": datetime.date.today().isoformat(), **card.describe()}
    for name in what:
        record[name] = getattr(card, name)()
        show(name, record[name])
    path = args.json or RESULTS / f"gpu-{card.backend.name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"compile, tune, or of {', '.join(MEASUREMENTS)} (all)")
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there instead of results/")
    args = parser.parse_args()
    if args.what == ["compile"]:
        compiled(args)
    elif args.what == ["tune"] or set(args.what) <= set(MEASUREMENTS):
        measured(args, args.what or list(MEASUREMENTS))
    else:
        parser.error(f"{args.what} is none of compile, tune, {', '.join(MEASUREMENTS)}")


if __name__ == "__main__":
    main()
