"""Choice of a device without one: what is refused, and that the message says what was found and what to do."""

import subprocess
import sys

import pytest

from lamina.core.errors import ConfigError
from lamina.kernels.gpu.device import Found, Gpu, find, require, visible

H200, V100 = Gpu("NVIDIA H200", 90), Gpu("Tesla V100", 70)
READY = Found((H200, H200), "3.9.0", "14.2.0")


def test_what_is_there_is_taken():
    assert require(0, READY) == require(1, READY) == H200


@pytest.mark.parametrize(
    ("index", "found", "message"),
    [
        (
            1,
            Found(None, None, None),
            r"cuda device 1 cannot be used; found no NVIDIA driver; no Triton, no CuPy. "
            r"Install NVIDIA's driver and pip install triton 'cupy-cuda13x\[ctk\]' torchao, or use a CPU",
        ),
        (0, Found((), "3.9.0", "14.2.0"), "an NVIDIA driver without GPUs; .* CUDA_VISIBLE_DEVICES, or use a CPU"),
        (2, READY, r"found cuda:0 NVIDIA H200 \(compute capability 9.0\), cuda:1 .* Use a device from 0 to 1"),
        (-1, READY, "Use a device from 0 to 1"),
        (0, Found((V100,), "3.9.0", "14.2.0"), "compute capability 7.0.* needs compute capability 8.0"),
        (0, Found((H200,), None, "14.2.0"), r"no Triton, CuPy 14.2.0. Run pip install triton 'cupy-cuda13x\[ctk\]'"),
        (0, Found((H200,), "3.9.0", None), r"Triton 3.9.0, no CuPy. Run pip install triton 'cupy-cuda13x\[ctk\]'"),
    ],
)
def test_what_is_not_there_is_refused(index, found, message):
    with pytest.raises(ConfigError, match=message):
        require(index, found)


def test_this_machine_is_described():
    found = find()
    assert str(found)
    if not found.gpus:
        with pytest.raises(ConfigError, match="cuda device 1 cannot be used; found"):
            require(1, found)


def test_only_visible_cards_count():
    gpus = tuple(Gpu("NVIDIA H200", 90, uuid=f"GPU-{letter}{number}") for number, letter in enumerate("aab"))
    for wanted, chosen in (
        (None, "012"),
        ("", ""),
        ("2,0", "20"),
        ("GPU-b", "2"),
        ("GPU-a1,2", "12"),
        ("GPU-a", ""),  # two GPUs: ambiguous
        ("1,7,0", "1"),  # what follows an unknown one is not seen either
        ("-1", ""),
    ):
        assert visible(gpus, wanted) == tuple(gpus[int(index)] for index in chosen), wanted


def test_nothing_of_the_package_needs_triton_or_cupy_to_be_imported():
    code = """
import sys
sys.modules["triton"] = sys.modules["cupy"] = None
import lamina, lamina.memory.worker, lamina.kernels.attention
from lamina.kernels.gpu import attention, tilings, device, backend, specialize, tables
from lamina.transport.device import polling
try:
    polling.Polling("peer")
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "cupy" in run.stdout
