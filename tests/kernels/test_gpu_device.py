"""Choice of a device without one: what is refused, and that the message says what was found and what to do."""

import subprocess
import sys

import pytest

from lamina.errors import ConfigError
from lamina.kernels.gpu.device import Card, Found, find, select

H200, V100 = Card("NVIDIA H200", 90), Card("Tesla V100", 70)
READY = Found((H200, H200), "3.9.0", "14.2.0")


@pytest.mark.parametrize(("asked", "index"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_what_is_there_is_taken(asked, index):
    assert select(asked, READY) == index


def test_a_processor_needs_nothing():
    assert select("cpu", Found(None, None, None)) is None


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        (
            "cuda:1",
            Found(None, None, None),
            r"cuda:1 cannot be used; found no NVIDIA driver \(libcuda.so.1\); no Triton, no CuPy. "
            r"Install NVIDIA's driver and pip install 'lamina\[cuda\]', or ask for cpu",
        ),
        (
            "cuda",
            Found((), "3.9.0", "14.2.0"),
            "an NVIDIA driver without cards; .* CUDA_VISIBLE_DEVICES, or ask for cpu",
        ),
        ("cuda:2", READY, r"found cuda:0 NVIDIA H200 \(compute capability 9.0\), cuda:1 .* Ask for cuda:0 to cuda:1"),
        ("cuda", Found((V100,), "3.9.0", "14.2.0"), "compute capability 7.0.* needs a card of compute capability 8.0"),
        ("cuda", Found((H200,), None, "14.2.0"), r"no Triton, CuPy 14.2.0. Run pip install 'lamina\[cuda\]'"),
        ("cuda", Found((H200,), "3.9.0", None), r"Triton 3.9.0, no CuPy. Run pip install 'lamina\[cuda\]'"),
        ("cuda:01", READY, "device 'cuda:01' is none; give cpu, cuda or cuda:N"),
        ("rocm", READY, "device 'rocm' is none"),
    ],
)
def test_what_is_not_there_is_refused(asked, found, message):
    with pytest.raises(ConfigError, match=message):
        select(asked, found)


def test_this_machine_is_described():
    found = find()
    assert str(found)
    if not found.cards:
        with pytest.raises(ConfigError, match="cuda:1 cannot be used; found"):
            select("cuda:1", found)


def test_nothing_of_the_package_needs_triton_or_cupy_to_be_imported():
    code = """
import sys
sys.modules["triton"] = sys.modules["cupy"] = None
import lamina, lamina.memory.worker, lamina.kernels.attention
from lamina.kernels.gpu import attention, choice, device, program, specialize, tables
from lamina.transport.device import polling
try:
    polling.Polling("peer")
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "cupy" in run.stdout
