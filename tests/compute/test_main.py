"""What a compute worker does before its imports leaves torch as quiet as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.compute.split_cache import prepare
from lamina.models import directory

# Imported late by torch, so that any build may pass for one for CUDA.
IMPORT_AS_IF_BUILT_FOR_CUDA = """
from lamina.compute.late_imports import before_imports
before_imports("cpu")
import sys, torch
assert "torch.utils.flop_counter" not in sys.modules
torch.version.cuda = "13.0"
import torch.utils.flop_counter
"""


def test_a_torch_built_for_cuda_does_not_warn_of_the_triton_that_is_hidden_from_it() -> None:
    command = [sys.executable, "-c", IMPORT_AS_IF_BUILT_FOR_CUDA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["lamina.splitter.assemble", "lamina.models.pretrained"])
def test_importing_what_imports_transformers_prints_nothing(module: str) -> None:
    """With torchao installed, which transformers imports, and warns of kernels of other GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_model_is_split_alike_by_torch_and_transformers_that_have_left_out_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compute worker leaves them out unless it has to split, as here: the records are compared byte by byte."""
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path / "all of torch"))
    prepare(directory.find(None), None, lambda: None)
    code = """
from lamina.compute.late_imports import before_imports
before_imports("cpu")
import sys
from lamina.compute.split_cache import prepare
import torch
from lamina.models import directory
assert "torch._decomp" not in sys.modules
prepare(directory.find(None), None, lambda: None)
for package in ("transformers", "transformers.models", "torch._dynamo", "torch.distributed.tensor"):
    assert not hasattr(sys.modules[package], "__file__"), package  # nothing has asked for its names
assert torch.distributed.is_available()
"""
    variables = os.environ | {"LAMINA_CACHE_DIR": str(tmp_path / "less")}
    subprocess.run([sys.executable, "-c", code], env=variables, timeout=200, check=True)
    (whole,) = (tmp_path / "all of torch").glob("models/*")
    (less,) = (tmp_path / "less").glob("models/*")
    assert (less.name, less.read_bytes()) == (whole.name, whole.read_bytes())


def test_names_that_transformers_and_torch_have_left_out_are_found_when_asked_for() -> None:
    code = """
from lamina.compute.late_imports import before_imports, import_transformers
before_imports("cpu")
import torch
import_transformers()
import lamina.splitter.capture  # imports modules of the compiler
from transformers.models.llama import LlamaConfig as by_module
from transformers.models import LlamaConfig, GPT2Config
from transformers import LlamaConfig as by_package
assert LlamaConfig is by_module is by_package
from torch.distributed.tensor import Replicate
import torch.distributed.tensor
assert torch.distributed.tensor.DTensor is torch.distributed.tensor._api.DTensor
assert torch._dynamo.is_compiling() is False
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""
    subprocess.run([sys.executable, "-c", code], timeout=200, check=True)
