"""Every kind of line that `lamina plan` advises starts, on CPUs or on GPUs that this machine pretends to have.

Only the model is small, as is the longest part of a sequence on one memory worker. The text is Hugging Face's.
"""

import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina.cli.plan_commands import launch_command, launching, obstacle
from lamina.cluster import pool
from lamina.cluster.degrees import parse_computes, shapes
from lamina.cluster.refusals import require_allowed
from lamina.compute.split_cache import prepare
from lamina.config.engine_config import EngineConfig
from lamina.core.types import DType
from lamina.lowering import Target
from lamina.models import directory
from lamina.models.directory import BUNDLED
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.ways import Kind, Partition, Way, layouts, ways
from lamina.splitter.parts import Rank
from lamina.text.tokenizer import Tokenizer
from tests.support.commands import RUN_S, start
from tests.support.random_models import greedy
from tests.support.sweep import sweep
from tests.support.waiting import END_S

CATALOGUE = hardware.load()
CPU = replace(CATALOGUE["h100"], kind="cpu")  # as `lamina plan --measure` names this machine
MODEL = str(BUNDLED)
SHAPE = model_shapes.find(MODEL)
SEGMENT = 64
LONG = "import os\nfor name in os.listdir('.'):\n    print(name)\n" * 6
PROMPTS = ["x =", "def add(a, b):\n    return", LONG, "class"]
TOKENS = 8


def kind_of(way: Way) -> str:
    """What makes the line of a way differ from other lines, besides numbers."""
    words = [way.kind.value, f"TP{way.shape.ranks}" * (way.shape.ranks > 1), "copies" * (way.replicas > 1)]
    words += ["stages" * (way.shape.stages > 1), f"prompts in {way.prefill_shape}" * (way.prefill_shape is not None)]
    words += ["memory pool" * (way.kind is Kind.PREFILL and way.memory is not None)]
    if way.kind is Kind.OFFLOADED:
        each = way.lanes // (way.replicas * way.shape.stages)
        order = "rotating" if way.rotates else "fixed" if each == 1 else "several fixed"
        divided = "by heads" * (way.partition is Partition.HEAD), "in parts" * (way.segment is not None)
        words += [order, *divided, "memories" * (way.memory_workers > 1), "prompts on compute" * way.scratch]
    return ", ".join(filter(None, words))


def smallest(compute: Hardware, memory: Hardware) -> dict[str, Way]:
    """Return the smallest way of each kind that has a line, on up to four and two workers.

    Also on workers that are too small for the weights, which stages divide.
    """
    found: dict[str, Way] = {}
    pools, small = ([(compute, 4)], [(memory, 2)]), replace(compute, memory_bytes=0.9 * SHAPE.weight_bytes)
    every = [*ways(SHAPE, *pools, (None, SEGMENT)), *ways(SHAPE, [(compute, 1)], []), *layouts(SHAPE, *pools)]
    every += ways(SHAPE, [(small, 4)], [(memory, 2)])
    for way in sorted(every, key=lambda way: (sum(workers for _, workers in way.pools), way.lanes)):
        # Scratch memory knows nothing of further memory workers.
        varies = not way.scratch or way.memory_workers == 1 or way.kind is Kind.PREFILL
        if varies and (kind := kind_of(way)) not in found and obstacle(way, SHAPE, MODEL) is None:
            found[kind] = way
    return found


def line_of(way: Way) -> str:
    """Return the line that `lamina plan` prints for whole requests or, by heads, for decoding alone."""
    if way.partition is Partition.HEAD:
        return launch_command(way, SHAPE, MODEL, "")
    (line,) = launching(SimpleNamespace(way=way), SHAPE, MODEL, 16)  # type: ignore[arg-type]
    return line


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Hugging Face's text after each prompt."""
    tokenizer = Tokenizer(directory.find(MODEL))
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return [tokenizer.decode(greedy(reference, tokenizer.encode(prompt), TOKENS)) for prompt in PROMPTS]


@pytest.fixture
def workers() -> Iterator[list[psutil.Process]]:
    """The workers of a server, which must have ended."""
    started: list[psutil.Process] = []
    yield started
    assert psutil.wait_procs(started, END_S)[1] == []


def serves(
    way: Way, line: str, target: Target, workers: list[psutil.Process], prompts: list[str], **variables: str
) -> list[str]:
    """Start a line as it is printed, but for the type of elements, and return the text after each prompt."""
    for degree in {shape.ranks for shape in way.shapes if shape.stages == 1}:
        for number in range(degree):  # once, instead of in every worker
            prepare(directory.find(MODEL), DType.FLOAT32, lambda: None, target, Rank(number, degree))
    words = shlex.split(line)
    assert words[:2] == ["lamina", "launch"]
    server = start(*words[2:], "--dtype", "float32", stderr=subprocess.PIPE, **variables)
    workers += server.workers()
    try:
        commands = [" ".join(worker.cmdline()) for worker in workers]
        assert sum("lamina.compute" in command for command in commands) == way.compute_workers + way.prefill_workers
        assert sum("lamina.memory.worker" in command for command in commands) == way.memory_workers
        body = {"prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=RUN_S).json()
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


ON_CPUS = smallest(CPU, CPU)
ORDINARY = [
    "local",
    "local, TP2, copies",
    "local, copies, stages",
    "local, TP2, stages",
    "prefill-apart",
    "lamina, stages, fixed",
    "lamina, rotating",
    "lamina, copies, several fixed, in parts, memories",
    "lamina, copies, fixed, prompts on compute",
]


@pytest.mark.parametrize("name", sorted(ON_CPUS))
def test_no_line_is_refused(name: str) -> None:
    way = ON_CPUS[name]
    words = shlex.split(line_of(way))[4:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    settings: dict[str, Any] = {flag[2:].replace("-", "_"): text for flag, text in given.items()}
    settings |= {flag: int(text) for flag, text in settings.items() if text.isdecimal()}
    config = EngineConfig(**settings)
    require_allowed(config, pool.kinds(parse_computes(config)), pool.kinds(pool.parse(settings["memory"])))
    there = "auto" if way.prefill and way.has_local else "compute"  # where scratch memory is the default
    assert shapes(config) == way.shapes and (config.prompt_attention == there) == way.scratch


@pytest.mark.parametrize("way", sweep(ON_CPUS, ORDINARY))
def test_a_line_on_cpus(way: Way, workers: list[psutil.Process], expected: list[str]) -> None:
    assert serves(way, line_of(way), Target.CPU, workers, PROMPTS) == expected


@pytest.fixture(scope="module")
def on_gpus() -> dict[str, Way]:
    return smallest(CATALOGUE["h100"], CATALOGUE["h20"])


EMULATED = [
    "local",
    "local, copies",
    "local, TP2, copies",
    "local, stages",
    "prefill-apart",
    "prefill-apart, TP2",
    "prefill-apart, memory pool",
    "prefill-apart, TP2, memory pool",
    "lamina, TP2, fixed",
    "lamina, copies, rotating, memories",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATED)
def test_a_line_on_gpus(name: str, on_gpus: dict[str, Way], workers: list[psutil.Process], expected: list[str]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    way, line = on_gpus[name], line_of(on_gpus[name])
    assert all(f"{kind.kind}:{workers}" in line and kind.kind in ("h100", "h20") for kind, workers in way.pools)
    texts = serves(way, line, Target.GPU, workers, PROMPTS[:2], LAMINA_EMULATED_GPUS="h100:4,h20:2")
    assert texts == expected[:2]
