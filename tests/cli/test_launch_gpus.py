"""`lamina launch` on GPUs, which this machine pretends to have."""

import signal

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from tests.cli.commands import END_S, RUN_S, assert_refused, run_here, start
from tests.random_models import greedy

PROMPT = "x ="
TOKENS = 2


def test_two_a100_and_six_rtx3090_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch line of the title; text is what Hugging Face says."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:6,a100:2")
    server = start("--compute", "a100:2", "--memory", "rtx3090:6", "--dtype", "float32", "--max-num-seqs", "8")
    workers = server.workers()
    try:
        assert sum("lamina.compute" in " ".join(worker.cmdline()) for worker in workers) == 2
        assert sum("lamina.memory.worker" in " ".join(worker.cmdline()) for worker in workers) == 6
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=RUN_S).json()
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
    assert psutil.wait_procs(workers, END_S)[1] == []
    model = directory.find(None)
    tokenizer = Tokenizer(model)
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    assert answer["choices"][0]["text"] == tokenizer.decode(greedy(reference, tokenizer.encode(PROMPT), TOKENS))


def test_a_gpu_that_does_not_exist_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_EMULATED_GPUS", "rtx3090:1")
    assert_refused(run_here("launch", "--compute", "a100:1"), "a100:1 asks for 1 GPU; this machine has 1 x NVIDIA")
