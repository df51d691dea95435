"""Decode steps over local memory as one CUDA graph each: the logits of steps that run slice by slice."""

import pytest

from lamina.lowering.gpu_slices import Main
from tests.support.local_steps import assert_same_logits, recorded_and_usual

pytestmark = pytest.mark.gpu
CAPACITY = 600


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_recorded_step_gives_the_logits_of_slices(family: str) -> None:
    """Compare logits while lengths change, batches grow and shrink, and page tables move to larger memory."""
    from lamina.compute.device.cuda import Cuda

    class Unfused(Cuda):
        """Fuses no operators, which would take a minute."""

        def compiled(self, graph: Main) -> Main | None:
            return None

    recorded, usual = recorded_and_usual(family, Unfused(0), "cuda:0", CAPACITY)
    assert_same_logits(recorded, usual, seed=1, steps=36, most=9, longest=24, tolerance=1e-4, reserved=4)
