"""The bundled model: small, complete, and consistent with its model card."""

import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.core.types import DType
from lamina.models import pretrained
from lamina.models.directory import BUNDLED, find
from lamina.models.pretrained import load_config
from lamina.text.tokenizer import Tokenizer

TRAINING = Path(__file__).parents[2] / "tools" / "train_bundled.py"


def loss(model: torch.nn.Module, ids: list[int]) -> float:
    """Mean nats per token."""
    row = torch.tensor([ids])
    with torch.no_grad():
        return float(model(row, labels=row).loss)


def test_the_whole_directory_stays_under_four_megabytes() -> None:
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file()) <= 4_000_000


def test_it_has_learned_what_the_standard_library_looks_like() -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokenizer = Tokenizer(find(None))
    assert loss(model, tokenizer.encode(inspect.getsource(json.decoder))[:1024]) < 2.7  # ln 2048 = 7.6 knows nothing
    noise = torch.randint(1, 2048, (1024,), generator=torch.Generator().manual_seed(0))
    assert loss(model, noise.tolist()) > 7.6


def test_loader_gives_the_weights_transformers_gives() -> None:
    directory = find(None)
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16).state_dict()
    ours = pretrained.load(directory, list(theirs), load_config(directory), DType.BFLOAT16)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_chat_starts_a_function_under_the_message_and_keeps_the_history() -> None:
    tokenizer = Tokenizer(find(None))
    first = [{"role": "user", "content": "Add two\nnumbers"}]
    assert tokenizer.apply_chat_template(first) == "# Add two\n# numbers\n\ndef"
    reply = {"role": "assistant", "content": " add(a, b):\n    return a + b\n"}
    again = tokenizer.apply_chat_template([*first, reply, {"role": "user", "content": "Subtract"}])
    assert again == "# Add two\n# numbers\n\ndef add(a, b):\n    return a + b\n\n\n# Subtract\n\ndef"


@pytest.mark.slow
def test_training_writes_a_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_bundled", str(tmp_path), "--steps", "2"])
    runpy.run_path(str(TRAINING), run_name="__main__")
    trained, bundled = find(tmp_path), find(None)
    assert trained.tensors.keys() == bundled.tensors.keys()
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in BUNDLED.iterdir()}
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 2048
    assert "2 steps of 4,096 tokens" in (tmp_path / "README.md").read_text()
