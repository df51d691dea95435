"""Offline decode and prefill of a random Llama: Lamina, other engines and the memory limit, measured in the same run.

    python -m bench.runtime.serve [--model 250m] [--grid 1x512,8x512,64x512,16x2048,4x8192] [--rounds 3]
                          [--peers DIR] [--engines lamina,lamina_pools,unsplit,openvino,llama_cpp] [--json FILE]

Every engine is a process of its own, on all cores this process may use, with the same weights: bfloat16 weights and KV,
greedy decoding, random prompts. The engines of a cell take turns, ``--rounds`` times, while the others wait; figures
are medians. So are the ratios to other engines, over the rounds, since the machine's speed may change between these;
with a 95% confidence interval, from six rounds on (order statistics of the ratios).
``bench/peers/setup.sh DIR`` makes the environments of the peers; the models are kept in DIR too. ``lamina`` has its
default pools, a compute worker with local memory; ``lamina_pools`` has a memory worker instead; ``unsplit`` is Lamina's
kernels in one process, without workers and transport.

A decode step must read every weight once and every request's KV once: the limit is those bytes over the read bandwidth
that a native loop reaches with all cores, measured before every engine's turn.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import scipy.stats
from rich.console import Console
from rich.table import Column, Table

from bench import ROOT
from bench.models import MODELS, checkpoint, kv_bytes_per_token, weight_bytes
from bench.peers.offline import DECODED
from lamina import _native
from lamina.cluster.local_workers import OPENMP_SPIN_COUNT, allocation_variables
from lamina.kernels.host_memory import allocate

READ_BYTES = 512 * 1024 * 1024
TIMEOUT_S = 1800
END_S = 30


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
        Engine("lamina_pools", "lamina_pools"),
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
        _native.read_memory(memory, threads)
        rates.append(READ_BYTES / (time.perf_counter() - start))
    return statistics.median(rates)


class Running:
    """An engine that has loaded a model for one cell, and measures it when asked."""

    def __init__(self, engine: Engine, peers: Path, model: Path, batch: int, context: int, cores: int) -> None:
        python = sys.executable if engine.environment is None else str(peers / engine.environment / "bin" / "python")
        cell = ["--batch", str(batch), "--context", str(context), "--threads", str(cores)]
        self._what = f"{engine.name} at {batch} x {context}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.{engine.module}", model, *cell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | engine.variables,
            cwd=ROOT,
        )

    def measure(self) -> dict[str, Any]:
        """Return the engine's figures. Raises SystemExit with its output if it fails, or takes ``TIMEOUT_S``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline = threading.Timer(TIMEOUT_S, self._process.kill)
        deadline.start()
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("{"):
                    result: dict[str, Any] = json.loads(line)
                    return result
        except BrokenPipeError:
            pass  # it has ended: said below
        finally:
            deadline.cancel()
        self._said.seek(0)
        raise SystemExit(f"{self._what} ended or took {TIMEOUT_S} s:\n{self._said.read()[-4000:]}")

    def close(self) -> None:
        """End the engine, which reads no further line."""
        assert self._process.stdin is not None
        with self._said, self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def take_turns(args: argparse.Namespace, peers: Path, model: Path) -> list[Turn]:
    """All cells, rounds and engines, in this order."""
    cores = len(os.sched_getaffinity(0))
    turns = []
    for batch, context in args.grid:
        bytes_read = weight_bytes(args.model) + batch * (context + DECODED / 2) * kv_bytes_per_token(args.model)
        with contextlib.ExitStack() as stack:
            running = {}
            for name in args.engines:
                running[name] = Running(ENGINES[name], peers, model, batch, context, cores)
                stack.callback(running[name].close)
            for one in running.values():
                one.measure()  # all have loaded and warmed up before any figure counts
            for number, (name, one) in itertools.product(range(args.rounds), running.items()):
                limit = batch * read_bandwidth(threads=cores) / bytes_read
                turns.append(Turn(name, batch, context, number, limit=limit, **one.measure()))
                rates = f"{turns[-1].decode:.0f} {turns[-1].prefill:.0f}"
                print(f"{batch} x {context} {name}: {rates}", file=sys.stderr)
    return turns


def ratio(here: Sequence[Turn], figure: str, others: Sequence[str]) -> str:
    """Lamina over the best of ``others``: the median over rounds, and its 95% interval if there are enough rounds."""
    rounds = [
        {turn.engine: getattr(turn, figure) for turn in here if turn.round == number}
        for number in {turn.round for turn in here}
    ]
    ratios = [rates["lamina"] / max(rates[name] for name in others) for rates in rounds]
    low, high = scipy.stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    interval = "" if math.isnan(low) or math.isnan(high) else f" ({low:.2f} to {high:.2f})"
    return f"{statistics.median(ratios):.2f}{interval}"


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
            values = [f"{known[name]:.0f}" for name in [*engines, *limits]]
            for other in others:
                compared = peers if other == "best peer" else [other]
                values.append(
                    f"{rates['lamina'] / known[other]:.2f}" if other == "limit" else ratio(here, figure, compared)
                )
            table.add_row(f"{cell[0]} x {cell[1]}", *values)
        made.append(table)
    return made


def cells(text: str) -> list[tuple[int, int]]:
    """``1x512,8x512`` as pairs."""
    pairs = [cell.split("x") for cell in text.split(",")]
    return [(int(batch), int(context)) for batch, context in pairs]


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the engines of ``--engines``; by default, all whose environment exists. Raises SystemExit."""
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
