"""Offline decode and prefill of a random Llama: Lamina, other engines and the memory limit, measured in the same run.

    python -m bench.runtime.serve [--model 250m] [--grid 1x512,8x512,64x512,16x2048,4x8192] [--rounds 3]
                          [--weights bf16,int8,int4,q8_0,q4_k_m] [--activation-dtype dtype,int8]
                          [--engines lamina,lamina_pools,unsplit,openvino,llama_cpp] [--peers DIR]
                          [--threads 2] [--cpu-time] [--json FILE]

Every engine is a process of its own, with as many threads as this process may use cores, or ``--threads``; with the
same weights, greedy decoding and random prompts. ``--weights`` are the types of the weights of linear layers: an engine
is measured with each that it has. Lamina quantises the bfloat16 weights while it loads them; ``--activation-dtype`` is
that of its layers of codes. ``lamina`` has its default pools, a compute worker with local memory; ``lamina_pools`` has
a memory worker instead; ``unsplit`` is Lamina's kernels in one process, without workers and transport.
``bench/peers/setup.sh DIR`` makes the environments of the other engines; the models are kept in DIR too.

The engines of a cell take turns, ``--rounds`` times, while the others wait; figures are medians. So are the ratios to
the best of the other engines whose weights have as many bits, over the rounds, since the machine's speed may change
between these; with a 95% confidence interval, from six rounds on (order statistics of the ratios). Where other programs
keep the cores busy, ``--cpu-time --threads 1`` compares tokens per second of processor time instead, of one thread,
which waits for no other one.

A decode step must read every weight once and every request's KV once: the limit is those bytes over the read bandwidth
that a native loop reaches with as many threads, measured before every engine's turn. It is that of bfloat16 KV and of
the weights as Lamina stores them.
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
from collections.abc import Collection, Mapping, Sequence
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


BITS = {"bf16": 16, "int8": 8, "int4": 4, "q8_0": 8, "q4_k_m": 4}
"""Bits of a weight, without scales and zero points, by the names of ``--weights``."""


@dataclass(frozen=True)
class Engine:
    """An engine that is measured.

    Attributes:
        module: its module of ``bench.peers``.
        weights: types of weights that it has.
        environment: the directory of its Python environment in ``--peers``; None: it runs in this one.
        variables: variables of its environment.
        codes_by_codes: whether ``--activation-dtype`` is an option of it.
    """

    name: str
    module: str
    weights: Collection[str]
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    codes_by_codes: bool = False


# The process that does everything gets what the launcher gives workers.
WORKER_VARIABLES = {"GOMP_SPINCOUNT": OPENMP_SPIN_COUNT} | allocation_variables()
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("lamina", "lamina_offline", ("bf16", "int8", "int4"), codes_by_codes=True),
        Engine("lamina_pools", "lamina_pools", ("bf16", "int8", "int4"), codes_by_codes=True),
        Engine("unsplit", "unsplit", ("bf16",), variables=WORKER_VARIABLES),
        Engine("openvino", "openvino_peer", ("bf16", "int8", "int4"), "openvino"),
        Engine("llama_cpp", "llama_cpp_peer", ("bf16", "q8_0", "q4_k_m"), "llama_cpp"),
    )
}
PEERS = [name for name, engine in ENGINES.items() if engine.environment]


@dataclass(frozen=True)
class Variant:
    """An engine with one type of weights and, if it is Lamina, one of activations."""

    engine: str
    weights: str
    activation_dtype: str = "auto"

    @property
    def bits(self) -> int:
        """Bits of a weight, without scales and zero points."""
        return BITS[self.weights]

    @property
    def name(self) -> str:
        """Name in tables."""
        activations = "" if self.activation_dtype == "auto" else f" x {self.activation_dtype}"
        return f"{self.engine} {self.weights}{activations}"


@dataclass(frozen=True)
class Turn:
    """One engine's measurement of one cell; tokens per second over all requests (``bench.peers.offline.Rates``).

    Attributes:
        limit: tokens per second of decode at which memory is read as fast as a native loop does.
    """

    engine: str
    weights: str
    activation_dtype: str
    batch: int
    context: int
    round: int
    decode: float
    prefill: float
    decode_cpu: float
    prefill_cpu: float
    limit: float
    about: dict[str, str]

    @property
    def variant(self) -> Variant:
        """What was measured."""
        return Variant(self.engine, self.weights, self.activation_dtype)


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

    def __init__(self, variant: Variant, peers: Path, model: Path, batch: int, context: int, threads: int) -> None:
        engine = ENGINES[variant.engine]
        python = sys.executable if engine.environment is None else str(peers / engine.environment / "bin" / "python")
        cell = ["--batch", str(batch), "--context", str(context), "--threads", str(threads)]
        cell += ["--weights", variant.weights, "--activation-dtype", variant.activation_dtype]
        self._what = f"{variant.name} at {batch} x {context}"
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
    turns = []
    for batch, context in args.grid:
        kv_bytes = batch * (context + DECODED / 2) * kv_bytes_per_token(args.model)
        with contextlib.ExitStack() as stack:
            running = {}
            for variant in args.variants:
                running[variant] = Running(variant, peers, model, batch, context, args.threads)
                stack.callback(running[variant].close)
            for one in running.values():
                one.measure()  # all have loaded and warmed up before any figure counts
            for number, (variant, one) in itertools.product(range(args.rounds), running.items()):
                bytes_read = weight_bytes(args.model, variant.bits) + kv_bytes
                limit = batch * read_bandwidth(args.threads) / bytes_read
                turns.append(
                    Turn(**asdict(variant), batch=batch, context=context, round=number, limit=limit, **one.measure())
                )
                rates = " ".join(
                    f"{name} {value:.0f}" for name, value in asdict(turns[-1]).items() if isinstance(value, float)
                )
                print(f"{batch} x {context} {variant.name}: {rates}", file=sys.stderr)
    return turns


def ratio(here: Sequence[Turn], figure: str, variant: Variant, others: Collection[Variant]) -> str:
    """Return a variant over the best of ``others``: the median over rounds, with its 95% interval if there is one."""
    rounds = [
        {turn.variant: getattr(turn, figure) for turn in here if turn.round == number}
        for number in {turn.round for turn in here}
    ]
    ratios = [rates[variant] / max(rates[other] for other in others) for rates in rounds]
    low, high = scipy.stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    interval = "" if math.isnan(low) or math.isnan(high) else f" ({low:.2f} to {high:.2f})"
    return f"{statistics.median(ratios):.2f}{interval}"


def tables(turns: Sequence[Turn], title: str, suffix: str = "") -> list[Table]:
    """Return the tables of decode and prefill by bits of weights: a row per cell, a column per variant and ratio.

    suffix: of the names of the figures; "_cpu" for those per second of processor time.
    """
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    made = []
    for bits, figure in itertools.product(
        sorted({each.bits for each in variants}, reverse=True), ("decode", "prefill")
    ):
        equal = [each for each in variants if each.bits == bits]
        made.append(_table([turn for turn in turns if turn.variant in equal], equal, figure + suffix, title, bits))
    return made


def _table(turns: Sequence[Turn], variants: Sequence[Variant], figure: str, title: str, bits: int) -> Table:
    peers = [each for each in variants if each.engine in PEERS]
    unsplit = [each for each in variants if each.engine == "unsplit"]
    compared = {"best peer": peers, "unsplit": unsplit}
    lamina = [each for each in variants if each.engine == "lamina"]
    ratios = [(each, other) for each in lamina for other in compared if compared[other]]
    limits = [(each, "limit") for each in lamina if figure == "decode"]
    heads = [each.name for each in variants] + ["limit"] * (figure == "decode")
    heads += [f"{each.name} / {other}" for each, other in [*ratios, *limits]]
    unit = "tokens per second of processor time" if figure.endswith("_cpu") else "tokens/s"
    columns = [Column(head, justify="right") for head in heads]
    table = Table("batch x context", *columns, title=f"{title}, weights of {bits} bits, {figure}, {unit}")
    for cell in dict.fromkeys((turn.batch, turn.context) for turn in turns):
        here = [turn for turn in turns if (turn.batch, turn.context) == cell]
        rates = {
            each: statistics.median(getattr(turn, figure) for turn in here if turn.variant == each) for each in variants
        }
        limit = statistics.median(turn.limit for turn in here)
        values = [f"{rate:.0f}" for rate in rates.values()] + [f"{limit:.0f}"] * (figure == "decode")
        values += [ratio(here, figure, each, compared[other]) for each, other in ratios]
        values += [f"{rates[each] / limit:.2f}" for each, _ in limits]
        table.add_row(f"{cell[0]} x {cell[1]}", *values)
    return table


def cells(text: str) -> list[tuple[int, int]]:
    """``1x512,8x512`` as pairs."""
    pairs = [cell.split("x") for cell in text.split(",")]
    return [(int(batch), int(context)) for batch, context in pairs]


def chosen(
    engines: str | None, weights: Sequence[str], activations: Sequence[str], peers: Path | None
) -> list[Variant]:
    """Return what is measured: engines, by default all whose environment exists, each with the weights that it has.

    Raises SystemExit for unknown names, an environment that does not exist, and if no engine has any of the weights.
    """
    names = engines.split(",") if engines else [n for n in ENGINES if peers or n not in PEERS]
    for kind, given, known in (("engine", names, ENGINES), ("type of weights", weights, BITS)):
        for name in given:
            if name not in known:
                raise SystemExit(f"error: no {kind} is called {name!r}; choose from {', '.join(known)}")
    variants = []
    for engine in [ENGINES[name] for name in names]:
        if engine.environment and not (peers and (peers / engine.environment).is_dir()):
            raise SystemExit(
                f"error: no environment for {engine.name}; make it with bench/peers/setup.sh DIR, give --peers DIR"
            )
        for kind in [kind for kind in weights if kind in engine.weights]:
            rounded = engine.codes_by_codes and kind != "bf16"
            variants += [Variant(engine.name, kind, each) for each in (activations if rounded else ["auto"])]
    if not variants:
        raise SystemExit(f"error: none of {', '.join(names)} has weights in {' or '.join(weights)}")
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="250m")
    parser.add_argument(
        "--grid", type=cells, default="1x512,8x512,64x512,16x2048,4x8192", help="batch x context, by commas"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", default="bf16", metavar="TYPES", help=f"by commas, of {', '.join(BITS)}")
    parser.add_argument(
        "--activation-dtype", default="auto", metavar="TYPES", help="of Lamina's codes: auto, dtype, int8"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="environments made by bench/peers/setup.sh")
    parser.add_argument("--engines", metavar="NAMES", help="by commas; default: all whose environment is there")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--cpu-time", action="store_true", help="compare tokens per second of processor time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.variants = chosen(args.engines, args.weights.split(","), args.activation_dtype.split(","), args.peers)
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        peers = (args.peers or Path(place)).resolve()
        turns = take_turns(args, peers, checkpoint(args.model, peers))
    for table in tables(turns, args.model, "_cpu" * args.cpu_time):
        Console(width=160).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(turn) for turn in turns], indent=1))


if __name__ == "__main__":
    main()
