"""Offline decode and prefill of a random Llama: Lamina, other engines and the memory limit, measured in the same run.

    python -m bench.runtime.serve [--model 250m] [--grid 1x512,8x512,64x512,16x2048,4x8192] [--rounds 3]
                          [--peers DIR] [--engines lamina,unsplit,openvino,llama_cpp] [--json FILE]

Every engine runs alone, in a process of its own, on all cores this process may use, with the same weights: bfloat16
weights and KV, greedy decoding, random prompts. The engines take turns, ``--rounds`` times; figures are medians.
``bench/peers/setup.sh DIR`` makes the environments of the peers; the models are kept in DIR too. ``unsplit`` is Lamina
in one process, without workers and transport.

A decode step must read every weight once and every request's KV once: the limit is those bytes over the read bandwidth
that a native loop reaches with all cores, measured before every engine's turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench import ROOT
from bench.models import MODELS, checkpoint, kv_bytes_per_token, weight_bytes
from bench.peers.offline import DECODED
from lamina.cluster.launchers.local import OPENMP_SPIN_COUNT, allocation_variables
from lamina.kernels.memory import allocate, read

READ_BYTES = 512 * 1024 * 1024
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Engine:
    """A module of ``bench.peers`` and the environment it runs in; None: this one."""

    name: str
    module: str
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


# The process that does everything gets what the launcher gives workers.
WORKER_VARIABLES = {"GOMP_SPINCOUNT": OPENMP_SPIN_COUNT} | allocation_variables()
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("lamina", "lamina_offline"),
        Engine("unsplit", "unsplit", variables=WORKER_VARIABLES),
        Engine("openvino", "openvino_peer", "openvino"),
        Engine("llama_cpp", "llama_cpp_peer", "llama_cpp"),
    )
}
PEERS = [name for name, engine in ENGINES.items() if engine.environment]


@dataclass(frozen=True)
class Turn:
    """One engine's measurement of one cell; tokens per second over all requests, ``limit`` of decode as well."""

    engine: str
    batch: int
    context: int
    round: int
    decode: float
    prefill: float
    limit: float
    about: dict[str, str]


def read_bandwidth(threads: int) -> float:
    """Bytes per second that a native loop reads from memory larger than any cache: the median of seven."""
    memory = allocate(READ_BYTES)
    memory[:] = 1
    rates = []
    for _ in range(7):
        start = time.perf_counter()
        read(memory, threads)
        rates.append(READ_BYTES / (time.perf_counter() - start))
    return statistics.median(rates)


def measure(engine: Engine, peers: Path, model: Path, batch: int, context: int, cores: int) -> dict[str, Any]:
    """What the engine prints. Raises SystemExit with what it said if it fails."""
    python = sys.executable if engine.environment is None else str(peers / engine.environment / "bin" / "python")
    cell = ["--batch", str(batch), "--context", str(context), "--threads", str(cores)]
    process = subprocess.run(
        [python, "-m", f"bench.peers.{engine.module}", model, *cell],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=os.environ | engine.variables,
        cwd=ROOT,
    )
    if process.returncode != 0:
        raise SystemExit(f"{engine.name} failed at {batch} x {context}:\n{process.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def take_turns(args: argparse.Namespace, peers: Path, model: Path) -> list[Turn]:
    """All cells, rounds and engines, in this order."""
    cores = len(os.sched_getaffinity(0))
    turns = []
    for batch, context in args.grid:
        bytes_read = weight_bytes(args.model) + batch * (context + DECODED / 2) * kv_bytes_per_token(args.model)
        for number in range(args.rounds):
            for name in args.engines:
                limit = batch * read_bandwidth(threads=cores) / bytes_read
                result = measure(ENGINES[name], peers, model, batch, context, cores)
                turns.append(Turn(name, batch, context, number, limit=limit, **result))
                print(f"{batch} x {context} {name}: {result['decode']:.0f} {result['prefill']:.0f}", file=sys.stderr)
    return turns


def tables(turns: Sequence[Turn], engines: Sequence[str], title: str) -> list[Table]:
    """Decode and prefill: one row per cell, one column per engine, Lamina over the others and the limit."""
    peers = [name for name in engines if name in PEERS]
    ratios = ["best peer"] * bool(peers) + ["unsplit"] * ("unsplit" in engines)
    cells = list(dict.fromkeys((turn.batch, turn.context) for turn in turns))
    made = []
    for figure, limits in (("decode", ["limit"]), ("prefill", [])):
        others = [*ratios, *limits] if "lamina" in engines else []
        heads = [*engines, *limits, *(f"lamina / {other}" for other in others)]
        columns = [Column(head, justify="right") for head in heads]
        table = Table("batch x context", *columns, title=f"{title}, {figure}, tokens/s")
        for cell in cells:
            here = [turn for turn in turns if (turn.batch, turn.context) == cell]
            rates = {
                name: statistics.median(getattr(turn, figure) for turn in here if turn.engine == name)
                for name in engines
            }
            known = rates | {"limit": statistics.median(turn.limit for turn in here)}
            known |= {"best peer": max(rates[name] for name in peers)} if peers else {}
            values = [f"{known[name]:.0f}" for name in [*engines, *limits]]
            values += [f"{rates['lamina'] / known[other]:.2f}" for other in others]
            table.add_row(f"{cell[0]} x {cell[1]}", *values)
        made.append(table)
    return made


def cells(text: str) -> list[tuple[int, int]]:
    """``1x512,8x512`` as pairs."""
    pairs = [cell.split("x") for cell in text.split(",")]
    return [(int(batch), int(context)) for batch, context in pairs]


def chosen(args: argparse.Namespace) -> list[str]:
    """The engines asked for; without ``--engines``, all whose environment is there. Raises SystemExit."""
    names = args.engines.split(",") if args.engines else [n for n in ENGINES if args.peers or n not in PEERS]
    for name in names:
        if name not in ENGINES:
            raise SystemExit(f"error: no engine is called {name!r}; choose from {', '.join(ENGINES)}")
        environment = ENGINES[name].environment
        if environment and not (args.peers and (args.peers / environment).is_dir()):
            raise SystemExit(
                f"error: no environment for {name}; make it with bench/peers/setup.sh DIR, give --peers DIR"
            )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="250m")
    parser.add_argument(
        "--grid", type=cells, default="1x512,8x512,64x512,16x2048,4x8192", help="batch x context, by commas"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="environments made by bench/peers/setup.sh")
    parser.add_argument("--engines", metavar="NAMES", help="by commas; default: all whose environment is there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.engines = chosen(args)
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        peers = (args.peers or Path(place)).resolve()
        turns = take_turns(args, peers, checkpoint(args.model, peers))
    for table in tables(turns, args.engines, f"{args.model}, bfloat16"):
        Console(width=160).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(turn) for turn in turns], indent=1))


if __name__ == "__main__":
    main()
