"""Replicas of several ranks, on real workers, against Hugging Face."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import CompletionOutput, RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from lamina.lowering import Target
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import NAMES, SERVED, served, variant
from tests.support.rank_runs import check_ranks
from tests.support.running import HALF, assert_same, config, survive
from tests.support.whole_outputs import whole

pytestmark = pytest.mark.slow


def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    """Each on a lane of its own; the heads of a sequence are on one memory worker."""
    check_ranks(tmp_path, served("llama"), 2, compute="cpu:4", memory="cpu:1")


def test_more_memory_workers_than_ranks_share_the_heads(tmp_path: Path) -> None:
    """Each rank has two shards of the heads, which are on four workers."""
    check_ranks(tmp_path, served("bloom"), 2, memory="cpu:4", partition="head", transport="tcp")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_four_ranks_equal_hugging_face(family: str, tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 4} if family == "llama" else {}
    check_ranks(tmp_path, served(family, **heads), 4)


@pytest.mark.parametrize(
    ("compute", "victim", "why"),
    [
        ("cpu:2", "compute1", "worker compute1 is gone"),
        ("emulated:2", "compute1", "worker compute1 is gone"),
        ("emulated:2", "memory0", "ranks on GPUs cannot leave a sum.*worker memory0 is gone"),
    ],
)
def test_a_loss_without_another_replica_ends_the_engine_and_all_requests(
    compute: str, victim: str, why: str, tmp_path: Path
) -> None:
    """While the other ranks may be in the middle of a sum. No process is left."""
    write_prepared(served("llama"), tmp_path, target=Target.CPU if compute == "cpu:2" else Target.GPU, ranks=2)
    workers = LocalWorkers()
    config = EngineConfig(
        model=str(tmp_path),
        compute=compute,
        memory="cpu:2",
        tensor_parallel=2,
        dtype=DType.FLOAT32,
        max_restarts=0,
    )
    engine = launch(config, workers=workers)
    outputs: list[RequestOutput] = []
    started, ended = threading.Event(), threading.Event()

    def on_output(output: RequestOutput) -> None:
        started.set()
        if output.finished:
            outputs.append(output)
            if len(outputs) == 20:
                ended.set()

    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for number in range(20):
        engine.submit(str(number), [5, 6, 7], params, whole(engine.tokenizer, on_output))
    assert started.wait(120)
    processes = dict(workers.processes)
    os.kill(processes[victim].pid, signal.SIGKILL)
    assert ended.wait(60), f"{len(outputs)} of 20 requests ended"
    failed = [output for output in outputs if output.error]
    assert failed and all(re.search(why, str(output.error), re.DOTALL) for output in failed)
    engine.close()
    assert all(process.poll() is not None for process in processes.values())


@pytest.mark.parametrize(
    ("compute", "victim", "settings"),
    [
        (2, "memory0", {"lanes": 3}),
        (4, "compute3", {}),
        (4, "compute0", {"lanes": 4, "pipelining": "fixed"}),
        (4, "compute2", {"pipelining": "rotational", "transport": "tcp"}),
    ],
)
def test_a_lost_rank_costs_its_replica_and_a_lost_memory_worker_a_pause(
    compute: int,
    victim: str,
    settings: dict[str, Any],
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    wanted = config(checkpoint, compute, 2, tensor_parallel=2, **settings)
    assert_same(survive(wanted, [(victim, signal.SIGKILL)], 150), undisturbed[:HALF])


@pytest.mark.parametrize("family", NAMES)
def test_two_ranks_equal_hugging_face(family: str, tmp_path: Path) -> None:
    check_ranks(tmp_path, served(family) if family in SERVED else variant(family), 2)


@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("falcon-mqa", 4, {}),
        ("gpt_bigcode", 4, {}),
        ("llama", 4, {"num_key_value_heads": 1, "kv_tokens_per_worker": 16}),
        ("gemma2", 4, {}),
        ("qwen3", 4, {"memory": "cpu:1"}),
        ("falcon-mqa", 2, {"alibi": True, "memory": "cpu:2", "transport": "tcp"}),
    ],
)
def test_fewer_kv_heads_than_ranks_equal_hugging_face(
    family: str, ranks: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """One or two KV heads, which two or four ranks share; prompts of several chunks, on two memory workers."""
    heads = {name: settings.pop(name) for name in ("num_key_value_heads", "alibi") if name in settings}
    check_ranks(tmp_path, (served if family in SERVED else variant)(family, **heads), ranks, **settings)


@pytest.mark.parametrize("family", NAMES)
def test_two_ranks_on_gpus_equal_hugging_face(family: str, tmp_path: Path) -> None:
    """On emulated ones, which attend by the CPU's memory workers."""
    model = served(family) if family in SERVED else variant(family)
    check_ranks(tmp_path, model, 2, (1, 6, 34), 5, compute="emulated:2")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "falcon-mqa"])
def test_ranks_and_memory_on_gpus_equal_hugging_face(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    model = served(family) if family in SERVED else variant(family)
    check_ranks(tmp_path, model, 2, (1, 3, 13), 3, compute="emulated:2", memory="emulated:1,cpu:1")


@pytest.mark.parametrize("attention", ["memory", "compute"])
def test_ranks_on_gpus_decode_what_others_prefill(attention: str, tmp_path: Path) -> None:
    """KV is on the ranks that decode, which serve nothing while they wait for each other."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    pools = {"prefill": "emulated:2", "compute": "emulated:2", "memory": "local", "prompt_attention": attention}
    check_ranks(tmp_path, served("llama"), 2, (1, 30), 3, **pools)


def test_two_replicas_of_two_ranks_on_gpus(tmp_path: Path) -> None:
    model = served("llama", num_key_value_heads=1)
    check_ranks(tmp_path, model, 2, (1, 6, 34), 5, compute="emulated:4")
