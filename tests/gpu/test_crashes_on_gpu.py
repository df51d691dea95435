"""Workers on a GPU that are killed: requests go on, and no process, context or memory of theirs is left."""

import time
from pathlib import Path

import pytest
import torch

from lamina.config.engine_config import EngineConfig
from lamina.core.types import DType, Polling
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import served
from tests.support.running import LONG, Streams, worker_processes

pytestmark = pytest.mark.gpu
SLACK = 64 << 20  # bytes; a context takes several times as much
DEADLINE_S = 30.0


def wait_for_memory(before: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (free := torch.cuda.mem_get_info(0)[0]) < before - SLACK:
        assert time.monotonic() < deadline, f"{before - free} bytes of the GPU's memory are still in use"
        time.sleep(0.1)


@pytest.mark.parametrize("polling", ["host", "device"])
@pytest.mark.parametrize("victim", ["compute", "memory"])
def test_a_killed_worker_leaves_nothing_on_the_gpu(victim: str, polling: Polling, tmp_path: Path) -> None:
    """In the middle of steps, as those that a GPU waits for; a GPU in both roles does not poll."""
    torch.zeros(1, device="cuda")  # this process has a context from now on
    before = torch.cuda.mem_get_info(0)[0]
    write_prepared(served("llama"), tmp_path)
    compute = "cuda:1" if polling == "host" else "cpu:1"
    config = EngineConfig(
        model=str(tmp_path), compute=compute, memory="cuda:1", dtype=DType.FLOAT32, max_restarts=2, polling=polling
    )
    engine = launch(config)
    try:
        streams = Streams(engine, [([5, 6, 7 + index], LONG) for index in range(8)])
        streams.wait_for_tokens(8)
        module = {"compute": "lamina.compute#", "memory": "lamina.memory.worker#"}[victim]
        next(process for name, process in worker_processes().items() if name.startswith(module)).kill()
        assert len(streams.results()) == 8
    finally:
        engine.close()
    assert not worker_processes()
    wait_for_memory(before)
