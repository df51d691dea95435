"""`lamina launch` on GPUs, which this machine pretends to have."""

import signal
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina.compute.split_cache import prepare
from lamina.core.types import DType
from lamina.lowering import Target
from lamina.models import directory
from lamina.splitter.parts import Rank
from lamina.text.tokenizer import Tokenizer
from tests.support.commands import RUN_S, assert_refused, run_here, start
from tests.support.random_models import greedy
from tests.support.running import check_greedy
from tests.support.waiting import END_S

PROMPT = "x ="
TOKENS = 2


def test_a_small_model_on_an_a100_and_an_rtx3090(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the launch line below, in this process."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:1,a100:1")
    check_greedy("llama", tmp_path, compute="a100:1", memory="rtx3090:1", lengths=(3, 1), tokens=2, holders={"memory0"})


@pytest.mark.slow
@pytest.mark.parametrize(("a100s", "rtx3090s", "ranks"), [(1, 1, 1), (2, 6, 1), (2, 1, 2)])
def test_a100s_compute_and_rtx3090s_attend(
    a100s: int, rtx3090s: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is what Hugging Face says. Eight workers take a minute to start on two cores."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:6,a100:2")
    model = directory.find(None)
    for number in range(ranks):  # once, instead of in every worker
        prepare(model, DType.FLOAT32, lambda: None, Target.GPU, Rank(number, ranks))
    pools = "--compute", f"a100:{a100s}", "--memory", f"rtx3090:{rtx3090s}", "--tensor-parallel", str(ranks)
    sizes = "--max-num-seqs", "8", "--max-num-batched-tokens", "16"
    server = start(*pools, *sizes, "--dtype", "float32")
    workers = server.workers()
    try:
        commands = [" ".join(worker.cmdline()) for worker in workers]
        assert sum("lamina.compute" in command for command in commands) == a100s
        assert sum("lamina.memory.worker" in command for command in commands) == rtx3090s
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=RUN_S).json()
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
    assert psutil.wait_procs(workers, END_S)[1] == []
    tokenizer = Tokenizer(model)
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    assert answer["choices"][0]["text"] == tokenizer.decode(greedy(reference, tokenizer.encode(PROMPT), TOKENS))


def test_a_gpu_that_does_not_exist_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:1")
    assert_refused(
        run_here("launch", "--port", "0", "--compute", "a100:1"), "a100:1 asks for 1 GPU; this machine has 1 x NVIDIA"
    )
