"""Combinations of settings on real workers: refused before any starts, or they give the tokens of Hugging Face.

``make test`` runs cases that contain every pair of the values below that is not refused. ``make test-all`` runs every
triple, and the whole product of ``PRODUCT``. In half of the cases a worker is killed while requests run.
"""

import itertools
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster import pool
from lamina.cluster.degrees import parse_computes
from lamina.cluster.refusals import refusals
from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.covering import Case, covering
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import greedy, served
from tests.support.running import Killable, Streams, wait_for_recoveries
from tests.support.waiting import wait_until

TOKENS = 10
LENGTHS = (1, 6, 21, 34, 14)
DRAWN = 3000  # of some 500,000 cases
LAYERS = 3  # each of two stages has attention
KV_NBYTES = 120_000  # some 300 tokens: requests are preempted where one worker has all KV
KILL_AFTER = 40  # tokens, of 180

VALUES: dict[str, Sequence[Any]] = {
    "ranks": (1, 2),
    "stages": (1, 2),
    "replicas": (1, 2),
    "lanes": ("1", "2", "rotating"),
    "memory": ("pool", "local", "both"),
    "prefill": ("shared", "apart", "degrees"),
    "partition": ("auto", "request", "head", "token"),
    "prompts": ("memory", "compute"),
    "policy": ("fifo", "loongserve", "slo"),
    "balance": ("auto", "bandwidth", "throughput", "ledger"),
    "disk": ("none", "disk"),
    "autoscale": ("none", "memory", "compute", "prefill"),
    "loss": ("none", "loss"),
}
"""``lanes``: for each stage of each replica. ``replicas``: in all; two if one of them may only run prompts.
``prefill degrees``: the replica that only runs prompts has other ranks and stages."""

PRODUCT = ("ranks", "stages", "lanes", "memory", "prefill", "partition")
MEMORY = {"pool": "cpu:2", "local": "local", "both": "local,cpu:1"}
OTHER_DEGREES = {(1, 1): (2, 1), (2, 1): (1, 2), (1, 2): (2, 1), (2, 2): (1, 1)}  # ranks and stages


def settings_of(case: Case) -> dict[str, Any]:
    """Return the settings of a case."""
    ranks, stages, apart = case["ranks"], case["stages"], case["prefill"] != "shared"
    early = OTHER_DEGREES[ranks, stages] if case["prefill"] == "degrees" else (ranks, stages)
    replicas = 2 if apart or case["autoscale"] == "prefill" else case["replicas"]
    group = ranks * stages
    computes, memories = (replicas - apart) * group, {"pool": 2, "local": 0, "both": 1}[case["memory"]]
    targets = case["policy"] == "slo" or case["autoscale"] == "prefill"
    bounds = {
        "none": None,
        "memory": f"memory={memories}:{memories + 1}",
        "compute": f"compute={computes}:{computes + group}",
        "prefill": f"prefill={group}:{group}",
    }
    return {
        "tensor_parallel": ranks,
        "pipeline_parallel": stages,
        "compute": f"cpu:{computes}",
        "prefill": f"cpu:{early[0] * early[1]}/tp{early[0]}/pp{early[1]}" if apart else None,
        "memory": MEMORY[case["memory"]],
        "lanes": None if case["lanes"] == "rotating" else int(case["lanes"]) * replicas * max(early[1], stages),
        "pipelining": "rotational" if case["lanes"] == "rotating" else "fixed",
        "partition": case["partition"],
        "prompt_attention": case["prompts"],
        "policy": case["policy"],
        "slo_ttft_ms": 60_000 if targets else None,
        "slo_tbt_ms": 60_000 if case["autoscale"] == "prefill" else None,
        "balance": case["balance"],
        "kv_overcommit": 2.0 if case["disk"] == "disk" else 1.0,
        "autoscale": bounds[case["autoscale"]],
    }


def configured(case: Case, folder: Path) -> EngineConfig:
    settings = settings_of(case)
    return EngineConfig(
        model=str(folder),
        dtype=DType.FLOAT32,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=KV_NBYTES,
        kv_spill_dir=str(folder) if settings["kv_overcommit"] > 1 else None,
        **settings,
    )


def starts(case: Case) -> bool:
    """Whether the table of refusals has nothing against a case."""
    config = configured(case, Path("/tmp"))
    kinds = pool.kinds(parse_computes(config)), pool.kinds(pool.parse(str(config.memory)))
    return next(refusals(config, *kinds), None) is None


def named(case: Case) -> str:
    """Return the values of a case that are not the first of their dimension."""
    return " ".join(f"{name}={value}" for name, value in case.items() if value != VALUES[name][0]) or "defaults"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test its cases. Those that are slow, which take seconds to find, are left out where none would run."""
    if "case" not in metafunc.fixturenames:
        return
    pairs = covering(VALUES, starts, 2)
    skips_slow = "not slow" in str(metafunc.config.getoption("markexpr"))
    every = pairs
    if not skips_slow:
        every = covering(VALUES, starts, len(PRODUCT), PRODUCT, begun=every)
        every = covering(VALUES, starts, 3, begun=every)
    marks = [()] * len(pairs) + [pytest.mark.slow] * (len(every) - len(pairs))
    metafunc.parametrize(
        "case", [pytest.param(case, id=named(case), marks=mark) for case, mark in zip(every, marks, strict=True)]
    )


def test_the_cases_contain_every_pair_that_starts() -> None:
    """Compared with random cases: two values that occur in a case that starts occur in a case of the tests."""
    draw = random.Random(1)
    covered = {pair for case in covering(VALUES, starts, 2) for pair in itertools.combinations(case.items(), 2)}
    drawn = [{name: draw.choice(each) for name, each in VALUES.items()} for _ in range(DRAWN)]
    found = {pair for case in drawn if starts(case) for pair in itertools.combinations(case.items(), 2)}
    assert found <= covered


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A checkpoint, prompts, and their greedy tokens by Hugging Face."""
    folder = tmp_path_factory.mktemp("llama")
    model = served("llama", layers=LAYERS)
    write_prepared(model, folder)
    made = write_prepared(model, folder, ranks=2)
    draw = random.Random(7)
    prompts = [[draw.randrange(3, made.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    return folder, prompts, [greedy(made, prompt, TOKENS) for prompt in prompts]


def check_held_once(output: RequestOutput, heads: int) -> None:
    """Every head of every token of a completion, but for the last one drawn, is on one worker."""
    assert output.placement
    for sequence in {segment.sequence for segment in output.placement}:
        held = [
            (head, token)
            for segment in output.placement
            if segment.sequence == sequence
            for head in range(*segment.heads)
            for token in range(segment.tokens[0], segment.tokens[1] or 0)
        ]
        tokens = len(output.prompt_token_ids) + TOKENS - 1
        assert sorted(held) == list(itertools.product(range(heads), range(tokens)))


def wait_until_empty(engine: Engine) -> None:
    """Wait until workers report no KV but cached prefixes, and the engine has no slot reserved."""
    placement = engine._scheduler.placement

    def is_empty() -> bool:
        memory = engine.stats().memory
        return not any(one.used or one.sequences for one in memory.values()) and not any(placement.reserved.values())

    wait_until(is_empty, "slabs are not empty")


def test_what_starts_gives_the_tokens_of_hugging_face(
    case: Case, reference: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    """Greedy tokens of one and of two completions. More requests arrive than decode at once."""
    folder, prompts, expected = reference
    workers = Killable()
    engine = launch(configured(case, folder), workers=workers)
    try:
        heads, victim = engine.cluster.shards.heads, random.Random(named(case)).choice(sorted(workers.processes))
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        streams = Streams(engine, [(prompt, each) for each in params for prompt in prompts])
        if case["loss"] == "loss":
            streams.wait_for_tokens(KILL_AFTER)
            workers.signal(victim, signal.SIGKILL)
            wait_for_recoveries(engine, 1)
        outputs = streams.wait()
        wait_until_empty(engine)
    finally:
        engine.close()
    assert not [output.error for output in outputs if output.error]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[one] for one in expected] + [[one] * 2 for one in expected]
    for output in outputs:
        check_held_once(output, heads)
