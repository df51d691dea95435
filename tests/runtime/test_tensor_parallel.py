"""Replicas of several ranks, on real workers, against Hugging Face."""

import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from lamina.cluster.launchers.local import LocalWorkers
from lamina.config import EngineConfig
from lamina.engine.updates import whole
from lamina.errors import ConfigError
from lamina.launch import launch
from lamina.types import DType, RequestOutput, SamplingParams
from tests.random_models import NAMES, SERVED, greedy, served, variant
from tests.runtime.checkpoints import write_prepared
from tests.runtime.test_parity import run_all

pytestmark = pytest.mark.slow
TOKENS = 12
LENGTHS = (1, 6, 7, 8, 21, 34, 45, 14)


def check(folder: Path, model: PretrainedConfig, ranks: int, **settings: Any) -> None:
    reference = write_prepared(model, folder, ranks=ranks)
    draw = random.Random(model.model_type)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    given: dict[str, Any] = {"compute": f"cpu:{ranks}", "memory": "cpu:2", "dtype": DType.FLOAT32} | settings
    config = EngineConfig(
        model=str(folder),
        tensor_parallel=ranks,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
        **given,
    )
    engine = launch(config)
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]


def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    """Each on a lane of its own; q travels first, in parts; the heads of a sequence are on one memory worker."""
    check(tmp_path, served("llama"), 2, compute="cpu:4", memory="cpu:1", q_first=True, mini_batches=2)


def test_more_memory_workers_than_ranks_share_the_heads(tmp_path: Path) -> None:
    """Each rank has two shards of the heads, which are on four workers."""
    check(tmp_path, served("bloom"), 2, memory="cpu:4", partition="head", transport="tcp")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_four_ranks_equal_hugging_face(family: str, tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 4} if family == "llama" else {}
    check(tmp_path, served(family, **heads), 4)


@pytest.mark.parametrize("victim", ["compute1", "memory0"])
def test_the_loss_of_a_worker_ends_the_engine_and_all_requests(victim: str, tmp_path: Path) -> None:
    """While the other ranks may be in the middle of a sum. No process is left."""
    write_prepared(served("llama"), tmp_path, ranks=2)
    workers = LocalWorkers()
    config = EngineConfig(model=str(tmp_path), compute="cpu:2", memory="cpu:2", tensor_parallel=2, dtype=DType.FLOAT32)
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
    why = f"worker {victim} is gone.*With tensor_parallel the loss of a worker ends the engine"
    assert failed and all(re.search(why, str(output.error), re.DOTALL) for output in failed)
    engine.close()
    assert all(process.poll() is not None for process in processes.values())


@pytest.mark.parametrize("family", NAMES)
def test_two_ranks_equal_hugging_face(family: str, tmp_path: Path) -> None:
    model = served(family) if family in SERVED else variant(family)
    if family in ("falcon-mqa", "gpt_bigcode"):
        with pytest.raises(ConfigError, match="1 KV heads, which 2 ranks cannot share"):
            check(tmp_path, model, 2)
    else:
        check(tmp_path, model, 2)
