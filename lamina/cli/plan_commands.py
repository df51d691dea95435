"""Builds the command lines that launch or simulate a way of `lamina plan`, or says why launch cannot start it."""

import shlex
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.core.types import DType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lamina.planning.plan.model_shapes import ModelShape
    from lamina.planning.plan.prices import Prices
    from lamina.planning.plan.ways import Way
    from lamina.planning.simulate.trial import Course, Trial


@dataclass(frozen=True)
class Asked:
    """Holds the options of a `lamina plan` that the commands which it prints repeat.

    Attributes:
        model: Value of --model.
        lengths: Prompt and output tokens of every request if there is no trace.
        trace: Value of --trace.
        hardware: Value of --hardware.
    """

    model: str
    lengths: tuple[int, int]
    trace: Path | None = None
    hardware: Path | None = None

    @property
    def requests(self) -> str:
        """Options of ``lamina simulate`` for the requests."""
        if self.trace is not None:
            return f"--trace {shlex.quote(str(self.trace))}"
        return f"--prompt {self.lengths[0]} --output {self.lengths[1]}"


def warn_of_prices(market: "Prices", kinds: "Iterable[str]") -> None:
    """Print warnings of prices that may no longer hold."""
    from lamina.cli.console import print_sentence

    for line in market.warnings(kinds, date.today()):
        print_sentence(line, style="yellow")


def simulate_line(course: "Course", trial: "Trial", asked: Asked) -> str:
    """Return the `lamina simulate` command that repeats the simulation of ``trial``, a row of the plan's table."""
    from lamina.planning.simulate.trial import SEED

    way, deployment = trial.way, course.deployment(trial.capacity)
    pools = pools_option(way, {kind.kind: kind.kind for kind, _ in way.pools})
    lanes = f" --lanes {way.lanes} --pipelining {deployment.pipelining}" if way.memory else ""
    lanes += f" --kv-tokens-per-worker {way.segment}" if way.segment else ""
    lanes += attention_option(way)
    chosen = f"--first {trial.requests}" if course.replays else f"--draw {trial.requests} --seed {SEED}"
    return (
        f"lamina simulate --model {shlex.quote(asked.model)} --system {way.kind.system} "
        f"{pools}{degrees_option(way)}{lanes} "
        f"--max-num-seqs {deployment.max_num_seqs} --max-num-batched-tokens {way.chunk} "
        f"{asked.requests} {chosen} "
        f"--rate-scale {course.rate_scale(trial.rate, trial.requests)} --prices {shlex.quote(course.prices)}"
        + (f" --hardware {shlex.quote(str(asked.hardware))}" if asked.hardware else "")
        + type_options(deployment.model)
    )


def obstacle(way: "Way", shape: "ModelShape", model: str) -> str | None:
    """Return why `lamina launch` cannot start a way; None if it can."""
    from lamina.planning.plan.ways import Kind

    if way.kind is Kind.ONE_POOL:
        return "lamina launch cannot start this: it is another system, shown for comparison."
    lacking = missing(way, shape, model)
    return f"lamina launch cannot start this yet: it lacks {' and '.join(lacking)}." if lacking else None


def missing(way: "Way", shape: "ModelShape", model: str) -> list[str]:
    """Return what `lamina launch` lacks to start a way."""
    from lamina.cluster.pool import RUNNABLE

    kinds = _launch_kinds(way)
    lacking = [f"{kind} workers" for kind in dict.fromkeys(kinds.values()) if kind not in RUNNABLE]
    return [*lacking, *filter(None, [shape.unread]), *unquantised(shape, model, kinds[way.prompts.kind])]


def _launch_kinds(way: "Way") -> dict[str, str]:
    """Return, by kind of a way's pools, the name by which `lamina launch` knows it."""
    from lamina.planning.plan.hardware import ALIASES

    spelled = {"a100-40g": "a100", **{entry: name for name, entry in ALIASES.items()}}  # both are A100s to a driver
    return {kind: spelled.get(kind, kind) for kind in way.kinds}


def pools_option(way: "Way", names: "Mapping[str, str]") -> str:
    """Return the options of ``lamina launch`` and ``lamina simulate`` for the pools, with degrees if these differ.

    ``names``: Names of the kinds.
    """
    from lamina.cluster.degrees import degrees_text

    early, late = ("", "") if way.prefill_shape is None else map(degrees_text, way.shapes)
    prefill = f"--prefill {names[way.prefill.kind]}:{way.prefill_workers}{early} " if way.prefill else ""
    memory = ["local"] * way.has_local + ([f"{names[way.memory.kind]}:{way.memory_workers}"] if way.memory else [])
    given = f" --memory {','.join(memory)}" if memory else ""
    return f"{prefill}--compute {names[way.compute.kind]}:{way.compute_workers}{late}{given}"


def degrees_option(way: "Way") -> str:
    """Return the options of ``lamina launch`` and ``lamina simulate`` for degrees that all pools have; empty for 1."""
    if way.prefill_shape is not None:
        return ""
    ranks, stages = way.shape.ranks, way.shape.stages
    options = f" --tensor-parallel {ranks}" if ranks > 1 else ""
    return options + (f" --pipeline-parallel {stages}" if stages > 1 else "")


def launching(trial: "Trial", shape: "ModelShape", model: str, sequences: int) -> list[str]:
    """Return the `lamina launch` command of a trial's way, or why launch cannot start it.

    ``sequences``: Most sequences that run at once, for --max-num-seqs.
    """
    way = trial.way
    if (reason := obstacle(way, shape, model)) is not None:
        return [reason]
    batch = f" --max-num-seqs {sequences} --max-num-batched-tokens {way.chunk}"
    return [launch_command(way, shape, model, batch)]


def launch_command(way: "Way", shape: "ModelShape", model: str, batch: str) -> str:
    """Return the `lamina launch` command that starts a way. ``batch``: its options for sequences and rows."""
    from lamina.planning.plan.model_shapes import model_to_launch
    from lamina.planning.plan.ways import Partition

    names = _launch_kinds(way)
    order = f" --lanes {way.lanes} --pipelining {'rotational' if way.rotates else 'fixed'}"
    return (
        f"lamina launch --model {shlex.quote(model_to_launch(model))} {pools_option(way, names)}"
        + (order if way.memory else "")
        + degrees_option(way)
        + (" --partition head" if way.partition is Partition.HEAD else "")
        + batch
        + (f" --kv-tokens-per-worker {way.segment}" if way.segment else "")
        + attention_option(way)
        + kv_option(shape)
        + quantization_option(shape, model, names[way.prompts.kind])
    )


def attention_option(way: "Way") -> str:
    """Return the option of ``lamina launch`` and ``lamina simulate`` for where prompts attend to earlier chunks.

    Empty if the default, auto, is what the way has.
    """
    from lamina.cluster.pool import CPU
    from lamina.planning.plan.ways import Kind

    if way.scratch:
        return "" if way.has_local else " --prompt-attention compute"
    alone = way.kind is Kind.OFFLOADED and way.replicas == way.shape.stages == 1
    is_auto = way.kind is Kind.PREFILL or (alone and way.compute.kind != CPU == way.second.kind)
    return " --prompt-attention memory" if is_auto else ""


def kv_option(shape: "ModelShape") -> str:
    """Return the option of ``lamina launch`` for the KV type of a plan."""
    return "" if shape.kv_cache_dtype == "auto" else f" --kv-cache-dtype {shape.kv_cache_dtype}"


def _quantises(shape: "ModelShape", model: str) -> bool:
    """Return whether a plan quantises the weights of an unquantised checkpoint."""
    from lamina.planning.plan.model_shapes import find

    return shape.weight_dtype != find(model).weight_dtype


def unquantised(shape: "ModelShape", model: str, compute: str) -> list[str]:
    """Return what ``lamina launch`` lacks to quantise weights as planned on compute workers of kind ``compute``."""
    lacks = (compute, shape.weight_dtype) == ("cpu", "fp8") and _quantises(shape, model)
    return ["matrix products with fp8 weights on CPUs"] if lacks else []


def quantization_option(shape: "ModelShape", model: str, compute: str) -> str:
    """Return the options of ``lamina launch`` that quantise weights as planned, on workers of kind ``compute``."""
    if not _quantises(shape, model) or unquantised(shape, model, compute):
        return ""
    needs_bfloat16 = (compute == "cpu" or shape.weight_dtype == "int4") and shape.dtype is not DType.BFLOAT16
    return f" --quantization {shape.weight_dtype}" + (" --dtype bfloat16" if needs_bfloat16 else "")


def untried(shape: "ModelShape", compute: str) -> list[str]:
    """Return what a plan for quantised weights assumes but nobody has measured, on workers of kind ``compute``."""
    if shape.weight_dtype == "auto" or compute == "cpu":
        return []
    widened = "; it multiplies in 16 bits, as plans count for its ways" if shape.fp8 else ""
    return [f"Lamina's product of {shape.weight_dtype} weights has never run on a GPU{widened}."]


def type_options(shape: "ModelShape") -> str:
    """Return the options of ``lamina simulate`` for the types of KV and weights."""
    return kv_option(shape) + ("" if shape.weight_dtype == "auto" else f" --weight-dtype {shape.weight_dtype}")
