"""Predicts served workloads that other projects measured, and prints the errors by band, with their sign.

    python -m bench.cost.measured [--file NAME] [--every N] [--kernels-alone] [--rows]

Every row of four files in ``bench/cost/measurements`` is predicted by the simulator's engine (``chunked-prefill``):
single requests of a ShareGPT trace on one GPU, and means at a fixed concurrency on 1 to 8. Each is one run of the
simulator: nothing of a row but its lengths, its concurrency and its devices is used.

The engine's figures (``lamina.planning.plan.overheads``) were fitted by hand to the rows called *fitted*: every other
row of a file. The others are *held out*, but rows of both kinds were looked at while the terms were chosen.
``--kernels-alone`` leaves all figures of the engine out: the model as it was.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import NO_OVERHEAD, VLLM, VLLM_012, Engine
from lamina.planning.simulate import Arrivals, Deployment, Result, System, simulate

MEASUREMENTS = Path(__file__).parent / "measurements"
CATALOGUE = hardware.load()

WAVES = 10
"""Requests of a run over its concurrency."""

RESERVED_TOKENS = 8192
"""Tokens of a step for which these engines keep memory free: vLLM's default on these devices."""


@dataclass(frozen=True)
class Load:
    """How a file's load was made.

    Attributes:
        prompts: Least length of a prompt over the stated one, which is the most.
        outputs: The same for outputs.
        step_tokens: Most tokens of a step; None: those of one prompt, besides a token of every other request.
    """

    prompts: float
    outputs: float
    step_tokens: int | None

    def lengths(self, least: float, most: int, count: int, seed: int) -> NDArray[np.int64]:
        """Return uniformly distributed lengths."""
        return np.random.default_rng(seed).integers(round(least * most), most, count, endpoint=True)


INFERENCEX = Load(0.8, 0.8, 8192)
"""The load of InferenceX, whose grid of lengths, concurrencies and devices the gpt-oss file has: its scripts ask for
lengths of 0.8 to 1 times the stated ones, 10 requests for each at once, and steps of 8,192 tokens
(github.com/SemiAnalysisAI/InferenceX, gptoss_fp4_h200.sh and benchmark_serving.py)."""

MARLIN = replace(VLLM, marlin=True)
"""vLLM as InferenceX's script starts it, with VLLM_MXFP4_USE_MARLIN."""

TRAIN = Load(1.0, 0.99, None)
"""The load of the Qwen3 file, of which nothing is known, chosen with its rows in sight: the time to a first token, over
that of a prompt alone, depends on the concurrency, but neither on the length of prompts nor of outputs, as if requests
arrived in a train, each while the prompt before it runs."""


@dataclass(frozen=True)
class Prediction:
    """One row: what was measured and predicted, in seconds and output tokens per second.

    Attributes:
        band: the group of rows in the table.
        fitted: whether the engine's figures were fitted to rows like this one.
        concurrency: requests at once; 0 for a single request of a trace.
    """

    file: str
    band: str
    fitted: bool
    concurrency: int
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    tokens_s: tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Single requests of a trace on one GPU.

    Attributes:
        kv_tokens: Tokens of KV that the engine reported; None: as predicted. In a full GPU, one block more or less
            decides which requests are preempted.
    """

    file: str
    kind: str
    max_num_seqs: int
    kv_tokens: int | None = None
    engine: Engine = VLLM

    def predict(self, engine: Engine, every: int) -> Iterator[Prediction]:
        """Yield a prediction for each request. ``every``: has no meaning, the requests share one run."""
        rows = _rows(self.file)
        arrivals = Arrivals(
            np.array([float(row["arrival_s"]) for row in rows]),
            np.array([int(row["prompt_tokens"]) for row in rows]),
            np.array([int(row["output_tokens"]) for row in rows]),
        )
        deployment = Deployment(
            model=model_shapes.find("Llama-3-8B"),
            compute=CATALOGUE[self.kind],
            compute_workers=1,
            max_num_seqs=self.max_num_seqs,
            engine=engine,
        )
        if self.kv_tokens is not None:
            reserve = _reserve(deployment, self.kv_tokens)
            deployment = replace(deployment, engine=replace(engine, reserve_bytes=reserve, reserve_token_bytes=0.0))
        result = simulate(deployment, arrivals, System.CHUNKED_PREFILL)
        log, output = result.log, arrivals.output
        ttft = log.first_s - arrivals.arrival_s
        tpot = (log.end_s - log.first_s) / (output - 1)
        ended = max(float(row["arrival_s"]) + float(row["latency_s"]) for row in rows)
        tokens_s = float(output.sum()) / ended, float(output.sum()) / float(log.end_s.max())
        for place, row in enumerate(rows):
            yield Prediction(
                self.file,
                self.kind,
                place % 2 == 1,
                0,
                (float(row["ttft_s"]), float(ttft[place])),
                (float(row["tpot_s"]), float(tpot[place])),
                tokens_s,
            )


@dataclass(frozen=True)
class Cells:
    """Means at a fixed concurrency."""

    file: str
    kind: str
    model: Callable[[str], ModelShape]
    load: Load
    engine: Engine = VLLM

    def predict(self, engine: Engine, every: int) -> Iterator[Prediction]:
        """Yield a prediction for one in ``every`` cells: each is a run of its own."""
        for place, row in enumerate(_rows(self.file)):
            if place % every:
                continue
            concurrency, degree = int(row["concurrency"]), int(row["tp"])
            prompt, output = int(row["isl"]), int(row["osl"])
            result = self._run(row, engine)
            log = result.log
            ttft = float((log.first_s - log.arrivals.arrival_s).mean())
            tpot = float(((log.end_s - log.first_s) / (log.arrivals.output - 1)).mean())
            measured = float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3
            mean = (1 + self.load.outputs) / 2 * output
            served, found = (concurrency * mean / (t + (mean - 1) * p) for t, p in (measured, (ttft, tpot)))
            yield Prediction(
                self.file,
                f"{row['model']} {row['precision']}, TP{degree}, {prompt} in",
                place % 2 == 1,
                concurrency,
                (measured[0], ttft),
                (measured[1], tpot),
                (served, found),
            )

    def _run(self, row: dict[str, str], engine: Engine) -> Result:
        concurrency, prompt, load = int(row["concurrency"]), int(row["isl"]), self.load
        count = WAVES * concurrency
        arrivals = Arrivals(
            np.zeros(count),
            load.lengths(load.prompts, prompt, count, 0),
            load.lengths(load.outputs, int(row["osl"]), count, 1),
            concurrency=concurrency,
        )
        deployment = Deployment(
            model=self.model(row["precision"]),
            compute=CATALOGUE[self.kind],
            compute_workers=int(row["tp"]),
            shape=Shape(int(row["tp"])),
            max_num_batched_tokens=load.step_tokens or prompt + concurrency,
            engine=replace(engine, reserve_bytes=engine.reserved(RESERVED_TOKENS), reserve_token_bytes=0.0),
        )
        return simulate(deployment, arrivals, System.CHUNKED_PREFILL)


def _reserve(deployment: Deployment, kv_tokens: int) -> float:
    """Return the bytes that an engine reserves beside the weights and ``kv_tokens`` tokens of KV."""
    shape = deployment.model
    return deployment.compute_cost.usable_bytes - shape.weight_bytes - (kv_tokens + 0.5) * shape.kv_bytes_per_token


def _rows(file: str) -> list[dict[str, str]]:
    with (MEASUREMENTS / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def _qwen3_32b(precision: str) -> ModelShape:
    shape = model_shapes.find("Qwen3-32B")
    return shape.stored_as("fp8", "fp8") if precision == "fp8" else shape


def _gpt_oss(precision: str) -> ModelShape:
    return model_shapes.find("gpt-oss-120b")


FILES: Sequence[Trace | Cells] = (
    Trace("vllm_rtx4090_llama31_8b.csv", "rtx4090", 256, kv_tokens=41_408),
    Trace("vllm_rtxpro6000_llama31_8b.csv", "rtxpro6000", 128),
    Cells("serving_h100_qwen3_32b_vllm.csv", "h100", _qwen3_32b, TRAIN, VLLM_012),
    Cells("serving_h200_gpt_oss_120b_vllm.csv", "h200", _gpt_oss, INFERENCEX, MARLIN),
)


def predict(every: int = 1, files: Sequence[Trace | Cells] = FILES, kernels_alone: bool = False) -> list[Prediction]:
    """Return the predictions of all files; of those at a fixed concurrency, one in ``every``."""
    return [one for file in files for one in file.predict(NO_OVERHEAD if kernels_alone else file.engine, every)]


def error(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median and 90th percentile of the absolute relative errors, and the median with its sign."""
    errors: Floats = np.array([found / measured - 1 for measured, found in pairs])
    return float(np.median(abs(errors))), float(np.quantile(abs(errors), 0.9)), float(np.median(errors))


def table(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of the table: every band, then each file's fitted and held-out rows."""
    yield f"{'':<44}{'rows':>5}   {'TTFT':<20}{'TPOT':<20}{'output tokens/s':<20}"
    yield f"{'':<44}{'':>5}" + f"   {'median  p90   bias':<17}" * 3
    groups: dict[str, list[Prediction]] = {}
    for one in found:
        groups.setdefault(f"  {one.band}", []).append(one)
        groups.setdefault(f"  concurrency {one.concurrency}" if one.concurrency else "  one by one", []).append(one)
    for one in found:
        groups.setdefault(f"{one.file.removesuffix('.csv')} {'fitted' if one.fitted else 'held out'}", []).append(one)
    for name, own in groups.items():
        figures = (error([getattr(one, what) for one in own]) for what in ("ttft", "tpot", "tokens_s"))
        shown = "".join(f"   {median:>5.0%}{p90:>6.0%}{bias:>+6.0%}" for median, p90, bias in figures)
        yield f"{name:<44}{len(own):>5}{shown}"


def main() -> None:
    """Predict every row and print the table."""
    parser = argparse.ArgumentParser(description="Predict measured serving and print the errors.")
    parser.add_argument("--file", help="only the file whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only one in so many cells")
    parser.add_argument("--kernels-alone", action="store_true", help="leave out what the engine needs")
    parser.add_argument("--rows", action="store_true", help="print every row too")
    arguments = parser.parse_args()
    files = [one for one in FILES if not arguments.file or arguments.file in one.file]
    found = predict(arguments.every, files, arguments.kernels_alone)
    if arguments.rows:
        for one in found:
            print(f"{one.band} {one.concurrency}", *(f"{a:.4g} {b / a - 1:+.0%}" for a, b in (one.ttft, one.tpot)))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
