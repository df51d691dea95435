"""What a compute worker does before its imports leaves torch as quiet as it was."""

import subprocess
import sys

import pytest

# Imported late by torch, so that any build may pass for one for CUDA.
IMPORT_AS_IF_BUILT_FOR_CUDA = """
from lamina.compute.__main__ import before_imports
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
